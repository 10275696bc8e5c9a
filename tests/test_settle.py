"""Settling: complete, retry, fail, renew, release and many at once, each only by the claim that still owns the event."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete
from sqlalchemy.pool import QueuePool

from outbox import Claim, Contract, Failure, InputError, Outbox, Outcome, RetryPolicy, Settled, Success
from outbox.schema import outbox_event
from outbox.values import sha256_hex
from tests.support import (
    TOPIC,
    WORKER,
    Notes,
    T,
    canonical,
    claimed,
    dump,
    ids,
    leased,
    make_outbox,
    note,
    notes,
    raw_row,
    refused,
    response,
    statements,
    together,
    unchanged,
)
from tests.test_enqueue import forbidden

DETAIL = "0123456789abcdef" * 4
NO_LEASE = {"lease_owner": None, "lease_token": None, "lease_expires_at": None}


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


# -- what each verb writes ------------------------------------------------------------------------------------------


def test_complete(outbox: Outbox, engine: Engine) -> None:
    claim = leased(outbox)
    before = raw_row(engine)
    answer = response()

    outcome = outbox.complete(claim, answer, now=T + 5)

    assert outcome == Outcome("note-1", "succeeded", 1, 5, None, None)
    assert raw_row(engine) == before | NO_LEASE | {
        "status": "succeeded", "updated_at": T + 5, "receipt": '{"place":7}',
        "response_sha256": sha256_hex(canonical(answer)),
    }  # fmt: skip
    status = outbox.status("note-1", now=T + 5)
    assert (status.receipt, status.response_sha256) == ({"place": 7}, sha256_hex(canonical(answer)))
    assert outbox.claim(WORKER, now=T + 1000) is None


@pytest.mark.parametrize("detail", [None, DETAIL])
def test_retry(outbox: Outbox, engine: Engine, detail: str | None) -> None:
    claim = leased(outbox)
    before = raw_row(engine)

    outcome = outbox.retry(claim, "http_status", detail_hash=detail, now=T + 5)

    assert outcome == Outcome("note-1", "retry_wait", 1, 5, T + 15, "http_status")
    assert raw_row(engine) == before | NO_LEASE | {
        "status": "retry_wait", "updated_at": T + 5, "next_attempt_at": T + 15, "last_error_code": "http_status",
        "last_error_detail_hash": detail,
    }  # fmt: skip


@pytest.mark.parametrize("detail", [None, DETAIL])
def test_fail(outbox: Outbox, engine: Engine, detail: str | None) -> None:
    claim = leased(outbox)
    before = raw_row(engine)

    outcome = outbox.fail(claim, "refused", detail_hash=detail, now=T + 5)

    assert outcome == Outcome("note-1", "failed", 1, 5, None, "refused")
    assert raw_row(engine) == before | NO_LEASE | {
        "status": "failed", "updated_at": T + 5, "last_error_code": "refused", "last_error_detail_hash": detail,
    }  # fmt: skip


def test_back_off_doubles_to_its_cap_and_the_last_attempt_fails(outbox: Outbox) -> None:
    outbox.enqueue(note(), max_attempts=8, now=T)
    now, delays = T, []
    for attempt in range(1, 9):
        outcome = outbox.retry(claimed(outbox, now=now), "busy", now=now + 1)
        assert (outcome.attempt, outcome.status) == (attempt, "failed" if attempt == 8 else "retry_wait")
        if outcome.next_attempt_at is not None:
            delays.append(outcome.next_attempt_at - (now + 1))
            now = outcome.next_attempt_at
    assert delays == [10, 20, 40, 80, 160, 300, 300]
    status = outbox.status("note-1")
    assert (status.status, status.attempts, status.last_error_code) == ("failed", 8, "busy")
    assert status.next_attempt_at == now


@pytest.mark.parametrize(
    ("asked", "delay"), [(None, 10), (0, 10), (9.5, 10), (10.5, 10.5), (301, 301), (3600, 3600), (1e12, 3600)]
)
def test_a_wish_for_later_is_a_lower_bound_with_a_cap(outbox: Outbox, asked: float | None, delay: float) -> None:
    outcome = outbox.retry(leased(outbox), "busy", retry_after=asked, now=T)
    assert outcome.next_attempt_at == T + delay


def test_a_wish_does_not_give_a_last_attempt_another(outbox: Outbox) -> None:
    outcome = outbox.retry(leased(outbox, max_attempts=1), "busy", retry_after=60, now=T)
    assert (outcome.status, outcome.next_attempt_at) == ("failed", None)


def test_a_policy_of_the_hosts(engine: Engine) -> None:
    outbox = make_outbox(engine, retry=RetryPolicy(base_delay_seconds=0.5, max_delay_seconds=0.75))
    assert outbox.retry(leased(outbox), "busy", now=T).next_attempt_at == T + 0.5
    assert outbox.retry(claimed(outbox, now=T + 1), "busy", now=T + 1).next_attempt_at == T + 1.75


def test_the_default_policy(engine: Engine) -> None:
    outbox = Outbox(engine, [Notes()])
    assert outbox.retry(leased(outbox), "busy", now=T).next_attempt_at == T + 5


def test_without_a_time_it_is_now(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(2))
    first, second = outbox.claim_batch(WORKER)
    completed = outbox.complete(first, response())
    retried = outbox.retry(second, "busy")
    assert completed.status == "succeeded"
    assert retried.next_attempt_at is not None
    leased_at = first.lease_expires_at - 600
    assert leased_at <= outbox.status("note-1").updated_at <= retried.next_attempt_at - 10 < leased_at + 60


# -- renew ----------------------------------------------------------------------------------------------------------


def test_renew(outbox: Outbox, engine: Engine) -> None:
    claim = leased(outbox, lease_seconds=60)
    before = raw_row(engine)

    (renewed,) = outbox.renew([claim], lease_seconds=100, now=T + 50)

    assert renewed == replace(claim, lease_expires_at=T + 150)
    assert raw_row(engine) == before | {"lease_expires_at": T + 150, "updated_at": T + 50}
    for verb in OWNERS_VERBS.values():
        with unchanged(engine), refused("dispatch.claim_lost"):
            verb(outbox, claim, T + 50)
    assert outbox.renew([claim], now=T + 50) == []
    assert outbox.complete(renewed, response(), now=T + 149).status == "succeeded"


def test_renewing_shorter(outbox: Outbox) -> None:
    claim = leased(outbox, lease_seconds=600)
    (renewed,) = outbox.renew([claim], lease_seconds=1, now=T)
    assert renewed.lease_expires_at == T + 1


def test_renewing_some_that_are_lost(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(3), now=T)
    first, second, third = outbox.claim_batch(WORKER, now=T)
    outbox.complete(second, response("note-2"), now=T)
    renewed = outbox.renew([third, second, first], lease_seconds=700, now=T)
    assert [claim.event_id for claim in renewed] == ["note-3", "note-1"]
    assert raw_row(engine, "note-2")["status"] == "succeeded"


def test_renewing_one_twice_in_a_call(outbox: Outbox) -> None:
    claim = leased(outbox)
    assert len(outbox.renew([claim, claim], lease_seconds=700, now=T)) == 1


@pytest.mark.parametrize("seconds", [0, -1, 86_400.001, math.nan, True, "60", None])
def test_renewing_for_no_time(apart: Outbox, seconds: Any) -> None:
    for claims in ([], [fabricated()]):
        with refused("dispatch.lease_invalid"):
            apart.renew(claims, lease_seconds=seconds)


# -- release --------------------------------------------------------------------------------------------------------


def test_releasing_a_first_attempt(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), now=T)
    before = raw_row(engine)
    claim = claimed(outbox, now=T + 1)

    (settled,) = outbox.release([claim], now=T + 2)

    assert settled == Settled(claim, True, Outcome("note-1", "pending", 0, 5, T, None), None)
    assert raw_row(engine) == before | {"updated_at": T + 2}
    again = claimed(outbox, now=T + 2)
    assert (again.attempt, again.due_at) == (1, T)


def test_releasing_a_later_attempt(outbox: Outbox, engine: Engine) -> None:
    outbox.retry(leased(outbox), "busy", detail_hash=DETAIL, now=T)
    before = raw_row(engine)
    claim = claimed(outbox, now=T + 20)

    (settled,) = outbox.release([claim], now=T + 21)

    assert settled.outcome == Outcome("note-1", "retry_wait", 1, 5, T + 10, "lease_released")
    assert raw_row(engine) == before | {
        "last_error_code": "lease_released", "last_error_detail_hash": None, "updated_at": T + 21,
    }  # fmt: skip
    assert claimed(outbox, now=T + 21).attempt == 2


def test_releasing_again_and_again_uses_up_nothing(outbox: Outbox) -> None:
    outbox.enqueue(note(), max_attempts=1, now=T)
    for _ in range(5):
        (settled,) = outbox.release([claimed(outbox)], now=T)
        assert settled.won
    assert outbox.complete(claimed(outbox), response(), now=T).attempt == 1


def test_released_events_keep_their_place(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(5), now=T)
    claims = outbox.claim_batch(WORKER, limit=3, now=T + 1)
    outbox.release(reversed(claims), now=T + 2)
    assert [claim.event_id for claim in outbox.claim_batch(WORKER, now=T + 2)] == ids(5)


# -- many at once ---------------------------------------------------------------------------------------------------


def test_many_results_in_one_transaction(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(5), max_attempts=2, now=T)
    claims = outbox.claim_batch(WORKER, now=T)
    outbox.complete(claims[3], response("note-4"), now=T)
    results: list[Success | Failure] = [
        Failure(claims[2], "refused", retryable=False, detail_hash=DETAIL),
        Success(claims[0], response("note-1")),
        Success(claims[3], response("note-4")),
        Failure(claims[1], "busy", retry_after=100),
        Success(claims[4], {"id": "another"}),
    ]

    lines = outbox.settle(iter(results), now=T + 1)

    assert [line.claim for line in lines] == [result.claim for result in results]
    assert [(line.won, line.error_code) for line in lines] == [
        (True, None), (True, None), (False, "dispatch.claim_lost"), (True, None), (True, None),
    ]  # fmt: skip
    assert [line.outcome for line in lines] == [
        Outcome("note-3", "failed", 1, 2, None, "refused"),
        Outcome("note-1", "succeeded", 1, 2, None, None),
        None,
        Outcome("note-2", "retry_wait", 1, 2, T + 101, "busy"),
        Outcome("note-5", "failed", 1, 2, None, "dispatch.response_invalid"),
    ]
    found = [(row["status"], row["last_error_code"], row["last_error_detail_hash"]) for row in dump(engine)]
    assert found == [
        ("succeeded", None, None), ("retry_wait", "busy", None), ("failed", "refused", DETAIL), ("succeeded", None, None),
        ("failed", "dispatch.response_invalid", None),
    ]  # fmt: skip
    assert outbox.health(deep=True, now=T).failed == 2


def test_the_same_claim_twice_wins_once(outbox: Outbox) -> None:
    claim = leased(outbox)
    first, second = outbox.settle([Success(claim, response()), Failure(claim, "busy")], now=T)
    assert (first.won, second.won, second.error_code) == (True, False, "dispatch.claim_lost")
    assert outbox.status("note-1").status == "succeeded"


@pytest.mark.parametrize("renewed_first", [True, False])
def test_a_claim_before_and_after_its_renewal(outbox: Outbox, renewed_first: bool) -> None:
    old = leased(outbox)
    (new,) = outbox.renew([old], lease_seconds=700, now=T)
    claims = [new, old] if renewed_first else [old, new]
    lines = outbox.settle([Success(claim, response()) for claim in claims], now=T)
    assert {line.claim: line.won for line in lines} == {new: True, old: False}


def test_nothing_to_settle(apart: Outbox) -> None:
    assert apart.settle([]) == []
    assert apart.release([]) == []
    assert apart.renew([]) == []


def test_a_batch_of_any_size_takes_as_many_statements(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(602), now=T)
    claims = outbox.claim_batch(WORKER, limit=1000, now=T)

    def counted(verb: Callable[[], Any]) -> int:
        with statements(engine) as seen:
            verb()
        return len(seen)

    def settle(some: list[Claim]) -> int:
        return counted(lambda: outbox.settle([Failure(claim, "busy") for claim in some], now=T))

    assert settle(claims[:1]) == settle(claims[2:302]) <= 6
    assert settle(claims[:1]) == settle(claims[2:302]) <= 7  # all lost by now, which is looked up
    claims = outbox.renew(claims[302:], lease_seconds=700, now=T)
    assert counted(lambda: outbox.renew(claims[:1], now=T)) == counted(lambda: outbox.renew(claims[1:], now=T)) <= 5
    assert len(claims) == 300


def test_more_claims_than_sqlite_takes_parameters(sqlite_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue(note(), now=T)
    claim = claimed(outbox)
    lost = [replace(claim, id=number, lease_token=f"{number:032x}") for number in range(2, 33_000)]
    assert outbox.renew([*lost, claim], lease_seconds=700, now=T) == [replace(claim, lease_expires_at=T + 700)]


def test_claims_in_portions(sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.dialects.sqlite._PORTION", 3)
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue_many(notes(10), now=T)
    claims = outbox.claim_batch(WORKER, now=T)
    renewed = outbox.renew(claims, lease_seconds=700, now=T)
    assert [claim.event_id for claim in renewed] == ids(10)
    assert all(line.won for line in outbox.settle([Failure(claim, "busy") for claim in renewed], now=T))
    assert {row["status"] for row in dump(sqlite_engine)} == {"retry_wait"}


def test_threads_settle_each_claim_once(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(60), now=T)
    claims = outbox.claim_batch(WORKER, now=T)
    rounds = [claims, claims[::-1], claims[30:] + claims[:30], claims[::-1]]
    found = together(
        *[lambda some=some: outbox.settle([Success(c, response(c.event_id)) for c in some], now=T) for some in rounds]
    )
    won = [line.claim.event_id for lines in found for line in lines if line.won]
    assert sorted(won) == sorted(ids(60))


# -- claims that have lost ------------------------------------------------------------------------------------------

Verb = Callable[[Outbox, Claim, float], Any]

OWNERS_VERBS: dict[str, Verb] = {
    "complete": lambda outbox, claim, now: outbox.complete(claim, response(claim.event_id), now=now),
    "retry": lambda outbox, claim, now: outbox.retry(claim, "busy", now=now),
    "fail": lambda outbox, claim, now: outbox.fail(claim, "refused", now=now),
}


def lines_of(verb: Callable[..., list[Settled]]) -> Callable[[Outbox, list[Claim], float], list[str | None]]:
    return lambda outbox, claims, now: [line.error_code for line in verb(outbox, claims, now)]


MANY_VERBS: dict[str, Callable[[Outbox, list[Claim], float], list[str | None]]] = {
    "settle": lines_of(
        lambda outbox, claims, now: outbox.settle([Success(c, response(c.event_id)) for c in claims], now=now)
    ),
    "release": lines_of(lambda outbox, claims, now: outbox.release(claims, now=now)),
}


def settled(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    outbox.complete(claim, response(claim.event_id), now=T)
    return T


def taken_by_another(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    assert claimed(outbox, now=T + 600).event_id == claim.event_id
    return T + 600


def recovered(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    outbox.enqueue(note("other"), now=T)
    claimed(outbox, now=T + 600)
    assert raw_row(engine, claim.event_id)["status"] == "retry_wait"
    return T + 600


def released(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    outbox.release([claim], now=T)
    return T


def purged(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    with engine.begin() as connection:
        connection.execute(delete(outbox_event).where(outbox_event.c.id == claim.id))
    return T


def purged_and_enqueued_again(outbox: Outbox, engine: Engine, claim: Claim) -> float:
    now = purged(outbox, engine, claim)
    number = claim.event_id.removeprefix("note-")
    outbox.enqueue(note(number), now=T)
    assert claimed(outbox).event_id == claim.event_id
    return now


LOST: dict[str, tuple[str, Callable[[Outbox, Engine, Claim], float]]] = {
    "expired, though nobody else has it": ("dispatch.lease_expired", lambda *_: T + 600),
    "expired long ago": ("dispatch.lease_expired", lambda *_: T + 1e9),
    "settled": ("dispatch.claim_lost", settled),
    "leased by another": ("dispatch.claim_lost", taken_by_another),
    "recovered": ("dispatch.claim_lost", recovered),
    "released": ("dispatch.claim_lost", released),
    "purged": ("dispatch.claim_missing", purged),
    "purged and enqueued again": ("dispatch.claim_lost", purged_and_enqueued_again),
    "a clock that went back": ("dispatch.clock_regressed", lambda *_: T - 1e-6),
    "a clock that went back to the start": ("dispatch.clock_regressed", lambda *_: 0),
}


@pytest.mark.parametrize(("code", "lose"), LOST.values(), ids=LOST)
def test_a_lost_claim_changes_nothing(outbox: Outbox, engine: Engine, code: str, lose: Any) -> None:
    claim = leased(outbox)
    now = lose(outbox, engine, claim)
    with unchanged(engine):
        for verb in OWNERS_VERBS.values():
            with refused(code, event_id="note-1"):
                verb(outbox, claim, now)
        for many in MANY_VERBS.values():
            assert many(outbox, [claim], now) == [code]
        assert outbox.renew([claim], now=now) == []


@pytest.mark.parametrize(("code", "lose"), LOST.values(), ids=LOST)
@pytest.mark.parametrize("verb", MANY_VERBS.values(), ids=MANY_VERBS)
def test_a_lost_claim_spoils_no_other(outbox: Outbox, engine: Engine, code: str, lose: Any, verb: Any) -> None:
    lost = leased(outbox, 1)
    now = lose(outbox, engine, lost)
    outbox.enqueue_many([note(2), note(3)], now=now)
    others = [c for c in outbox.claim_batch("worker-2", now=now) if c.event_id in ("note-2", "note-3")]
    if code in ("dispatch.lease_expired", "dispatch.clock_regressed"):
        code = code if raw_row(engine)["lease_token"] == lost.lease_token else "dispatch.claim_lost"
    assert verb(outbox, [others[0], lost, others[1]], now) == [None, code, None]


@pytest.mark.parametrize("verb", OWNERS_VERBS.values(), ids=OWNERS_VERBS)
@pytest.mark.parametrize("now", [T, T + 600 - 1e-6])
def test_a_claim_is_live_from_its_first_moment_to_its_last(outbox: Outbox, verb: Verb, now: float) -> None:
    assert verb(outbox, leased(outbox), now).event_id == "note-1"


OTHERS: dict[str, Any] = {
    "id": lambda claim: claim.id + 1,
    "attempt": lambda claim: claim.attempt + 1,
    "max_attempts": lambda claim: claim.max_attempts + 1,
    "lease_owner": lambda claim: claim.lease_owner + "x",
    "lease_token": lambda claim: "f" * 32,
    "lease_expires_at": lambda claim: math.nextafter(claim.lease_expires_at, 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_part_of_the_fence_counts(outbox: Outbox, engine: Engine, name: str) -> None:
    claim = leased(outbox)
    other = replace(claim, **{name: OTHERS[name](claim)})
    with unchanged(engine):
        for verb in OWNERS_VERBS.values():
            with refused("dispatch.claim_lost"):
                verb(outbox, other, T)
        for many in MANY_VERBS.values():
            assert many(outbox, [other], T) == ["dispatch.claim_lost"]
        assert outbox.renew([other], now=T) == []


def test_the_payload_is_part_of_the_fence(outbox: Outbox, engine: Engine) -> None:
    payload = canonical(note(1, "other"))
    other = replace(leased(outbox), payload=payload, payload_sha256=sha256_hex(payload))
    with unchanged(engine), refused("dispatch.claim_lost"):
        outbox.complete(other, response(), now=T)


def test_a_claim_of_another_event(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(2), now=T)
    first, second = outbox.claim_batch(WORKER, now=T)
    mixed = replace(second, id=first.id)
    with unchanged(engine), refused("dispatch.claim_lost"):
        outbox.complete(mixed, response("note-2"), now=T)


# -- refused before the database is asked ---------------------------------------------------------------------------


def fabricated(**changes: Any) -> Claim:
    payload = canonical(note())
    claim = Claim(
        topic=TOPIC, event_id="note-1", payload=payload, payload_sha256=sha256_hex(payload), attempt=1, max_attempts=5,
        lease_owner=WORKER, lease_token="f" * 32, lease_expires_at=T + 600, id=1,
    )  # fmt: skip
    return replace(claim, **changes)


MALFORMED: dict[str, Any] = {
    "nothing": None,
    "a dict": {"event_id": "note-1"},
    "a token": "f" * 32,
    "a number": 7,
    "a list of a claim": [fabricated()],
    "the class": Claim,
    **{
        f"{name} {value!r:.20}": fabricated(**{name: value})
        for name, values in dict[str, list[Any]](
            {
                "topic": [None, "", "a b", 7, b"test.note"],
                "event_id": [None, "", "a b", 7, "x" * 257],
                "payload": [None, "", "{}", b"{}", {}, "\ud800"],
                "payload_sha256": [None, "", "0" * 64, "Z" * 64, 7],
                "attempt": [None, 0, -1, 6, True, 1.0, "1"],
                "max_attempts": [None, 0, 21, True, 5.0, "5"],
                "lease_owner": [None, "", "a b", "w" * 129, 7],
                "lease_token": [None, "", "a b", "t" * 129, 7],
                "lease_expires_at": [None, math.nan, math.inf, True, "later", 10**400],
                "id": [None, 0, -1, True, 1.0, "1", 2**63, 2**200],
            }
        ).items()
        for value in values
    },
}

CLAIM_VERBS: dict[str, Callable[[Outbox, Any], Any]] = {
    "complete": lambda outbox, claim: outbox.complete(claim, response()),
    "retry": lambda outbox, claim: outbox.retry(claim, "busy"),
    "fail": lambda outbox, claim: outbox.fail(claim, "refused"),
    "renew": lambda outbox, claim: outbox.renew([claim]),
    "release": lambda outbox, claim: outbox.release([claim]),
    "settle a success": lambda outbox, claim: outbox.settle([Success(claim, response())]),
    "settle a failure": lambda outbox, claim: outbox.settle([Failure(claim, "busy")]),
}


@pytest.mark.parametrize("claim", MALFORMED.values(), ids=MALFORMED)
def test_malformed_claims(apart: Outbox, claim: Any) -> None:
    for verb in CLAIM_VERBS.values():
        with refused("dispatch.claim_invalid"):
            verb(apart, claim)


@pytest.mark.parametrize("result", [None, fabricated(), "note-1", (fabricated(), response()), object()])
def test_results_that_are_none(apart: Outbox, result: Any) -> None:
    with refused("dispatch.claim_invalid"):
        apart.settle([Success(fabricated(), response()), result])


def test_claims_of_a_topic_without_a_contract(apart: Outbox) -> None:
    claim = fabricated(topic="other")
    with refused("dispatch.topic_unknown"):
        apart.complete(claim, response())
    with refused("dispatch.topic_unknown"):
        apart.settle([Success(claim, response())])


@pytest.mark.parametrize("now", [True, "0", -1, math.nan, math.inf])
def test_bad_times(apart: Outbox, now: Any) -> None:
    for verb in (
        lambda claim: apart.complete(claim, response(), now=now),
        lambda claim: apart.retry(claim, "busy", now=now),
        lambda claim: apart.fail(claim, "refused", now=now),
        lambda claim: apart.renew([claim], now=now),
        lambda claim: apart.release([claim], now=now),
        lambda claim: apart.settle([Failure(claim, "busy")], now=now),
        lambda _: apart.renew([], now=now),
        lambda _: apart.release([], now=now),
        lambda _: apart.settle([], now=now),
    ):
        with refused("dispatch.time_invalid"):
            verb(fabricated())


BAD_FAILURES: list[dict[str, Any]] = [
    *({"error_code": value} for value in ("", "Busy", "a b", "a" * 129, "1a", None, 7)),
    *({"error_code": "busy", "detail_hash": value} for value in ("", "0" * 63, "X" * 64, "secret", 7)),
]
BAD_WISHES = [-1, -1e-9, math.nan, math.inf, True, "60", 10**400]


@pytest.mark.parametrize("arguments", BAD_FAILURES)
def test_malformed_failures(apart: Outbox, arguments: dict[str, Any]) -> None:
    for verb in (
        lambda: apart.retry(fabricated(), **arguments),
        lambda: apart.fail(fabricated(), **arguments),
        lambda: apart.settle([Failure(fabricated(), **arguments)]),
    ):
        with refused("dispatch.error_invalid"):
            verb()


@pytest.mark.parametrize("wish", BAD_WISHES)
def test_malformed_wishes(apart: Outbox, wish: Any) -> None:
    with refused("dispatch.error_invalid"):
        apart.retry(fabricated(), "busy", retry_after=wish)
    with refused("dispatch.error_invalid"):
        apart.settle([Failure(fabricated(), "busy", retry_after=wish)])


BAD_RESPONSES: dict[str, Any] = {
    "nothing": None,
    "empty": {},
    "text": "ok",
    "of another event": response("note-2"),
    "no JSON": response() | {"more": object()},
    "not a number": response() | {"more": math.nan},
    "a lone surrogate": response() | {"more": "\ud800"},
    "a tuple": response() | {"more": (1,)},
    "keys that are none": response() | {1: 2},
    "too deep": response() | {"more": __import__("functools").reduce(lambda inner, _: [inner], range(100), [])},
}


@pytest.mark.parametrize("answer", BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_a_response_that_is_refused(apart: Outbox, answer: Any) -> None:
    with refused("dispatch.response_invalid"):
        apart.complete(fabricated(), answer)


@pytest.mark.parametrize("answer", BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_a_response_that_is_refused_among_others(outbox: Outbox, answer: Any) -> None:
    outbox.enqueue_many(notes(2), now=T)
    first, second = outbox.claim_batch(WORKER, now=T)
    lines = outbox.settle([Success(first, answer), Success(second, response("note-2"))], now=T)
    assert [line.outcome and line.outcome.status for line in lines] == ["failed", "succeeded"]
    assert outbox.status("note-1").last_error_code == "dispatch.response_invalid"


class Accepting(Contract):
    """A contract whose judgement of responses is the host's code, and fails as code fails."""

    topic = TOPIC
    check = Notes.check

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def accept(self, event_id: str, response: Any) -> Any:
        return self._act()


