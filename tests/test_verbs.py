"""Every verb's rules and codes on both databases."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import (
    Claim,
    ClaimLostError,
    CollisionError,
    DatabaseError,
    DeliveryFailed,
    Failure,
    InputError,
    IntegrityError,
    NotFoundError,
    Outbox,
    OutboxError,
    RetryPolicy,
    SchemaError,
    Success,
)
from tests.plain import Plain, Scripted, fails_with, fill

NOW = 1_800_000_000.0
HASH = "0" * 64


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, [Plain()], RetryPolicy(base_delay_seconds=5, max_delay_seconds=300))


def dump(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("SELECT * FROM outbox_event ORDER BY id"))]


def tamper(engine: Engine, event_id: str, **columns: Any) -> None:
    sets = ", ".join(f"{name} = :{name}" for name in columns)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_event SET {sets} WHERE event_id = :key"), {**columns, "key": event_id})


@contextmanager
def refused(code: str, kind: type[OutboxError] = InputError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code
    assert caught.value.__cause__ is None


def claimed(outbox: Outbox, count: int = 1, **more: Any) -> list[Claim]:
    fill(outbox, count, now=NOW)
    return outbox.claim_batch("worker", limit=count, **{"now": NOW, **more})


# -- enqueue ---


def test_enqueue_is_idempotent_whatever_became_of_the_event(outbox: Outbox, engine: Engine) -> None:
    first = outbox.enqueue({"id": "a"}, now=NOW)
    assert (first.status, first.attempts, first.max_attempts, first.created_at) == ("pending", 0, 5, NOW)
    claim = outbox.claim("worker", now=NOW)
    assert claim is not None
    assert outbox.enqueue({"id": "a"}, now=NOW + 1).status == "leased"
    outbox.complete(claim, {"echo": "a"}, now=NOW + 1)
    again = outbox.enqueue({"id": "a"}, now=NOW + 2)
    assert (again.status, again.receipt, again.created_at) == ("succeeded", {"echo": "a"}, NOW)
    assert len(dump(engine)) == 1


@pytest.mark.parametrize(
    ("change", "more"), [({"id": "a", "x": 1}, {}), ({"id": "a"}, {"max_attempts": 6})], ids=["payload", "attempts"]
)
def test_another_event_under_an_id_collides(
    outbox: Outbox, engine: Engine, change: dict[str, Any], more: dict[str, Any]
) -> None:
    outbox.enqueue({"id": "a"})
    before = dump(engine)
    with refused("dispatch.idempotency_collision", CollisionError):
        outbox.enqueue(change, **more)
    with refused("dispatch.idempotency_collision", CollisionError):
        outbox.enqueue_many([{"id": "new"}, change, {"id": "newer"}], **more)
    assert dump(engine) == before


def test_enqueue_many_keeps_its_order_and_counts_repeats_once(outbox: Outbox, engine: Engine) -> None:
    ids = ["c", "a", "b", "a"]
    statuses = outbox.enqueue_many(({"id": event_id} for event_id in ids), now=NOW)
    assert [status.event_id for status in statuses] == ids
    with engine.connect() as connection:
        assert list(connection.scalars(text("SELECT event_id FROM outbox_event ORDER BY id"))) == ["c", "a", "b"]
    assert [claim.event_id for claim in outbox.claim_batch("worker", now=NOW)] == ["c", "a", "b"]
    with refused("dispatch.idempotency_collision", CollisionError):
        outbox.enqueue_many([{"id": "d"}, {"id": "d", "x": 1}])
    assert outbox.enqueue_many([]) == []


@pytest.mark.parametrize("count", [1200])
def test_enqueue_many_across_chunks(outbox: Outbox, count: int) -> None:
    fill(outbox, count)
    assert outbox.health().counts["pending"] == count


@pytest.mark.parametrize("value", [True, 0, 21, 1.0, "5", None])
def test_max_attempts_out_of_bounds(outbox: Outbox, engine: Engine, value: Any) -> None:
    with refused("dispatch.max_attempts_invalid"):
        outbox.enqueue({"id": "a"}, max_attempts=value)
    assert dump(engine) == []


@pytest.mark.parametrize("value", [1, 20])
def test_max_attempts_at_its_bounds(outbox: Outbox, value: int) -> None:
    assert outbox.enqueue({"id": "a"}, max_attempts=value).max_attempts == value


@pytest.mark.parametrize("now", [True, "1", -0.1, math.nan, math.inf, -math.inf, 10**400])
def test_a_time_that_is_none(outbox: Outbox, now: Any) -> None:
    (claim,) = claimed(outbox)
    calls: list[Callable[[], Any]] = [
        lambda: outbox.enqueue({"id": "b"}, now=now),
        lambda: outbox.claim("worker", now=now),
        lambda: outbox.complete(claim, {"echo": claim.event_id}, now=now),
        lambda: outbox.retry(claim, "x", now=now),
        lambda: outbox.fail(claim, "x", now=now),
        lambda: outbox.renew([claim], now=now),
        lambda: outbox.release([claim], now=now),
        lambda: outbox.settle([], now=now),
        lambda: outbox.run_once(Scripted(), "worker", now=now),
        lambda: outbox.status("event-0", now=now),
        lambda: outbox.health(now=now),
        lambda: outbox.purge(older_than_seconds=1, now=now),
        lambda: outbox.redrive("event-0", now=now),
    ]
    for call in calls:
        with refused("dispatch.time_invalid"):
            call()


@pytest.mark.parametrize("change", [{}, {"id": "a b"}, {"id": "a" * 257}, {"id": ""}, [], None, {"id": "a", 1: 2}])
def test_a_bad_event(outbox: Outbox, engine: Engine, change: Any) -> None:
    for call in (lambda: outbox.enqueue(change), lambda: outbox.enqueue_many([{"id": "ok"}, change])):
        with refused("dispatch.change_invalid"):
            call()
    assert dump(engine) == []


@pytest.mark.parametrize("topic", ["other", "", 7])
def test_an_unknown_topic_everywhere(outbox: Outbox, topic: Any) -> None:
    for call in (
        lambda: outbox.enqueue({"id": "a"}, topic=topic),
        lambda: outbox.claim("worker", topic=topic),
        lambda: outbox.claim_batch("worker", topic=topic),
        lambda: outbox.status("a", topic=topic),
        lambda: outbox.redrive("a", topic=topic),
        lambda: outbox.redrive_all(topic=topic),
        lambda: outbox.purge(older_than_seconds=1, topic=topic),
        lambda: outbox.run_once(Scripted(), "worker", topic=topic),
        lambda: outbox.ready(topic=topic),
        lambda: outbox.announce("worker", topic=topic),
    ):
        with refused("dispatch.topic_unknown"):
            call()


def test_with_two_contracts_the_topic_must_be_named(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain("one"), Plain("two")])
    with refused("dispatch.topic_unknown"):
        outbox.enqueue({"id": "a"})
    outbox.enqueue({"id": "a"}, topic="one")
    assert outbox.claim("worker", topic="two") is None
    assert outbox.claim("worker", topic="one") is not None


@pytest.mark.parametrize("contracts", [[], [Plain(), Plain()], [object()], [Plain("a b")]])
def test_contracts_that_are_no_set(engine: Engine, contracts: list[Any]) -> None:
    with refused("dispatch.contract_invalid"):
        Outbox(engine, contracts)


# -- host transactions ---


def test_a_hosts_transaction_decides(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection:
        with connection.begin() as transaction:
            outbox.enqueue({"id": "undone"}, connection=connection)
            transaction.rollback()
        with connection.begin():
            outbox.enqueue({"id": "kept"}, connection=connection)
            with connection.begin_nested() as savepoint:
                outbox.enqueue({"id": "undone-too"}, connection=connection)
                savepoint.rollback()
            assert connection.in_transaction()
    with Session(engine) as session:
        outbox.enqueue({"id": "session-undone"}, connection=session)
        session.rollback()
        outbox.enqueue({"id": "session-kept"}, connection=session)
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    outbox.enqueue({"id": "scoped-kept"}, connection=scoped)
    scoped.commit()
    scoped.remove()
    assert [row[2] for row in dump(engine)] == ["kept", "session-kept", "scoped-kept"]


def test_a_refused_enqueue_leaves_the_transaction_usable(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue({"id": "a"})
    with engine.connect() as connection, connection.begin():
        outbox.enqueue({"id": "b"}, connection=connection)
        with refused("dispatch.idempotency_collision", CollisionError):
            outbox.enqueue_many([{"id": "c"}, {"id": "a", "x": 1}], connection=connection)
        with refused("dispatch.change_invalid"):
            outbox.enqueue({}, connection=connection)
        outbox.enqueue({"id": "d"}, connection=connection)
    assert [row[2] for row in dump(engine)] == ["a", "b", "d"]


def test_an_autocommit_connection_is_refused(outbox: Outbox, engine: Engine) -> None:
    autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with autocommit as connection, refused("dispatch.transaction_required"):
        outbox.enqueue({"id": "a"}, connection=connection)
    assert dump(engine) == []


def test_an_autocommit_engine_is_refused_to_join_and_served_otherwise(
    database_url: str, engines: Callable[..., Engine]
) -> None:
    engine = engines(database_url, isolation_level="AUTOCOMMIT")
    outbox = Outbox(engine, [Plain()])
    with engine.connect() as connection, refused("dispatch.transaction_required"):
        outbox.enqueue({"id": "a"}, connection=connection)
    outbox.enqueue({"id": "a"})
    assert outbox.run_once(Scripted(), "worker") is not None


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_whatever_the_engines_isolation(pg_url: str, engines: Callable[..., Engine], level: str) -> None:
    engine = engines(pg_url, isolation_level=level)
    outbox = Outbox(engine, [Plain()])
    fill(outbox, 20)
    while outbox.run_once(Scripted(), "worker"):
        pass
    assert outbox.health().counts["succeeded"] == 20
    with engine.connect() as connection:
        assert connection.get_isolation_level() == level


def test_a_host_that_begins_transactions_by_itself(sqlite_url: str, engines: Callable[..., Engine]) -> None:
    """SQLAlchemy's recipe for savepoints: pysqlite begins nothing, a listener does."""
    engine = engines(sqlite_url)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    outbox = Outbox(engine, [Plain()])
    with engine.connect() as connection:
        outbox.enqueue({"id": "undone"}, connection=connection)
        connection.rollback()
        outbox.enqueue({"id": "kept"}, connection=connection)
        connection.commit()
    outbox.enqueue({"id": "own"})
    assert [row[2] for row in dump(engine)] == ["kept", "own"]
    with engine.connect() as connection:
        assert connection.connection.dbapi_connection.isolation_level is None  # type: ignore[union-attr]


