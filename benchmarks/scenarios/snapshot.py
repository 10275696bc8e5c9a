"""A drain while another transaction holds an old snapshot, so that nothing delivered can be forgotten."""

from __future__ import annotations

import itertools
import time

from benchmarks.databases import Databases, outbox
from benchmarks.events import TOPIC, NoOp
from benchmarks.harness import Bench, Scenario, at_least, at_most
from outbox import Worker
from outbox.records import Settled

_PARTS = 10


class _Marks:
    """The time and the processor time, ours and the server's, at every tenth of a drain."""

    def __init__(self, count: int, databases: Databases) -> None:
        self._tenth = count // _PARTS
        self._databases = databases
        self._seen = 0
        self._marks = [self._now()]

    def __call__(self, _: Settled) -> None:
        self._seen += 1
        if self._seen % self._tenth == 0:
            self._marks.append(self._now())

    def tenths(self) -> tuple[list[float], list[float]]:
        """Events a second, and microseconds of processor time an event, in each tenth."""
        steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(self._marks)]
        assert len(steps) == _PARTS, f"{self._seen} delivered of {self._tenth * _PARTS}"
        return [self._tenth / seconds for seconds, _ in steps], [1e6 * cpu / self._tenth for _, cpu in steps]

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() + self._databases.cpu()


def _snapshot(bench: Bench, databases: Databases) -> None:
    count = bench.size(200_000, 50_000)
    with databases.fresh() as url:
        databases.load(url, count)
        databases.settle_in(url)
        box = outbox(url)
        with databases.held_snapshot(url):
            box.health()  # its connection is open before the first mark
            marks = _Marks(count, databases)
            Worker(box, {TOPIC: NoOp()}, observer=marks).run(until_idle=True)
        box.engine.dispose()
    speeds, costs = marks.tenths()
    what = f"{count:,} events, an old snapshot held"
    bench.ratio(
        f"{what}: speed, last tenth / first", speeds[-1:], speeds[:1], unit="events/s", names=("last", "first"),
        budget=at_least(0.7), tenths=speeds,
    )  # fmt: skip
    bench.ratio(
        f"{what}: processor time, last tenth / first", costs[-1:], costs[:1], unit="µs/event", names=("last", "first"),
        budget=at_most(1 / 0.7), tenths=costs,
    )  # fmt: skip


SNAPSHOT = Scenario("snapshot", "a long drain while another transaction holds an old snapshot", _snapshot)
