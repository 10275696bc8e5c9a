"""Enqueue, in transactions of its own: what is stored, what counts as the same event, and that a refusal leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import QueuePool

from outbox import EventStatus, Outbox
from outbox.values import MAX_PAYLOAD_BYTES, sha256_hex
from tests.support import (
    STATES,
    TOPIC,
    Notes,
    T,
    canonical,
    dump,
    ids,
    leased,
    lock_waits,
    make_outbox,
    note,
    notes,
    put,
    raw_row,
    refused,
    row_count,
    statements,
    together,
    unchanged,
    until,
)


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


def test_a_new_event(outbox: Outbox, engine: Engine) -> None:
    event = note(1, "größer ✓ \x00 \U0001f600")
    payload = canonical(event)

    found = outbox.enqueue(event, max_attempts=3, now=T)

    assert found == EventStatus(
        topic=TOPIC, event_id="note-1", payload_sha256=sha256_hex(payload), status="pending", attempts=0, max_attempts=3,
        next_attempt_at=T, lease_expires_at=None, lease_expired=False, last_error_code=None, last_error_detail_hash=None,
        receipt=None, response_sha256=None, ordering_key=None, redrives=0, created_at=T, updated_at=T,
    )  # fmt: skip
    assert found == outbox.status("note-1", now=T)
    row = raw_row(engine)
    assert (row["payload"], row["headers"], row["ordering_key"]) == (payload, None, None)


def test_the_event_is_not_touched(outbox: Outbox) -> None:
    event = note()
    outbox.enqueue(event)
    assert event == note()


def test_without_a_time_it_is_now(outbox: Outbox, engine: Engine) -> None:
    earlier = outbox.enqueue(note(1)).created_at
    later = outbox.enqueue_many([note(2), note(3)])[0].created_at
    assert earlier <= later
    with engine.connect() as connection:  # the machine's clock, and on PostgreSQL here the server's is the same
        seconds = {"sqlite": "strftime('%s', 'now') * 1.0", "postgresql": "extract(epoch FROM now())::float8"}
        clock = connection.execute(text(f"SELECT {seconds[engine.dialect.name]}")).scalar_one()
    assert abs(clock - later) < 60
    row = raw_row(engine, "note-2")
    assert row["created_at"] == row["updated_at"] == row["next_attempt_at"] == later


@pytest.mark.parametrize("now", [0, 0.1, 1_700_000_000.123456789, 1e300])
def test_times_are_kept_exactly(outbox: Outbox, engine: Engine, now: float) -> None:
    assert outbox.enqueue(note(), now=now).created_at == now
    assert outbox.enqueue_many([note(2), note(3)], now=now)[1].created_at == now
    assert {row["next_attempt_at"] for row in dump(engine)} == {now}


def test_the_largest_event(outbox: Outbox) -> None:
    around = len(canonical(note(1, "x"))) - 1
    event = note(1, "x" * (MAX_PAYLOAD_BYTES - around))
    outbox.enqueue(event, now=T)
    claim = outbox.claim("worker-1", now=T)
    assert claim is not None
    assert claim.payload == canonical(event)
    with refused("dispatch.change_invalid"):
        outbox.enqueue(note(2, event["text"] + "x"))


# -- the same event again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_the_same_event_again_returns_it_as_it_stands(outbox: Outbox, engine: Engine, state: str) -> None:
    put(outbox, state)
    with unchanged(engine):
        for again in (note(), dict(reversed(note().items()))):
            assert outbox.enqueue(again, now=T + 1) == outbox.status("note-1", now=T + 1)


@pytest.mark.parametrize("now", [T + 1, None])
def test_an_expired_lease_shows(outbox: Outbox, now: float | None) -> None:
    leased(outbox, lease_seconds=1)
    assert outbox.enqueue(note(), now=T + 0.5).lease_expired is False
    assert outbox.enqueue(note(), now=now).lease_expired is True


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("change", ["text", "max_attempts"])
def test_anything_else_under_the_id_collides(outbox: Outbox, engine: Engine, state: str, change: str) -> None:
    put(outbox, state)
    event, attempts = (note(1, "other"), 5) if change == "text" else (note(1), 4)
    with unchanged(engine):
        with refused("dispatch.idempotency_collision", event_id="note-1"):
            outbox.enqueue(event, now=T, max_attempts=attempts)
        with refused("dispatch.idempotency_collision", event_id="note-1"):
            outbox.enqueue_many([note(2), event, note(3)], now=T, max_attempts=attempts)


def test_ids_are_by_topic(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    outbox.enqueue(note(1, "a"), topic="one")
    assert outbox.enqueue(note(1, "b"), topic="two").topic == "two"
    assert row_count(engine) == 2


# -- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 501, 1203])
def test_ids_and_due_order_follow_the_call(outbox: Outbox, engine: Engine, count: int) -> None:
    shuffled = sorted(notes(count), key=lambda event: sha256_hex(event["id"]))
    wanted = [event["id"] for event in shuffled]

    found = outbox.enqueue_many(iter(shuffled))

    assert [status.event_id for status in found] == wanted
    assert [row["event_id"] for row in dump(engine)] == wanted
    claims = [*outbox.claim_batch("worker-1", limit=1000), *outbox.claim_batch("worker-1", limit=1000)]
    assert [claim.event_id for claim in claims] == wanted


def test_an_event_given_twice_counts_once(outbox: Outbox, engine: Engine) -> None:
    found = outbox.enqueue_many([note(1), note(2), note(1), note(1)], now=T)
    assert [status.event_id for status in found] == ["note-1", "note-2", "note-1", "note-1"]
    assert row_count(engine) == 2


def test_an_id_given_twice_with_two_payloads_collides(outbox: Outbox, engine: Engine) -> None:
    with refused("dispatch.idempotency_collision", event_id="note-1"):
        outbox.enqueue_many([note(1), note(2), note(1, "other")])
    assert row_count(engine) == 0


def test_old_and_new_ones_together(outbox: Outbox) -> None:
    for number, state in enumerate(STATES[1:], 1):
        put(outbox, state, number)
    put(outbox, "pending", 5)
    found = outbox.enqueue_many(notes(7), now=T + 1)
    assert [status.status for status in found] == [*STATES[1:], "pending", "pending", "pending"]
    assert [status.created_at for status in found] == [T] * 5 + [T + 1] * 2
    assert found == [outbox.status(event_id, now=T + 1) for event_id in ids(7)]


@pytest.mark.parametrize("place", [0, 299, 1099])
def test_all_or_none(outbox: Outbox, engine: Engine, place: int) -> None:
    outbox.enqueue(note("taken"), now=T)
    events = notes(1100)
    events[place] = note("taken", "other")
    with unchanged(engine), refused("dispatch.idempotency_collision", event_id="note-taken"):
        outbox.enqueue_many(events)
    events[place] = {"id": "note-bad"}
    with unchanged(engine), refused("dispatch.change_invalid"):
        outbox.enqueue_many(events)


def test_nothing_to_enqueue(outbox: Outbox, engine: Engine) -> None:
    assert outbox.enqueue_many([]) == []
    assert outbox.enqueue_many(iter(())) == []
    assert row_count(engine) == 0


def test_a_batch_of_any_size_takes_few_statements(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many([note("warm-1"), note("warm-2")])
    with statements(engine) as few:
        outbox.enqueue_many([note("a"), note("b")])
    with statements(engine) as many:
        outbox.enqueue_many(notes(300))
    with statements(engine) as again:
        outbox.enqueue_many(notes(300))
    assert len(many) == len(few)
    assert len(again) == len(few) + 1  # looking up what was there


def test_a_batch_of_large_events(outbox: Outbox, engine: Engine) -> None:
    """Together larger than any one statement should be."""
    events = [note(number, "x" * 900_000) for number in range(1, 40)]
    assert [status.event_id for status in outbox.enqueue_many(events)] == ids(39)
    assert [row["event_id"] for row in dump(engine)] == ids(39)


# -- refused before the database is asked ---------------------------------------------------------------------------


def forbidden() -> Any:
    raise AssertionError("the database was asked")


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


BAD_EVENTS: dict[str, Any] = {
    "nothing": None,
    "text": "note-1",
    "a list": [note()],
    "an object": object(),
    "no id": {"text": "hello"},
    "an id that is no token": {"id": "a b", "text": "hello"},
    "an id that is too long": {"id": "x" * 257, "text": "hello"},
    "an id that is a number": {"id": 1, "text": "hello"},
    "an id that is True": {"id": True, "text": "hello"},
    "an id that is None": {"id": None, "text": "hello"},
    "too much": {**note(), "more": 1},
    "a lone surrogate": note(1, "\ud800"),
    "an id with a lone surrogate": {"id": "\ud800", "text": "hello"},
}


@pytest.mark.parametrize("event", BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_bad_events(apart: Outbox, event: Any) -> None:
    with refused("dispatch.change_invalid"):
        apart.enqueue(event)
    with refused("dispatch.change_invalid"):
        apart.enqueue_many([note(), event])


class Odd(Notes):
    """A contract that leaves everything to its host's code, and that fails as code fails."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.check = act  # type: ignore[method-assign]


