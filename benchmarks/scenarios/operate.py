"""What an operator's questions cost at a million rows."""

from __future__ import annotations

from benchmarks.databases import Databases, outbox
from benchmarks.harness import Bench, Scenario, at_most, timed
from benchmarks.scenarios.backlog import SMALL, filled


def _health(bench: Bench, databases: Databases) -> None:
    large = bench.size(1_000_000, 100_000)
    for what, url in (
        (f"{large:,} rows due", filled(databases, large)),
        (f"{large:,} rows settled", filled(databases, SMALL, settled=large)),
    ):
        box = outbox(url)
        # Of whatever row is first: the numbers of a run's events depend on what ran before.
        (claim,) = box.claim_batch("bench", limit=1)
        box.release([claim])
        box.health()
        health = [timed(box.health) * 1e3 for _ in range(bench.size(15, 7))]
        status = [timed(lambda box=box, claim=claim: box.status(claim.event_id)) * 1e3 for _ in range(15)]  # type: ignore[misc]
        bench.value(f"health at {what}", health, unit="ms", budget=at_most(50))
        bench.value(f"status at {what}", status, unit="ms")
        box.engine.dispose()


HEALTH = Scenario("health", "health and status at a million rows, due and settled", _health)
