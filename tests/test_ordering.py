"""Ordering keys: events of one key are delivered one after another, as enqueued, whatever happens to any of them."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Claim, Failure, Outbox, Success
from outbox.records import EventStatus
from tests.support import (
    PATIENCE,
    TOPIC,
    WORKER,
    Notes,
    Scripted,
    T,
    claimed,
    dump,
    make_outbox,
    note,
    notes,
    poison,
    refused,
    response,
    row_count,
    statements,
    together,
    unchanged,
    until,
)

OTHER = "test.other"


class Passing(Notes):
    """Later events pass one that failed."""

    hold_on_failure = False


class Keyed(Notes):
    """The key is what stands before the colon of the text."""

    def ordering_key(self, event: Any) -> str | None:
        key, colon, _ = event["text"].partition(":")
        return key if colon else None


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def passing(engine: Engine) -> Outbox:
    return Outbox(engine, [Passing()])


@pytest.fixture(params=[Notes, Passing], ids=["holding", "passing"])
def either(request: pytest.FixtureRequest, engine: Engine) -> Outbox:
    return Outbox(engine, [request.param()])


def queue_up(outbox: Outbox, count: int, key: str = "k", *, now: float = T, **more: Any) -> list[str]:
    """note-1 and so on, all behind each other."""
    outbox.enqueue_many(notes(count), ordering_key=key, now=now, **more)
    return [f"note-{number}" for number in range(1, count + 1)]


def claim_all(outbox: Outbox, now: float = T, **more: Any) -> list[str]:
    return [claim.event_id for claim in outbox.claim_batch(WORKER, now=now, **more)]


def complete(outbox: Outbox, claims: Sequence[Claim], now: float | None = T) -> None:
    lines = outbox.settle([Success(claim, response(claim.event_id)) for claim in claims], now=now)
    assert all(line.won for line in lines), lines


def drain(outbox: Outbox, now: float | None = T, **more: Any) -> list[str]:
    """Deliver whatever is due, and return it in order. Twice nothing is the end: the sweep goes portion by portion."""
    found, nothing = list[str](), 0
    while nothing < 3:
        claims = outbox.claim_batch(WORKER, now=now, **more)
        complete(outbox, claims, now)
        found += [claim.event_id for claim in claims]
        nothing = 0 if claims else nothing + 1
    return found


def states(engine: Engine) -> dict[str, str]:
    return {row["event_id"].removeprefix("note-"): row["status"] for row in dump(engine)}


# -- one after another ----------------------------------------------------------------------------------------------


def test_one_at_a_time_in_the_order_enqueued(outbox: Outbox, engine: Engine) -> None:
    first = outbox.enqueue(note(1), ordering_key="k", now=T)
    second = outbox.enqueue(note(2), ordering_key="k", now=T + 1)
    assert [(each.status, each.ordering_key) for each in (first, second)] == [("pending", "k"), ("waiting", "k")]
    claim = claimed(outbox, T + 5)
    assert (claim.event_id, claim.ordering_key) == ("note-1", "k")
    assert outbox.claim(WORKER, now=T + 5) is None
    complete(outbox, [claim], T + 6)
    assert claimed(outbox, T + 6).event_id == "note-2"
    assert outbox.health(deep=True, now=T + 6).counts["waiting"] == 0


def test_keys_and_topics_do_not_wait_for_each_other(engine: Engine) -> None:
    outbox = make_outbox(engine, TOPIC, OTHER)
    for topic in (TOPIC, OTHER):
        outbox.enqueue_many(notes(2), topic=topic, ordering_key="k", now=T)
        outbox.enqueue(note("j"), topic=topic, ordering_key="j", now=T)
        outbox.enqueue(note("free"), topic=topic, now=T)
        assert claim_all(outbox, topic=topic) == ["note-1", "note-j", "note-free"]


def test_many_keys_in_one_call(engine: Engine) -> None:
    outbox = Outbox(engine, [Keyed()])
    given = [note(1, "a:"), note(2, "b:"), note(3, "a:"), note(1, "a:"), note(4, "free"), note(5, "b:")]
    found = outbox.enqueue_many(given, now=T)
    assert [(each.event_id[5:], each.ordering_key, each.status) for each in found] == [
        ("1", "a", "pending"), ("2", "b", "pending"), ("3", "a", "waiting"), ("1", "a", "pending"),
        ("4", None, "pending"), ("5", "b", "waiting"),
    ]  # fmt: skip
    assert drain(outbox) == ["note-1", "note-2", "note-4", "note-3", "note-5"]


def test_an_argument_overrides_the_contract(engine: Engine) -> None:
    outbox = Outbox(engine, [Keyed()])
    assert outbox.enqueue(note(1, "a:"), ordering_key="z", now=T).ordering_key == "z"
    assert outbox.enqueue(note(2, "a:"), now=T).status == "pending"
    with refused("dispatch.idempotency_collision", event_id="note-1"):
        outbox.enqueue(note(1, "a:"), now=T)


@pytest.mark.parametrize("state", ["pending", "waiting", "leased", "retry_wait", "succeeded", "failed"])
def test_enqueuing_again_changes_nothing(outbox: Outbox, engine: Engine, state: str) -> None:
    outbox.enqueue(note(1), ordering_key="k", now=T)
    outbox.enqueue(note(2), ordering_key="k", now=T)
    again = note(1)
    if state == "waiting":
        again = note(2)
    elif state != "pending":
        claim = claimed(outbox)
        if state == "retry_wait":
            outbox.retry(claim, "busy", now=T)
        elif state == "failed":
            outbox.fail(claim, "refused", now=T)
        elif state == "succeeded":
            complete(outbox, [claim])
    with unchanged(engine):
        assert outbox.enqueue(again, ordering_key="k", now=T + 9).status == state
        assert outbox.enqueue_many([again, again], ordering_key="k", now=T + 9)[1].status == state
        for key in ("another", None):
            with refused("dispatch.idempotency_collision"):
                outbox.enqueue(again, ordering_key=key, now=T + 9)
        with refused("dispatch.idempotency_collision"):  # and what came with it is not stored
            outbox.enqueue_many([note("new"), again | {"text": "changed"}], ordering_key="k", now=T + 9)


def test_a_collision_leaves_the_key_as_it_was(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(1), now=T)
    with unchanged(engine), refused("dispatch.idempotency_collision", event_id="note-1"):
        outbox.enqueue_many([note(2), note(1)], ordering_key="k", now=T)
    assert outbox.enqueue(note(3), ordering_key="k", now=T).status == "pending"


BAD_KEYS = ["", " ", "a ", "x" * 257, "a\0", "a\nb", "\x7f", "\ud800", "a\u2028b", 7, b"k", True, ["k"]]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_bad_keys(engine: Engine, key: Any) -> None:
    class Odd(Notes):
        def ordering_key(self, event: Any) -> Any:
            return key

    for store in (
        lambda: make_outbox(engine).enqueue(note(), ordering_key=key),
        lambda: Outbox(engine, [Odd()]).enqueue(note()),
    ):
        with refused("dispatch.ordering_key_invalid") as caught:
            store()
        assert not isinstance(key, str) or len(key) < 2 or key not in str(caught.value)
    assert row_count(engine) == 0


@pytest.mark.parametrize("key", ["x" * 256, "a b", "' \" \\ % :of_topic", "é\U0001f600", "Z", "z", "~"])
def test_keys_of_any_printable_text(outbox: Outbox, key: str) -> None:
    queue_up(outbox, 2, key)
    outbox.enqueue(note("between"), ordering_key="m", now=T)
    assert drain(outbox) == ["note-1", "note-between", "note-2"]


def test_a_contract_whose_key_raises(engine: Engine) -> None:
    class Raising(Notes):
        def ordering_key(self, event: Any) -> str:
            raise KeyError("s3cret")

    with refused("dispatch.change_invalid") as caught:
        Outbox(engine, [Raising()]).enqueue(note())
    assert "s3cret" not in str(caught.value)


# -- a host's transactions ------------------------------------------------------------------------------------------


def test_rollback_leaves_the_key_free(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as host:
        transaction = host.begin()
        assert outbox.enqueue(note(1), connection=host, ordering_key="k", now=T).status == "pending"
        transaction.rollback()
    outbox.enqueue(note(2), ordering_key="k", now=T)
    assert drain(outbox) == ["note-2"]


def test_savepoints(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as host, host.begin():
        host.execute(text("DELETE FROM outbox_idle"))  # pysqlite begins only now, and a savepoint needs that
        for number in range(1, 7):
            savepoint = host.begin_nested()
            outbox.enqueue(note(number), connection=host, ordering_key="k", now=T)
            if number % 2:
                savepoint.rollback()
            else:
                savepoint.commit()
    assert drain(outbox) == ["note-2", "note-4", "note-6"]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_hosts_of_any_isolation(pg_engine: Engine, isolation: str) -> None:
    """An old snapshot does not show who else waits for a key, so the sweep takes that over."""
    outbox = make_outbox(pg_engine)
    with pg_engine.connect().execution_options(isolation_level=isolation) as host, host.begin() as transaction:
        host.execute(text("SELECT count(*) FROM outbox_event"))  # the snapshot is taken here
        outbox.enqueue(note(1), ordering_key="k", now=T)
        outbox.enqueue(note("j"), ordering_key="j", now=T)
        complete(outbox, outbox.claim_batch(WORKER, now=T))
        outbox.enqueue_many([note(2), note(3)], connection=host, ordering_key="k", now=T)
        outbox.enqueue_many([note("new")], connection=host, ordering_key="new", now=T)
        outbox.enqueue(note("j2"), ordering_key="j", now=T)
        assert claim_all(outbox) == ["note-j2"]
        transaction.commit()
    assert sorted(claim_all(outbox)) == ["note-2", "note-new"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_hosts_of_other_keys_do_not_break_each_others_transactions(pg_engine: Engine, isolation: str) -> None:
    outbox = make_outbox(pg_engine)
    strict = pg_engine.execution_options(isolation_level=isolation)
    with strict.connect() as one, strict.connect() as other:
        hosts = {"a": (one, one.begin()), "b": (other, other.begin())}
        for number in range(3):
            for key, (host, _) in hosts.items():
                outbox.enqueue(note(f"{key}{number}"), connection=host, ordering_key=key, now=T)
                outbox.enqueue_many(
                    [note(f"{key}{number}.{each}") for each in range(2)], connection=host, ordering_key=key, now=T
                )
        for _, transaction in hosts.values():
            transaction.commit()
    assert len(drain(outbox)) == 18


def test_producers_of_a_key_wait_for_each_other_and_workers_for_none(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    outbox.enqueue(note(1), ordering_key="k", now=T)
    with pg_engine.connect() as host, host.begin() as transaction:
        outbox.enqueue(note(2), connection=host, ordering_key="k", now=T)
        producer = threading.Thread(target=outbox.enqueue, args=(note(3),), kwargs={"ordering_key": "k", "now": T})
        producer.start()
        until(lambda: advisory_waits(pg_engine) == 1, "the second producer waiting for the first")
        outbox.enqueue(note("j"), ordering_key="j", now=T)
        assert drain(outbox) == ["note-1", "note-j"]  # nobody can take the key over, and nobody waits for it
        transaction.commit()
        producer.join(PATIENCE)
    assert drain(outbox) == ["note-2", "note-3"]


def advisory_waits(pg_engine: Engine) -> int:
    with pg_engine.connect() as connection:
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return int(connection.execute(text(query)).scalar_one())


@contextmanager
def holding(pg_engine: Engine, key: str = "k", topic: str = TOPIC) -> Iterator[Connection]:
    """A second connection that holds a key, as a producer does between its insert and its commit."""
    with pg_engine.connect() as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:of, 0))"), {"of": f"{topic} {key}"})
        yield connection


@pytest.mark.parametrize("same", [True, False], ids=["same outbox", "another outbox"])
def test_enqueued_just_as_the_one_before_it_ends(pg_engine: Engine, same: bool) -> None:
    """The producer saw a head, and whoever ended that could not see the producer's event."""
    outbox = make_outbox(pg_engine)
    outbox.enqueue(note(1), ordering_key="k", now=T)
    claim = claimed(outbox)
    with pg_engine.connect() as host, host.begin() as transaction:
        assert outbox.enqueue(note(2), connection=host, ordering_key="k", now=T).status == "waiting"
        complete(outbox, [claim])
        assert claim_all(outbox) == []
        transaction.commit()
    finder = outbox if same else make_outbox(pg_engine)
    assert finder.ready(now=T)
    assert claim_all(finder) == ["note-2"]


