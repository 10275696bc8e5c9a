"""SQLite: one writer at a time, so every transaction of ours takes the write lock when it begins."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    LargeBinary,
    Row,
    TextClause,
    TypeDecorator,
    bindparam,
    cast,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool
from sqlalchemy.sql import ColumnElement, Select

from outbox import schema
from outbox.dialects.base import (
    NO_LEASE,
    TOPIC_COLUMNS,
    Change,
    Count,
    Dialect,
    NewEvent,
    Pulse,
    ThreadedWatch,
    Watch,
    event,
    fence,
    insert_values,
)
from outbox.errors import DatabaseError, IntegrityError, OutboxError, SchemaError
from outbox.records import Claim

#: A host that set no busy timeout (or a short one) still gets this much patience on transactions of ours, in seconds.
PATIENCE: Final = 5.0
_LONGEST_NAP: Final = 0.05
#: Ids in one statement; SQLite takes 32,766 parameters unless it was built otherwise.
_PORTION: Final = 10_000
_ANY_TEXT: Final = partial(str, encoding="utf-8", errors="surrogateescape")

#: Pools without a second connection (in a thread).
_ONLY_ONE: Final = (StaticPool, SingletonThreadPool)

T = TypeVar("T")

_PULSE = text(
    f"SELECT :now, EXISTS (SELECT 1 FROM {schema.EVENT_TABLE} WHERE ({schema.LEASED}) AND lease_expires_at <= :now),"
    f" (SELECT group_concat(version_num) FROM {schema.VERSION_TABLE}), schema_version, {TOPIC_COLUMNS}"
    f" FROM pragma_schema_version LEFT JOIN {schema.TOPIC_TABLE} AS topic_row"
)
_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class SQLiteDialect(Dialect):
    name = "sqlite"
    shared_clock = False

    # -- transactions -----------------------------------------------------------------------------------------------

    @contextmanager
    def begin(self, engine: Engine, *, write: bool = True) -> Iterator[Connection]:
        # BEGIN IMMEDIATE, since a transaction that reads first and then writes cannot wait for another writer: SQLite
        # refuses the upgrade at once ("database is locked") whatever the busy timeout is.
        _check_unshared(engine.pool)
        with self.mapped_errors(), engine.connect() as connection:
            raw = _raw(connection)
            with _explicit_transactions(raw, str if write else _ANY_TEXT):
                _patiently(lambda: connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN"))
                try:
                    yield connection
                    _patiently(lambda: connection.exec_driver_sql("COMMIT"))  # waits for readers where there is no WAL
                finally:
                    if raw.in_transaction:  # not so after errors on which SQLite itself rolled back
                        raw.execute("ROLLBACK")

    def pulse(self, connection: Connection, now: float | None) -> Pulse:
        def ask() -> Pulse:
            moment = time.time() if now is None else now
            return Pulse.of(connection.execute(_PULSE, {"now": moment}).all(), moment)

        return _patiently(ask)  # the first to read, which in a transaction that only reads can meet a writer

    def clock(self, connection: Connection) -> float:
        del connection
        return time.time()

    def in_transaction(self, connection: Connection) -> bool:
        raw = _raw(connection)
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            return False
        if raw.in_transaction or _begins_by_itself(raw):
            return True
        # A host that begins transactions in a listener (SQLAlchemy's own recipe) has not done so before the first
        # statement. Beginning is what that statement would do anyway.
        if not connection.in_transaction():
            begun = connection.begin()
            if not raw.in_transaction:
                begun.rollback()
        return raw.in_transaction

    def identity(self, connection: Connection) -> tuple[Any, ...]:
        path = connection.execute(text("SELECT file FROM pragma_database_list WHERE name = 'main'")).scalar()
        if not path:  # a database in memory belongs to its connection
            return ("memory", id(connection.connection.dbapi_connection))
        found = Path(path).stat()
        return (found.st_dev, found.st_ino)

    def translate(self, error: SQLAlchemyError) -> OutboxError:
        original = error.orig if isinstance(error, DBAPIError) else None
        if _primary_code(original) in _BUSY:
            return DatabaseError("dispatch.database_busy", found="SQLITE_BUSY")
        said = str(original)
        if said.startswith(("no such table: outbox", "no such column", "table outbox_event has no column")):
            return SchemaError(
                "dispatch.schema_altered", expected=f"revision {schema.HEAD_REVISION}: run `outbox migrate`"
            )
        found = getattr(original, "sqlite_errorname", None) or type(original or error).__name__
        if _primary_code(original) in _DAMAGED:
            return IntegrityError("dispatch.database_integrity", found=found)
        return DatabaseError("dispatch.database_unavailable", found=found)

    # -- writing ----------------------------------------------------------------------------------------------------

    def insert(self, connection: Connection, rows: Sequence[NewEvent], now: float | None) -> Sequence[Row[Any]]:
        created = time.time() if now is None else now
        times = {"next_attempt_at": created, "created_at": created, "updated_at": created}
        return connection.execute(_INSERT, [{**values, **times} for values in insert_values(rows)]).all()

    def settle(self, connection: Connection, changes: Sequence[Change], now: float) -> set[str]:
        live = self._live(connection, [change.claim for change in changes], now)
        won = [change for change in changes if change.claim.lease_token in live]
        if won:
            connection.execute(_SETTLE, [_settle_parameters(change, now) for change in won])
        return live

    def renew(self, connection: Connection, claims: Sequence[Claim], expires_at: float, now: float) -> set[str]:
        live = self._live(connection, claims, now)
        for ids in _portions([claim.id for claim in claims if claim.lease_token in live]):
            connection.execute(_RENEW, {"ids": ids, "expires_at": expires_at, "now": now})
        return live

    @staticmethod
    def _live(connection: Connection, claims: Sequence[Claim], now: float) -> set[str]:
        """Which claims are live. The write lock is ours, so what is read here still holds when we write."""
        fences = dict[int, tuple[Any, ...]]()
        for ids in _portions([claim.id for claim in claims]):
            fences.update((row.id, tuple(row)) for row in connection.execute(_FENCE, {"ids": ids, "now": now}))
        return {claim.lease_token for claim in claims if fences.get(claim.id) == fence(claim)}

    # -- waiting for work -------------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> Watch:
        # The only connection of a database in memory cannot tell what others commit: there are none.
        return Watch() if isinstance(engine.pool, _ONLY_ONE) else _DataVersion(engine)

    # -- asking -----------------------------------------------------------------------------------------------------

    def count(self, connection: Connection, condition: str, now: float | None = None) -> Count:
        rows: int = connection.execute(_count(condition, now)).scalar_one()
        return Count(rows, exact=True)

    def damage(self, connection: Connection) -> str | None:
        found = connection.execute(text("PRAGMA quick_check(1)")).scalars().all()
        return None if found == ["ok"] else "PRAGMA quick_check reports a fault"

    def advice(self, connection: Connection) -> str | None:
        mode = connection.execute(text("PRAGMA journal_mode")).scalar()
        if mode == "wal":
            return None
        return (
            f"journal_mode is {mode}: with WAL (PRAGMA journal_mode=WAL) readers and the worker do not block each other"
        )

    # -- shared statements ------------------------------------------------------------------------------------------

    def _payload(self) -> ColumnElement[str]:
        return cast(event.c.payload, _AnyText)

    def _token(self) -> ColumnElement[str]:
        return func.lower(func.hex(func.randomblob(16)))

    def _chosen(self, picked: Select[tuple[int]]) -> ColumnElement[bool]:
        return event.c.id.in_(picked)


class _AnyText(TypeDecorator[str]):
    """Text read as bytes, since SQLite stores any bytes as text and its driver raises when they are no UTF-8."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> str:
        del dialect
        return _ANY_TEXT(value)