def raising(error: Exception) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


@pytest.mark.parametrize(
    "act",
    [
        raising(KeyError("s3cret")), raising(InputError("dispatch.event_invalid")), raising(InputError("host.own")),
        raising(RecursionError()), lambda: None, lambda: 7, lambda: [1], lambda: {"a": object()},
        lambda: {"a": "x" * 64_000},
    ],
)  # fmt: skip
def test_whatever_goes_wrong_in_a_contract_is_a_bad_response(outbox: Outbox, engine: Engine, act: Any) -> None:
    odd = Outbox(engine, [Accepting(act)])
    claim = leased(outbox)
    with unchanged(engine), refused("dispatch.response_invalid") as caught:
        odd.complete(claim, response(), now=T)
    assert "s3cret" not in str(caught.value)
    (line,) = odd.settle([Success(claim, response())], now=T)
    assert line.outcome == Outcome("note-1", "failed", 1, 5, None, "dispatch.response_invalid")


def test_a_receipt_of_any_text_comes_back(engine: Engine) -> None:
    fields = {"text": '\0 \x1f " \\ \u2028 é \U0001f600', "numbers": [1.5, -0.0, 2**70, None, True], "": {}}
    outbox = Outbox(engine, [Accepting(lambda: fields)])
    outbox.complete(leased(outbox), response(), now=T)
    assert outbox.status("note-1").receipt == fields
    assert raw_row(engine)["receipt"] == canonical(fields)
