"""``status`` and ``health``: what they say of every state, and that they notice every way in which a row can be wrong."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, literal_column, text
from sqlalchemy.pool import QueuePool

from outbox import EventStatus, Health, Outbox
from outbox.records import STATUSES, TopicStatus
from outbox.values import sha256_hex
from tests.support import (
    STATES,
    TOPIC,
    WORKER,
    T,
    canonical,
    claimed,
    forge,
    leased,
    make_outbox,
    note,
    notes,
    put,
    refused,
    response,
    statements,
    tamper,
    tamper_unchecked,
    unchanged,
)
from tests.test_enqueue import forbidden

NONE_YET = dict.fromkeys(STATUSES, 0)
CLOSED = {TOPIC: TopicStatus(TOPIC, "closed")}


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


# -- status ---------------------------------------------------------------------------------------------------------


def expected(**changes: Any) -> EventStatus:
    common: dict[str, Any] = {
        "topic": TOPIC, "event_id": "note-1", "payload_sha256": sha256_hex(canonical(note())), "attempts": 1,
        "max_attempts": 5, "next_attempt_at": T, "lease_expires_at": None, "lease_expired": False,
        "last_error_code": None, "last_error_detail_hash": None, "receipt": None, "response_sha256": None,
        "ordering_key": None, "redrives": 0, "created_at": T, "updated_at": T,
    }  # fmt: skip
    return EventStatus(**{**common, **changes})


OF_STATE: dict[str, dict[str, Any]] = {
    "pending": {"attempts": 0},
    "leased": {"lease_expires_at": T + 600},
    "retry_wait": {"next_attempt_at": T + 10, "last_error_code": "busy"},
    "succeeded": {"receipt": {"place": 7}, "response_sha256": sha256_hex(canonical(response()))},
    "failed": {"last_error_code": "refused"},
}


@pytest.mark.parametrize("state", STATES)
def test_status_of_every_state(outbox: Outbox, engine: Engine, state: str) -> None:
    put(outbox, state)
    with unchanged(engine):
        assert outbox.status("note-1", now=T) == expected(status=state, **OF_STATE[state])


def test_status_by_the_clock(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(2))
    assert outbox.claim(WORKER, lease_seconds=5e-324) is not None
    assert outbox.status("note-1").lease_expired is True
    assert outbox.status("note-2").lease_expired is False


def test_status_does_not_hold_the_payload(outbox: Outbox) -> None:
    outbox.enqueue(note(1, "s3cret"))
    assert "s3cret" not in repr(outbox.status("note-1"))


def test_status_in_its_topic(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    outbox.enqueue(note(), topic="one", now=T)
    assert outbox.status("note-1", topic="one").topic == "one"
    with refused("dispatch.event_missing", event_id="note-1"):
        outbox.status("note-1", topic="two")
    with refused("dispatch.topic_unknown"):
        outbox.status("note-1")


@pytest.mark.parametrize("event_id", ["", "a b", "x" * 257, "é", None, 7, True, b"note-1", ["note-1"]])
def test_ids_that_are_none(apart: Outbox, event_id: Any) -> None:
    with refused("dispatch.event_invalid"):
        apart.status(event_id)
    with refused("dispatch.event_invalid"):
        apart.redrive(event_id)


@pytest.mark.parametrize("now", [True, "0", -1, math.nan, math.inf])
def test_bad_times(apart: Outbox, now: Any) -> None:
    for verb in (lambda: apart.status("note-1", now=now), lambda: apart.health(now=now), lambda: apart.ready(now=now)):
        with refused("dispatch.time_invalid"):
            verb()


# -- rows that break the rules --------------------------------------------------------------------------------------

#: What the CHECK constraints cannot see, by the state of the row.
UNSEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a topic's event id that is none": ("pending", {"event_id": "no token"}),
    "a hash that is none": ("pending", {"payload_sha256": "Z" * 64}),
    "another hash": ("pending", {"payload_sha256": "0" * 64}),
    "another payload": ("succeeded", {"payload": canonical(note(1, "other"))}),
    "pending after an attempt": ("pending", {"attempts": 1}),
    "waiting without a key": ("pending", {"status": "waiting"}),
    "leased without an attempt": ("leased", {"attempts": 0}),
    "succeeded without an attempt": ("succeeded", {"attempts": 0}),
    "retried with no attempt left": ("retry_wait", {"attempts": 5}),
    "an owner that is none": ("leased", {"lease_owner": "a b"}),
    "a token that is none": ("leased", {"lease_token": ""}),
    "an error code that is none": ("failed", {"last_error_code": "Not A Code"}),
    "a detail that is no hash": ("failed", {"last_error_detail_hash": "secret"}),
    "a receipt that is no JSON": ("succeeded", {"receipt": "secret"}),
    "a receipt that is no object": ("succeeded", {"receipt": "[]"}),
    "a receipt that is not canonical": ("succeeded", {"receipt": '{"place": 7}'}),
    "a response's hash that is none": ("succeeded", {"response_sha256": "secret"}),
}
#: What they see, and what only SQLite without them lets in.
SEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a status that is none": ("pending", {"status": "done"}),
    "too many attempts": ("failed", {"attempts": 6}),
    "negative attempts": ("pending", {"attempts": -1}),
    "no attempts allowed": ("pending", {"max_attempts": 0}),
    "too many allowed": ("pending", {"max_attempts": 21}),
    "negative redrives": ("pending", {"redrives": -1}),
    "due before it was created": ("pending", {"next_attempt_at": T - 1}),
    "changed before it was created": ("pending", {"updated_at": T - 1}),
    "created before all time": ("pending", {"created_at": -1.0}),
    "a time that is text": ("pending", {"updated_at": literal_column("'soon'")}),
    "a time that is endless": ("pending", {"next_attempt_at": math.inf}),
    "leased by nobody": ("leased", {"lease_owner": None}),
    "leased without a token": ("leased", {"lease_token": None}),
    "leased for ever": ("leased", {"lease_expires_at": None}),
    "a lease that ended before it began": ("leased", {"lease_expires_at": T}),
    "pending and leased": ("pending", {"lease_owner": "worker-1", "lease_token": "t", "lease_expires_at": T + 1}),
    "failed without a code": ("failed", {"last_error_code": None}),
    "pending with a code": ("pending", {"last_error_code": "busy"}),
    "succeeded without a receipt": ("succeeded", {"receipt": None}),
    "succeeded without a response": ("succeeded", {"response_sha256": None}),
    "failed with a receipt": ("failed", {"receipt": "{}", "response_sha256": "0" * 64}),
    "a hash too short": ("pending", {"payload_sha256": "0" * 63}),
    "a number that is text": ("pending", {"attempts": literal_column("'none'")}),
}


def finds(outbox: Outbox, changed_id: str) -> None:
    named = {"event_id": changed_id} if changed_id == "note-1" else {}
    with refused("dispatch.state_invalid", **named) as caught:
        outbox.health(deep=True, now=T)
    assert "secret" not in str(caught.value)
    if changed_id == "note-1":
        with refused("dispatch.state_invalid", event_id="note-1"):
            outbox.status("note-1", now=T)


@pytest.mark.parametrize(("state", "changes"), UNSEEN.values(), ids=UNSEEN)
def test_rows_that_break_a_rule(outbox: Outbox, engine: Engine, state: str, changes: dict[str, Any]) -> None:
    put(outbox, state)
    assert outbox.health(deep=True, now=T).counts[state] == 1  # type: ignore[index]
    tamper(engine, **changes)
    finds(outbox, changes.get("event_id", "note-1"))
    outbox.health(now=T)  # which is cheap, and looks at no row


@pytest.mark.parametrize(("state", "changes"), SEEN.values(), ids=SEEN)
def test_rows_that_break_a_constraint(sqlite_engine: Engine, state: str, changes: dict[str, Any]) -> None:
    outbox = make_outbox(sqlite_engine)
    put(outbox, state)
    tamper_unchecked(sqlite_engine, **changes)
    finds(outbox, "note-1")


@pytest.mark.parametrize(
    "payload",
    [
        "hello",
        canonical(note(2)),
        '{"text":"hello","id":"note-1"}',
        '{"id":"note-1"}',
        canonical(note()).replace(",", ", "),
    ],
)
def test_payloads_that_hash_right_and_are_wrong(outbox: Outbox, engine: Engine, payload: str) -> None:
    put(outbox, "succeeded")
    forge(engine, payload)
    finds(outbox, "note-1")


def test_rows_of_a_topic_without_a_contract_are_held_to_the_rest(engine: Engine) -> None:
    make_outbox(engine, "other").enqueue(note(), now=T)
    tamper(engine, payload="hello")
    outbox = make_outbox(engine)
    assert outbox.health(deep=True, now=T).counts["pending"] == 1
    tamper(engine, attempts=1)
    with refused("dispatch.state_invalid", event_id="note-1"):
        outbox.health(deep=True, now=T)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 8])
def test_deep_health_looks_at_every_row(
    outbox: Outbox, engine: Engine, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.store.DEEP_ROWS", 4)
    outbox.enqueue_many(notes(count), now=T)
    assert outbox.health(deep=True, now=T).due == count
    for event_id in [event["id"] for event in notes(count)]:
        tamper(engine, event_id, payload_sha256="0" * 64)
        with refused("dispatch.state_invalid", event_id=event_id):
            outbox.health(deep=True, now=T)
        tamper(engine, event_id, payload_sha256=sha256_hex(canonical(note(event_id.removeprefix("note-")))))


# -- health ---------------------------------------------------------------------------------------------------------


def test_an_empty_outbox(outbox: Outbox) -> None:
    for deep in (False, True):
        assert outbox.health(deep=deep) == Health("ok", NONE_YET, 0, 0, 0, None, (), CLOSED)


def test_every_state_is_counted(outbox: Outbox) -> None:
    number = 0
    for state, count in {"failed": 1, "succeeded": 2, "retry_wait": 3, "leased": 4, "pending": 5}.items():
        for _ in range(count):
            number += 1
            put(outbox, state, number)
    counts = {"pending": 5, "waiting": 0, "leased": 4, "retry_wait": 3, "succeeded": 2, "failed": 1}
    for deep in (False, True):
        assert outbox.health(deep=deep, now=T) == Health("blocked", counts, 5, 0, 1, 0.0, (), CLOSED)  # type: ignore[arg-type]
    assert outbox.health(now=T + 10).due == 8


def test_waiting_is_counted_and_not_due(outbox: Outbox) -> None:
    leased(outbox, ordering_key="a key")
    outbox.enqueue(note(2), ordering_key="a key", now=T)
    health = outbox.health(deep=True, now=T)
    assert (health.counts, health.due, health.oldest_due_age) == (NONE_YET | {"leased": 1, "waiting": 1}, 0, None)
    assert outbox.claim(WORKER, now=T) is None


@pytest.mark.parametrize(
    ("state", "now", "status"),
    [
        ("pending", T, "ok"), ("pending", T + 1e9, "ok"), ("leased", T + 599, "ok"), ("leased", T + 600, "blocked"),
        ("retry_wait", T, "ok"), ("succeeded", T, "ok"), ("failed", T, "blocked"),
    ],
)  # fmt: skip
def test_blocked_or_ok(outbox: Outbox, state: str, now: float, status: str) -> None:
    put(outbox, state)
    health = outbox.health(now=now)
    assert health.status == status
    assert (health.expired_leases, health.failed) == (int(now == T + 600), int(state == "failed"))


def test_what_has_been_recovered_blocks_no_longer(outbox: Outbox) -> None:
    leased(outbox, lease_seconds=1)
    assert outbox.health(now=T + 1).status == "blocked"
    claimed(outbox, now=T + 1)
    assert outbox.health(now=T + 1).status == "ok"


@pytest.mark.parametrize(
    ("now", "due", "age"), [(T - 1, 0, None), (T, 1, 0), (T + 4.5, 1, 4.5), (T + 5, 2, 5), (T + 100, 3, 100)]
)
def test_the_oldest_due_age(outbox: Outbox, now: float, due: int, age: float | None) -> None:
    for number, moment in enumerate([T + 5, T, T + 50], 1):
        outbox.enqueue(note(number), now=moment)
    health = outbox.health(now=now)
    assert (health.due, health.oldest_due_age) == (due, age)


def test_the_oldest_is_sought_in_every_topic(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    outbox.enqueue(note(), topic="one", now=T + 5)
    outbox.enqueue(note(), topic="two", now=T)
    assert outbox.health(now=T + 7).oldest_due_age == 7


def test_health_by_the_clock(outbox: Outbox) -> None:
    outbox.enqueue(note())
    age = outbox.health().oldest_due_age
    assert age is not None
    assert 0 <= age < 30


def test_health_changes_nothing_and_costs_the_same_whatever_there_is(outbox: Outbox, engine: Engine) -> None:
    with statements(engine) as empty:
        outbox.health(now=T + 700)
    outbox.enqueue_many(notes(300), now=T)
    outbox.claim_batch(WORKER, limit=200, now=T)
    with unchanged(engine), statements(engine) as full:
        outbox.health(now=T + 700)
    counted = [statement for statement in full if "count" in statement]
    assert len([statement for statement in empty if "count" in statement]) == len(counted) < 12


def test_large_counts_are_estimates_on_postgresql(pg_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = make_outbox(pg_engine)
    outbox.enqueue_many(notes(40), now=T)
    outbox.claim_batch(WORKER, limit=10, now=T)
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE outbox_event"))
    monkeypatch.setattr("outbox.dialects.postgresql.EXACT_UP_TO", 10)
    health = outbox.health(now=T)
    assert health.approximate == ("pending",)
    assert health.counts["leased"] == 10
    assert 11 <= health.counts["pending"] <= 60
    assert 11 <= health.due <= 60
    monkeypatch.setattr("outbox.dialects.postgresql.EXACT_UP_TO", 40)
    health = outbox.health(now=T)
    assert (health.approximate, health.counts["pending"], health.due) == ((), 30, 30)


# -- damage ---------------------------------------------------------------------------------------------------------


def closed_file(engine: Engine) -> Path:
    """The engine's database as one file that nobody has open."""
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return Path(str(engine.url.database))


