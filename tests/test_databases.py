"""The tests' own machinery keeps its promises: what it hands out is fresh, and what it starts ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from outbox.schema_check import table_differences
from tests.databases import Databases
from tests.postgres import PrivatePostgres
from tests.test_schema import insert

ROOT = Path(__file__).parent.parent

LEFT_BEHIND = {
    "rows": None,
    "an index": "CREATE INDEX dba ON outbox_event (created_at)",
    "a dropped check": "ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_times",
    "a table": "CREATE TABLE host (id INTEGER)",
    "a revision": "UPDATE outbox_alembic_version SET version_num = 'x'",
    "storage parameters": "ALTER TABLE outbox_event SET (fillfactor = 50)",
    "a function": "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "a nullable column": "ALTER TABLE outbox_event ALTER COLUMN payload DROP NOT NULL",
    "statistics": "ANALYZE outbox_event",
}


@pytest.mark.parametrize("what", LEFT_BEHIND)
def test_a_reused_database_is_as_good_as_new(pg_databases: Databases, what: str) -> None:
    statement = LEFT_BEHIND[what]
    with pg_databases.fresh() as first:
        engine = create_engine(first, poolclass=NullPool)
        with engine.begin() as connection:
            insert(connection)
            if statement is not None:
                connection.execute(text(statement))
    with pg_databases.fresh() as second, create_engine(second, poolclass=NullPool).connect() as connection:
        assert table_differences(connection) == []
        assert connection.scalar(text("SELECT count(*) FROM outbox_event")) == 0
        assert connection.scalar(text("SELECT count(*) FROM pg_class WHERE relname IN ('dba', 'host')")) == 0
        insert(connection)
        assert connection.scalar(text("SELECT id FROM outbox_event")) == 1
        with pytest.raises(OperationalError), engine.connect():
            pass  # what the first test has left running cannot find it any more


def test_databases_are_apart(databases: Databases) -> None:
    with databases.fresh() as one, databases.fresh() as other:
        with create_engine(one, poolclass=NullPool).begin() as connection:
            insert(connection)
        with create_engine(other, poolclass=NullPool).connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM outbox_event")) == 0


def test_sqlite_is_in_wal_mode(sqlite_url: str) -> None:
    with create_engine(sqlite_url, poolclass=NullPool).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_a_private_server_recovers_from_crashes() -> None:
    with PrivatePostgres() as server:
        server.execute("CREATE TABLE t (x INTEGER)")
        for crash in (lambda: server.stop("immediate"), server.kill):
            server.execute("INSERT INTO t VALUES (1)")
            crash()
            with pytest.raises(OperationalError), create_engine(server.url(), poolclass=NullPool).connect():
                pass
            server.start()
        assert server.execute("SELECT count(*) FROM t") == [(2,)]
        assert make_url(server.url()).port == server.port
    assert not server.directory.exists()


def test_a_killed_process_leaves_no_server() -> None:
    program = """
import os, signal
from tests.postgres import PrivatePostgres
with PrivatePostgres() as server:
    print(server.pid, server.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    _, directory = result.stdout.split()
    deadline = time.monotonic() + 60
    while Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