class _DataVersion(ThreadedWatch):
    """``PRAGMA data_version`` changes on a connection when any other one commits.

    Asking takes a few microseconds and no lock, and nobody asks while no worker rests.
    """

    INTERVAL = 0.008

    def _watch(self, wake: Callable[[], None]) -> None:
        with closing(self._engine.raw_connection()) as connection:
            raw: Any = connection.dbapi_connection
            with _explicit_transactions(raw, str):  # in a transaction it would only ever see its own snapshot
                seen = None
                while self._resting.wait() and not self._closed.is_set():
                    (version,) = raw.execute("PRAGMA data_version").fetchone()
                    if version != seen:
                        seen = version
                        wake()
                    time.sleep(self.INTERVAL)


_INSERT = insert(event).on_conflict_do_nothing().returning(event.c.id, event.c.event_id, event.c.created_at)

_FENCE = select(
    event.c.id,
    event.c.lease_token,
    event.c.lease_owner,
    event.c.attempts,
    event.c.max_attempts,
    event.c.payload_sha256,
    event.c.lease_expires_at,
).where(
    event.c.id.in_(bindparam("ids", expanding=True)),
    event.c.lease_expires_at > bindparam("now"),
    event.c.updated_at <= bindparam("now"),
)

_SETTLE = (
    update(event)
    .where(event.c.id == bindparam("row_id"))
    .values(
        status=bindparam("new_status"),
        attempts=bindparam("new_attempts"),
        next_attempt_at=func.coalesce(bindparam("due_at"), event.c.next_attempt_at),
        last_error_code=bindparam("error_code"),
        last_error_detail_hash=bindparam("detail_hash"),
        receipt=bindparam("new_receipt"),
        response_sha256=bindparam("new_response_sha256"),
        updated_at=bindparam("now"),
        **NO_LEASE,
    )
)

