"""What a claim of 100 costs when a lot is due, settled or waiting for its next attempt."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.databases import Databases, outbox
from benchmarks.events import event, response
from benchmarks.harness import Bench, Scenario, Spread, at_most
from outbox import Outbox
from outbox.records import Claim, Success

_CLAIM = 100
SMALL = 1_000


def filled(databases: Databases, due: int, *, settled: int = 0, backing_off: int = 0) -> str:
    """A database with so many rows; those in back-off are the oldest."""

    def fill(url: str) -> None:
        if settled:
            databases.load(url, settled, "succeeded")
        if backing_off:
            databases.load(url, backing_off, "retry_wait", due_in=3600.0)
        databases.load(url, due)

    return databases.prepared(f"{due} due, {settled} settled, {backing_off} in back-off", fill)


class _Claims:
    """Claims 100 at a time, and keeps the backlog as long as it was: what is claimed is settled and replaced."""

    def __init__(self, url: str) -> None:
        self._box: Outbox = outbox(url)
        self._number = 0
        self._taken: list[Claim] = []

    def __call__(self) -> float:
        began = time.perf_counter()
        claims = self._box.claim_batch("bench", limit=_CLAIM)
        took = time.perf_counter() - began
        assert len(claims) == _CLAIM
        self._taken = claims
        return took * 1e3

    def restock(self) -> None:
        """Settle and replace what was claimed last, if anything was."""
        claims, self._taken = self._taken, []
        self._box.settle([Success(claim, response(claim.event_id)) for claim in claims])
        first = 10**12 + self._number
        self._number += len(claims)
        self._box.enqueue_many([event(first + n) for n in range(len(claims))])

    def close(self) -> None:
        self._box.engine.dispose()


def _cases(bench: Bench, databases: Databases) -> dict[str, tuple[int, Callable[[], str]]]:
    middle, large = bench.size(100_000, 20_000), bench.size(1_000_000, 100_000)
    settled, backing_off = bench.size(1_000_000, 100_000), bench.size(300_000, 30_000)
    return {
        f"{SMALL:,} due": (SMALL, lambda: filled(databases, SMALL)),
        f"{middle:,} due": (middle, lambda: filled(databases, middle)),
        f"{large:,} due": (large, lambda: filled(databases, large)),
        f"{settled:,} settled beside": (SMALL, lambda: filled(databases, SMALL, settled=settled)),
        f"{backing_off:,} in back-off at the head": (SMALL, lambda: filled(databases, SMALL, backing_off=backing_off)),
    }


def _backlog(bench: Bench, databases: Databases) -> None:
    cases = _cases(bench, databases)
    claims = {name: _Claims(fill()) for name, (_, fill) in cases.items()}
    for each in claims.values():
        each()
        each.restock()

    def restock() -> None:
        for each in claims.values():
            each.restock()

    found = bench.alternate(dict(claims.items()), bench.size(25, 11), prepare=restock)
    base = found[f"{SMALL:,} due"]
    at = Spread.of(base).median
    bench.value(f"claim of {_CLAIM} at {SMALL:,} due", base, unit="ms", due=SMALL)
    for name, times in found.items():
        if times is not base:
            due = cases[name][0] if name.endswith("due") else None
            # Against the median: single claims are short enough for noise to move each by half.
            bench.ratio(
                f"claim of {_CLAIM}: {name} / {SMALL:,} due", times, [at] * len(times), unit="ms",
                names=(name, f"{SMALL:,} due"), budget=at_most(1.3),
                cpu=(found.cpu[name], found.cpu[f"{SMALL:,} due"]), due=due,
            )  # fmt: skip
    for each in claims.values():
        each.close()


BACKLOG = Scenario(
    "backlog", "a claim of 100 at 1,000 to 1,000,000 due rows, and beside settled and backed-off rows", _backlog
)
