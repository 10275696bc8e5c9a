"""Constraints refuse what the row rules forbid, and the schema check sees every alteration."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import IntegrityError, SAWarning

from outbox import schema
from outbox.errors import SchemaError
from outbox.schema_check import check_schema, normalised, table_differences
from tests.databases import Databases

NOW = 1_700_000_000.5
PENDING: Mapping[str, Any] = {
    "topic": "cms.change", "event_id": "e1", "payload": "{}", "payload_sha256": "a" * 64, "ordering_key": None,
    "headers": None, "status": "pending", "attempts": 0, "max_attempts": 5, "redrives": 0, "next_attempt_at": NOW,
    "lease_owner": None, "lease_token": None, "lease_expires_at": None, "last_error_code": None,
    "last_error_detail_hash": None, "receipt": None, "response_sha256": None, "created_at": NOW, "updated_at": NOW,
}  # fmt: skip
LEASE = {"lease_owner": "w", "lease_token": "t", "lease_expires_at": NOW + 60}
ERROR = {"last_error_code": "network"}
RECEIPT = {"receipt": "{}", "response_sha256": "b" * 64}

GOOD: Mapping[str, Mapping[str, Any]] = {
    "pending": {},
    "waiting": {"status": "waiting", "ordering_key": "k"},
    "leased": {"status": "leased", "attempts": 1, **LEASE},
    "retry_wait": {"status": "retry_wait", "attempts": 1, "next_attempt_at": NOW + 5, **ERROR},
    "retry_wait with detail": {"status": "retry_wait", **ERROR, "last_error_detail_hash": "c" * 64},
    "succeeded": {"status": "succeeded", "attempts": 1, **RECEIPT},
    "failed": {"status": "failed", "attempts": 5, **ERROR},
    "failed unsent": {"status": "failed", "attempts": 0, **ERROR},
    "one attempt": {"max_attempts": 1, "attempts": 1, "status": "succeeded", **RECEIPT},
    "twenty attempts": {"max_attempts": 20},
    "at the epoch": {"created_at": 0.0, "updated_at": 0.0, "next_attempt_at": 0.0},
    "redriven": {"redrives": 3},
}

BAD: Mapping[str, list[tuple[str, Mapping[str, Any]]]] = {
    "ck_outbox_event_status": [
        ("unknown", {"status": "done"}),
        ("empty", {"status": ""}),
        ("upper case", {"status": "PENDING"}),
    ],
    "ck_outbox_event_lease": [
        ("none", {"status": "leased"}),
        *((f"no {name}", {"status": "leased", **LEASE, name: None}) for name in LEASE),
        *((f"{name} without lease", {name: value}) for name, value in LEASE.items()),
        ("kept when settled", {"status": "succeeded", **RECEIPT, **LEASE}),
        ("kept when retried", {"status": "retry_wait", **ERROR, **LEASE}),
    ],
    "ck_outbox_event_error": [
        ("retry without", {"status": "retry_wait"}),
        ("failed without", {"status": "failed"}),
        ("pending with", ERROR),
        ("leased with", {"status": "leased", **LEASE, **ERROR}),
        ("succeeded with", {"status": "succeeded", **RECEIPT, **ERROR}),
        ("detail without code", {"last_error_detail_hash": "c" * 64}),
    ],
    "ck_outbox_event_receipt": [
        ("none", {"status": "succeeded"}),
        *((f"no {name}", {"status": "succeeded", **RECEIPT, name: None}) for name in RECEIPT),
        *((f"{name} when pending", {name: value}) for name, value in RECEIPT.items()),
        ("failed with", {"status": "failed", **ERROR, **RECEIPT}),
    ],
    "ck_outbox_event_attempts": [
        ("negative", {"attempts": -1}),
        ("too many", {"attempts": 6}),
        ("no maximum", {"max_attempts": 0}),
        ("maximum too high", {"max_attempts": 21}),
        ("negative redrives", {"redrives": -1}),
    ],
    "ck_outbox_event_times": [
        ("before the epoch", {"created_at": -1.0, "updated_at": 0.0, "next_attempt_at": 0.0}),
        ("due before it was made", {"next_attempt_at": NOW - 1}),
        ("changed before it was made", {"updated_at": NOW - 1}),
        ("lease over before it began", {"status": "leased", **LEASE, "lease_expires_at": NOW}),
    ],
    "ck_outbox_event_payload_sha256": [
        ("short", {"payload_sha256": "a" * 63}),
        ("long", {"payload_sha256": "a" * 65}),
    ],
}
BAD_ROWS = [
    pytest.param(name, row, id=f"{name.removeprefix('ck_outbox_event_')}: {what}")
    for name, rows in BAD.items()
    for what, row in rows
]
REQUIRED = [column.name for column in schema.outbox_event.columns if not column.nullable and not column.primary_key]


def insert(connection: Connection, **values: Any) -> None:
    connection.execute(schema.outbox_event.insert(), {**PENDING, **values})


# -- constraints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", GOOD.values(), ids=GOOD.keys())
def test_good_rows_are_taken(engine: Engine, row: Mapping[str, Any]) -> None:
    with engine.begin() as connection:
        insert(connection, **row)


def test_every_check_has_bad_rows() -> None:
    checks = schema.outbox_event.constraints
    assert {str(check.name) for check in checks if str(check.name).startswith("ck_")} == BAD.keys()


@pytest.mark.parametrize(("constraint", "row"), BAD_ROWS)
def test_bad_rows_are_refused(engine: Engine, constraint: str, row: Mapping[str, Any]) -> None:
    with engine.connect() as connection, pytest.raises(IntegrityError) as caught:
        insert(connection, **row)
    # A row can break two rules at once, and databases do not agree on which they name first.
    assert re.search(rf"{constraint}|ck_outbox_event_", str(caught.value.orig))


@pytest.mark.parametrize("column", REQUIRED)
def test_required_columns(engine: Engine, column: str) -> None:
    with engine.connect() as connection, pytest.raises(IntegrityError):
        insert(connection, **{column: None})


def test_an_event_id_is_unique_in_its_topic(engine: Engine) -> None:
    with engine.begin() as connection:
        insert(connection)
        insert(connection, topic="other")
    with engine.connect() as connection, pytest.raises(IntegrityError):
        insert(connection, status="succeeded", **RECEIPT)


LIVE: Mapping[str, Mapping[str, Any]] = {name: GOOD[name] for name in ("pending", "leased", "retry_wait")}
NOT_LIVE: Mapping[str, Mapping[str, Any]] = {name: GOOD[name] for name in ("waiting", "succeeded", "failed")}


@pytest.mark.parametrize("second", LIVE)
@pytest.mark.parametrize("first", LIVE)
def test_one_live_event_of_an_ordering_key(engine: Engine, first: str, second: str) -> None:
    with engine.begin() as connection:
        insert(connection, **{**LIVE[first], "ordering_key": "k"})
        insert(connection, **{**LIVE[second], "ordering_key": "k", "event_id": "e2", "topic": "other"})
        insert(connection, **{**LIVE[second], "ordering_key": "another", "event_id": "e3"})
        insert(connection, **{**LIVE[second], "ordering_key": None, "event_id": "e4"})
        insert(connection, **{**LIVE[second], "ordering_key": None, "event_id": "e5"})
    with engine.connect() as connection, pytest.raises(IntegrityError):
        insert(connection, **{**LIVE[second], "ordering_key": "k", "event_id": "e6"})


@pytest.mark.parametrize("other", NOT_LIVE)
def test_any_number_of_others_of_an_ordering_key(engine: Engine, other: str) -> None:
    with engine.begin() as connection:
        insert(connection, ordering_key="k")
        insert(connection, **{**NOT_LIVE[other], "ordering_key": "k", "event_id": "e2"})
        insert(connection, **{**NOT_LIVE[other], "ordering_key": "k", "event_id": "e3"})


@pytest.mark.parametrize("value", [0.1, 1_700_000_000.123456, 2.0**53, 1e300])
def test_times_come_back_exactly(engine: Engine, value: float) -> None:
    with engine.begin() as connection:
        insert(connection, next_attempt_at=max(value, NOW), created_at=min(value, NOW))
        row = connection.execute(schema.outbox_event.select()).one()
    assert (row.next_attempt_at, row.created_at) == (max(value, NOW), min(value, NOW))


# -- alterations ----------------------------------------------------------------------------------------------------


def rebuild(connection: Connection, before: str, after: str) -> None:
    """Change the table on SQLite beyond what ALTER TABLE can: make it again from its changed definition."""
    query = text("SELECT sql FROM sqlite_master WHERE tbl_name = 'outbox_event' AND sql IS NOT NULL ORDER BY type DESC")
    table, *indexes = connection.scalars(query).all()
    assert before in table
    connection.exec_driver_sql("DROP TABLE outbox_event")
    for statement in (table.replace(before, after), *indexes):
        connection.exec_driver_sql(statement)


class Alteration:
    """One change for either database: SQL, or for SQLite a pair to replace in the table's definition."""

    def __init__(self, found: str, *, sqlite: str | tuple[str, str] = "", postgresql: str | None = None) -> None:
        self.found = found
        self._sqlite = sqlite
        self._postgresql = postgresql or str(sqlite)

    def apply(self, engine: Engine) -> None:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                for statement in self._postgresql.split(";"):
                    connection.exec_driver_sql(statement)
            elif isinstance(self._sqlite, tuple):
                rebuild(connection, *self._sqlite)
            else:
                for statement in self._sqlite.split(";"):
                    connection.exec_driver_sql(statement)