def test_what_is_no_connection(outbox: Outbox, engine: Engine, empty_engine: Engine) -> None:
    closed = engine.connect()
    closed.close()
    for nothing in (object(), engine, "connection", closed, Session()):
        with refused("dispatch.connection_invalid"):
            outbox.enqueue({"id": "a"}, connection=nothing)  # type: ignore[arg-type]
    with empty_engine.connect() as connection, pytest.raises(OutboxError) as caught:
        outbox.enqueue({"id": "a"}, connection=connection)
    assert caught.value.code in {"dispatch.schema_altered", "dispatch.connection_invalid"}
    assert dump(engine) == []


def test_another_database_is_refused(outbox: Outbox, databases: Any, engines: Callable[..., Engine]) -> None:
    with databases.fresh() as url:
        other = engines(url)
        with other.connect() as connection, refused("dispatch.connection_invalid"):
            outbox.enqueue({"id": "a"}, connection=connection)
        assert dump(other) == []
        other.dispose()


def test_another_engine_on_the_same_database_is_joined(
    outbox: Outbox, database_url: str, engines: Callable[..., Engine]
) -> None:
    with engines(database_url).connect() as connection, connection.begin():
        outbox.enqueue({"id": "a"}, connection=connection)
    assert outbox.status("a").status == "pending"


