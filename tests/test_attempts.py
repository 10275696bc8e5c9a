"""What is kept of attempts that failed, for how long, and what costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from outbox import Claim, DeliveryFailed, Failure, Outbox, Success
from outbox.records import Arrival, FailedAttempt
from outbox.schema import outbox_attempt
from outbox.store import SHOWN_ATTEMPTS
from outbox.values import sha256_hex
from tests.support import (
    WORKER,
    Scripted,
    T,
    claimed,
    leased,
    make_outbox,
    note,
    notes,
    poison,
    raw_row,
    refused,
    response,
    row_count,
    statements,
    together,
)

DETAIL = "0123456789abcdef" * 4


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


def kept(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(outbox_attempt)).scalar_one()


def failures(outbox: Outbox, event_id: str = "note-1") -> list[FailedAttempt]:
    return list(outbox.status(event_id, now=T).failures)


# -- what is recorded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retryable", [True, False])
@pytest.mark.parametrize(
    ("arrival", "http_status", "seconds"),
    [
        ("unsent", None, 0.0),
        ("unknown", None, 29.75),
        ("refused", 422, 0.125),
        ("refused", 999, None),
        ("refused", 100, 1e6),
    ],
)
def test_a_settled_failure(
    outbox: Outbox, retryable: bool, arrival: Arrival, http_status: int | None, seconds: float | None
) -> None:
    claim = leased(outbox)
    failure = Failure(claim, "busy", retryable, None, DETAIL, arrival, http_status, seconds=seconds)
    (line,) = outbox.settle([failure], now=T + 5)
    assert line.won
    assert failures(outbox) == [FailedAttempt(1, T + 5, seconds, "busy", arrival, http_status, DETAIL)]


@pytest.mark.parametrize("verb", ["retry", "fail"])
def test_the_single_verbs(outbox: Outbox, verb: str) -> None:
    getattr(outbox, verb)(leased(outbox), "busy", detail_hash=DETAIL, now=T + 5)
    assert failures(outbox) == [FailedAttempt(1, T + 5, None, "busy", "unknown", None, DETAIL)]


def test_what_a_delivery_says(outbox: Outbox) -> None:
    error = DeliveryFailed(
        "http_status", retryable=True, detail_hash=DETAIL, arrival="refused", http_status=502, outage=True
    )

    def act(claim: Claim) -> Any:
        raise error

    outbox.enqueue(note(), now=T)
    outbox.run_once(Scripted(act), WORKER, now=T)
    (found,) = failures(outbox)
    assert found.seconds is not None
    assert 0 <= found.seconds < 60
    assert found == FailedAttempt(1, T, found.seconds, "http_status", "refused", 502, DETAIL)


def test_what_nobody_declared(outbox: Outbox) -> None:
    error = RuntimeError("s3cret")

    def act(claim: Claim) -> Any:
        raise error

    outbox.enqueue(note(), now=T)
    outbox.run_once(Scripted(act), WORKER, now=T)
    (found,) = failures(outbox)
    assert (found.error_code, found.arrival, found.http_status) == ("dispatch.client_failure", "unknown", None)
    assert found.detail_hash == sha256_hex(repr(error))


def test_a_response_that_the_contract_refuses(outbox: Outbox) -> None:
    outbox.settle([Success(leased(outbox), {"id": "another"})], now=T + 5)
    assert failures(outbox) == [FailedAttempt(1, T + 5, None, "dispatch.response_invalid", "unknown", None, None)]


@pytest.mark.parametrize("last", [True, False])
def test_a_lease_that_ran_out(outbox: Outbox, last: bool) -> None:
    leased(outbox, max_attempts=1 if last else 2, lease_seconds=10)
    claimed_again = outbox.claim(WORKER, now=T + 10)
    assert (claimed_again is None) is last
    assert failures(outbox) == [FailedAttempt(1, T + 10, None, "lease_expired", "unknown", None, None)]


def test_many_leases_that_ran_out(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(300), now=T)
    outbox.claim_batch(WORKER, limit=300, lease_seconds=1, now=T)
    outbox.claim_batch(WORKER, limit=1, now=T + 1)
    assert kept(engine) == 300
    together(*[lambda: outbox.claim_batch(WORKER, limit=1, now=T + 700) for _ in range(4)])
    assert kept(engine) == 301


def test_each_of_a_batch(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(4), now=T)
    one, two, three, four = outbox.claim_batch(WORKER, now=T)
    outbox.settle(
        [Failure(three, "c"), Success(one, response("note-1")), Failure(two, "b", retryable=False), Failure(four, "d")],
        now=T,
    )
    assert [[each.error_code for each in failures(outbox, f"note-{n}")] for n in (1, 2, 3, 4)] == [
        [],
        ["b"],
        ["c"],
        ["d"],
    ]
    assert kept(engine) == 3


# -- what is not ----------------------------------------------------------------------------------------------------


def succeed(outbox: Outbox, claim: Claim) -> None:
    outbox.complete(claim, response(), now=T)


def release(outbox: Outbox, claim: Claim) -> None:
    outbox.release([claim], now=T)


def renew(outbox: Outbox, claim: Claim) -> None:
    outbox.renew([claim], now=T)


def refuse(outbox: Outbox, claim: Claim) -> None:
    with refused("dispatch.response_invalid"):
        outbox.complete(claim, {"id": "another"}, now=T)


def come_late(outbox: Outbox, claim: Claim) -> None:
    with refused("dispatch.lease_expired"):
        outbox.retry(claim, "busy", now=T + 600)


def step_back(outbox: Outbox, claim: Claim) -> None:
    with refused("dispatch.clock_regressed"):
        outbox.fail(claim, "busy", now=T - 1)


def lose(outbox: Outbox, claim: Claim) -> None:
    outbox.complete(claim, response(), now=T)
    (line,) = outbox.settle([Failure(claim, "busy")], now=T)
    assert line.error_code == "dispatch.claim_lost"


@pytest.mark.parametrize("verb", [succeed, release, renew, refuse, come_late, step_back, lose])
def test_nothing_is_recorded(outbox: Outbox, engine: Engine, verb: Callable[[Outbox, Claim], None]) -> None:
    claim = leased(outbox)
    with statements(engine) as seen:
        verb(outbox, claim)
    assert kept(engine) == 0
    assert not [statement for statement in seen if "INSERT INTO outbox_attempt" in statement]


def test_the_same_claim_twice_is_recorded_once(outbox: Outbox, engine: Engine) -> None:
    claim = leased(outbox)
    outbox.settle([Failure(claim, "first"), Failure(claim, "second")], now=T)
    assert [each.error_code for each in failures(outbox)] == ["first"]


def test_what_is_spared_is_not_recorded(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(7), now=T)
    results = [Failure(claim, "down", outage=True) for claim in outbox.claim_batch(WORKER, now=T)]
    outbox.settle(results, now=T)
    assert [len(failures(outbox, f"note-{n}")) for n in range(1, 8)] == [1, 1, 1, 1, 0, 0, 0]
    assert [raw_row(engine, f"note-{n}")["attempts"] for n in range(1, 8)] == [1, 1, 1, 1, 0, 0, 0]


def test_a_quarantined_event_was_not_attempted(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), now=T)
    poison(engine)
    assert outbox.claim_batch(WORKER, now=T) == []
    assert kept(engine) == 0


# -- how it is shown ------------------------------------------------------------------------------------------------


def test_oldest_first(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)
    for number in range(1, 4):
        outbox.retry(claimed(outbox, T + 1000 * number), f"code-{number}", now=T + 1000 * number + 1)
    found = failures(outbox)
    assert [(each.attempt, each.ended_at, each.error_code) for each in found] == [
        (number, T + 1000 * number + 1, f"code-{number}") for number in (1, 2, 3)
    ]
    assert outbox.redrive_all(now=T + 5000) == 0
    assert outbox.enqueue(note(), now=T).failures == ()


def test_no_more_than_are_useful(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), max_attempts=20, now=T)
    now = T
    for turn in range(3):
        for _ in range(20):
            now += 400
            outbox.retry(claimed(outbox, now), f"turn-{turn}", now=now)
        outbox.redrive("note-1", now=now)
    found = failures(outbox)
    assert kept(engine) == 60
    assert len(found) == SHOWN_ATTEMPTS == 50
    assert [each.attempt for each in found] == [*range(11, 21), *range(1, 21), *range(1, 21)]
    assert [each.ended_at for each in found] == sorted(each.ended_at for each in found)
    assert found[-1].error_code == "turn-2"


@pytest.mark.parametrize("verb", ["redrive", "discard"])
def test_kept_when_an_event_is(outbox: Outbox, verb: str) -> None:
    outbox.fail(leased(outbox), "refused", now=T)
    getattr(outbox, verb)("note-1", now=T + 1)
    assert [each.error_code for each in failures(outbox)] == ["refused"]


def test_kept_when_an_event_succeeds_at_last(outbox: Outbox) -> None:
    outbox.retry(leased(outbox), "busy", now=T)
    outbox.complete(claimed(outbox, T + 100), response(), now=T + 100)
    assert [each.error_code for each in failures(outbox)] == ["busy"]


# -- how long -------------------------------------------------------------------------------------------------------


def test_gone_with_their_event_and_no_other(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(3), now=T)
    one, two, three = outbox.claim_batch(WORKER, now=T)
    outbox.settle([Failure(each, "busy") for each in (one, two, three)], now=T)
    again = {claim.event_id: claim for claim in outbox.claim_batch(WORKER, now=T + 100)}
    outbox.complete(again["note-1"], response("note-1"), now=T + 100)
    outbox.fail(again["note-2"], "refused", now=T + 100)
    assert kept(engine) == 4
    assert outbox.purge(older_than_seconds=10, now=T + 200) == 1
    assert kept(engine) == 3
    assert outbox.purge(older_than_seconds=10, include_failed=True, now=T + 200) == 1
    assert [each.error_code for each in failures(outbox, "note-3")] == ["busy"]
    assert kept(engine) == 1


def test_many_gone_at_once(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(1000), now=T)
    outbox.settle(
        [Failure(each, "refused", retryable=False) for each in outbox.claim_batch(WORKER, limit=1000, now=T)], now=T
    )
    assert kept(engine) == 1000
    assert outbox.purge(older_than_seconds=0, include_failed=True, limit=999, now=T + 1) == 999
    assert kept(engine) == row_count(engine) == 1


def test_not_left_to_the_next_event_of_the_same_row(outbox: Outbox, engine: Engine) -> None:
    """SQLite gives the id of the last row, once that is deleted, to the next."""
    outbox.fail(leased(outbox), "refused", now=T)
    before = raw_row(engine)["id"]
    outbox.purge(older_than_seconds=0, include_failed=True, now=T + 1)
    outbox.enqueue(note(), now=T + 2)
    if engine.dialect.name == "sqlite":
        assert raw_row(engine)["id"] == before
    assert failures(outbox) == []


def test_a_claim_of_a_purged_event_records_nothing_on_its_successor(outbox: Outbox, engine: Engine) -> None:
    stale = leased(outbox)
    outbox.complete(stale, response(), now=T)
    outbox.purge(older_than_seconds=0, now=T + 1)
    outbox.enqueue(note("new"), now=T + 1)
    (line,) = outbox.settle([Failure(stale, "busy")], now=T + 2)
    assert line.error_code == "dispatch.claim_missing"
    assert failures(outbox, "note-new") == []
    assert kept(engine) == 0