def test_a_key_that_is_held_while_its_head_ends(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    queue_up(outbox, 2)
    with holding(pg_engine):
        complete(outbox, outbox.claim_batch(WORKER, now=T))
        assert claim_all(outbox) == []
        assert states(pg_engine) == {"1": "succeeded", "2": "waiting"}
    assert claim_all(outbox) == ["note-2"]


# -- when one fails -------------------------------------------------------------------------------------------------


def fail(outbox: Outbox, engine: Engine) -> float:
    outbox.fail(claimed(outbox), "refused", now=T)
    return T


def use_up(outbox: Outbox, engine: Engine) -> float:
    for number in range(5):
        outbox.retry(claimed(outbox, T + 1000 * number), "busy", now=T + 1000 * number)
    return T + 4000


def expire(outbox: Outbox, engine: Engine) -> float:
    for number in range(5):
        assert claimed(outbox, T + number, lease_seconds=1).attempt == number + 1
    return T + 5


def tamper_with(outbox: Outbox, engine: Engine) -> float:
    poison(engine, "note-1")
    with refused("dispatch.payload_integrity", event_id="note-1"):
        outbox.claim(WORKER, now=T)
    return T


FAILURES = [fail, use_up, expire, tamper_with]
Fail = Callable[[Outbox, Engine], float]


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_head_holds_its_key(outbox: Outbox, engine: Engine, how: Fail) -> None:
    queue_up(outbox, 3)
    now = how(outbox, engine)
    for _ in range(3):
        assert claim_all(outbox, now) == []
    assert outbox.status("note-1").status == "failed"
    outbox.enqueue(note("late"), ordering_key="k", now=now)
    outbox.enqueue(note("j"), ordering_key="j", now=now)
    assert claim_all(outbox, now) == ["note-j"]
    assert list(states(engine).values()) == ["failed", "waiting", "waiting", "waiting", "leased"]


@pytest.mark.parametrize("how", FAILURES)
def test_or_is_passed(passing: Outbox, engine: Engine, how: Fail) -> None:
    queue_up(passing, 3)
    now = how(passing, engine)
    assert drain(passing, now) == ["note-2", "note-3"]
    assert passing.status("note-1").status == "failed"


def test_a_head_that_runs_out_makes_way_in_the_same_claim(passing: Outbox) -> None:
    queue_up(passing, 2, max_attempts=1)
    passing.enqueue(note("free"), now=T)
    assert claim_all(passing, lease_seconds=1) == ["note-1", "note-free"]
    passing.enqueue_many([note(f"more-{number}") for number in range(5)], now=T)
    assert "note-2" in claim_all(passing, T + 1)


def test_expiry_and_retry_keep_the_head(either: Outbox) -> None:
    queue_up(either, 2)
    claimed(either, lease_seconds=1)
    again = claimed(either, T + 1)
    assert (again.event_id, again.attempt) == ("note-1", 2)
    assert claim_all(either, T + 1) == []
    either.retry(again, "busy", now=T + 2)
    assert claim_all(either, T + 2) == []
    again = claimed(either, T + 100)
    (line,) = either.release([again], now=T + 100)
    assert line.won
    assert drain(either, T + 100) == ["note-1", "note-2"]


def test_a_head_that_was_never_tried_is_released(either: Outbox) -> None:
    queue_up(either, 2)
    either.release([claimed(either)], now=T)
    assert drain(either) == ["note-1", "note-2"]


def test_a_redriven_head_takes_its_old_place(outbox: Outbox) -> None:
    queue_up(outbox, 3)
    fail(outbox, outbox.engine)
    assert outbox.redrive("note-1", now=T + 1).status == "pending"
    assert drain(outbox, T + 1) == ["note-1", "note-2", "note-3"]


def test_redriving_all(outbox: Outbox) -> None:
    for key in "abc":
        outbox.enqueue_many([note(f"{key}{number}") for number in range(3)], ordering_key=key, now=T)
    for claim in outbox.claim_batch(WORKER, now=T):
        outbox.fail(claim, "refused", now=T)
    assert outbox.redrive_all(now=T + 1) == 3
    found = drain(outbox, T + 1)
    for key in "abc":
        assert [each for each in found if each[5] == key] == [f"note-{key}{number}" for number in range(3)]


def test_a_redriven_event_goes_before_later_ones_that_have_not_been_tried(passing: Outbox, engine: Engine) -> None:
    queue_up(passing, 3)
    fail(passing, engine)
    assert states(engine) == {"1": "failed", "2": "pending", "3": "waiting"}
    assert passing.redrive("note-1", now=T + 1).status == "pending"
    assert states(engine) == {"1": "pending", "2": "waiting", "3": "waiting"}
    assert passing.health(deep=True, now=T + 1).counts["waiting"] == 2
    assert drain(passing, T + 1) == ["note-1", "note-2", "note-3"]


def test_a_later_one_in_flight_that_was_never_sent_makes_way(passing: Outbox, engine: Engine) -> None:
    queue_up(passing, 3)
    fail(passing, engine)
    later = claimed(passing)
    passing.redrive("note-1", now=T + 1)
    (line,) = passing.release([later], now=T + 1)
    assert line.won
    assert states(engine) == {"1": "pending", "2": "waiting", "3": "waiting"}
    assert drain(passing, T + 1) == ["note-1", "note-2", "note-3"]


@pytest.mark.parametrize("end", ["complete", "retry", "fail"])
def test_a_redriven_event_waits_for_a_later_one_in_flight(passing: Outbox, engine: Engine, end: str) -> None:
    queue_up(passing, 3)
    fail(passing, engine)
    later = claimed(passing)
    assert later.event_id == "note-2"
    assert passing.redrive("note-1", now=T + 1).status == "waiting"
    assert claim_all(passing, T + 1) == []
    if end == "complete":
        complete(passing, [later], T + 1)
    elif end == "fail":
        passing.fail(later, "refused", now=T + 1)
    else:
        passing.retry(later, "busy", now=T + 1)
        assert claim_all(passing, T + 1) == []
        assert passing.redrive_all(now=T + 1) == 0
    expected = ["note-2"] if end == "retry" else []
    assert drain(passing, T + 1000) == [*expected, "note-1", "note-3"]


def test_redriving_several_of_a_key(passing: Outbox, engine: Engine) -> None:
    queue_up(passing, 4)
    for _ in range(3):
        passing.fail(claimed(passing), "refused", now=T)
    assert states(engine) == {"1": "failed", "2": "failed", "3": "failed", "4": "pending"}
    assert passing.redrive("note-2", now=T + 1).status == "pending"
    assert passing.redrive_all(now=T + 2) == 2
    assert states(engine) == {"1": "pending", "2": "waiting", "3": "waiting", "4": "waiting"}
    assert drain(passing, T + 2) == ["note-1", "note-2", "note-3", "note-4"]


def test_a_later_failed_event_does_not_hold_an_earlier_one(outbox: Outbox, engine: Engine) -> None:
    queue_up(outbox, 3)
    fail(outbox, engine)
    outbox.discard("note-1", now=T)
    fail(outbox, engine)
    assert states(engine) == {"1": "failed", "2": "failed", "3": "waiting"}
    assert outbox.redrive("note-1", now=T + 1).status == "pending"
    assert drain(outbox, T + 1) == ["note-1"]
    assert outbox.redrive("note-2", now=T + 1).status == "pending"
    assert drain(outbox, T + 1) == ["note-2", "note-3"]


def test_the_sweep_finds_an_event_before_a_failed_one(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    queue_up(outbox, 2)
    fail(outbox, pg_engine)
    outbox.discard("note-1", now=T)
    fail(outbox, pg_engine)
    with holding(pg_engine):
        assert outbox.redrive("note-1", now=T + 1).status == "waiting"
    other = make_outbox(pg_engine)
    assert other.ready(now=T + 1)
    assert claim_all(other, T + 1) == ["note-1"]


# -- discard and purge ----------------------------------------------------------------------------------------------


def test_discard(outbox: Outbox, engine: Engine) -> None:
    queue_up(outbox, 2)
    outbox.fail(claimed(outbox), "refused", detail_hash="0" * 64, now=T)
    status = outbox.discard("note-1", now=T + 1)
    assert (status.status, status.last_error_code, status.last_error_detail_hash) == ("failed", "discarded", None)
    assert outbox.health(deep=True, now=T + 1).failed == 1
    assert drain(outbox, T + 1) == ["note-2"]
    again = outbox.discard("note-1", now=T + 2)
    assert again.last_error_code == "discarded"
    assert outbox.redrive("note-1", now=T + 3).status == "pending"
    assert drain(outbox, T + 3) == ["note-1"]


@pytest.mark.parametrize("state", ["pending", "waiting", "leased", "retry_wait", "succeeded"])
def test_only_what_failed_can_be_discarded(outbox: Outbox, engine: Engine, state: str) -> None:
    queue_up(outbox, 2)
    claim = claimed(outbox)
    if state == "pending":
        outbox.release([claim], now=T)
    elif state == "retry_wait":
        outbox.retry(claim, "busy", now=T)
    elif state == "succeeded":
        complete(outbox, [claim])
    with unchanged(engine), refused("dispatch.discard_invalid"):
        outbox.discard("note-2" if state == "waiting" else "note-1", now=T)
    with refused("dispatch.event_missing"):
        outbox.discard("note-9", now=T)


def test_discarding_one_without_a_key(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)
    fail(outbox, outbox.engine)
    assert outbox.discard("note-1", now=T).last_error_code == "discarded"


@pytest.mark.parametrize("how", ["succeeded", "failed", "discarded"])
def test_purging_what_stood_before_others(outbox: Outbox, engine: Engine, how: str) -> None:
    queue_up(outbox, 3)
    if how == "succeeded":
        complete(outbox, outbox.claim_batch(WORKER, now=T))
    else:
        fail(outbox, engine)
    if how == "discarded":
        outbox.discard("note-1", now=T)
    assert outbox.purge(older_than_seconds=0, include_failed=True, now=T + 1) == 1
    outbox.enqueue(note("new"), ordering_key="k", now=T + 1)
    assert drain(outbox, T + 1) == ["note-2", "note-3", "note-new"]


def test_redriving_all_leaves_what_was_given_up(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(2), now=T)
    for claim in outbox.claim_batch(WORKER, now=T):
        outbox.fail(claim, "refused", now=T)
    outbox.discard("note-1", now=T)
    assert outbox.redrive_all(now=T + 1) == 1
    assert states(engine) == {"1": "failed", "2": "pending"}
    assert outbox.redrive_all(error_code="discarded", now=T + 1) == 1


def test_enqueuing_again_finds_a_redriven_event_its_place(pg_engine: Engine) -> None:
    """It is due from then on, and not since it was created."""
    outbox = make_outbox(pg_engine)
    queue_up(outbox, 1)
    fail(outbox, pg_engine)
    with holding(pg_engine):
        assert outbox.redrive("note-1", now=T + 100).status == "waiting"
    again = outbox.enqueue(note(1), ordering_key="k", now=T + 200)
    assert (again.status, again.next_attempt_at, again.updated_at) == ("pending", T + 100, T + 100)


# -- many -----------------------------------------------------------------------------------------------------------


def test_two_thousand_behind_one_key(outbox: Outbox) -> None:
    expected, found = queue_up(outbox, 2000), list[str]()
    while claims := outbox.claim_batch(WORKER, limit=1000, now=T):
        (claim,) = claims  # one at a time, whatever is asked for
        complete(outbox, claims)
        found.append(claim.event_id)
    assert found == expected


def test_two_thousand_keys(outbox: Outbox, engine: Engine) -> None:
    keyed = Outbox(engine, [Keyed()])
    given = [note(f"{key}.{turn}", f"{key}:") for turn in range(3) for key in range(2000)]
    for start in range(0, len(given), 1000):
        keyed.enqueue_many(given[start : start + 1000], now=T)
    assert keyed.health(now=T).counts["waiting"] == 4000
    found = drain(keyed, limit=1000)
    turns = defaultdict(list)
    for event_id in found:
        key, _, turn = event_id.removeprefix("note-").partition(".")
        turns[key].append(turn)
    assert len(turns) == 2000
    assert set(map(tuple, turns.values())) == {("0", "1", "2")}


def test_many_stranded_keys_are_found_portion_by_portion(outbox: Outbox, engine: Engine) -> None:
    keyed = Outbox(engine, [Keyed()])
    keyed.enqueue_many([note(number, f"key {number:04}:") for number in range(1200)], now=T)
    with engine.begin() as connection:  # as if whoever should have made them due were gone
        connection.execute(text("UPDATE outbox_event SET status = 'waiting'"))
    assert keyed.ready(now=T)
    assert len(drain(keyed, limit=1000)) == 1200


def test_a_batch_of_heads_of_many_keys(outbox: Outbox, engine: Engine) -> None:
    keyed = Outbox(engine, [Keyed()])
    keyed.enqueue_many([note(f"{key}{turn}", f"{key}:") for turn in (1, 2) for key in "abcd"], now=T)
    a, b, c, d = keyed.claim_batch(WORKER, now=T)
    keyed.complete(d, response(d.event_id), now=T)
    lines = keyed.settle(
        [Success(a, response(a.event_id)), Failure(b, "busy"), Failure(c, "refused", retryable=False), Success(d, response(d.event_id))],
        now=T,
    )  # fmt: skip
    assert [line.won for line in lines] == [True, True, True, False]
    assert set(claim_all(keyed)) == {"note-a2", "note-d2"}
    assert states(engine) == {
        "a1": "succeeded", "b1": "retry_wait", "c1": "failed", "d1": "succeeded",
        "a2": "leased", "b2": "waiting", "c2": "waiting", "d2": "leased",
    }  # fmt: skip


def test_without_keys_nothing_more_is_asked(outbox: Outbox, engine: Engine) -> None:
    """Beyond what it took before there were keys: a pulse, BEGIN and COMMIT where they are statements, and the verb."""
    sqlite = engine.dialect.name == "sqlite"
    outbox.enqueue_many(notes(30), now=T)
    outbox.claim_batch(WORKER, limit=1, now=T)  # the sweep has just had its look
    around = ["BEGIN IMMEDIATE", "COMMIT"] if sqlite else []

    def seen(verb: Callable[[], Any]) -> list[str]:
        with statements(engine) as found:
            verb()
        return [statement for statement in found if statement not in around][1:]

    assert len(seen(lambda: outbox.enqueue(note("x"), now=T))) == 1
    claims: list[Claim] = []
    assert len(seen(lambda: claims.extend(outbox.claim_batch(WORKER, limit=10, now=T)))) == 1
    assert len(seen(lambda: complete(outbox, claims))) == (2 if sqlite else 1)


class History:
    """Verbs at random on a few keys, and what must hold after each."""

    def __init__(self, engine: Engine, contract: Notes, seed: int) -> None:
        self._engine, self._holds, self._random = engine, contract.hold_on_failure, random.Random(seed)
        self._outbox = Outbox(engine, [contract])
        self._now, self._number, self._idle = T, 0, False
        self._claims: list[Claim] = []

    def run(self, steps: int) -> None:
        acts = [
            self._enqueue, self._enqueue, self._claim, self._claim, self._claim, self._complete, self._complete, self._fail,
            self._retry, self._release, self._redrive, self._redrive_all, self._discard, self._purge, self._wait,
        ]  # fmt: skip
        for _ in range(steps):
            self._random.choice(acts)()
            self._hold_together()
        self._finish()

    def _finish(self) -> None:
        """Redriven and drained, nothing is left."""
        self._outbox.health(deep=True, now=self._now)
        for _ in range(500):
            self._claim()
            self._complete()
            self._now += 50
            self._outbox.redrive_all(now=self._now)
            if set(states(self._engine).values()) <= {"succeeded"} | ({"failed"} if self._discarded() else set()):
                return
        pytest.fail(f"never drained: {states(self._engine)}")

    def _discarded(self) -> bool:
        failed = [row for row in dump(self._engine) if row["status"] == "failed"]
        return all(row["last_error_code"] == "discarded" for row in failed)

    def _hold_together(self) -> None:
        everything = dump(self._engine)
        for key in "ab":
            rows = [row for row in everything if row["ordering_key"] == key]
            heads = [row for row in rows if row["status"] in ("pending", "leased", "retry_wait")]
            waiting = [row["id"] for row in rows if row["status"] == "waiting"]
            failed = [row["id"] for row in rows if row["status"] == "failed" and row["last_error_code"] != "discarded"]
            assert len(heads) <= 1
            for head in heads:
                assert not waiting or head["id"] < waiting[0] or head["status"] != "pending"
                assert (
                    not self._holds or head["status"] != "pending" or not [each for each in failed if each < head["id"]]
                )
            assert not waiting or heads or not self._idle or (self._holds and failed and failed[0] < waiting[0])

    def _enqueue(self) -> None:
        events = [note(self._number + each) for each in range(self._random.randint(1, 3))]
        self._number += len(events)
        self._outbox.enqueue_many(events, ordering_key=self._random.choice("ab"), max_attempts=2, now=self._now)

    def _claim(self) -> None:
        seconds = self._random.choice([5, 600])
        claims = self._outbox.claim_batch(WORKER, limit=3, lease_seconds=seconds, now=self._now)
        self._idle = not claims
        self._claims += claims
        if not claims:
            self._hold_together()
        self._idle = False

    def _settle(self, make: Callable[[Claim], Success | Failure]) -> None:
        if self._claims:
            chosen = self._random.sample(self._claims, self._random.randint(1, len(self._claims)))
            self._outbox.settle([make(claim) for claim in chosen], now=self._now)
            self._claims = [claim for claim in self._claims if claim not in chosen]

    def _complete(self) -> None:
        self._settle(lambda claim: Success(claim, response(claim.event_id)))

    def _fail(self) -> None:
        self._settle(lambda claim: Failure(claim, "refused", retryable=False))

    def _retry(self) -> None:
        self._settle(lambda claim: Failure(claim, "busy"))

    def _release(self) -> None:
        self._outbox.release(self._claims, now=self._now)
        self._claims = []

    def _failed(self) -> list[str]:
        return [row["event_id"] for row in dump(self._engine) if row["status"] == "failed"]

    def _redrive(self) -> None:
        if found := self._failed():
            self._outbox.redrive(self._random.choice(found), now=self._now)

    def _redrive_all(self) -> None:
        self._outbox.redrive_all(limit=2, now=self._now)

    def _discard(self) -> None:
        if found := self._failed():
            self._outbox.discard(self._random.choice(found), now=self._now)

    def _purge(self) -> None:
        if self._random.random() < 0.3:
            self._outbox.purge(older_than_seconds=20, include_failed=True, limit=3, now=self._now)

    def _wait(self) -> None:
        self._now += self._random.choice([1, 6, 30])


@pytest.mark.parametrize("seed", [100, 142])
@pytest.mark.parametrize("contract", [Notes, Passing], ids=["holding", "passing"])
def test_any_history(engine: Engine, contract: Callable[[], Notes], seed: int) -> None:
    History(engine, contract(), seed).run(200)


def test_keys_of_all_kinds_are_found_when_stranded(engine: Engine) -> None:
    """Portion by portion, in whatever order the database sorts them."""
    outbox = Outbox(engine, [Keyed()])
    kinds = [
        "a",
        "A",
        "é",
        "É",
        "Z",
        "z",
        "~",
        "_",
        "-",
        "'",
        '"',
        "%",
        "0",
        "10",
        "9",
        "ß",
        "ss",
        "\U0001f600",
        "\u4e2d",
        "a b",
    ]
    outbox.enqueue_many(
        [note(f"{n}-{m}", f"{kind}{m or ''}:") for n, kind in enumerate(kinds) for m in range(40)], now=T
    )
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_event SET status = 'waiting'"))
    assert len(drain(outbox, limit=1000)) == 800


# -- all at once ----------------------------------------------------------------------------------------------------


class Producer:
    """Enqueues events of a few keys in transactions of its own, some held open for a while, some rolled back."""

    def __init__(self, outbox: Outbox, engine: Engine, name: str, seed: int) -> None:
        self._outbox, self._engine, self._name, self._random = outbox, engine, name, random.Random(seed)
        self.committed: list[str] = []

    def __call__(self) -> None:
        for number in range(25):
            names = [f"{self._name}-{number}-{each}" for each in range(self._random.randint(1, 4))]
            key = f"key-{self._random.randrange(4)}"
            with self._engine.connect() as host:
                transaction = host.begin()
                self._outbox.enqueue_many([note(each) for each in names], connection=host, ordering_key=key)
                if self._random.random() < 0.3:
                    self._outbox.enqueue(note(names[0]), connection=host, ordering_key=key)  # once more
                if self._random.random() < 0.25:
                    transaction.rollback()
                else:
                    transaction.commit()
                    self.committed += [f"note-{each}" for each in names]


def test_producers_and_workers_at_once(engine: Engine) -> None:
    producers = [Producer(make_outbox(engine), engine, f"p{number}", number) for number in range(4)]
    delivered, failures = list[tuple[str, str]](), list[BaseException]()
    lock, done = threading.Lock(), threading.Event()

    def work(number: int) -> None:
        outbox = make_outbox(engine)  # each knows of no key that another has left behind
        nothing = 0
        while nothing < 3 or not done.is_set():
            finished = done.is_set()
            claims = outbox.claim_batch(f"worker-{number}", limit=7)
            with lock:
                delivered.extend((str(claim.ordering_key), claim.event_id) for claim in claims)
            lines = outbox.settle([Success(claim, response(claim.event_id)) for claim in claims])
            assert all(line.won for line in lines)
            nothing = 0 if claims or not finished else nothing + 1

    def guarded(act: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                failures.append(error)
                done.set()

        return run

    threads = [threading.Thread(target=guarded(lambda number=number: work(number))) for number in range(3)]
    makers = [threading.Thread(target=guarded(producer)) for producer in producers]
    for thread in threads + makers:
        thread.start()
    for maker in makers:
        maker.join(2 * PATIENCE)
    done.set()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not failures
    assert not any(thread.is_alive() for thread in threads + makers)
    rows = dump(engine)
    assert {row["status"] for row in rows} == {"succeeded"}
    assert sorted(row["event_id"] for row in rows) == sorted(each for maker in producers for each in maker.committed)
    for key in {row["ordering_key"] for row in rows}:
        stored = [row["event_id"] for row in rows if row["ordering_key"] == key]
        assert [event_id for of, event_id in delivered if of == key] == stored


def test_the_same_events_from_many_hosts_at_once(engine: Engine) -> None:
    """Each call takes its keys in one order, whatever the order of its events."""
    outbox = Outbox(engine, [Keyed()])
    events = [note(f"{key}{turn}", f"{key}:") for turn in range(3) for key in "abcdef"]

    def enqueue(seed: int) -> list[EventStatus]:
        shuffled = random.Random(seed).sample(events, len(events))
        return outbox.enqueue_many([*shuffled, shuffled[0]])

    found = together(*[lambda seed=seed: enqueue(seed) for seed in range(8)])
    assert [len(statuses) for statuses in found] == [19] * 8
    assert row_count(engine) == 18
    order = defaultdict(list)
    for row in dump(engine):
        order[row["ordering_key"]].append(row["event_id"])
    delivered = drain(outbox, None)
    for key, expected in order.items():
        assert [each for each in delivered if each[5] == key] == expected


def test_workers_do_not_wait_for_open_transactions(pg_engine: Engine) -> None:
    """Hosts hold keys, with an event before theirs in the outbox; everything else is drained meanwhile."""
    outbox = make_outbox(pg_engine)
    for key in "abc":
        outbox.enqueue_many([note(f"{key}{number}") for number in range(3)], ordering_key=key, now=T)
    expected = {f"note-{key}{number}" for key in "abc" for number in range(3)}
    with pg_engine.connect() as host, host.begin() as transaction:
        outbox.enqueue(note("open"), connection=host, ordering_key="a", now=T)
        found = drain(outbox)
        assert {each for each in found if each[5] != "a"} == {each for each in expected if each[5] != "a"}
        assert [each for each in found if each[5] == "a"] == ["note-a0"]
        transaction.commit()
    assert set(found) | set(drain(outbox)) == expected | {"note-open"}
    assert [row["event_id"] for row in dump(pg_engine) if row["ordering_key"] == "a"][-1] == "note-open"


def test_a_producer_that_waits_for_a_worker_gets_its_turn(outbox: Outbox, engine: Engine) -> None:
    """run_once of one outbox beside enqueues of another, key by key."""
    destination = Scripted()
    for number in range(20):
        status: EventStatus = outbox.enqueue(note(number), ordering_key="k", now=T)
        assert status.status == ("pending" if number % 2 == 0 else "waiting")
        if number % 2:
            for _ in range(2):
                assert outbox.run_once(destination, WORKER, now=T) is not None
    assert [claim.event_id for claim in destination.seen] == [f"note-{number}" for number in range(20)]


class Crowd:
    """Threads that go on until as many events have been accepted, and what was accepted in which order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._tried = set[str]()
        self._failures = list[BaseException]()
        self.accepted = list[tuple[str, str]]()

    def run(self, *rounds: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._go_on, args=(each,)) for each in rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert not self._failures
        assert not any(thread.is_alive() for thread in threads)

    def _go_on(self, act: Callable[[], None]) -> None:
        try:
            while len(self.accepted) < self._count and not self._failures:
                act()
        except BaseException as error:
            self._failures.append(error)

    def treat(self, outbox: Outbox, claim: Claim) -> None:
        """Fail it or give it back the first time, accept it the next."""
        with self._lock:
            new = claim.event_id not in self._tried
            self._tried.add(claim.event_id)
            if not new:
                self.accepted.append((str(claim.ordering_key), claim.event_id))
        if not new:
            outbox.complete(claim, response(claim.event_id))
        elif claim.event_id.endswith(("1", "4", "7")):
            assert outbox.release([claim])[0].won
        else:
            outbox.fail(claim, "refused")


@pytest.mark.parametrize("contract", [Notes, Passing], ids=["holding", "passing"])
def test_failing_and_redriving_at_once(engine: Engine, contract: Callable[[], Notes]) -> None:
    """Every event fails once or is given back once, while somebody redrives whatever has failed."""
    outbox, *outboxes = (Outbox(engine, [contract()]) for _ in range(5))
    for key in "abc":
        outbox.enqueue_many([note(f"{key}{number}") for number in range(8)], ordering_key=key)
    crowd = Crowd(24)

    def work(outbox: Outbox) -> None:
        for claim in outbox.claim_batch(WORKER, limit=2):
            crowd.treat(outbox, claim)

    workers = [lambda each=each: work(each) for each in outboxes[:2]]
    redrivers = [lambda each=each: each.redrive_all(limit=3) for each in outboxes[2:]]
    crowd.run(*workers, *redrivers)
    assert set(states(engine).values()) == {"succeeded"}
    for key in "abc":
        order = [event_id for of, event_id in crowd.accepted if of == key]
        expected = [f"note-{key}{number}" for number in range(8)]
        assert order == expected if contract is Notes else sorted(order) == expected
    assert outbox.health(deep=True).status == "ok"