def test_two_hosts_enqueue_the_same_event_at_once(pg_engine: Engine) -> None:
    outbox = Outbox(pg_engine, [Plain()])
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    found: list[Any] = []
    with pg_engine.connect() as first, first.begin():
        outbox.enqueue({"id": "a"}, connection=first)
        second = threading.Thread(target=lambda: found.append(outbox.enqueue({"id": "a"})))
        second.start()
        with pg_engine.connect() as watcher:
            while not watcher.execute(waiting).scalar_one():
                watcher.rollback()
    second.join()
    assert [status.status for status in found] == ["pending"]
    assert len(dump(pg_engine)) == 1


# -- claim ---


def test_claims_go_in_due_order_and_count_their_attempt(outbox: Outbox) -> None:
    outbox.enqueue({"id": "later"}, now=NOW + 2)
    outbox.enqueue({"id": "sooner"}, now=NOW + 1)
    assert outbox.claim("worker", now=NOW) is None
    assert outbox.claim("worker", now=NOW + 0.999) is None
    first = outbox.claim("worker", lease_seconds=10, now=NOW + 1)
    assert first is not None
    assert (first.event_id, first.attempt, first.lease_owner, first.lease_expires_at) == (
        "sooner",
        1,
        "worker",
        NOW + 11,
    )
    assert first.payload == '{"id":"sooner"}'
    assert 'sooner"}' not in repr(first)


