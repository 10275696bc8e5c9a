"""The seam between the engine and a database: the domain's verbs, private and few.

The store decides (policy, contracts, what a lost claim means) and a dialect does the writing. A third database is one
new file here that passes the conformance suite. Nothing above this package asks which database it is talking to.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import starmap
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Engine,
    Row,
    Text,
    TextClause,
    bindparam,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql import ColumnElement, Select
from sqlalchemy.sql.dml import ReturningUpdate, Update
from sqlalchemy.sql.selectable import ScalarSelect

from outbox import schema
from outbox.breaker import TopicState
from outbox.errors import OutboxError
from outbox.records import Claim, FailedAttempt, Status

event = schema.outbox_event
idle = schema.outbox_idle
topic_state = schema.outbox_topic
attempt = schema.outbox_attempt
DUE = schema.predicate(schema.DUE)
LEASED = schema.predicate(schema.LEASED)
WAITING = schema.predicate(schema.WAITING)
FAILED = schema.predicate(schema.FAILED)
ORDERING_HEAD = schema.predicate(schema.ORDERING_HEAD)
FAILED_HEAD = schema.predicate(schema.FAILED_HEAD)
#: The error code of failed events that were given up, as that predicate spells it.
DISCARDED = "discarded"

#: Clearing a lease is the same three columns wherever a row stops being leased.
NO_LEASE: Mapping[str, ColumnElement[Any]] = {
    "lease_owner": null(),
    "lease_token": null(),
    "lease_expires_at": null(),
}


class NewEvent(NamedTuple):
    """A row to insert; its times are the database's to fill in."""

    topic: str
    event_id: str
    payload: str
    payload_sha256: str
    ordering_key: str | None
    headers: str | None
    max_attempts: int

    @property
    def status(self) -> Status:
        """As which it is inserted. One with an ordering key waits until it has proven to be the first of it."""
        return "pending" if self.ordering_key is None else "waiting"


class Change(NamedTuple):
    """What settling one claim writes. ``next_attempt_at`` None leaves the column as it is."""

    claim: Claim
    status: str
    attempts: int
    next_attempt_at: float | None = None
    error_code: str | None = None
    detail_hash: str | None = None
    receipt: str | None = None
    response_sha256: str | None = None


class Pulse(NamedTuple):
    """The first thing asked in every transaction of our own.

    Attributes:
        now: the time this transaction goes by.
        expired: whether some lease ended at or before ``now`` and has not been recovered.
        generation: changes whenever the schema may have; compared, never read.
        topics: how the topics' destinations fare, for those that were ever other than closed.
    """

    now: float
    expired: bool
    generation: tuple[Any, ...]
    topics: Mapping[str, TopicState]

    @classmethod
    def of(cls, rows: Sequence[Any], now: float | None = None) -> Pulse:
        """From rows of (now, expired, generation…, columns of ``outbox_topic``): one a topic, or one without any."""
        ours, width = rows[0], len(_TOPIC_COLUMNS)
        topics = (TopicState(*row[-width:]) for row in rows if row[-width] is not None)
        moment = ours[0] if now is None else now
        return cls(moment, bool(ours[1]), tuple(ours[2:-width]), {state.topic: state for state in topics})


class Count(NamedTuple):
    """A number of rows, and whether it was counted or estimated."""

    rows: int
    exact: bool


