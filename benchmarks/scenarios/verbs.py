"""The verbs alone: claim a batch and settle it, beside bare SQL of the same shape."""

from __future__ import annotations

import time

from benchmarks.bare import Bare, bare
from benchmarks.databases import Databases, outbox
from benchmarks.events import response
from benchmarks.harness import Bench, Scenario
from outbox import Outbox
from outbox.records import Success

#: How many events each batch size is measured over in one round.
_EVENTS = {1: 400, 10: 2000, 100: 6000, 500: 10000}


def by_verbs(box: Outbox, batch: int, count: int) -> float:
    """Events a second, claimed and settled by the verbs."""
    began, done = time.perf_counter(), 0
    while done < count:
        claims = box.claim_batch("bench", limit=batch)
        box.settle([Success(claim, response(claim.event_id)) for claim in claims])
        done += len(claims)
    return done / (time.perf_counter() - began)


def by_hand(sql: Bare, batch: int, count: int) -> float:
    """Events a second, claimed and settled by hand."""
    began = time.perf_counter()
    return sql.drain(batch, count) / (time.perf_counter() - began)


def _claim_settle(bench: Bench, databases: Databases) -> None:
    rounds = bench.size(5, 3)
    sizes = {batch: bench.size(count, count // 4) for batch, count in _EVENTS.items()}
    with databases.fresh() as url, bare(url) as sql:
        databases.load(url, 2 * (rounds + 1) * sum(sizes.values()))
        databases.settle_in(url)
        box = outbox(url)
        for batch, count in sizes.items():
            by_verbs(box, batch, count), by_hand(sql, batch, count)
            found = bench.alternate(
                {
                    "ours": lambda batch=batch, count=count: by_verbs(box, batch, count),  # type: ignore[misc]
                    "bare": lambda batch=batch, count=count: by_hand(sql, batch, count),  # type: ignore[misc]
                },
                rounds,
            )
            what = f"claim + settle in batches of {batch} / bare SQL"
            bench.ratio(
                what,
                found["ours"],
                found["bare"],
                unit="events/s",
                names=("ours", "bare"),
                cpu=(found.cpu["ours"], found.cpu["bare"]),
                batch=batch,
            )
        box.engine.dispose()


CLAIM_SETTLE = Scenario("claim-settle", "claim_batch and settle in batches of 1 to 500 beside bare SQL", _claim_settle)