def fail_with(error: Exception) -> Any:
    def act(*_: Any) -> Any:
        raise error

    return act


@pytest.mark.parametrize(
    "act",
    [
        fail_with(KeyError("s3cret")), fail_with(RecursionError("s3cret")), fail_with(ValueError("s3cret")),
        lambda _: None, lambda _: "", lambda _: 7,
    ],
)  # fmt: skip
@pytest.mark.parametrize("event", [note(1, "s3cret"), {"s3cret": {1, 2}}, ["s3cret", math.nan]])
def test_whatever_goes_wrong_in_a_contract_is_a_bad_event(apart: Outbox, act: Any, event: Any) -> None:
    outbox = Outbox(apart.engine, [Odd(act)])
    with refused("dispatch.change_invalid") as caught:
        outbox.enqueue(event)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("max_attempts", [0, 21, -1, True, False, 5.0, "5", None, math.nan])
def test_bad_max_attempts(apart: Outbox, max_attempts: Any) -> None:
    with refused("dispatch.max_attempts_invalid"):
        apart.enqueue(note(), max_attempts=max_attempts)
    with refused("dispatch.max_attempts_invalid"):
        apart.enqueue_many([], max_attempts=max_attempts)


@pytest.mark.parametrize("now", [True, "0", -1, -1e-9, math.nan, math.inf, -math.inf, 10**400, [], object()])
def test_bad_times(apart: Outbox, now: Any) -> None:
    with refused("dispatch.time_invalid"):
        apart.enqueue(note(), now=now)
    with refused("dispatch.time_invalid"):
        apart.enqueue_many([], now=now)