class Watch:
    """Wakes a worker when there may be new work. This one never does, and its worker polls.

    Attributes:
        announced: whether hosts must be told that somebody is waiting; see :meth:`Dialect.announce`.
    """

    announced = False

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to watch, on a thread of its own. ``wake`` may be called from it at any time, also for nothing."""

    def rest(self, resting: bool) -> None:
        """Say whether anybody waits to be woken; nothing needs to be watched meanwhile if not."""

    def close(self) -> None:
        """Stop watching and give the connection back."""


class ThreadedWatch(Watch):
    """A watch on a daemon thread that survives its database: after an error it begins anew, a little later."""

    RECONNECT_SECONDS = 1.0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resting = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, wake: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(wake,), name="outbox-watch", daemon=True)
        self._thread.start()

    def rest(self, resting: bool) -> None:
        if resting:
            self._resting.set()
        else:
            self._resting.clear()

    def close(self) -> None:
        self._closed.set()
        self._resting.set()
        if self._thread is not None:
            self._thread.join(2 * self.RECONNECT_SECONDS)

    def _run(self, wake: Callable[[], None]) -> None:
        while not self._closed.is_set():
            try:
                self._watch(wake)
            except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error):
                # The worker's own claims say what is wrong with the database; here is nothing to add.
                self._closed.wait(self.RECONNECT_SECONDS)

    def _watch(self, wake: Callable[[], None]) -> None:
        """Watch on one connection until closed; raise when it fails."""
        raise NotImplementedError


class Dialect(ABC):
    """One database's way of doing what the store asks."""

    #: SQLAlchemy's name of the database.
    name: str
    #: Whether all hosts share the database's clock; otherwise a host's own clock rules.
    shared_clock: bool

    # -- transactions -----------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, engine: Engine, *, write: bool = True) -> AbstractContextManager[Connection]:
        """A transaction on a connection of our own, whatever the host's engine is set to.

        Raises:
            DatabaseError: ``dispatch.database_busy``, ``dispatch.database_unavailable``.
            IntegrityError: ``dispatch.database_integrity``.
        """

    @abstractmethod
    def pulse(self, connection: Connection, now: float | None) -> Pulse:
        """The time (``now`` if given), whether there are leases to recover, and the schema's generation.

        One statement, since it is asked in every transaction.

        Raises:
            SchemaError: ``dispatch.schema_altered``: a table is missing.
        """

    @abstractmethod
    def clock(self, connection: Connection) -> float:
        """The time on a connection that may be a host's, whose settings are left alone."""

    @abstractmethod
    def in_transaction(self, connection: Connection) -> bool:
        """Whether what is executed on a host's connection now waits for the host's commit."""

    @abstractmethod
    def identity(self, connection: Connection) -> tuple[Any, ...]:
        """Equal for two connections exactly when they write to the same database."""

    @abstractmethod
    def translate(self, error: SQLAlchemyError) -> OutboxError:
        """The foreign exception as one of ours, without the statement, its values or the driver's text."""

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Let no exception of the database, its driver or its pool out.

        They are not even chained: their text quotes values, and a driver's detail quotes whole rows.
        """
        try:
            yield
        except (DBAPIError, PoolTimeout, DisconnectionError) as error:
            raise self.translate(error) from None

    # -- writing ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewEvent], now: float | None) -> Sequence[Row[Any]]:
        """Insert what is not there yet and return (id, event_id, created_at) of the rows that are new.

        With ``now`` None the time is the database's, read once. Ids follow the order of ``rows``, which may be many.
        Those with an ordering key are inserted as ``waiting``.
        """

    @abstractmethod
    def settle(self, connection: Connection, changes: Sequence[Change], now: float) -> set[str]:
        """Write every change whose claim is live at ``now`` and return the tokens of those."""

    @abstractmethod
    def renew(self, connection: Connection, claims: Sequence[Claim], expires_at: float, now: float) -> set[str]:
        """Move the expiry of every claim that is live at ``now`` and return the tokens of those."""

    def recover(self, connection: Connection, now: float, limit: int, floor: float = 0.0) -> Sequence[Row[Any]]:
        """End up to ``limit`` leases that expired in [floor, now]; return their names and states."""
        return connection.execute(self._recover, {"now": now, "limit": limit, "floor": floor}).all()

    def lease(
        self,
        connection: Connection,
        topic: str,
        owner: str,
        expires_at: float,
        now: float,
        limit: int,
        floor: float = 0.0,
    ) -> list[Claim]:
        """Lease up to ``limit`` events due in [floor, now], in due order."""
        parameters = {
            "of_topic": topic, "owner": owner, "expires_at": expires_at, "now": now, "limit": limit, "floor": floor,
        }  # fmt: skip
        rows = connection.execute(self._lease, parameters).all()
        return sorted(starmap(Claim, rows), key=_due_order)  # RETURNING promises no order

    def redrive(
        self, connection: Connection, condition: ColumnElement[bool], now: float, limit: int | None = None
    ) -> Sequence[str | None]:
        """Make failed events under ``condition`` due again; return the ordering keys of those, None without one.

        Up to ``limit``, longest failed first. Without one ``condition`` names the event, by which it is to be found and
        not among all that have failed. Those with an ordering key wait their turn.
        """
        failed = hidden(event.c.status == "failed") if limit is None else FAILED
        # A clock that stepped back must not date the row before its own creation.
        picked = self._pick(failed, condition, event.c.created_at <= now)
        if limit is not None:
            picked = picked.order_by(event.c.updated_at).limit(limit)
        fresh = {
            "status": case((event.c.ordering_key.is_(None), "pending"), else_="waiting"), "attempts": 0,
            "redrives": event.c.redrives + 1, "last_error_code": null(), "last_error_detail_hash": null(),
            "next_attempt_at": literal(now), "updated_at": literal(now),
        }  # fmt: skip
        statement = update(event).where(self._chosen(picked)).values(fresh).returning(event.c.ordering_key)
        return connection.execute(statement).scalars().all()

    def discard(self, connection: Connection, event_row: int, now: float) -> bool:
        """Mark a failed event as given up, so that it no longer holds its ordering key."""
        given_up = {"last_error_code": DISCARDED, "last_error_detail_hash": null(), "updated_at": literal(now)}
        failed = (event.c.id == event_row, hidden(event.c.status == "failed"), event.c.updated_at <= now)
        return bool(connection.execute(update(event).where(*failed).values(given_up)).rowcount)

    def purge(self, connection: Connection, conditions: Sequence[ColumnElement[bool] | TextClause], limit: int) -> int:
        """Delete up to ``limit`` rows under ``conditions``, oldest first, and their attempts; return how many."""
        picked = self._pick(*conditions).order_by(event.c.updated_at).limit(limit)
        gone = connection.execute(delete(event).where(self._chosen(picked)).returning(event.c.id)).scalars().all()
        if gone:  # at once, since SQLite gives their ids to others
            connection.execute(delete(attempt).where(attempt.c.event_row.in_(gone)))
        return len(gone)

    # -- topics and attempts ----------------------------------------------------------------------------------------

    def lock_topic(self, connection: Connection, topic: str) -> TopicState:
        """The topic's row, made if there is none, that nobody else can change until the transaction ends."""
        connection.execute(_NEW_TOPIC, {"topic": topic})
        row = select(topic_state).where(topic_state.c.topic == topic).with_for_update()
        return TopicState(*connection.execute(row).one())

    def write_topic(self, connection: Connection, state: TopicState) -> None:
        """Write a topic's row that has been locked."""
        values = {name: getattr(state, name) for name in _TOPIC_COLUMNS}
        connection.execute(update(topic_state).where(topic_state.c.topic == state.topic).values(values))

    def record(self, connection: Connection, failed: Sequence[tuple[int, FailedAttempt]]) -> None:
        """Keep failed attempts, each with the id of its event's row."""
        rows = [{"event_row": row, **{name: getattr(each, name) for name in _ATTEMPT_FIELDS}} for row, each in failed]
        connection.execute(attempt.insert(), rows)

    def attempts(self, connection: Connection, event_row: int, limit: int) -> tuple[FailedAttempt, ...]:
        """The newest of an event's failed attempts, oldest first."""
        columns = [attempt.c[name] for name in _ATTEMPT_FIELDS]
        newest = select(*columns).where(attempt.c.event_row == event_row).order_by(attempt.c.id.desc()).limit(limit)
        return tuple(starmap(FailedAttempt, reversed(connection.execute(newest).all())))

    # -- ordering keys ----------------------------------------------------------------------------------------------
    #
    # Of each key the head alone stands in the due index. Whoever may change which event is the head, a producer or
    # whoever has ended the last one, holds the key meanwhile: a producer until its host commits, so that events have
    # ids in the order in which they become visible. A worker never waits for that; see Outbox._look_for_stranded.

    def hold_keys(self, connection: Connection, topic: str, keys: Sequence[str]) -> None:  # noqa: B027 - see below
        """Hold ordering keys until the transaction ends, waiting for other holders. One writer needs nothing."""

    def free_keys(self, connection: Connection, topic: str, keys: Sequence[str]) -> Sequence[str]:
        """Hold those of the keys that nobody else does, and return them. Never waits."""
        del connection, topic
        return keys

    def promote(self, connection: Connection, topic: str, keys: Sequence[str], now: float, *, passes: bool) -> int:
        """Make the first waiting event of each key the head, where there is none; return how many. The keys are held.

        An earlier event that failed stands in its way, unless it ``passes``.
        """
        parameters = [{"of_topic": topic, "key": key, "now": now} for key in keys]
        return connection.execute(self._promote[passes], parameters).rowcount

    def demote(self, connection: Connection, topic: str, keys: Sequence[str], now: float) -> None:
        """Let the heads of keys wait again that have not been tried yet, where an earlier event of theirs now waits."""
        connection.execute(self._demote, [{"of_topic": topic, "key": key, "now": now} for key in keys])

    def waiting_keys(self, connection: Connection, topic: str, after: str, limit: int) -> Sequence[Any]:
        """Up to ``limit`` ordering keys after ``after`` that events wait for: (key, has a head, and whether an event
        before the first that waits has failed)."""
        parameters = {"of_topic": topic, "after": after, "limit": limit}
        return connection.execute(_WAITING_KEYS, parameters).all()

    # -- waiting for work -------------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> Watch:
        """What wakes a worker when there may be new work. By default nothing does, and workers poll."""
        del engine
        return Watch()

    def announce(self, connection: Connection, worker_id: str, topic: str, until: float, now: float) -> None:
        """Say that a worker waits for a topic's events, so that hosts wake it; forget those who have stopped saying so.

        An enqueue that began before this is committed may not see it, so the worker must look once more after.
        """
        stale = (idle.c.idle_until < now) | ((idle.c.topic == topic) & (idle.c.worker_id == worker_id))
        connection.execute(idle.delete().where(stale))
        connection.execute(idle.insert(), {"topic": topic, "worker_id": worker_id, "idle_until": until})

    def withdraw(self, connection: Connection, worker_id: str) -> None:
        """Say that a worker waits no more."""
        connection.execute(idle.delete().where(idle.c.worker_id == worker_id))

    def ready(self, connection: Connection, topic: str, now: float) -> bool:
        """Whether a claim would find something: an event that is due, or a lease to recover."""
        return bool(connection.execute(_READY, {"of_topic": topic, "now": now}).scalar_one())

    # -- asking -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def count(self, connection: Connection, condition: str, now: float | None = None) -> Count:
        """How many rows hold under ``condition`` (one of the schema's), at a cost that stays small."""

    @abstractmethod
    def damage(self, connection: Connection) -> str | None:
        """What the database itself finds wrong with its files, content-free; None when it is whole."""

    @abstractmethod
    def advice(self, connection: Connection) -> str | None:
        """A setting of the host's database that we would change, in one sentence; None when there is none."""

    def expired_leases(self, connection: Connection, now: float) -> int:
        """How many leases ended at or before ``now`` and have not been recovered."""
        expired = select(func.count()).select_from(event).where(LEASED, event.c.lease_expires_at <= now)
        return connection.execute(expired).scalar_one()

    def oldest_due(self, connection: Connection, topics: Iterable[str], now: float) -> float | None:
        """Since when the longest-due event has been due: the head of the due index, topic by topic."""
        due_since = func.min(event.c.next_attempt_at)
        heads = [
            connection.execute(select(due_since).where(DUE, event.c.topic == topic)).scalar_one() for topic in topics
        ]
        return min((head for head in heads if head is not None and head <= now), default=None)

    # -- shared statements, built once per process and cached compiled ----------------------------------------------

    def __init__(self) -> None:
        self._recover = self._recover_statement()
        self._lease = self._lease_statement()
        self._demote = self._demote_statement()
        self._promote = {passes: self._promote_statement(passes=passes) for passes in (False, True)}

    @abstractmethod
    def _token(self) -> ColumnElement[str]:
        """An expression the database evaluates to a new unguessable token for each row."""

    @abstractmethod
    def _chosen(self, picked: Select[tuple[int]]) -> ColumnElement[bool]:
        """The condition that a row's id is among ``picked``, evaluated once."""

    @staticmethod
    def _pick(*conditions: ColumnElement[bool] | TextClause) -> Select[tuple[int]]:
        # SKIP LOCKED: nothing we do waits for a row that somebody else is changing. SQLite has one writer and compiles
        # this to nothing.
        return select(event.c.id).where(*conditions).with_for_update(skip_locked=True)

    def _claim_columns(self) -> list[ColumnElement[Any]]:
        """What a claim carries away from its row, in the order of Claim's fields."""
        return [
            event.c.topic,
            event.c.event_id,
            self._payload(),
            event.c.payload_sha256,
            event.c.attempts,
            event.c.max_attempts,
            event.c.lease_owner,
            event.c.lease_token,
            event.c.lease_expires_at,
            event.c.id,
            event.c.ordering_key,
            event.c.headers,
            event.c.next_attempt_at,
        ]

    def _payload(self) -> ColumnElement[str]:
        """The payload as text, whatever has become of it: one that cannot be read must not stop the claim of others."""
        return event.c.payload

    def _recover_statement(self) -> ReturningUpdate[Any]:
        now = bindparam("now", type_=event.c.updated_at.type)
        expired = self._pick(
            LEASED,
            event.c.lease_expires_at <= now,
            event.c.lease_expires_at >= bindparam("floor", type_=event.c.lease_expires_at.type),
        )
        spent = event.c.attempts >= event.c.max_attempts
        return (
            update(event)
            .where(self._chosen(expired.order_by(event.c.lease_expires_at).limit(bindparam("limit"))))
            .values(
                status=case((spent, "failed"), else_="retry_wait"),
                next_attempt_at=case((spent, event.c.next_attempt_at), else_=now),
                last_error_code="lease_expired",
                last_error_detail_hash=null(),
                updated_at=now,
                **NO_LEASE,
            )
            .returning(
                event.c.id, event.c.topic, event.c.event_id, event.c.status, event.c.attempts, event.c.ordering_key
            )
        )

    def _lease_statement(self) -> ReturningUpdate[Any]:
        now = bindparam("now", type_=event.c.updated_at.type)
        due = self._pick(
            event.c.topic == bindparam("of_topic"),
            DUE,
            event.c.next_attempt_at <= now,
            event.c.next_attempt_at >= bindparam("floor", type_=event.c.next_attempt_at.type),
            event.c.attempts < event.c.max_attempts,
        )
        return (
            update(event)
            .where(
                self._chosen(due.order_by(event.c.next_attempt_at, event.c.id).limit(bindparam("limit"))),
            )
            .values(
                status="leased",
                attempts=event.c.attempts + 1,
                lease_owner=bindparam("owner"),
                lease_token=self._token(),
                lease_expires_at=bindparam("expires_at", type_=event.c.lease_expires_at.type),
                last_error_code=null(),
                last_error_detail_hash=null(),
                updated_at=now,
            )
            .returning(*self._claim_columns())
        )

    def _promote_statement(self, *, passes: bool) -> Update:
        topic, key = bindparam("of_topic", type_=Text()), bindparam("key", type_=Text())
        now: ColumnElement[float] = bindparam("now", type_=event.c.updated_at.type)
        due_at = case((event.c.updated_at > now, event.c.updated_at), else_=now)
        rows = event.alias("rows")
        of_key = (rows.c.topic == topic, rows.c.ordering_key == key)
        first = select(rows.c.id).where(*of_key, WAITING).order_by(rows.c.id).limit(1).scalar_subquery()
        in_the_way = [_one_of_key(rows, topic, key, ORDERING_HEAD)]
        if not passes:
            in_the_way.append(_one_of_key(rows, topic, key, FAILED_HEAD, rows.c.id < event.c.id))
        return (
            update(event)
            .where(
                event.c.id == first,
                hidden(event.c.status == "waiting"),
                *(each.is_(None) for each in in_the_way),
                *self._may_promote(),
            )
            .values(status="pending", next_attempt_at=due_at, updated_at=due_at)
        )

    def _demote_statement(self) -> Update:
        topic, key = bindparam("of_topic", type_=Text()), bindparam("key", type_=Text())
        now: ColumnElement[float] = bindparam("now", type_=event.c.updated_at.type)
        rows = event.alias("rows")
        earlier = select(rows.c.id).where(rows.c.topic == topic, rows.c.ordering_key == key, WAITING)
        first = earlier.order_by(rows.c.id).limit(1).scalar_subquery()
        untried = (ORDERING_HEAD, hidden(event.c.status == "pending"))
        # A claim that takes the head at this moment was first: what is in flight is not waited for.
        head = self._pick(event.c.topic == topic, event.c.ordering_key == key, *untried, event.c.id > first)
        since = case((event.c.updated_at > now, event.c.updated_at), else_=now)
        return update(event).where(self._chosen(head)).values(status="waiting", updated_at=since)

    def _may_promote(self) -> list[TextClause]:
        """Conditions under which what is read is what is committed."""
        return []