def test_expired_leases_are_recovered_first(outbox: Outbox) -> None:
    outbox.enqueue({"id": "spent"}, max_attempts=1, now=NOW)
    outbox.enqueue({"id": "again"}, max_attempts=2, now=NOW)
    before = {claim.event_id: claim for claim in outbox.claim_batch("one", lease_seconds=5, now=NOW)}
    assert outbox.claim_batch("two", now=NOW + 4.9) == []
    (after,) = outbox.claim_batch("two", now=NOW + 5)
    assert (after.event_id, after.attempt) == ("again", 2)
    assert after.lease_token != before["again"].lease_token
    spent = outbox.status("spent", now=NOW + 5)
    assert (spent.status, spent.last_error_code) == ("failed", "lease_expired")
    with refused("dispatch.claim_lost", ClaimLostError):
        outbox.complete(before["again"], {"echo": "again"}, now=NOW + 5)


@pytest.mark.parametrize("worker", ["", "a b", "w" * 129, None, 7, "ü"])
def test_a_worker_id_that_is_none(outbox: Outbox, worker: Any) -> None:
    with refused("dispatch.worker_invalid"):
        outbox.claim(worker)


@pytest.mark.parametrize("lease", [0, -1, 86_400.1, True, "60", math.nan, None])
def test_a_lease_that_is_none(outbox: Outbox, lease: Any) -> None:
    (claim,) = claimed(outbox)
    for call in (
        lambda: outbox.claim("worker", lease_seconds=lease),
        lambda: outbox.renew([claim], lease_seconds=lease),
        lambda: outbox.run_once(Scripted(), "worker", lease_seconds=lease),
    ):
        with refused("dispatch.lease_invalid"):
            call()


@pytest.mark.parametrize("lease", [1e-12, 86_400])
def test_a_lease_at_its_bounds(outbox: Outbox, lease: float) -> None:
    (claim,) = claimed(outbox, lease_seconds=lease)
    assert claim.lease_expires_at > NOW


@pytest.mark.parametrize("limit", [0, 1001, True, 1.0, "1"])
def test_a_limit_that_is_none(outbox: Outbox, limit: Any) -> None:
    with refused("dispatch.limit_invalid"):
        outbox.claim_batch("worker", limit=limit)