def overwrite_root(engine: Engine, name: str) -> None:
    """Make nonsense of the first page of a table or index."""
    with engine.connect() as connection:
        page = connection.exec_driver_sql("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).scalar_one()
        size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    path = closed_file(engine)
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(content)


def test_damage_that_only_a_deep_look_finds(sqlite_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue_many(notes(3), now=T)
    overwrite_root(sqlite_engine, "uq_outbox_event_ordering_head")
    assert outbox.health(now=T).due == 3
    with refused("dispatch.database_integrity"):
        outbox.health(deep=True, now=T)


def test_damage_that_every_verb_meets(sqlite_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    outbox.enqueue_many(notes(3), now=T)
    overwrite_root(sqlite_engine, "outbox_event")
    verbs: list[Callable[[], Any]] = [
        lambda: outbox.health(deep=True),
        lambda: outbox.status("note-1"),
        lambda: outbox.claim(WORKER),
        lambda: outbox.enqueue(note(4)),
    ]
    for verb in verbs:
        with refused("dispatch.database_integrity", says="SQLITE_CORRUPT"):
            verb()


def test_a_file_that_is_no_database(sqlite_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    closed_file(sqlite_engine).write_bytes(b"hello" * 10_000)
    with refused("dispatch.database_integrity", says="SQLITE_NOTADB"):
        outbox.health()
    assert sqlite3.SQLITE_NOTADB == 26


def test_an_index_that_does_not_serve_on_postgresql(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE INDEX mine ON outbox_event (max_attempts)"))
        connection.execute(text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'mine'::regclass"))
    assert outbox.health().status == "ok"
    with refused("dispatch.database_integrity", says="1 invalid index"):
        outbox.health(deep=True)


def test_advice_is_for_sqlite_without_wal(sqlite_engine: Engine, pg_engine: Engine) -> None:
    outbox = make_outbox(sqlite_engine)
    assert outbox.check() is None
    with sqlite_engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
    assert "journal_mode is delete" in str(outbox.check())
    assert make_outbox(pg_engine).check() is None
