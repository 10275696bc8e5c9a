"""The table as SQLAlchemy Core metadata: what the migrations make and what a database is compared with."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    TextClause,
    UniqueConstraint,
    event,
    text,
)
from sqlalchemy.schema import ExecutableDDLElement

#: The newest migration. Kept here, not read from Alembic, so that ``import outbox`` needs no Alembic; a test compares.
HEAD_REVISION: Final = "0003"
#: A version table of our own leaves the host's own Alembic history alone.
VERSION_TABLE: Final = "outbox_alembic_version"
EVENT_TABLE: Final = "outbox_event"
IDLE_TABLE: Final = "outbox_idle"
TOPIC_TABLE: Final = "outbox_topic"
ATTEMPT_TABLE: Final = "outbox_attempt"

metadata = MetaData()

# Predicates are spelled as PostgreSQL prints them back (no IN, no BETWEEN), so that one text serves both databases and
# can be compared with what is found there.
DUE = "status = 'pending' OR status = 'retry_wait'"
LEASED = "status = 'leased'"
WAITING = "status = 'waiting'"
RETRY_WAIT = "status = 'retry_wait'"
SUCCEEDED = "status = 'succeeded'"
FAILED = "status = 'failed'"
ORDERING_HEAD = "(status = 'pending' OR status = 'leased' OR status = 'retry_wait') AND ordering_key IS NOT NULL"
#: Failed events that hold their ordering key: all but those that were discarded.
FAILED_HEAD = "status = 'failed' AND ordering_key IS NOT NULL AND last_error_code <> 'discarded'"

#: What ``health`` counts, each over a partial index of its own; ``due`` is pending and retry_wait together.
COUNTED: Final[dict[str, str]] = {
    "due": DUE,
    "waiting": WAITING,
    "leased": LEASED,
    "retry_wait": RETRY_WAIT,
    "succeeded": SUCCEEDED,
    "failed": FAILED,
}


def predicate(condition: str) -> TextClause:
    """One of the predicates above, to the letter: SQLite matches a partial index by its text.

    As text, since an expression of boolean type is rendered as ``(…) = 1`` on SQLite and matches nothing.
    """
    return text(f"({condition})")


outbox_event = Table(
    EVENT_TABLE,
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(always=False), primary_key=True),
    Column("topic", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("payload", Text, nullable=False),
    Column("payload_sha256", Text, nullable=False),
    Column("ordering_key", Text),
    Column("headers", Text),
    Column("status", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("redrives", Integer, nullable=False),
    Column("next_attempt_at", Double, nullable=False),
    Column("lease_owner", Text),
    Column("lease_token", Text),
    Column("lease_expires_at", Double),
    Column("last_error_code", Text),
    Column("last_error_detail_hash", Text),
    Column("receipt", Text),
    Column("response_sha256", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("topic", "event_id", name="uq_outbox_event_topic_event_id"),
    CheckConstraint(
        "status = 'pending' OR status = 'waiting' OR status = 'leased' OR status = 'retry_wait'"
        " OR status = 'succeeded' OR status = 'failed'",
        name="ck_outbox_event_status",
    ),
    CheckConstraint(
        "(status = 'leased') = (lease_owner IS NOT NULL)"
        " AND (status = 'leased') = (lease_token IS NOT NULL)"
        " AND (status = 'leased') = (lease_expires_at IS NOT NULL)",
        name="ck_outbox_event_lease",
    ),
    CheckConstraint(
        "(status = 'retry_wait' OR status = 'failed') = (last_error_code IS NOT NULL)"
        " AND (last_error_code IS NOT NULL OR last_error_detail_hash IS NULL)",
        name="ck_outbox_event_error",
    ),
    CheckConstraint(
        "(status = 'succeeded') = (receipt IS NOT NULL) AND (status = 'succeeded') = (response_sha256 IS NOT NULL)",
        name="ck_outbox_event_receipt",
    ),
    CheckConstraint(
        "attempts >= 0 AND attempts <= max_attempts AND max_attempts >= 1 AND max_attempts <= 20 AND redrives >= 0",
        name="ck_outbox_event_attempts",
    ),
    CheckConstraint(
        "created_at >= 0 AND next_attempt_at >= created_at AND updated_at >= created_at"
        " AND (lease_expires_at IS NULL OR lease_expires_at > updated_at)",
        name="ck_outbox_event_times",
    ),
    CheckConstraint("length(payload_sha256) = 64", name="ck_outbox_event_payload_sha256"),
)


#: Which workers are waiting to be woken for which topic, and until when to believe it.
outbox_idle = Table(
    IDLE_TABLE,
    metadata,
    Column("topic", Text, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("idle_until", Double, nullable=False),
    PrimaryKeyConstraint("topic", "worker_id", name="pk_outbox_idle"),
)

#: How each topic's destination fares, shared by all workers: pauses by hand and the breaker. No row means closed.
outbox_topic = Table(
    TOPIC_TABLE,
    metadata,
    Column("topic", Text, nullable=False),
    Column("paused_at", Double),
    Column("pause_reason", Text),
    Column("failures", Integer, nullable=False),
    Column("last_failed_event", Text),
    Column("opened_at", Double),
    Column("error_code", Text),
    Column("probes", Integer, nullable=False),
    Column("probe_at", Double),
    Column("probe_token", Text),
    Column("held_until", Double),
    Column("closed_at", Double),
    Column("ramp_claimed", Integer, nullable=False),
    PrimaryKeyConstraint("topic", name="pk_outbox_topic"),
    CheckConstraint(
        "(paused_at IS NOT NULL) = (pause_reason IS NOT NULL) AND (opened_at IS NOT NULL) = (probe_at IS NOT NULL)"
        " AND failures >= 0 AND probes >= 0 AND ramp_claimed >= 0",
        name="ck_outbox_topic_state",
    ),
)

#: Attempts that failed, and nothing of those that succeeded. Deleted with their event.
outbox_attempt = Table(
    ATTEMPT_TABLE,
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(always=False), primary_key=True),
    Column("event_row", BigInteger().with_variant(Integer, "sqlite"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("seconds", Double),
    Column("error_code", Text, nullable=False),
    Column("arrival", Text, nullable=False),
    Column("http_status", Integer),
    Column("detail_hash", Text),
    CheckConstraint(
        "arrival = 'unsent' OR arrival = 'unknown' OR arrival = 'refused'", name="ck_outbox_attempt_arrival"
    ),
    Index("ix_outbox_attempt_event_row", "event_row", "id"),
)


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    predicate = text(where)
    return Index(
        name,
        *(outbox_event.c[column] for column in columns),
        unique=unique,
        postgresql_where=predicate,
        sqlite_where=predicate,
    )


_partial("ix_outbox_event_due", "topic", "next_attempt_at", "id", where=DUE)
_partial("ix_outbox_event_lease", "lease_expires_at", where=LEASED)
_partial("uq_outbox_event_ordering_head", "topic", "ordering_key", where=ORDERING_HEAD, unique=True)
_partial("ix_outbox_event_waiting", "topic", "ordering_key", "id", where=WAITING)
_partial("ix_outbox_event_failed_head", "topic", "ordering_key", where=FAILED_HEAD)
# For health and for purge: without them both would walk the whole table.
_partial("ix_outbox_event_retry_wait", "next_attempt_at", where=RETRY_WAIT)
_partial("ix_outbox_event_succeeded", "updated_at", where=SUCCEEDED)
_partial("ix_outbox_event_failed", "updated_at", where=FAILED)

# Each row is written three times and then left alone. A page keeps room for a row's later versions, and dead ones are
# cleaned after a fixed number of changes rather than after a fifth of a table that mostly holds settled rows.
STORAGE_PARAMETERS: Final = (
    "ALTER TABLE outbox_event SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0,"
    " autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_scale_factor = 0,"
    " autovacuum_vacuum_insert_threshold = 50000, autovacuum_analyze_scale_factor = 0,"
    " autovacuum_analyze_threshold = 10000)"
)
_storage: ExecutableDDLElement = DDL(STORAGE_PARAMETERS)  # type: ignore[no-untyped-call, unused-ignore]
event.listen(outbox_event, "after_create", _storage.execute_if(dialect="postgresql"))