TAMPERED = {
    "payload": {"payload": '{"id":"event-0","x":1}'},
    "hash": {"payload_sha256": HASH},
    "not canonical": {"payload": '{"id": "event-0"}'},
    "no JSON": {"payload": "secret"},
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_does_not_prove_itself_is_quarantined(outbox: Outbox, engine: Engine, how: str) -> None:
    fill(outbox, 3)
    tamper(engine, "event-0", **TAMPERED[how])
    with refused("dispatch.payload_integrity", IntegrityError):
        outbox.claim("worker")
    found = outbox.status("event-0")
    assert (found.status, found.last_error_code) == ("failed", "dispatch.payload_integrity")
    assert [claim.event_id for claim in outbox.claim_batch("worker")] == ["event-1", "event-2"]
    outbox.health(deep=True)


def test_a_batch_of_nothing_but_poison_hides_nothing(outbox: Outbox, engine: Engine) -> None:
    fill(outbox, 4)
    for number in range(2):
        tamper(engine, f"event-{number}", payload="{}")
    assert [claim.event_id for claim in outbox.claim_batch("worker", limit=2)] == ["event-2", "event-3"]


# -- settle ---


def test_retries_back_off_and_end(outbox: Outbox) -> None:
    fill(outbox, 1, now=NOW, max_attempts=3)
    now = NOW
    for attempt, delay in ((1, 5), (2, 10)):
        claim = outbox.claim("worker", now=now)
        assert claim is not None
        outcome = outbox.retry(claim, "network", detail_hash=HASH, now=now)
        assert (outcome.status, outcome.attempt, outcome.next_attempt_at) == ("retry_wait", attempt, now + delay)
        assert outbox.status("event-0").last_error_detail_hash == HASH
        now += delay
    claim = outbox.claim("worker", now=now)
    assert claim is not None
    outcome = outbox.retry(claim, "network", now=now)
    assert (outcome.status, outcome.next_attempt_at, outcome.error_code) == ("failed", None, "network")


@pytest.mark.parametrize(("asked", "waited"), [(None, 5), (0, 5), (4, 5), (60, 60), (10**6, 3600)])
def test_retry_after_is_a_lower_bound_up_to_a_cap(outbox: Outbox, asked: float | None, waited: float) -> None:
    (claim,) = claimed(outbox)
    assert outbox.retry(claim, "busy", retry_after=asked, now=NOW).next_attempt_at == NOW + waited


def test_fail_ends_the_event_and_redrive_begins_it_anew(outbox: Outbox) -> None:
    (claim,) = claimed(outbox)
    assert outbox.fail(claim, "refused", now=NOW).status == "failed"
    assert outbox.health(now=NOW).status == "blocked"
    redriven = outbox.redrive("event-0", now=NOW + 1)
    assert (redriven.status, redriven.attempts, redriven.redrives, redriven.next_attempt_at) == (
        "pending",
        0,
        1,
        NOW + 1,
    )
    with refused("dispatch.redrive_invalid"):
        outbox.redrive("event-0", now=NOW + 1)
    with refused("dispatch.event_missing", NotFoundError):
        outbox.redrive("nobody")
    assert outbox.health(now=NOW + 1).status == "ok"


def test_redrive_all_by_code(outbox: Outbox) -> None:
    for claim, code in zip(claimed(outbox, 3), ("a", "b", "a"), strict=True):
        outbox.fail(claim, code, now=NOW)
    assert outbox.redrive_all(error_code="a", now=NOW + 1) == 2
    assert outbox.redrive_all(error_code="a", now=NOW + 1) == 0
    assert outbox.redrive_all(now=NOW + 1) == 1
    for bad, code in (({"limit": 0}, "dispatch.limit_invalid"), ({"error_code": "A b"}, "dispatch.error_invalid")):
        with refused(code):
            outbox.redrive_all(**bad)  # type: ignore[arg-type]


def stale(outbox: Outbox, engine: Engine, claim: Claim, code: str) -> float:
    """Make ``claim`` lose with ``code``; return the time to settle it at."""
    if code == "dispatch.claim_missing":
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox_event"))
    if code == "dispatch.claim_lost":
        outbox.renew([claim], lease_seconds=60, now=NOW)
    return {"dispatch.lease_expired": claim.lease_expires_at, "dispatch.clock_regressed": NOW - 1}.get(code, NOW)


LOST = ["dispatch.claim_missing", "dispatch.claim_lost", "dispatch.lease_expired", "dispatch.clock_regressed"]


@pytest.mark.parametrize("code", LOST)
def test_a_lost_claim_changes_nothing(outbox: Outbox, engine: Engine, code: str) -> None:
    (claim,) = claimed(outbox)
    now = stale(outbox, engine, claim, code)
    before = dump(engine)
    for call in (
        lambda: outbox.complete(claim, {"echo": claim.event_id}, now=now),
        lambda: outbox.retry(claim, "x", now=now),
        lambda: outbox.fail(claim, "x", now=now),
    ):
        with refused(code, ClaimLostError):
            call()
    assert outbox.renew([claim], now=now) == []
    assert [line.error_code for line in outbox.release([claim], now=now)] == [code]
    (line,) = outbox.settle([Success(claim, {"echo": claim.event_id})], now=now)
    assert (line.won, line.error_code, line.outcome) == (False, code, None)
    assert dump(engine) == before


def test_the_last_moment_of_a_lease_still_counts(outbox: Outbox) -> None:
    (claim,) = claimed(outbox, lease_seconds=10)
    last = math.nextafter(claim.lease_expires_at, 0)
    assert outbox.complete(claim, {"echo": claim.event_id}, now=last).status == "succeeded"


def test_settle_is_fenced_line_by_line(outbox: Outbox) -> None:
    claims = claimed(outbox, 5)
    outbox.fail(claims[1], "x", now=NOW)
    lines = outbox.settle(
        [
            Success(claims[0], {"echo": "event-0"}),
            Success(claims[1], {"echo": "event-1"}),
            Failure(claims[2], "network", retry_after=60),
            Success(claims[3], {"echo": "wrong"}),
            Failure(claims[4], "refused", retryable=False),
            Success(claims[0], {"echo": "event-0"}),
        ],
        now=NOW,
    )
    assert [(line.won, line.error_code, line.outcome and line.outcome.status) for line in lines] == [
        (True, None, "succeeded"),
        (False, "dispatch.claim_lost", None),
        (True, None, "retry_wait"),
        (True, None, "failed"),
        (True, None, "failed"),
        (False, "dispatch.claim_lost", None),
    ]
    assert outbox.status("event-3").last_error_code == "dispatch.response_invalid"


def test_a_renewed_claim_replaces_the_old_one(outbox: Outbox) -> None:
    (old,) = claimed(outbox, lease_seconds=10)
    (new,) = outbox.renew([old], lease_seconds=100, now=NOW + 5)
    assert new == dataclasses.replace(old, lease_expires_at=NOW + 105)
    lines = outbox.settle([Success(old, {"echo": old.event_id}), Success(new, {"echo": new.event_id})], now=NOW + 6)
    assert [line.won for line in lines] == [False, True]


def test_release_gives_back_without_counting(outbox: Outbox) -> None:
    first, second = claimed(outbox, 2)
    outbox.retry(second, "network", now=NOW)
    (second,) = outbox.claim_batch("worker", now=NOW + 5)
    assert all(line.won for line in outbox.release([first, second], now=NOW + 6))
    one, two = outbox.status("event-0"), outbox.status("event-1")
    assert (one.status, one.attempts, one.last_error_code) == ("pending", 0, None)
    assert (two.status, two.attempts, two.last_error_code) == ("retry_wait", 1, "lease_released")
    assert [claim.event_id for claim in outbox.claim_batch("worker", now=NOW + 6)] == ["event-0", "event-1"]


MALFORMED: dict[str, Any] = {
    "attempt": 0,
    "max_attempts": 21,
    "payload": '{"id":"another"}',
    "payload_sha256": "xyz",
    "lease_token": "a b",
    "lease_owner": None,
    "lease_expires_at": math.nan,
    "topic": 7,
    "event_id": "",
    "id": "1",
}


@pytest.mark.parametrize("field", [*MALFORMED, "all of it"])
def test_a_claim_that_no_claim_made(outbox: Outbox, engine: Engine, field: str) -> None:
    (claim,) = claimed(outbox)
    bad: Any = object() if field == "all of it" else dataclasses.replace(claim, **{field: MALFORMED[field]})
    before = dump(engine)
    for call in (
        lambda: outbox.complete(bad, {}),
        lambda: outbox.retry(bad, "x"),
        lambda: outbox.fail(bad, "x"),
        lambda: outbox.renew([bad]),
        lambda: outbox.release([bad]),
        lambda: outbox.settle([Success(bad, {})]),
        lambda: outbox.settle([Failure(bad, "x")]),
    ):
        with refused("dispatch.claim_invalid"):
            call()
    assert dump(engine) == before


@pytest.mark.parametrize("response", [None, [], {}, {"echo": "x"}, object()])
def test_a_response_that_the_contract_refuses(outbox: Outbox, engine: Engine, response: Any) -> None:
    (claim,) = claimed(outbox)
    before = dump(engine)
    with refused("dispatch.response_invalid"):
        outbox.complete(claim, response, now=NOW)
    assert dump(engine) == before


@pytest.mark.parametrize(
    ("code", "detail"),
    [("", None), ("A", None), ("a b", None), ("a" * 129, None), (None, None), ("a", "x"), ("a", HASH[1:])],
)
def test_an_error_that_is_none(outbox: Outbox, engine: Engine, code: Any, detail: Any) -> None:
    (claim,) = claimed(outbox)
    before = dump(engine)
    for call in (
        lambda: outbox.retry(claim, code, detail_hash=detail),
        lambda: outbox.fail(claim, code, detail_hash=detail),
        lambda: outbox.settle([Failure(claim, code, detail_hash=detail)]),
    ):
        with refused("dispatch.error_invalid"):
            call()
    with refused("dispatch.error_invalid"):
        DeliveryFailed(code, retryable=True, detail_hash=detail)
    assert dump(engine) == before


def test_batch_verbs_use_as_many_statements_for_many_as_for_two(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.store.SWEEP_SECONDS", 1e9)  # a statement more, every so often
    outbox.claim("worker", now=NOW)
    statements: list[str] = []

    def count(*arguments: Any) -> None:
        statements.append(arguments[2])

    def counts(number: int) -> list[int]:
        found = []
        for verb in (
            lambda: outbox.enqueue_many([{"id": f"{number}-{n}"} for n in range(number)], now=NOW),
            lambda: claims.extend(outbox.claim_batch("worker", limit=number, now=NOW)),
            lambda: renewed.extend(outbox.renew(claims, now=NOW)),
            lambda: outbox.settle([Success(claim, {"echo": claim.event_id}) for claim in renewed[1:]], now=NOW),
            lambda: outbox.release(renewed[:1], now=NOW),
        ):
            statements.clear()
            verb()
            found.append(len(statements))
        return found

    event.listen(Engine, "before_cursor_execute", count)
    try:
        outbox.health()  # which looks at the schema once
        claims, renewed = list[Claim](), list[Claim]()
        few = counts(2)
        claims, renewed = list[Claim](), list[Claim]()
        outbox.run_once(Scripted(), "worker", now=NOW)  # the one given back
        assert counts(300) == few
    finally:
        event.remove(Engine, "before_cursor_execute", count)


# -- run_once, status, health, purge ---


@pytest.mark.parametrize(
    ("act", "status", "code"),
    [
        (None, "succeeded", None),
        (fails_with(DeliveryFailed("busy", retryable=True, retry_after=60)), "retry_wait", "busy"),
        (fails_with(DeliveryFailed("refused", retryable=False)), "failed", "refused"),
        (fails_with(ValueError("secret")), "failed", "dispatch.client_failure"),
        (lambda _: {"echo": "wrong"}, "failed", "dispatch.response_invalid"),
    ],
)
def test_run_once(outbox: Outbox, act: Any, status: str, code: str | None) -> None:
    assert outbox.run_once(Scripted(), "worker") is None
    fill(outbox, 1, now=NOW)
    outcome = outbox.run_once(Scripted(act), "worker", now=NOW)
    assert outcome is not None
    assert (outcome.event_id, outcome.status, outcome.error_code, outcome.attempt) == ("event-0", status, code, 1)
    assert outcome.next_attempt_at == (NOW + 60 if status == "retry_wait" else None)
    assert outbox.status("event-0").status == status


def test_losing_the_claim_while_delivering_is_raised(outbox: Outbox, engine: Engine) -> None:
    fill(outbox, 1)
    destination = Scripted(lambda claim: tamper(engine, claim.event_id, lease_token="stolen"))
    with refused("dispatch.claim_lost", ClaimLostError):
        outbox.run_once(destination, "worker")


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, True, "5", None])
def test_a_destination_that_is_none(outbox: Outbox, timeout: Any) -> None:
    fill(outbox, 1)
    destination = Scripted()
    destination.timeout = timeout
    for nothing in (destination, object(), None):
        with refused("dispatch.client_invalid"):
            outbox.run_once(nothing, "worker")  # type: ignore[arg-type]
    assert outbox.status("event-0").attempts == 0