UNIQUE_HEAD = (
    "DROP INDEX uq_outbox_event_ordering_head; CREATE {} INDEX uq_outbox_event_ordering_head ON outbox_event"
    " ({}) WHERE (status = 'pending' OR status = 'leased' OR status = 'retry_wait') AND ordering_key IS NOT NULL"
)
SHA_CHECK = ", \n\tCONSTRAINT ck_outbox_event_payload_sha256 CHECK (length(payload_sha256) = 64)"

ALTERATIONS: Mapping[str, Alteration] = {
    "index dropped": Alteration("index ix_outbox_event_due is missing", sqlite="DROP INDEX ix_outbox_event_due"),
    "index predicate changed": Alteration(
        "index ix_outbox_event_lease: expected on lease_expires_at where status = 'leased', found on",
        sqlite="DROP INDEX ix_outbox_event_lease; CREATE INDEX ix_outbox_event_lease"
        " ON outbox_event (lease_expires_at) WHERE status = 'failed'",
    ),
    "index predicate dropped": Alteration(
        "index ix_outbox_event_lease: expected",
        sqlite="DROP INDEX ix_outbox_event_lease;"
        " CREATE INDEX ix_outbox_event_lease ON outbox_event (lease_expires_at)",
    ),
    "index columns changed": Alteration(
        "index ix_outbox_event_due: expected on topic, next_attempt_at, id",
        sqlite="DROP INDEX ix_outbox_event_due; CREATE INDEX ix_outbox_event_due ON outbox_event (topic, id)"
        " WHERE status = 'pending' OR status = 'retry_wait'",
    ),
    "index order changed": Alteration(
        "index uq_outbox_event_ordering_head: expected", sqlite=UNIQUE_HEAD.format("UNIQUE", "ordering_key, topic")
    ),
    "index no longer unique": Alteration(
        "index uq_outbox_event_ordering_head: expected unique on", sqlite=UNIQUE_HEAD.format("", "topic, ordering_key")
    ),
    "unique index added": Alteration(
        "index dba is not one of ours", sqlite="CREATE UNIQUE INDEX dba ON outbox_event (payload_sha256)"
    ),
    "unique constraint dropped": Alteration(
        "unique constraint uq_outbox_event_topic_event_id is missing",
        sqlite=(", \n\tCONSTRAINT uq_outbox_event_topic_event_id UNIQUE (topic, event_id)", ""),
        postgresql="ALTER TABLE outbox_event DROP CONSTRAINT uq_outbox_event_topic_event_id",
    ),
    "check dropped": Alteration(
        "check constraint ck_outbox_event_payload_sha256 is missing",
        sqlite=(SHA_CHECK, ""),
        postgresql="ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_payload_sha256",
    ),
    "check changed": Alteration(
        "check constraint ck_outbox_event_attempts: expected attempts >= 0",
        sqlite=("max_attempts <= 20", "max_attempts <= 99"),
        postgresql="ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_attempts;"
        " ALTER TABLE outbox_event ADD CONSTRAINT ck_outbox_event_attempts CHECK (attempts >= 0 AND"
        " attempts <= max_attempts AND max_attempts >= 1 AND max_attempts <= 99 AND redrives >= 0)",
    ),
    "check added": Alteration(
        "check constraint ck_dba is not one of ours",
        sqlite=(SHA_CHECK, f"{SHA_CHECK}, \n\tCONSTRAINT ck_dba CHECK (attempts < 3)"),
        postgresql="ALTER TABLE outbox_event ADD CONSTRAINT ck_dba CHECK (attempts < 3)",
    ),
    "column added": Alteration(
        "column outbox_event.dba is not one of ours", sqlite="ALTER TABLE outbox_event ADD COLUMN dba TEXT"
    ),
    "column dropped": Alteration(
        "column outbox_event.headers is missing", sqlite="ALTER TABLE outbox_event DROP COLUMN headers"
    ),
    "column renamed": Alteration(
        "column outbox_event.headers is missing", sqlite="ALTER TABLE outbox_event RENAME COLUMN headers TO hdrs"
    ),
    "type changed": Alteration(
        "column outbox_event.redrives: expected INTEGER NOT NULL, found BIGINT NOT NULL",
        sqlite=("redrives INTEGER", "redrives BIGINT"),
        postgresql="ALTER TABLE outbox_event ALTER COLUMN redrives TYPE BIGINT",
    ),
    "time's type changed": Alteration(
        "column outbox_event.updated_at: expected DOUBLE",
        sqlite=("updated_at DOUBLE", "updated_at REAL"),
        postgresql="ALTER TABLE outbox_event ALTER COLUMN updated_at TYPE REAL",
    ),
    "nullable now": Alteration(
        "column outbox_event.payload: expected TEXT NOT NULL, found TEXT NULL",
        sqlite=("payload TEXT NOT NULL", "payload TEXT"),
        postgresql="ALTER TABLE outbox_event ALTER COLUMN payload DROP NOT NULL",
    ),
    "required now": Alteration(
        "column outbox_event.headers: expected TEXT NULL, found TEXT NOT NULL",
        sqlite=("headers TEXT", "headers TEXT NOT NULL"),
        postgresql="ALTER TABLE outbox_event ALTER COLUMN headers SET NOT NULL",
    ),
    "primary key dropped": Alteration(
        "primary key of outbox_event: expected id, found none",
        sqlite=(", \n\tPRIMARY KEY (id)", ""),
        postgresql="ALTER TABLE outbox_event DROP CONSTRAINT outbox_event_pkey",
    ),
    "foreign key added": Alteration(
        "foreign key of outbox_event on topic is not one of ours",
        sqlite=(SHA_CHECK, f"{SHA_CHECK}, \n\tFOREIGN KEY (topic) REFERENCES topics (name)"),
        postgresql="CREATE TABLE topics (name TEXT PRIMARY KEY);"
        " ALTER TABLE outbox_event ADD FOREIGN KEY (topic) REFERENCES topics (name)",
    ),
    "table dropped": Alteration("table outbox_event is missing", sqlite="DROP TABLE outbox_event"),
    "table renamed": Alteration(
        "table outbox_event is missing", sqlite="ALTER TABLE outbox_event RENAME TO outbox_event_old"
    ),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_are_found(engine: Engine, name: str) -> None:
    alteration = ALTERATIONS[name]
    alteration.apply(engine)
    with engine.connect() as connection:
        differences = table_differences(connection)
        assert any(difference.startswith(alteration.found) for difference in differences), differences
        with pytest.raises(SchemaError) as caught:
            check_schema(connection)
    assert caught.value.code == "dispatch.schema_altered"
    assert caught.value.found is not None


FAILED_INDEX = (
    "DROP INDEX ix_outbox_event_failed; CREATE INDEX ix_outbox_event_failed ON outbox_event {} WHERE status = 'failed'"
)
PG_ALTERATIONS: Mapping[str, Alteration] = {
    "check not valid": Alteration(
        "check constraint ck_outbox_event_payload_sha256: expected",
        postgresql="ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_payload_sha256;"
        " ALTER TABLE outbox_event ADD CONSTRAINT ck_outbox_event_payload_sha256"
        " CHECK (length(payload_sha256) = 64) NOT VALID",
    ),
    "identity dropped": Alteration(
        "column outbox_event.id: expected BIGINT NOT NULL IDENTITY, found BIGINT NOT NULL",
        postgresql="ALTER TABLE outbox_event ALTER COLUMN id DROP IDENTITY",
    ),
    "generated": Alteration(
        "column outbox_event.headers: expected TEXT NULL, found TEXT NULL GENERATED",
        postgresql="ALTER TABLE outbox_event DROP COLUMN headers;"
        " ALTER TABLE outbox_event ADD COLUMN headers TEXT GENERATED ALWAYS AS (topic) STORED",
    ),
    "enum": Alteration(
        "column outbox_event.topic: expected TEXT NOT NULL",
        postgresql="CREATE TYPE kind AS ENUM ('cms.change');"
        " ALTER TABLE outbox_event ALTER COLUMN topic TYPE kind USING topic::kind",
    ),
    "index method": Alteration(
        "index ix_outbox_event_failed: expected", postgresql=FAILED_INDEX.format("USING brin (updated_at)")
    ),
    "index descending": Alteration(
        "index ix_outbox_event_failed: expected", postgresql=FAILED_INDEX.format("(updated_at DESC)")
    ),
    "index on an expression": Alteration(
        "index ix_outbox_event_failed: expected", postgresql=FAILED_INDEX.format("(floor(updated_at))")
    ),
}


@pytest.mark.parametrize("name", PG_ALTERATIONS)
def test_alterations_only_postgresql_knows(pg_engine: Engine, name: str) -> None:
    PG_ALTERATIONS[name].apply(pg_engine)
    with pg_engine.connect() as connection:
        differences = table_differences(connection)
    assert any(difference.startswith(PG_ALTERATIONS[name].found) for difference in differences), differences


def test_a_check_that_is_not_enforced(pg_engine: Engine) -> None:
    with pg_engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_payload_sha256")
        if connection.dialect.server_version_info < (18,):  # type: ignore[operator]
            return  # the words are new in PostgreSQL 18; that a missing check is found is tested above
        connection.exec_driver_sql(
            "ALTER TABLE outbox_event ADD CONSTRAINT ck_outbox_event_payload_sha256"
            " CHECK (length(payload_sha256) = 64) NOT ENFORCED"
        )
    with pg_engine.connect() as connection, warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # it has not heard of those words yet
        assert table_differences(connection) != []


def test_an_index_left_invalid_by_a_broken_build(pg_engine: Engine) -> None:
    """IF NOT EXISTS would be content with it."""
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        insert(connection, event_id="e1", ordering_key="k")
        connection.exec_driver_sql("DROP INDEX uq_outbox_event_ordering_head")
        insert(connection, event_id="e2", ordering_key="k")
        with pytest.raises(IntegrityError):
            connection.exec_driver_sql(
                "CREATE UNIQUE INDEX CONCURRENTLY uq_outbox_event_ordering_head ON outbox_event (topic, ordering_key)"
                f" WHERE {schema.ORDERING_HEAD}"
            )
        differences = table_differences(connection)
    assert len(differences) == 1
    assert differences[0].startswith("index uq_outbox_event_ordering_head: expected a working index")


TOLERATED = {
    "index": "CREATE INDEX dba ON outbox_event (created_at)",
    "partial index": "CREATE INDEX dba ON outbox_event (created_at) WHERE status = 'waiting'",
    "table": "CREATE TABLE dba (id INTEGER)",
    "view": "CREATE VIEW dba AS SELECT event_id FROM outbox_event",
    "names in another case and spacing": "DROP INDEX ix_outbox_event_lease; CREATE INDEX ix_outbox_event_lease"
    " ON outbox_event (LEASE_EXPIRES_AT) where ((STATUS='leased'))",
}


@pytest.mark.parametrize("name", TOLERATED)
def test_what_is_a_dbas_own_business(engine: Engine, name: str) -> None:
    Alteration("", sqlite=TOLERATED[name]).apply(engine)
    with engine.connect() as connection:
        assert table_differences(connection) == []


REVISIONS = {
    "no version table": ("DROP TABLE outbox_alembic_version", "no revision (there is no table outbox_alembic_version)"),
    "no version": ("DELETE FROM outbox_alembic_version", "no revision (outbox_alembic_version is empty)"),
    "another version": ("UPDATE outbox_alembic_version SET version_num = '0000'", "revision 0000"),
    "two versions": (
        "INSERT INTO outbox_alembic_version (version_num) VALUES ('0000')",
        f"revision 0000 and {schema.HEAD_REVISION}",
    ),
    "another table of that name": (
        "DROP TABLE outbox_alembic_version; CREATE TABLE outbox_alembic_version (x INTEGER)",
        "no revision (there is no table outbox_alembic_version)",
    ),
}


@pytest.mark.parametrize("name", REVISIONS)
def test_revisions(engine: Engine, name: str) -> None:
    script, found = REVISIONS[name]
    Alteration("", sqlite=script).apply(engine)
    with engine.connect() as connection:
        assert table_differences(connection) == [f"revision: expected {schema.HEAD_REVISION}, found {found}"]
        with pytest.raises(SchemaError, match="run `outbox migrate` or `alembic upgrade head`") as caught:
            check_schema(connection)
    assert (caught.value.expected, caught.value.found) == (f"revision {schema.HEAD_REVISION}", found)


def test_an_empty_database(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        assert table_differences(connection) == [
            f"revision: expected {schema.HEAD_REVISION}, found no revision (there is no table outbox_alembic_version)",
            *(f"table {name} is missing" for name in sorted(schema.metadata.tables)),
        ]
        with pytest.raises(SchemaError, match="outbox migrate"):
            check_schema(connection)


def test_a_hosts_transaction_goes_on(empty_engine: Engine) -> None:
    """On PostgreSQL one failed statement would end it."""
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE TABLE host (id INTEGER)"))
        with pytest.raises(SchemaError):
            check_schema(connection)
        connection.execute(text("INSERT INTO host VALUES (1)"))
    with empty_engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM host")) == 1


def test_the_check_only_reads(engine: Engine) -> None:
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def _note(connection, cursor, statement, parameters, context, many):
        statements.append(statement.split(None, 1)[0].upper())

    with engine.connect() as connection:
        check_schema(connection)
    assert set(statements) <= {"SELECT", "PRAGMA", "WITH"}


def test_tables_of_another_schema_are_not_ours(pg_engine: Engine, pg_databases: Databases) -> None:
    with pg_engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        connection.exec_driver_sql("CREATE TABLE elsewhere.outbox_event (id INTEGER)")
    with pg_engine.connect() as connection:
        assert table_differences(connection) == []


def test_tables_on_the_search_path(pg_databases: Databases, engines) -> None:
    """A host may keep the outbox in a schema of its own."""
    from outbox.migrate import upgrade

    with pg_databases.fresh(migrated=False) as url:
        engine = engines(url, connect_args={"options": "-c search_path=mail"})
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA mail")
        upgrade(engine)
        with engine.connect() as connection:
            assert table_differences(connection) == []
        engine.dispose()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(status = 'pending'::text)", "status = 'pending'"),
        ("created_at >= (0)::double precision", "created_at >= 0"),
        ("((a  IS NOT\n NULL))", "a is not null"),
    ],
)
def test_normalised(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


def test_normalised_keeps_what_matters() -> None:
    assert normalised("a = 1 OR b = 2") != normalised("a = 1 AND b = 2")
