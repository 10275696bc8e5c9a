"""Claims: what is due, in which order, under which lease, and that nothing is handed out that does not prove itself."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import QueuePool

from outbox import Claim, Contract, InputError, Outbox
from outbox.values import sha256_hex
from tests.support import (
    TOPIC,
    WORKER,
    Notes,
    T,
    canonical,
    claimed,
    dump,
    forge,
    ids,
    leased,
    make_outbox,
    note,
    notes,
    poison,
    put,
    raw_row,
    refused,
    statements,
    tamper,
    together,
    unchanged,
)
from tests.test_enqueue import forbidden


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


def batch(outbox: Outbox, now: float | None = T, **arguments: Any) -> list[str]:
    return [claim.event_id for claim in outbox.claim_batch(WORKER, now=now, **arguments)]


# -- one claim ------------------------------------------------------------------------------------------------------


def test_what_a_claim_carries_and_what_it_writes(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), max_attempts=3, now=T)
    before = raw_row(engine)

    claim = outbox.claim("worker:1", lease_seconds=60, now=T + 1)

    assert claim is not None
    payload = canonical(note())
    assert (claim.topic, claim.event_id, claim.payload, claim.payload_sha256) == (
        TOPIC, "note-1", payload, sha256_hex(payload),
    )  # fmt: skip
    assert (claim.attempt, claim.max_attempts, claim.lease_owner, claim.lease_expires_at) == (1, 3, "worker:1", T + 61)
    assert (claim.due_at, claim.id) == (T, before["id"])
    assert raw_row(engine) == before | {
        "status": "leased", "attempts": 1, "lease_owner": "worker:1", "lease_token": claim.lease_token,
        "lease_expires_at": T + 61, "updated_at": T + 1,
    }  # fmt: skip
    status = outbox.status("note-1", now=T + 1)
    assert (status.status, status.attempts, status.lease_expires_at, status.lease_expired) == (
        "leased",
        1,
        T + 61,
        False,
    )


def test_a_claims_repr_does_not_tell_the_payload(outbox: Outbox) -> None:
    outbox.enqueue(note(1, "s3cret"), now=T)
    claim = claimed(outbox)
    assert "s3cret" in claim.payload
    assert "s3cret" not in repr(claim)
    assert "s3cret" not in str(claim)


def test_nothing_due(outbox: Outbox) -> None:
    assert outbox.claim(WORKER) is None
    assert outbox.claim_batch(WORKER) == []
    assert outbox.ready() is False


@pytest.mark.parametrize("state", ["leased", "succeeded", "failed"])
def test_what_is_not_due_is_not_claimed(outbox: Outbox, engine: Engine, state: str) -> None:
    put(outbox, state)
    with unchanged(engine):
        assert outbox.claim(WORKER, now=T + 599) is None
        assert batch(outbox, now=T + 599) == []
        assert outbox.ready(now=T + 599) is False


@pytest.mark.parametrize(("now", "due"), [(T - 1e-6, False), (T, True), (T + 1, True)])
def test_due_at_its_very_moment(outbox: Outbox, now: float, due: bool) -> None:
    put(outbox, "pending")
    assert outbox.ready(now=now) is due
    assert bool(outbox.claim(WORKER, now=now)) is due


@pytest.mark.parametrize(("now", "due"), [(T + 10 - 1e-6, False), (T + 10, True)])
def test_a_retry_is_due_at_its_very_moment(outbox: Outbox, now: float, due: bool) -> None:
    put(outbox, "retry_wait")
    assert outbox.status("note-1").next_attempt_at == T + 10
    assert outbox.ready(now=now) is due
    claim = outbox.claim(WORKER, now=now)
    assert (claim and claim.attempt) == (2 if due else None)


def test_a_claim_clears_the_last_error(outbox: Outbox, engine: Engine) -> None:
    outbox.retry(leased(outbox), "busy", detail_hash="a" * 64, now=T)
    claimed(outbox, now=T + 10)
    row = raw_row(engine)
    assert (row["last_error_code"], row["last_error_detail_hash"]) == (None, None)


def test_a_token_is_new_at_every_claim(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(50), max_attempts=20, now=T)
    tokens = list[str]()
    for round_ in range(10):
        claims = outbox.claim_batch(WORKER, now=T + round_)
        tokens += [claim.lease_token for claim in claims]
        outbox.release(claims[:25], now=T + round_)
        outbox.settle([], now=T + round_)
    assert len(set(tokens)) == len(tokens) == 50 + 9 * 25
    assert {len(token) for token in tokens} == {32}


def test_without_a_time_it_is_now(outbox: Outbox) -> None:
    created = outbox.enqueue(note()).created_at
    claim = claimed(outbox, now=None, lease_seconds=60)
    assert created <= claim.lease_expires_at - 60 < created + 30


# -- order and topics -----------------------------------------------------------------------------------------------


def test_due_order_is_by_time_and_then_by_age(outbox: Outbox) -> None:
    for number, due in enumerate([T + 3, T + 1, T + 2, T + 1, T, T + 9], 1):
        outbox.enqueue(note(number), now=due)
    expected = ["note-5", "note-2", "note-4", "note-3", "note-1"]
    assert [claimed(outbox, now=T + 5).event_id for _ in range(2)] == expected[:2]
    assert batch(outbox, now=T + 5) == expected[2:]
    assert batch(outbox, now=T + 5) == []


def test_first_attempts_and_retries_share_one_order(outbox: Outbox) -> None:
    put(outbox, "retry_wait", 1)  # due at T + 10
    outbox.enqueue(note(2), now=T + 9)
    outbox.enqueue(note(3), now=T + 11)
    assert batch(outbox, now=T + 20) == ["note-2", "note-1", "note-3"]


def test_the_limit(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(1001), now=T)
    assert batch(outbox, limit=1) == ids(1)
    assert batch(outbox) == ids(101)[1:]
    assert batch(outbox, limit=1000) == ids(1001)[101:]


def test_a_floor_passes_over_what_was_due_before(outbox: Outbox) -> None:
    for number in range(1, 5):
        outbox.enqueue(note(number), now=T + number)
    assert batch(outbox, now=T + 9, due_from=T + 3) == ["note-3", "note-4"]
    assert batch(outbox, now=T + 9) == ["note-1", "note-2"]


def test_topics_are_apart(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    for topic in ("one", "two"):
        outbox.enqueue(note(1, topic), topic=topic, now=T)
    claim = claimed(outbox, topic="two")
    assert (claim.topic, claim.payload) == ("two", canonical(note(1, "two")))
    assert outbox.claim(WORKER, topic="two", now=T) is None
    assert outbox.ready(topic="two", now=T) is False
    assert outbox.ready(topic="one", now=T) is True
    assert batch(outbox, topic="one") == ["note-1"]


def test_attempts_that_are_used_up_are_not_claimed(outbox: Outbox, engine: Engine) -> None:
    """No row of ours is ever like that; one that is must not be tried once more."""
    put(outbox, "pending")
    tamper(engine, attempts=5)
    with unchanged(engine):
        assert outbox.claim(WORKER, now=T) is None
        assert outbox.ready(now=T) is False


def test_a_batch_of_any_size_takes_as_many_statements(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(302), now=T)
    outbox.claim(WORKER, now=T)
    with statements(engine) as one:
        assert len(outbox.claim_batch(WORKER, limit=1, now=T)) == 1
    with statements(engine) as many:
        assert len(outbox.claim_batch(WORKER, limit=300, now=T)) == 300
    assert len(many) == len(one) <= 4


# -- expired leases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "expired"), [(T + 60 - 1e-6, False), (T + 60, True)])
def test_a_lease_ends_at_its_very_moment(outbox: Outbox, engine: Engine, now: float, expired: bool) -> None:
    old = leased(outbox, lease_seconds=60)
    assert outbox.status("note-1", now=now).lease_expired is expired
    assert outbox.ready(now=now) is expired
    new = outbox.claim("worker-2", now=now)
    if not expired:
        assert new is None
        assert raw_row(engine)["lease_token"] == old.lease_token
        return
    assert new is not None
    assert (new.attempt, new.lease_owner, new.due_at) == (2, "worker-2", now)
    assert new.lease_token != old.lease_token


def test_recovery_makes_due_now_and_says_why(outbox: Outbox, engine: Engine) -> None:
    leased(outbox, lease_seconds=60)
    outbox.enqueue(note(2), now=T + 70)
    before = raw_row(engine)
    claim = claimed(outbox, now=T + 100)
    assert claim.event_id == "note-2"  # which had been due for longer
    assert raw_row(engine) == before | {
        "status": "retry_wait", "lease_owner": None, "lease_token": None, "lease_expires_at": None,
        "last_error_code": "lease_expired", "next_attempt_at": T + 100, "updated_at": T + 100,
    }  # fmt: skip
    assert claimed(outbox, now=T + 100).event_id == "note-1"


def test_recovery_of_a_last_attempt_fails_the_event(outbox: Outbox, engine: Engine) -> None:
    leased(outbox, max_attempts=1, lease_seconds=60)
    before = raw_row(engine)
    assert outbox.claim(WORKER, now=T + 60) is None
    assert raw_row(engine) == before | {
        "status": "failed", "lease_owner": None, "lease_token": None, "lease_expires_at": None,
        "last_error_code": "lease_expired", "updated_at": T + 60,
    }  # fmt: skip
    assert outbox.health(now=T + 60).status == "blocked"


def test_recovery_is_for_all_topics_and_says_so(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    outbox = make_outbox(engine, "one", "two")
    outbox.enqueue(note(), topic="one", now=T)
    claimed(outbox, topic="one", lease_seconds=1)
    assert outbox.claim(WORKER, topic="two", now=T + 1) is None
    assert raw_row(engine)["status"] == "retry_wait"
    assert "lease expired on event note-1 of one: now retry_wait" in caplog.text


def test_a_mass_expiry_is_recovered(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(1500), now=T)
    for _ in range(2):
        outbox.claim_batch(WORKER, limit=1000, lease_seconds=1, now=T)
    assert outbox.health(now=T + 1).expired_leases == 1500
    first, second = (outbox.claim_batch(WORKER, limit=1000, now=T + 1) for _ in range(2))
    assert sorted(claim.event_id for claim in [*first, *second]) == sorted(ids(1500))
    assert {claim.attempt for claim in [*first, *second]} == {2}


def test_every_attempt_can_expire(outbox: Outbox) -> None:
    outbox.enqueue(note(), max_attempts=20, now=T)
    attempts = []
    for round_ in range(25):
        claim = outbox.claim(WORKER, lease_seconds=1, now=T + round_)
        attempts.append(claim and claim.attempt)
    assert attempts == [*range(1, 21), None, None, None, None, None]
    status = outbox.status("note-1")
    assert (status.status, status.attempts, status.last_error_code) == ("failed", 20, "lease_expired")


@pytest.mark.parametrize("seconds", [5e-324, 1e-9, 0.001, 86_400])
def test_leases_short_and_long(outbox: Outbox, seconds: float) -> None:
    claim = leased(outbox, lease_seconds=seconds)
    assert T < claim.lease_expires_at <= T + max(seconds, 1e-6)
    assert outbox.status("note-1", now=T).lease_expired is False
    assert outbox.health(deep=True, now=T).status == "ok"
    assert outbox.complete(claim, {"id": "note-1", "place": 1}, now=T).status == "succeeded"


@pytest.mark.parametrize("now", [0, 1e300])
def test_clocks_far_off(outbox: Outbox, now: float) -> None:
    """Whatever the clock says, a lease ends after it began, and the row keeps its rules."""
    outbox.enqueue(note(), now=0)
    claim = claimed(outbox, now=now)
    outbox.retry(claim, "busy", now=now)
    assert outbox.health(deep=True, now=now).counts["retry_wait"] == 1


# -- quarantine -----------------------------------------------------------------------------------------------------

PAYLOAD = canonical(note())


def forged(payload: str) -> Any:
    return lambda engine: forge(engine, payload)


POISON: dict[str, Any] = {
    "another text": poison,
    "an empty payload": lambda engine: tamper(engine, payload=""),
    "another hash": lambda engine: tamper(engine, payload_sha256="0" * 64),
    "a hash that is none": lambda engine: tamper(engine, payload_sha256="Z" * 64),
    "another name of the row": lambda engine: tamper(engine, event_id="note-9"),
    "another event in the payload": forged(canonical(note(9))),
    "white space": forged(PAYLOAD.replace(":", ": ")),
    "another order of keys": forged('{"text":"hello","id":"note-1"}'),
    "a key twice": forged('{"id":"note-1","id":"note-1","text":"hello"}'),
    "no JSON": forged("hello"),
    "an escape": forged('{"id":"note-1","text":"\\u0068ello"}'),
    "a lone surrogate": forged('{"id":"note-1","text":"\\ud800"}'),
    "not by the contract": forged('{"id":"note-1"}'),
    "brackets without end": forged("[" * 100_000),
    "an integer without end": forged("1" * 10_000),
}


def quarantined(engine: Engine) -> list[str]:
    return [row["event_id"] for row in dump(engine) if row["last_error_code"] == "dispatch.payload_integrity"]


@pytest.mark.parametrize("spoil", POISON.values(), ids=POISON)
def test_what_does_not_prove_itself_is_quarantined(outbox: Outbox, engine: Engine, spoil: Any) -> None:
    outbox.enqueue_many([note(1), note(2)], now=T)
    spoil(engine)
    before = dump(engine)[0]

    with refused("dispatch.payload_integrity", event_id=before["event_id"]):
        outbox.claim(WORKER, now=T)

    assert dump(engine)[0] == before | {
        "status": "failed", "attempts": 1, "last_error_code": "dispatch.payload_integrity", "updated_at": T,
    }  # fmt: skip
    assert claimed(outbox).event_id == "note-2"
    assert outbox.claim(WORKER, now=T + 300) is None


def test_text_that_is_no_utf8_is_poison_like_any_other(sqlite_engine: Engine) -> None:
    """SQLite stores whatever bytes it is given, and a flipped bit may well leave the reader with no text at all."""
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue_many(notes(3), now=T)
    with sqlite_engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE outbox_event SET payload = CAST(x'7bff7d' AS TEXT) WHERE event_id = 'note-1'"
        )
        connection.exec_driver_sql("UPDATE outbox_event SET payload = x'7b7d' WHERE event_id = 'note-2'")
    for event_id in ids(2):
        with refused("dispatch.state_invalid", event_id=event_id):
            outbox.status(event_id)
    with refused("dispatch.state_invalid"):
        outbox.health(deep=True)
    assert batch(outbox) == ["note-3"]
    with sqlite_engine.connect() as connection:
        poisoned = "SELECT event_id FROM outbox_event WHERE last_error_code = 'dispatch.payload_integrity' ORDER BY id"
        assert connection.exec_driver_sql(poisoned).scalars().all() == ids(2)


@pytest.mark.parametrize(("count", "bad"), [(5, {1}), (5, {2, 4}), (5, {5}), (250, set(range(1, 200, 3)))])
def test_poison_in_a_batch_stops_no_other(
    outbox: Outbox, engine: Engine, caplog: pytest.LogCaptureFixture, count: int, bad: set[int]
) -> None:
    outbox.enqueue_many(notes(count), now=T)
    for number in bad:
        poison(engine, f"note-{number}", "s3cret")
    assert batch(outbox, limit=1000) == [f"note-{number}" for number in range(1, count + 1) if number not in bad]
    assert quarantined(engine) == [f"note-{number}" for number in sorted(bad)]
    assert all(
        f"quarantined event note-{number} of {TOPIC}: dispatch.payload_integrity" in caplog.text for number in bad
    )
    assert "s3cret" not in caplog.text


def test_a_batch_of_nothing_but_poison_is_not_an_empty_outbox(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(7), now=T)
    for event_id in ids(6):
        poison(engine, event_id)
    assert batch(outbox, limit=2) == ["note-7"]
    assert quarantined(engine) == ids(6)
    assert batch(outbox) == []


def test_nothing_but_poison_at_all(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(3), now=T)
    for event_id in ids(3):
        poison(engine, event_id)
    assert batch(outbox, limit=1) == []
    assert quarantined(engine) == ids(3)


@pytest.mark.parametrize("now", [T, None])
def test_quarantine_does_not_race_a_lease_that_is_over_at_once(
    outbox: Outbox, engine: Engine, now: float | None
) -> None:
    outbox.enqueue_many(notes(2), now=T)
    for event_id in ids(2):
        poison(engine, event_id)
    with refused("dispatch.payload_integrity", event_id="note-1"):
        outbox.claim(WORKER, lease_seconds=5e-324, now=now)
    assert batch(outbox, lease_seconds=5e-324, now=now) == []
    assert quarantined(engine) == ids(2)
    assert [row["attempts"] for row in dump(engine)] == [1, 1]


def test_quarantine_is_seen_and_can_be_mended(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), now=T)
    poison(engine)
    assert batch(outbox) == []
    assert outbox.status("note-1").last_error_code == "dispatch.payload_integrity"
    assert outbox.health(deep=True, now=T).status == "blocked"
    tamper(engine, payload=PAYLOAD)
    assert outbox.redrive("note-1", now=T + 1).status == "pending"
    assert claimed(outbox, now=T + 1).payload == PAYLOAD


class Moody(Contract):
    """A contract that has changed its mind, in whatever way a host's code can."""

    topic = TOPIC

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def check(self, event: Any) -> str:
        if self._error:
            raise self._error
        return "another"

    accept = Notes.accept