@pytest.mark.parametrize(("lease", "enough"), [(4.9, False), (5.0, False), (5.1, True)])
def test_the_lease_must_outlast_the_timeout(outbox: Outbox, lease: float, enough: bool) -> None:
    fill(outbox, 1)
    if enough:
        assert outbox.run_once(Scripted(timeout=5.0), "worker", lease_seconds=lease) is not None
    else:
        with refused("dispatch.lease_too_short"):
            outbox.run_once(Scripted(timeout=5.0), "worker", lease_seconds=lease)


def test_status_and_its_codes(outbox: Outbox, engine: Engine) -> None:
    (claim,) = claimed(outbox, lease_seconds=10)
    assert not outbox.status("event-0", now=NOW + 9.9).lease_expired
    assert outbox.status("event-0", now=NOW + 10).lease_expired
    assert outbox.status("event-0", now=NOW).lease_expires_at == claim.lease_expires_at
    for bad in ("", "a b", 7, "x" * 257):
        with refused("dispatch.event_invalid"):
            outbox.status(bad)  # type: ignore[arg-type]
    with refused("dispatch.event_missing", NotFoundError):
        outbox.status("nobody")
    tamper(engine, "event-0", payload="{}")
    with refused("dispatch.state_invalid", IntegrityError):
        outbox.status("event-0")
    with refused("dispatch.state_invalid", IntegrityError):
        outbox.health(deep=True)