_TOPIC_COLUMNS = tuple(TopicState.__dataclass_fields__)
_ATTEMPT_FIELDS = tuple(FailedAttempt.__dataclass_fields__)
#: For the end of a pulse.
TOPIC_COLUMNS = ", ".join(f"topic_row.{name}" for name in _TOPIC_COLUMNS)

_NEW_TOPIC = text(
    f"INSERT INTO {schema.TOPIC_TABLE} (topic, failures, probes, ramp_claimed) VALUES (:topic, 0, 0, 0)"
    " ON CONFLICT DO NOTHING"
)
_NEXT_KEY = (
    f"(SELECT ordering_key FROM {schema.EVENT_TABLE} WHERE topic = :of_topic AND ({schema.WAITING})"
    " AND ordering_key > {} ORDER BY ordering_key LIMIT 1)"
)
# As _one_of_key.
_OF_KEY = (
    f"(SELECT id FROM {schema.EVENT_TABLE} WHERE topic = :of_topic AND ordering_key >= keys.value"
    " AND ordering_key <= keys.value AND ({}) ORDER BY ordering_key LIMIT 1) IS NOT NULL"
)
_FAILED_BEFORE = (
    f"{schema.FAILED_HEAD}) AND id < (SELECT id FROM {schema.EVENT_TABLE} WHERE topic = :of_topic"
    f" AND ordering_key = keys.value AND ({schema.WAITING}) ORDER BY id LIMIT 1"
)
# From key to key by the index, whatever number of events waits for each.
_WAITING_KEYS = text(
    f"WITH RECURSIVE keys (value) AS (SELECT {_NEXT_KEY.format('CAST(:after AS text)')}"
    f" UNION ALL SELECT {_NEXT_KEY.format('keys.value')} FROM keys WHERE keys.value IS NOT NULL)"
    f" SELECT keys.value, {_OF_KEY.format(schema.ORDERING_HEAD)}, {_OF_KEY.format(_FAILED_BEFORE)}"
    " FROM keys WHERE keys.value IS NOT NULL LIMIT :limit"
)