@pytest.mark.parametrize(
    "error", [None, InputError("dispatch.change_invalid"), InputError("host.own"), KeyError("s3cret"), RecursionError()]
)
def test_a_contract_that_no_longer_takes_an_event(outbox: Outbox, engine: Engine, error: Exception | None) -> None:
    outbox.enqueue(note(), now=T)
    changed = Outbox(engine, [Moody(error)])
    with refused("dispatch.payload_integrity", event_id="note-1") as caught:
        changed.claim(WORKER, now=T)
    assert "s3cret" not in str(caught.value)
    assert quarantined(engine) == ["note-1"]


# -- many at once ---------------------------------------------------------------------------------------------------


def test_threads_share_one_outbox_and_no_event(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(200), now=T)

    def drain() -> list[Claim]:
        claims = list[Claim]()
        while more := outbox.claim_batch(WORKER, limit=7, now=T):
            claims += more
        return claims

    claims = [claim for found in together(*[drain] * 8) for claim in found]
    assert sorted(claim.event_id for claim in claims) == sorted(ids(200))
    assert {claim.attempt for claim in claims} == {1}


def test_threads_recover_each_lease_once(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(100), now=T)
    outbox.claim_batch(WORKER, lease_seconds=1, now=T)
    found = together(*[lambda: outbox.claim_batch(WORKER, limit=20, now=T + 1)] * 8)
    late = outbox.claim_batch(WORKER, limit=1000, now=T + 1)
    claims = [claim for claims in [*found, late] for claim in claims]
    assert sorted(claim.event_id for claim in claims) == sorted(ids(100))
    assert {claim.attempt for claim in claims} == {2}