def test_health_counts(outbox: Outbox) -> None:
    claims = claimed(outbox, 6, lease_seconds=10)
    outbox.complete(claims[0], {"echo": "event-0"}, now=NOW)
    outbox.retry(claims[1], "x", now=NOW)
    outbox.release(claims[2:4], now=NOW)
    health = outbox.health(now=NOW + 3)
    assert dict(health.counts) == {
        "pending": 2,
        "waiting": 0,
        "leased": 2,
        "retry_wait": 1,
        "succeeded": 1,
        "failed": 0,
    }
    assert (health.status, health.due, health.expired_leases, health.oldest_due_age) == ("ok", 2, 0, 3.0)
    later = outbox.health(now=NOW + 10)
    assert (later.status, later.due, later.expired_leases) == ("blocked", 3, 2)


def test_purge_takes_only_what_is_settled_and_old(outbox: Outbox) -> None:
    claims = claimed(outbox, 6)
    outbox.settle([Success(claim, {"echo": claim.event_id}) for claim in claims[:3]], now=NOW)
    outbox.fail(claims[3], "x", now=NOW)
    outbox.retry(claims[4], "x", now=NOW)
    assert outbox.purge(older_than_seconds=10, now=NOW + 9.9) == 0
    assert outbox.purge(older_than_seconds=10, limit=2, now=NOW + 10) == 2
    assert outbox.purge(older_than_seconds=10, now=NOW + 10) == 1
    assert outbox.health(now=NOW).failed == 1
    assert outbox.purge(older_than_seconds=10, include_failed=True, now=NOW + 10) == 1
    assert sum(outbox.health(now=NOW).counts.values()) == 2
    for bad in (-1, True, "1", math.nan):
        with refused("dispatch.retention_invalid"):
            outbox.purge(older_than_seconds=bad)  # type: ignore[arg-type]


