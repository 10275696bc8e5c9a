"""PostgreSQL: many workers at once, row locks that skip each other, and one clock for all hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Double,
    Engine,
    Integer,
    Row,
    TableValuedAlias,
    Text,
    TextClause,
    any_,
    bindparam,
    case,
    cast,
    column,
    func,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.sql import ColumnElement, Select
from sqlalchemy.types import TypeEngine

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

#: Above so many rows, a count in ``health`` is the planner's estimate.
EXACT_UP_TO: Final = 50_000
#: What one statement inserts at most: rows, and characters of their payloads.
PORTION_ROWS: Final = 1000
PORTION_CHARACTERS: Final = 16_000_000

#: What an enqueue notifies while a worker is idle.
CHANNEL: Final = "outbox_event"

_MISSING: Final = {"42P01", "42703", "42P10", "3F000"}  # undefined table or column, no such ON CONFLICT target, schema
_BUSY: Final = {"55P03", "57014", "40001", "40P01"}  # lock not available, canceled, serialization failure, deadlock
_DAMAGED: Final = {"XX001", "XX002"}  # data corrupted, index corrupted

_TABLES: Final = ", ".join(f"to_regclass('{table}')" for table in schema.metadata.tables)

# One statement for the clock and for what changes when the schema does: the catalogs' rows about our tables, each known
# by the transaction that wrote it. A missing table raises or changes what is found.
_PULSE = text(
    "SELECT clock.now, (SELECT id FROM outbox_event WHERE (status = 'leased') AND lease_expires_at <= clock.now"
    "                   ORDER BY lease_expires_at LIMIT 1) IS NOT NULL AS expired,"
    # Every statement of ours has an index that is meant for it and brings its order along. Statistics of another time,
    # or none at all, must not send one through all the settled rows instead.
    " set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true),"
    f" (SELECT string_agg(version_num, ',') FROM {schema.VERSION_TABLE}) AS revision,"
    " (SELECT string_agg(xmin::text, ' ') FROM pg_attribute WHERE attrelid = ANY (ours.tables) AND attnum > 0),"
    " (SELECT string_agg(xmin::text, ' ') FROM pg_constraint WHERE conrelid = ANY (ours.tables)),"
    " (SELECT string_agg(xmin::text, ' ') FROM pg_index WHERE indrelid = ANY (ours.tables)),"
    f" {TOPIC_COLUMNS}"
    " FROM (SELECT coalesce(CAST(:now AS double precision), extract(epoch FROM clock_timestamp())::double precision)"
    "       AS now OFFSET 0) AS clock,"  # OFFSET 0: read once, or the volatile clock forbids the index
    f" (SELECT ARRAY[{_TABLES}]::oid[] AS tables)"
    f" AS ours LEFT JOIN {schema.TOPIC_TABLE} AS topic_row ON true"
)
# Several connections may reach one database under several names (a pooler's port, a socket), so names prove nothing.
_IDENTITY = text(
    "SELECT d.oid, pg_postmaster_start_time(), to_regclass(:table)::oid"
    " FROM pg_database AS d WHERE d.datname = current_database()"
)


class PostgreSQLDialect(Dialect):
    name = "postgresql"
    shared_clock = True

    # -- transactions -----------------------------------------------------------------------------------------------

    @contextmanager
    def begin(self, engine: Engine, *, write: bool = True) -> Iterator[Connection]:
        # READ COMMITTED whatever the host's default: under REPEATABLE READ a claim that meets another's would abort
        # instead of taking the next row.
        del write  # readers and writers begin alike
        with self.mapped_errors(), engine.connect() as connection, _read_committed(connection), connection.begin():
            yield connection

    def pulse(self, connection: Connection, now: float | None) -> Pulse:
        return Pulse.of(connection.execute(_PULSE, {"now": now}).all())

    def clock(self, connection: Connection) -> float:
        return connection.execute(select(_CLOCK)).scalar_one()

    def in_transaction(self, connection: Connection) -> bool:
        raw = connection.connection.dbapi_connection
        return not getattr(raw, "autocommit", False)

    def identity(self, connection: Connection) -> tuple[Any, ...]:
        return tuple(connection.execute(_IDENTITY, {"table": schema.EVENT_TABLE}).one())

    def translate(self, error: SQLAlchemyError) -> OutboxError:
        original = error.orig if isinstance(error, DBAPIError) else None
        state = getattr(original, "sqlstate", None)
        found = f"SQLSTATE {state}" if state else type(original or error).__name__
        if state in _MISSING:
            return SchemaError(
                "dispatch.schema_altered",
                expected=f"revision {schema.HEAD_REVISION}: run `outbox migrate`",
                found=found,
            )
        if state in _DAMAGED:
            return IntegrityError("dispatch.database_integrity", found=found)
        return DatabaseError(
            "dispatch.database_busy" if state in _BUSY else "dispatch.database_unavailable", found=found
        )

    # -- writing ----------------------------------------------------------------------------------------------------

    def insert(self, connection: Connection, rows: Sequence[NewEvent], now: float | None) -> Sequence[Row[Any]]:
        if len(rows) == 1:
            statement = _INSERT if now is None else _INSERT_AT
            return connection.execute(statement, {**insert_values(rows)[0], "now": now}).all()
        drawn = connection.execute(_DRAW, {"count": len(rows), "now": now}).all()
        # Ids are drawn in the order given, since that is the due order of equal times. Rows are inserted in the order
        # of their names, however many statements it takes: two hosts with overlapping batches then wait for each other
        # instead of deadlocking.
        numbered = sorted(((new.id, *row) for new, row in zip(drawn, rows, strict=True)), key=itemgetter(1, 2))
        names, found = ["id", *NewEvent._fields], list[Row[Any]]()
        for portion in _portions(numbered):
            found += connection.execute(_INSERT_MANY, {"records": _records(names, portion), "now": drawn[0].now})
        return found

    def settle(self, connection: Connection, changes: Sequence[Change], now: float) -> set[str]:
        changes = sorted(changes, key=lambda change: change.claim.id)  # one order of locking, so no deadlocks
        rows = [(*fence(change.claim), *change[1:]) for change in changes]
        parameters = {"records": _records([*_FENCE_TYPES, *_CHANGE_TYPES], rows), "now": now}
        return set(connection.execute(_SETTLE, parameters).scalars())

    def renew(self, connection: Connection, claims: Sequence[Claim], expires_at: float, now: float) -> set[str]:
        claims = sorted(claims, key=lambda claim: claim.id)
        records = _records(_FENCE_TYPES, [fence(claim) for claim in claims])
        parameters = {"records": records, "expires_at": expires_at, "now": now}
        return set(connection.execute(_RENEW, parameters).scalars())

    # -- ordering keys ----------------------------------------------------------------------------------------------

    def hold_keys(self, connection: Connection, topic: str, keys: Sequence[str]) -> None:
        connection.execute(_HOLD_KEYS, {"of_topic": topic, "keys": sorted(keys)})  # one order, so no deadlocks

    def free_keys(self, connection: Connection, topic: str, keys: Sequence[str]) -> Sequence[str]:
        return connection.execute(_FREE_KEYS, {"of_topic": topic, "keys": list(keys)}).scalars().all()

    # -- waiting for work -------------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> Watch:
        return _Listener(engine)

    # -- asking -----------------------------------------------------------------------------------------------------

    def count(self, connection: Connection, condition: str, now: float | None = None) -> Count:
        some = _rows(condition, now).limit(EXACT_UP_TO + 1).subquery()
        rows = connection.execute(select(func.count()).select_from(some)).scalar_one()
        if rows <= EXACT_UP_TO:
            return Count(rows, exact=True)
        wanted = str(_rows(condition, now).compile(connection, compile_kwargs={"literal_binds": True}))
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {wanted}").scalar_one()
        return Count(max(rows, plan[0]["Plan"]["Plan Rows"]), exact=False)

    def damage(self, connection: Connection) -> str | None:
        invalid = connection.execute(_INVALID_INDEXES).scalar_one()
        failures = connection.execute(_CHECKSUM_FAILURES).scalar_one()
        if invalid:
            return f"{invalid} invalid indexes on {schema.EVENT_TABLE}"
        return f"{failures} page checksum failures" if failures else None

    def advice(self, connection: Connection) -> str | None:
        del connection
        return None

    # -- shared statements ------------------------------------------------------------------------------------------

    def _token(self) -> ColumnElement[str]:
        return func.replace(cast(func.gen_random_uuid(), Text), "-", "")

    def _may_promote(self) -> list[TextClause]:
        # A snapshot that is older than the hold on the key may not show who else waits for it. Left to the sweep.
        return [text("current_setting('transaction_isolation') = 'read committed'")]

    def _chosen(self, picked: Select[tuple[int]]) -> ColumnElement[bool]:
        # An array, not a join: whatever the statistics say, it is evaluated once and its rows found by primary key.
        return event.c.id == any_(func.array(picked.scalar_subquery()))


@contextmanager
def _read_committed(connection: Connection) -> Iterator[None]:
    """READ COMMITTED for a while, then the connection as it was.

    By the driver's attributes: SQLAlchemy's ``execution_options`` would put back a fixed level where there was none and
    the session's own default ruled, and so change what the host's next transaction is.
    """
    raw: Any = connection.connection.dbapi_connection
    autocommit, level = raw.autocommit, raw.isolation_level
    connection.dialect.set_isolation_level(raw, "READ COMMITTED")
    try:
        yield
    finally:
        if not raw.closed:
            raw.autocommit, raw.isolation_level = autocommit, level


class _Listener(ThreadedWatch):
    """LISTEN on a connection of its own. A silent connection is asked for a sign of life now and then, since one that a
    router has forgotten looks just like one on which nothing happens."""

    PATIENCE = 1.0
    SIGN_OF_LIFE = 30.0

    def _watch(self, wake: Callable[[], None]) -> None:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.dbapi_connection
        pooled.detach()  # it is kept for as long as the worker runs, and the pool is the host's
        try:
            connection.autocommit = True
            connection.execute(f"LISTEN {CHANNEL}")
            self.announced = True
            wake()  # for what came while nobody listened
            alive_at = time.monotonic()
            while not self._closed.is_set():
                for _ in connection.notifies(timeout=self.PATIENCE, stop_after=1):
                    wake()
                if time.monotonic() - alive_at > self.SIGN_OF_LIFE:
                    connection.execute("SELECT 1")
                    alive_at = time.monotonic()
        finally:
            self.announced = False
            connection.close()


# NOTIFY takes a lock that is held until commit, one for the whole database: a host that always notified would queue all
# its commits behind each other. So it is sent only while a worker says that it is idle, which a busy one never does.
_WAKE: ColumnElement[Any] = literal_column(
    f"CASE WHEN EXISTS (SELECT FROM {schema.IDLE_TABLE} AS idle WHERE idle.topic = {schema.EVENT_TABLE}.topic"
    " AND idle.idle_until > extract(epoch FROM statement_timestamp()))"
    f" THEN pg_notify('{CHANNEL}', {schema.EVENT_TABLE}.topic)::text END"
).label("woken")

_CLOCK: ColumnElement[float] = literal_column("extract(epoch FROM statement_timestamp())::double precision", Double())
_GIVEN: ColumnElement[float] = bindparam("now", type_=Double())


def _insert_one(now: ColumnElement[float]) -> Any:
    return _idempotent(insert(event).values(next_attempt_at=now, created_at=now, updated_at=now))


def _insert_many() -> Any:
    """Rows in one statement of constant text, in the order of its parameter."""
    given = _recordset({name: event.c[name].type for name in ("id", *NewEvent._fields)})
    status = case((given.c.ordering_key.is_(None), "pending"), else_="waiting")
    constants = {"status": status, "attempts": literal(0), "redrives": literal(0)}
    times = dict.fromkeys(("next_attempt_at", "created_at", "updated_at"), _GIVEN)
    rows = select(*given.c, *constants.values(), *times.values())
    return _idempotent(insert(event).from_select(["id", *NewEvent._fields, *constants, *times], rows))


def _portions(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """The rows in portions that fit into one parameter, of which PostgreSQL takes no more than a gigabyte."""
    payload = 1 + NewEvent._fields.index("payload")
    portion, size = list[tuple[Any, ...]](), 0
    for row in rows:
        size += len(row[payload])
        if portion and (len(portion) == PORTION_ROWS or size > PORTION_CHARACTERS):
            yield portion
            portion, size = [], len(row[payload])
        portion.append(row)
    yield portion


def _idempotent(statement: Any) -> Any:
    target = [event.c.topic, event.c.event_id]
    return statement.on_conflict_do_nothing(index_elements=target).returning(
        event.c.id, event.c.event_id, event.c.created_at, _WAKE
    )


def _recordset(types: Mapping[str, TypeEngine[Any]]) -> TableValuedAlias:
    """Many rows as one parameter, so that a batch of any size is one statement of constant text.

    JSON rather than arrays: it is encoded in one go in C, where psycopg escapes every element of every array in Python,
    and its numbers are read back to the very same doubles.
    """
    columns = [column(name, kind) for name, kind in types.items()]
    records = func.json_to_recordset(cast(bindparam("records", type_=Text()), JSON))
    return records.table_valued(*columns, name="given").render_derived(with_types=True)


def _records(names: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    """The parameter of :func:`_recordset`."""
    names = tuple(names)
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows], ensure_ascii=False)


_FENCE_TYPES: Final[dict[str, TypeEngine[Any]]] = {
    "id": BigInteger(),
    "lease_token": Text(),
    "lease_owner": Text(),
    "attempt": Integer(),
    "max_attempts": Integer(),
    "payload_sha256": Text(),
    "lease_expires_at": Double(),
}
_CHANGE_TYPES: Final[dict[str, TypeEngine[Any]]] = {
    "status": Text(),
    "attempts": Integer(),
    "next_attempt_at": Double(),
    "error_code": Text(),
    "detail_hash": Text(),
    "receipt": Text(),
    "response_sha256": Text(),
}


def _live(given: TableValuedAlias) -> list[ColumnElement[bool]]:
    """The fence. Located by primary key and proven by the token.

    No ``status = 'leased'`` here: it would invite the planner to the small-looking index of leases, where under an old
    snapshot it walks over every dead entry. A token is only ever set on a leased row.
    """
    return [
        event.c.id == given.c.id,
        event.c.lease_token == given.c.lease_token,
        event.c.lease_owner == given.c.lease_owner,
        event.c.attempts == given.c.attempt,
        event.c.max_attempts == given.c.max_attempts,
        event.c.payload_sha256 == given.c.payload_sha256,
        event.c.lease_expires_at == given.c.lease_expires_at,
        event.c.lease_expires_at > _GIVEN,
        event.c.updated_at <= _GIVEN,
    ]


def _settle() -> Any:
    given = _recordset({**_FENCE_TYPES, **_CHANGE_TYPES})
    changed = update(event).where(*_live(given))
    return changed.values(
        status=given.c.status,
        attempts=given.c.attempts,
        next_attempt_at=func.coalesce(given.c.next_attempt_at, event.c.next_attempt_at),
        last_error_code=given.c.error_code,
        last_error_detail_hash=given.c.detail_hash,
        receipt=given.c.receipt,
        response_sha256=given.c.response_sha256,
        updated_at=_GIVEN,
        **NO_LEASE,
    ).returning(given.c.lease_token)


def _renew() -> Any:
    given = _recordset(_FENCE_TYPES)
    changed = update(event).where(*_live(given))
    expires_at: ColumnElement[float] = bindparam("expires_at", type_=Double())
    return changed.values(lease_expires_at=expires_at, updated_at=_GIVEN).returning(event.c.lease_token)


def _rows(condition: str, now: float | None) -> Select[Any]:
    statement = select(event.c.id).where(schema.predicate(condition))
    return statement if now is None else statement.where(event.c.next_attempt_at <= now)


_INSERT = _insert_one(_CLOCK)
_INSERT_AT = _insert_one(_GIVEN)
_INSERT_MANY = _insert_many()
_DRAW = text(
    f"SELECT nextval((SELECT pg_get_serial_sequence('{schema.EVENT_TABLE}', 'id')::regclass)) AS id,"
    " coalesce(CAST(:now AS double precision), extract(epoch FROM statement_timestamp())::double precision) AS now"
    " FROM generate_series(1, CAST(:count AS integer))"
)
# By a hash of topic and key. Of 64 bits no two keys with one hash are to be expected; they would wait for each other.
_KEY_HASH = "hashtextextended(CAST(:of_topic AS text) || ' ' || key, 0)"
_HOLD_KEYS = text(f"SELECT pg_advisory_xact_lock({_KEY_HASH}) FROM unnest(CAST(:keys AS text[])) AS key")
_FREE_KEYS = text(f"SELECT key FROM unnest(CAST(:keys AS text[])) AS key WHERE pg_try_advisory_xact_lock({_KEY_HASH})")
_SETTLE = _settle()
_RENEW = _renew()

_INVALID_INDEXES = text(
    f"SELECT count(*) FROM pg_index WHERE indrelid = to_regclass('{schema.EVENT_TABLE}') AND NOT indisvalid"
)
_CHECKSUM_FAILURES = text(
    "SELECT coalesce(sum(checksum_failures), 0)::bigint FROM pg_stat_database WHERE datname = current_database()"
)