# -- refused before the database is asked ---------------------------------------------------------------------------

BAD_ARGUMENTS: list[tuple[str, str, Any]] = [
    *(("dispatch.worker_invalid", "worker_id", value) for value in ("", "w" * 129, "a b", "é", "a\n", None, 7, b"worker")),
    *(("dispatch.lease_invalid", "lease_seconds", value)
      for value in (0, -1, 86_400.001, math.nan, math.inf, True, "60", None)),
    *(("dispatch.time_invalid", "now", value) for value in (True, "0", -1, math.nan, math.inf, b"", [])),
    *(("dispatch.topic_unknown", "topic", value) for value in ("other", "", 7, [TOPIC])),
]  # fmt: skip


@pytest.mark.parametrize(("code", "name", "value"), BAD_ARGUMENTS)
def test_bad_arguments(apart: Outbox, code: str, name: str, value: Any) -> None:
    arguments = {"worker_id": WORKER, name: value}
    with refused(code):
        apart.claim(**arguments)
    with refused(code):
        apart.claim_batch(**arguments)


@pytest.mark.parametrize("limit", [0, 1001, -1, True, 1.0, "1", None])
def test_bad_limits(apart: Outbox, limit: Any) -> None:
    with refused("dispatch.limit_invalid"):
        apart.claim_batch(WORKER, limit=limit)


@pytest.mark.parametrize("floor", [-1, True, math.nan, math.inf, "0"])
def test_bad_floors(apart: Outbox, floor: Any) -> None:
    with refused("dispatch.time_invalid"):
        apart.claim_batch(WORKER, due_from=floor)


def test_bad_questions(apart: Outbox) -> None:
    with refused("dispatch.topic_unknown"):
        apart.ready(topic="other")
    with refused("dispatch.time_invalid"):
        apart.ready(now=-1)


def test_worker_ids_at_their_longest(outbox: Outbox) -> None:
    put(outbox, "pending")
    claim = outbox.claim("w" * 128, now=T)
    assert claim is not None
    assert claim.lease_owner == "w" * 128


def test_the_log_is_the_packages_own(outbox: Outbox, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    outbox.enqueue(note(), now=T)
    poison(engine)
    with caplog.at_level(logging.DEBUG):
        batch(outbox)
    assert {record.name for record in caplog.records} == {"outbox"}