# -- the database ---


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "statement", ["UPDATE outbox_alembic_version SET version_num = '0000'", "DROP INDEX ix_outbox_event_due"]
)
def test_an_altered_schema_is_refused_before_anything_else(
    outbox: Outbox, engine: Engine, when: str, statement: str
) -> None:
    if when == "after":
        outbox.health()
    with engine.begin() as connection:
        connection.execute(text(statement))
    for call in (
        lambda: outbox.enqueue({"id": "a"}),
        lambda: outbox.claim("worker"),
        lambda: outbox.status("a"),
        outbox.health,
        lambda: outbox.run_once(Scripted(), "worker"),
        lambda: outbox.purge(older_than_seconds=0),
    ):
        with refused("dispatch.schema_altered", SchemaError):
            call()
    assert dump(engine) == []


def test_an_unmigrated_database_says_what_to_run(empty_engine: Engine) -> None:
    outbox = Outbox(empty_engine, [Plain()])
    with pytest.raises(SchemaError, match="outbox migrate") as caught:
        outbox.enqueue({"id": "a"})
    assert "no revision" in str(caught.value)


def test_a_database_out_of_reach(engines: Callable[..., Engine]) -> None:
    for url in ("postgresql+psycopg://nobody@127.0.0.1:1/none", "sqlite:////nowhere/at/all.db"):
        with refused("dispatch.database_unavailable", DatabaseError):
            Outbox(engines(url), [Plain()]).health()


def test_a_locked_database_is_waited_for_then_reported(
    sqlite_url: str, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outbox.dialects import sqlite

    engine = engines(sqlite_url, connect_args={"timeout": 0})
    outbox = Outbox(engine, [Plain()])
    outbox.health()
    tries: list[float] = []
    monkeypatch.setattr(sqlite.time, "sleep", tries.append)
    monkeypatch.setattr(sqlite, "PATIENCE", 0.05)
    with engine.connect() as holder:
        holder.exec_driver_sql("BEGIN IMMEDIATE")
        with refused("dispatch.database_busy", DatabaseError):
            outbox.enqueue({"id": "a"})
        assert tries
        monkeypatch.setattr(sqlite, "PATIENCE", 60.0)
        monkeypatch.setattr(sqlite.time, "sleep", lambda _: holder.exec_driver_sql("ROLLBACK"))
        assert outbox.enqueue({"id": "a"}).status == "pending"


def test_a_lock_timeout_is_busy(pg_url: str, engines: Callable[..., Engine]) -> None:
    engine = engines(pg_url, connect_args={"options": "-c lock_timeout=50"})
    outbox = Outbox(engine, [Plain()])
    with engine.connect() as holder, holder.begin():
        outbox.enqueue({"id": "a"}, connection=holder)
        with refused("dispatch.database_busy", DatabaseError):
            outbox.enqueue({"id": "a"})


def test_threads_share_one_outbox(outbox: Outbox) -> None:
    fill(outbox, 200)
    taken: list[str] = []

    def work() -> None:
        while claims := outbox.claim_batch("worker", limit=7):
            taken.extend(claim.event_id for claim in claims)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(f"event-{number}" for number in range(200))
