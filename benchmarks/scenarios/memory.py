"""Memory over a long drain, in a process of its own."""

from __future__ import annotations

from benchmarks.children import child, remember
from benchmarks.databases import Databases
from benchmarks.harness import Bench, Scenario, at_most

_PARTS = 10


def _memory(bench: Bench, databases: Databases) -> None:
    count = bench.size(100_000, 20_000)
    with databases.fresh() as url:
        databases.load(url, count)
        databases.settle_in(url)
        with child(remember, url, count, _PARTS) as (pipe, _):
            readings: list[int] = pipe.recv()
    mib = [reading / 2**20 for reading in readings]
    bench.ratio(
        f"resident memory after {count:,} events / after the first tenth", mib[-1:], mib[:1], unit="MiB",
        names=("last", "first"), budget=at_most(1.1), readings=mib,
    )  # fmt: skip


MEMORY = Scenario("memory", "resident memory over 100,000 events", _memory)