@pytest.mark.parametrize("topic", ["other", "", "TEST.NOTE", 7, True, [TOPIC], {}])
def test_unknown_topics(apart: Outbox, topic: Any) -> None:
    with refused("dispatch.topic_unknown", says=TOPIC):
        apart.enqueue(note(), topic=topic)


def test_which_of_several_topics_must_be_said(apart: Outbox) -> None:
    outbox = make_outbox(apart.engine, "one", "two")
    with refused("dispatch.topic_unknown"):
        outbox.enqueue(note())


@pytest.mark.parametrize("max_attempts", [1, 20])
def test_good_max_attempts(outbox: Outbox, engine: Engine, max_attempts: int) -> None:
    assert outbox.enqueue(note(), max_attempts=max_attempts).max_attempts == max_attempts
    assert raw_row(engine)["max_attempts"] == max_attempts


# -- two at once ----------------------------------------------------------------------------------------------------


def test_the_same_event_from_many_threads(outbox: Outbox, engine: Engine) -> None:
    found = together(*[lambda: outbox.enqueue(note(), now=T)] * 8)
    assert found == [outbox.status("note-1", now=T)] * 8
    assert row_count(engine) == 1


def test_of_two_that_differ_one_collides(outbox: Outbox, engine: Engine) -> None:
    def enqueue(words: str) -> bool:
        try:
            outbox.enqueue(note(1, words))
        except Exception as error:
            assert getattr(error, "code", None) == "dispatch.idempotency_collision"
            return False
        return True

    assert sorted(together(*[lambda n=n: enqueue(str(n)) for n in range(4)])) == [False, False, False, True]
    assert row_count(engine) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_host_that_meets_anothers_open_transaction_waits_for_it(pg_engine: Engine, end: str) -> None:
    outbox = make_outbox(pg_engine)
    outbox.enqueue(note("warm"), now=T)
    with pg_engine.connect() as first:
        outbox.enqueue(note(), connection=first, now=T)

        def second() -> EventStatus:
            with pg_engine.begin() as connection:
                return outbox.enqueue(note(), connection=connection, now=T + 1)

        def finish() -> None:
            until(lambda: lock_waits(pg_engine) == 1, "the second host waiting")
            getattr(first, end)()

        status, _ = together(second, finish)
    assert status.created_at == (T if end == "commit" else T + 1)
    assert row_count(pg_engine) == 2


def test_on_sqlite_the_second_host_waits_for_the_first(sqlite_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue(note("warm"), now=T)
    with sqlite_engine.connect() as first, statements(sqlite_engine) as seen:
        outbox.enqueue(note(), connection=first, now=T)

        def finish() -> None:
            until(lambda: "BEGIN IMMEDIATE" in seen, "the second host asking for the lock")
            first.commit()

        status, _ = together(lambda: outbox.enqueue(note(), now=T + 1), finish)
    assert status.created_at == T
    assert row_count(sqlite_engine) == 2


@pytest.mark.parametrize("count", [20, 1100])
def test_overlapping_batches_in_opposite_order_do_not_deadlock(pg_engine: Engine, count: int) -> None:
    """Two hosts' batches, each begun by an event that the other's ends with, the second not before the first is half
    done: both wait for a third host in the middle."""
    outbox = make_outbox(pg_engine)
    outbox.enqueue(note("warm"), now=T)
    events = notes(count)
    middle = sorted(events, key=lambda event: event["id"])[count // 2]
    with pg_engine.connect() as third:
        outbox.enqueue(middle, connection=third, now=T)

        def finish() -> None:
            until(lambda: lock_waits(pg_engine) == 2, "both batches waiting")
            third.rollback()

        one, other, _ = together(
            lambda: outbox.enqueue_many(events, now=T),
            lambda: outbox.enqueue_many(list(reversed(events)), now=T),
            finish,
        )
    assert [status.event_id for status in one] == ids(count)
    assert other == list(reversed(one))
    assert row_count(pg_engine) == count + 1
