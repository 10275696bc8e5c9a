"""One, two and four worker processes, over HTTP and with a destination that does nothing."""

from __future__ import annotations

import time
from contextlib import ExitStack

from benchmarks.children import child, drain
from benchmarks.databases import Databases
from benchmarks.harness import Bench, Budget, Scenario, at_least
from benchmarks.server import service


def _drained(url: str, origin: str | None, processes: int, count: int) -> float:
    """Events a second from the word go until the last process has nothing left to do."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(drain, url, origin, 16))[0] for _ in range(processes)]
        for pipe in pipes:
            assert pipe.recv() == "ready"
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        done = sum(pipe.recv() for pipe in pipes)
        took = time.perf_counter() - began
    assert done == count, f"{done} delivered of {count}"
    return count / took


def _processes(bench: Bench, databases: Databases) -> None:
    with databases.fresh() as url, service() as origin:
        for how, target, count, budget in (
            ("over HTTP", origin, bench.size(8_000, 2_000), at_least(1.6)),
            ("no-op destination", None, bench.size(20_000, 5_000), None),
        ):
            _compare(bench, databases, url, how, target, count, budget)


def _compare(
    bench: Bench, databases: Databases, url: str, how: str, target: str | None, count: int, budget: Budget | None
) -> None:
    def measure(processes: int) -> float:
        databases.load(url, count)
        databases.settle_in(url)
        return _drained(url, target, processes, count)

    found = bench.alternate(
        {"1": lambda: measure(1), "2": lambda: measure(2), "4": lambda: measure(4)}, bench.size(3, 1)
    )
    for number in ("2", "4"):
        bench.ratio(
            f"{number} worker processes {how} / 1", found[number], found["1"], unit="events/s",
            names=(f"{number} processes", "1"), budget=budget if number == "2" else None,
        )  # fmt: skip


PROCESSES = Scenario("processes", "one, two and four worker processes", _processes)
