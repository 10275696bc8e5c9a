"""A worker whose destination does nothing, beside bare SQL of the same shape."""

from __future__ import annotations

import time

from benchmarks.bare import Bare, bare
from benchmarks.databases import Databases, outbox
from benchmarks.events import TOPIC, NoOp
from benchmarks.harness import Bench, Scenario, at_least
from outbox import Outbox, Worker

BATCH = 100


def by_worker(box: Outbox, count: int) -> float:
    """Events a second through a worker as it comes."""
    worker = Worker(box, {TOPIC: NoOp()}, batch=BATCH)
    began = time.perf_counter()
    done = worker.run(until_idle=True).succeeded
    assert done == count, f"{done} delivered of {count}"
    return done / (time.perf_counter() - began)


def _by_hand(sql: Bare, count: int) -> float:
    began = time.perf_counter()
    assert sql.drain(BATCH) == count
    return count / (time.perf_counter() - began)


def _drain(bench: Bench, databases: Databases) -> None:
    count = bench.size(20_000, 5_000)
    with databases.fresh() as url, bare(url) as sql:
        box = outbox(url)

        def fill() -> None:
            databases.load(url, count)
            databases.settle_in(url)

        fill()
        by_worker(box, count)
        contenders = {"ours": lambda: by_worker(box, count), "bare": lambda: _by_hand(sql, count)}
        found = bench.alternate(contenders, prepare=fill)
        bench.ratio(
            "worker drain, no-op destination / bare SQL in batches of 100", found["ours"], found["bare"],
            unit="events/s", names=("ours", "bare"), budget=at_least(0.6),
            cpu=(found.cpu["ours"], found.cpu["bare"]),
        )  # fmt: skip
        box.engine.dispose()


DRAIN = Scenario("drain", "a worker with a no-op destination beside bare SQL of the same shape", _drain)