_DUE_FIRST = (
    select(event.c.id)
    .where(
        event.c.topic == bindparam("of_topic"),
        DUE,
        event.c.next_attempt_at <= bindparam("now"),
        event.c.attempts < event.c.max_attempts,
    )
    .order_by(event.c.next_attempt_at, event.c.id)
)
_EXPIRED_FIRST = select(event.c.id).where(LEASED, event.c.lease_expires_at <= bindparam("now"))
# The first in the index's order rather than EXISTS: statistics of a time when most events were due promise PostgreSQL
# one soon in the table's own order, where by now come all the settled ones.
_READY = select(
    or_(
        _DUE_FIRST.limit(1).scalar_subquery().is_not(None),
        _EXPIRED_FIRST.order_by(event.c.lease_expires_at).limit(1).scalar_subquery().is_not(None),
    )
)


def _one_of_key(
    rows: Any, topic: ColumnElement[str], key: ColumnElement[str], *conditions: ColumnElement[bool] | TextClause
) -> ScalarSelect[int]:
    """One of the rows of an ordering key under conditions, or NULL.

    Asked for as the first of a range: an equality's order is worth nothing to PostgreSQL, which then may take another
    index, by which there are as many rows as have failed in all.
    """
    of_key = (rows.c.topic == topic, rows.c.ordering_key >= key, rows.c.ordering_key <= key)
    found = select(rows.c.id).where(*of_key, *conditions).order_by(rows.c.ordering_key).limit(1)
    return found.correlate(event).scalar_subquery()


def of_topic(topic: str) -> ColumnElement[bool]:
    """That a row is of ``topic``, as a filter on rows that are found by something else.

    Without statistics both databases would rather find them by name, which leads to all settled rows of the topic.
    """
    return hidden(event.c.topic == topic)


def hidden(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition, spelled so that no planner finds an index for it."""
    return condition.is_(true())


def _due_order(claim: Claim) -> tuple[float, int]:
    return claim.due_at, claim.id


def fence(claim: Claim) -> tuple[Any, ...]:
    """What a row must still say for the claim to own it."""
    return (
        claim.id,
        claim.lease_token,
        claim.lease_owner,
        claim.attempt,
        claim.max_attempts,
        claim.payload_sha256,
        claim.lease_expires_at,
    )


def lease_end(now: float, lease_seconds: float) -> float:
    """When a lease taken at ``now`` ends: always later than ``now``, however short it is or far off the clock."""
    return max(now + lease_seconds, math.nextafter(now, math.inf))


def insert_values(rows: Sequence[NewEvent]) -> list[dict[str, Any]]:
    """The columns of new rows that are known before the clock is."""
    return [{**row._asdict(), "status": row.status, "attempts": 0, "redrives": 0} for row in rows]
