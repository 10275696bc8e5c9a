"""A contract, a destination and the small tools that the tests of the verbs share.

``T`` is "now" throughout: verbs that are given a time do not depend on a clock, and neither do their tests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import pytest
from sqlalchemy import Engine, event, func, select, text, update

from outbox import (
    Claim,
    ClaimLostError,
    CollisionError,
    Contract,
    DatabaseError,
    InputError,
    IntegrityError,
    NotFoundError,
    Outbox,
    OutboxError,
    RetryPolicy,
    SchemaError,
)
from outbox.schema import outbox_event
from outbox.values import sha256_hex

T: Final = 1_000_000.0
WORKER: Final = "worker-1"
TOPIC: Final = "test.note"
#: Waiting for what must come; never how long something takes.
PATIENCE: Final = 30.0
STATES: Final = ("pending", "leased", "retry_wait", "succeeded", "failed")
POLICY: Final = RetryPolicy(base_delay_seconds=10, max_delay_seconds=300, max_retry_after_seconds=3600)


class Notes(Contract):
    """An event is ``{"id": token, "text": non-empty string}``; a response ``{"id": the event's, "place": int, …}``."""

    def __init__(self, topic: str = TOPIC) -> None:
        self.topic = topic

    def check(self, event: Any) -> str:
        if type(event) is not dict or event.keys() != {"id", "text"}:
            raise InputError("dispatch.change_invalid", expected="exactly id and text")
        if type(event["text"]) is not str or not event["text"]:
            raise InputError("dispatch.change_invalid", expected="some text")
        return event["id"]  # type: ignore[no-any-return]

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        if not isinstance(response, dict) or response.get("id") != event_id or type(response.get("place")) is not int:
            raise InputError("dispatch.response_invalid", expected="the event's id and a place")
        return {"place": response["place"]}


class Scripted:
    """A destination that does what ``act`` says, and remembers what it was asked to deliver."""

    def __init__(self, act: Callable[[Claim], Any] | None = None, timeout: Any = 5.0) -> None:
        self.timeout = timeout
        self.seen: list[Claim] = []
        self._act = act or (lambda claim: response(claim.event_id))

    def deliver(self, claim: Claim) -> Any:
        self.seen.append(claim)
        return self._act(claim)


def note(number: int | str = 1, text: str = "hello") -> dict[str, Any]:
    return {"id": f"note-{number}", "text": text}


def notes(count: int) -> list[dict[str, Any]]:
    return [note(number) for number in range(1, count + 1)]


def ids(count: int) -> list[str]:
    return [each["id"] for each in notes(count)]


def response(event_id: str = "note-1", place: int = 7) -> dict[str, Any]:
    return {"id": event_id, "place": place, "echo": "ignored"}


def canonical(value: Any) -> str:
    """Canonical JSON, written down once more."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def make_outbox(engine: Engine, *topics: str, **arguments: Any) -> Outbox:
    contracts = [Notes(topic) for topic in topics or (TOPIC,)]
    return Outbox(engine, contracts, **{"retry": POLICY, **arguments})


# -- errors ---------------------------------------------------------------------------------------------------------

#: The family that a caller catches for each code that is raised.
_FAMILIES: Final[dict[type[OutboxError], Sequence[str]]] = {
    CollisionError: ["dispatch.idempotency_collision"],
    NotFoundError: ["dispatch.event_missing"],
    ClaimLostError: [
        "dispatch.claim_missing", "dispatch.claim_lost", "dispatch.lease_expired", "dispatch.clock_regressed",
    ],
    IntegrityError: ["dispatch.payload_integrity", "dispatch.state_invalid", "dispatch.database_integrity"],
    SchemaError: ["dispatch.schema_altered", "dispatch.migration_failed"],
    DatabaseError: ["dispatch.database_busy", "dispatch.database_unavailable", "dispatch.database_unsupported"],
}  # fmt: skip
FAMILY_OF: Final = {code: family for family, codes in _FAMILIES.items() for code in codes}


@contextmanager
def refused(code: str, *, event_id: str | None = None, says: str = "") -> Iterator[pytest.ExceptionInfo[OutboxError]]:
    """The block raises ``code``, as an error of the family that belongs to it, about ``event_id`` if that is given."""
    with pytest.raises(OutboxError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error!r} instead of {code}"
    assert type(error) is FAMILY_OF.get(code, InputError)
    assert event_id is None or error.event_id == event_id
    assert says in str(error)


# -- the table ------------------------------------------------------------------------------------------------------


def dump(engine: Engine) -> list[dict[str, Any]]:
    """The whole table, column by column."""
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(select(outbox_event).order_by(outbox_event.c.id)).mappings()]


def raw_row(engine: Engine, event_id: str = "note-1") -> dict[str, Any]:
    (row,) = [row for row in dump(engine) if row["event_id"] == event_id]
    return row


def row_count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(outbox_event)).scalar_one()


@contextmanager
def unchanged(engine: Engine) -> Iterator[None]:
    before = dump(engine)
    yield
    assert dump(engine) == before


def tamper(engine: Engine, event_id: str = "note-1", /, **columns: Any) -> None:
    """Change a row behind the outbox's back, as far as the table's constraints allow."""
    with engine.begin() as connection:
        changed = update(outbox_event).where(outbox_event.c.event_id == event_id).values(columns)
        assert connection.execute(changed).rowcount == 1


def tamper_unchecked(sqlite_engine: Engine, event_id: str = "note-1", /, **columns: Any) -> None:
    """The same without CHECK constraints, which only SQLite lets one switch off without changing the schema."""
    with sqlite_engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.execute(update(outbox_event).where(outbox_event.c.event_id == event_id).values(columns))
        connection.commit()
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = OFF")


def poison(engine: Engine, event_id: str = "note-1", text: str = "tampered") -> None:
    """Change an event's text, so that its hash no longer matches."""
    tamper(engine, event_id, payload=canonical({"id": event_id, "text": text}))


def forge(engine: Engine, payload: str, event_id: str = "note-1") -> None:
    """Change an event's payload together with its hash."""
    tamper(engine, event_id, payload=payload, payload_sha256=sha256_hex(payload))


# -- events in a state ----------------------------------------------------------------------------------------------


def claimed(outbox: Outbox, now: float | None = T, **arguments: Any) -> Claim:
    claim = outbox.claim(WORKER, now=now, **arguments)
    assert claim is not None
    return claim


def leased(
    outbox: Outbox, number: int | str = 1, *, max_attempts: int = 5, ordering_key: str | None = None, **arguments: Any
) -> Claim:
    """A new event, claimed at T; nothing else may be due."""
    outbox.enqueue(note(number), max_attempts=max_attempts, ordering_key=ordering_key, now=T)
    return claimed(outbox, **arguments)


def put(outbox: Outbox, state: str, number: int | str = 1) -> str:
    """A new event brought into a state by the verbs, at T, and its id; nothing else may be due."""
    if state == "pending":
        return outbox.enqueue(note(number), now=T).event_id
    claim = leased(outbox, number)
    if state == "retry_wait":
        outbox.retry(claim, "busy", now=T)
    elif state == "succeeded":
        outbox.complete(claim, response(claim.event_id), now=T)
    elif state == "failed":
        outbox.fail(claim, "refused", now=T)
    assert outbox.status(claim.event_id, now=T).status == state
    return claim.event_id


# -- observing ------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.005)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """What is executed on the engine's pool, by whichever engine: the outbox has one of its own there."""
    seen: list[str] = []

    def remember(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if connection.engine.pool is engine.pool:
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", remember)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", remember)


def lock_waits(pg_engine: Engine) -> int:
    """How many sessions of this database wait for a lock."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with pg_engine.connect() as connection:
        return int(connection.execute(waiting).scalar_one())


def together(*actions: Callable[[], Any]) -> list[Any]:
    """The results of actions begun at the same moment in a thread each."""
    barrier = threading.Barrier(len(actions))

    def act(action: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(act, action) for action in actions]]