_RENEW = (
    update(event)
    .where(event.c.id.in_(bindparam("ids", expanding=True)))
    .values(lease_expires_at=bindparam("expires_at"), updated_at=bindparam("now"))
)


#: The index over each of the schema's conditions.
_INDEX_OVER: Final = {str(index.dialect_options["sqlite"]["where"]): index.name for index in event.indexes}


def _count(condition: str, now: float | None) -> TextClause:
    # The index is named, since with its own statistics SQLite would rather read all rows, payloads and all, than most
    # of an index.
    counted = f"SELECT count(*) FROM {schema.EVENT_TABLE} INDEXED BY {_INDEX_OVER[condition]} WHERE ({condition})"
    return text(counted) if now is None else text(f"{counted} AND next_attempt_at <= :now").bindparams(now=now)


def _raw(connection: Connection) -> sqlite3.Connection:
    return connection.connection.dbapi_connection  # type: ignore[return-value]


def _portions(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _PORTION):
        yield ids[start : start + _PORTION]


def _settle_parameters(change: Change, now: float) -> dict[str, Any]:
    return {
        "row_id": change.claim.id,
        "new_status": change.status,
        "new_attempts": change.attempts,
        "due_at": change.next_attempt_at,
        "error_code": change.error_code,
        "detail_hash": change.detail_hash,
        "new_receipt": change.receipt,
        "new_response_sha256": change.response_sha256,
        "now": now,
    }


def _primary_code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # of an extended code it is the low byte


def _check_unshared(pool: Pool) -> None:
    """Refuse to begin where the pool has only one connection and the host is in the middle of a transaction on it, as
    with a database in memory: that transaction is not ours to end."""
    if isinstance(pool, StaticPool):
        raw: Any = pool.connection.dbapi_connection
    elif isinstance(pool, SingletonThreadPool):
        with closing(pool.connect()) as pooled:
            raw = pooled.dbapi_connection
    else:
        return
    if _legacy_control(raw) and raw.in_transaction:
        found = "the host's open transaction on the only one"
        raise DatabaseError("dispatch.database_busy", expected="a connection of our own", found=found)


def _patiently(action: Callable[[], T]) -> T:
    """Do what may have to wait for other writers and readers."""
    deadline = time.monotonic() + PATIENCE
    nap = 0.001
    while True:
        try:
            return action()
        except DBAPIError as error:
            if _primary_code(error.orig) not in _BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(nap)
        nap = min(nap * 2, _LONGEST_NAP)


def _legacy_control(raw: sqlite3.Connection) -> bool:
    """Whether ``isolation_level`` rules, as always before Python 3.12, or the newer ``autocommit`` attribute."""
    return not isinstance(getattr(raw, "autocommit", None), bool)


def _begins_by_itself(raw: sqlite3.Connection) -> bool:
    if _legacy_control(raw):
        return raw.isolation_level is not None
    return not raw.autocommit  # type: ignore[attr-defined, unused-ignore]


@contextmanager
def _explicit_transactions(raw: sqlite3.Connection, text_factory: Callable[[bytes], str]) -> Iterator[None]:
    """Take BEGIN and COMMIT into our own hands for a while, then give the connection back as the host set it."""
    control = {"isolation_level": None} if _legacy_control(raw) else {"autocommit": True}
    ours = {**control, "text_factory": text_factory}
    before = {attribute: getattr(raw, attribute) for attribute in ours}
    try:
        for attribute, value in ours.items():
            setattr(raw, attribute, value)
        yield
    finally:
        for attribute, value in before.items():
            setattr(raw, attribute, value)
