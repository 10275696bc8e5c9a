"""The migrations make what the metadata declares, whoever runs them, however many at once, and wherever they die."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import alembic.context
import pytest
from alembic.autogenerate import compare_metadata, produce_migrations
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.pool import NullPool, StaticPool

from outbox import migrate, schema
from outbox.dialects import urls
from outbox.dialects.locks import migration_lock
from outbox.errors import DatabaseError, InputError, OutboxError, SchemaError
from outbox.schema_check import check_schema, table_differences
from tests.databases import Databases
from tests.postgres import free_port

ROOT = Path(__file__).parent.parent
TABLES = {schema.VERSION_TABLE, *schema.metadata.tables}


def tables_of(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(inspect(connection).get_table_names())


def differences_of(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return table_differences(connection)


def driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


def alembic_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    environment.pop(migrate.URL_VARIABLE, None)
    environment.update(variables)
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


# -- what is made ---------------------------------------------------------------------------------------------------


def test_the_migrated_database_is_the_declared_one(engine: Engine) -> None:
    assert differences_of(engine) == []
    assert tables_of(engine) == TABLES


def test_alembic_finds_no_difference_either(engine: Engine) -> None:
    with engine.connect() as connection:
        # Alembic takes the identity that SQLite has no need of for a difference.
        defaults = connection.dialect.supports_identity_columns
        options = {"version_table": schema.VERSION_TABLE, "compare_type": True, "compare_server_default": defaults}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata) == []


def test_tables_made_from_the_metadata_are_the_migrated_ones(empty_engine: Engine) -> None:
    schema.metadata.create_all(empty_engine)
    differences = differences_of(empty_engine)
    assert len(differences) == 1
    assert differences[0].startswith(f"revision: expected {schema.HEAD_REVISION}, found no revision")


def test_storage_parameters_are_set(pg_engine: Engine, pg_databases: Databases) -> None:
    query = text("SELECT unnest(reloptions) FROM pg_class WHERE relname = 'outbox_event'")
    with pg_engine.connect() as connection:
        migrated = set(connection.scalars(query))
    assert {"fillfactor=70", "autovacuum_vacuum_scale_factor=0"} <= migrated
    with pg_databases.fresh(migrated=False) as url:
        engine = create_engine(url, poolclass=NullPool)
        schema.metadata.create_all(engine)
        with engine.connect() as connection:
            assert set(connection.scalars(query)) == migrated


def test_head_is_what_alembic_calls_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_directory()))
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD_REVISION]


def test_up_down_up(empty_engine: Engine) -> None:
    migrate.upgrade(empty_engine)
    assert migrate.current(empty_engine) == schema.HEAD_REVISION
    migrate.downgrade(empty_engine, "base")
    assert migrate.current(empty_engine) is None
    assert tables_of(empty_engine) == {schema.VERSION_TABLE}
    migrate.upgrade(empty_engine)
    assert differences_of(empty_engine) == []


def test_upgrading_again_changes_nothing(engine: Engine) -> None:
    migrate.upgrade(engine)
    assert migrate.current(engine) == schema.HEAD_REVISION
    assert differences_of(engine) == []


def test_current_of_an_empty_database(empty_engine: Engine) -> None:
    assert migrate.current(empty_engine) is None
    assert tables_of(empty_engine) == set()


# -- SQL on paper ---------------------------------------------------------------------------------------------------


def run_script(engine: Engine, script: str) -> None:
    """Run the script as a person would, with the database's own shell's rules: one statement after another."""
    with engine.connect() as connection:
        driver = driver_of(connection)
        if hasattr(driver, "executescript"):
            driver.executescript(script)
        else:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            driver.execute(script)


def test_printed_sql_makes_the_declared_tables(empty_engine: Engine) -> None:
    script = migrate.render_sql(empty_engine.url)
    assert script.count("BEGIN;") == script.count("COMMIT;") == script.count("-- Running upgrade") > 0
    run_script(empty_engine, script)
    assert differences_of(empty_engine) == []


def test_the_command_line_prints_the_same_sql(empty_url: str) -> None:
    result = alembic_command("upgrade", "head", "--sql", OUTBOX_DATABASE_URL=empty_url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == migrate.render_sql(empty_url).strip()


def test_sql_is_printed_without_a_database() -> None:
    port = free_port()
    assert "CREATE TABLE outbox_event" in migrate.render_sql(f"postgresql+psycopg://nobody@127.0.0.1:{port}/none")


# -- the command line -----------------------------------------------------------------------------------------------


def test_command_line_upgrade_with_the_variable(empty_engine: Engine, empty_url: str) -> None:
    result = alembic_command("upgrade", "head", OUTBOX_DATABASE_URL=empty_url)
    assert result.returncode == 0, result.stderr
    assert differences_of(empty_engine) == []


def test_command_line_upgrade_with_an_argument(empty_engine: Engine, empty_url: str) -> None:
    result = alembic_command("-x", f"url={empty_url}", "upgrade", "head")
    assert result.returncode == 0, result.stderr
    assert differences_of(empty_engine) == []


def test_command_line_check_finds_nothing_to_do(database_url: str) -> None:
    result = alembic_command("check", OUTBOX_DATABASE_URL=database_url)
    assert result.returncode == 0, result.stderr
    assert "No new upgrade operations" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "set OUTBOX_DATABASE_URL, or give -x url=..."),
        (["-x", "url=postgresql+psycopg://me:hunter2@127.0.0.1:port/x"], "dispatch.connection_invalid"),
        (["-x", "url=mysql://me:hunter2@127.0.0.1/x"], "dispatch.database_unsupported"),
        (["-x", "url=postgresql+psycopg://me:hunter2@127.0.0.1:1/x"], "dispatch.database_unavailable"),
    ],
)
def test_command_line_errors_are_one_line(arguments: list[str], expected: str) -> None:
    result = alembic_command(*arguments, "upgrade", "head")
    assert result.returncode != 0
    said = (result.stdout + result.stderr).strip()
    assert len(said.splitlines()) == 1
    assert expected in said
    assert "hunter2" not in said


# -- many at once ---------------------------------------------------------------------------------------------------

UPGRADE = """
import sys
from outbox.migrate import upgrade
sys.stdin.readline()
upgrade(sys.argv[1])
"""


def test_four_processes_upgrade_at_once(empty_engine: Engine, empty_url: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADE, empty_url],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    processes.append(  # the lock is the same for the command line
        subprocess.Popen(
            [sys.executable, "-m", "alembic", "-x", f"url={empty_url}", "upgrade", "head"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        errors = list(pool.map(lambda process: process.communicate("\n", timeout=60)[1], processes))
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert differences_of(empty_engine) == []


def test_threads_upgrade_at_once(empty_engine: Engine, empty_url: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(migrate.upgrade, target) for _ in range(2) for target in (empty_engine, empty_url)]
        for future in futures:
            future.result()
    assert differences_of(empty_engine) == []


def test_whoever_waits_too_long_says_so(empty_engine: Engine, empty_url: str) -> None:
    with empty_engine.connect() as holder, holder.begin():
        migrate.upgrade(holder)
        with pytest.raises(DatabaseError) as caught:
            migrate.upgrade(empty_url, patience=0.2)
        assert caught.value.code == "dispatch.database_busy"
        holder.get_transaction().rollback()  # type: ignore[union-attr]
    migrate.upgrade(empty_url, patience=5)
    assert differences_of(empty_engine) == []


def test_a_dead_process_leaves_no_lock(empty_engine: Engine, empty_url: str) -> None:
    program = textwrap.dedent("""
        import sys
        from sqlalchemy import create_engine
        from outbox.dialects.locks import migration_lock
        with create_engine(sys.argv[1]).connect() as connection, migration_lock(connection, 5):
            print("held", flush=True)
            sys.stdin.read()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program, empty_url],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(DatabaseError):
            migrate.upgrade(empty_engine, patience=0.1)
        process.kill()
        migrate.upgrade(empty_engine, patience=30)
    assert differences_of(empty_engine) == []


def test_waiters_do_not_hold_up_a_concurrent_index_build(pg_engine: Engine, pg_url: str) -> None:
    """With a blocking pg_advisory_lock() the build waits for the waiter's snapshot, and the waiter for the builder."""
    sessions = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_try_advisory_lock%'")
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pg_engine.connect() as builder:
        with migration_lock(builder, 5), pg_engine.connect() as other:
            other.execution_options(isolation_level="AUTOCOMMIT")
            waiter = pool.submit(migrate.upgrade, pg_url)
            while other.scalar(sessions) != 2:  # the builder's second session, and the waiter's
                time.sleep(0.01)
            other.execute(text("SET statement_timeout = '20s'"))
            other.execute(text("CREATE INDEX CONCURRENTLY ix_later ON outbox_event (created_at)"))
            assert not waiter.done()
        waiter.result(30)


# -- dying half way -------------------------------------------------------------------------------------------------


def die_at(engine: Engine, words: str) -> None:
    @event.listens_for(engine, "before_cursor_execute")
    def _die(connection, cursor, statement, parameters, context, many):
        if words in statement:
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    "words", ["ix_outbox_event_due", "uq_outbox_event_ordering_head", "INSERT INTO outbox_alembic"]
)
@pytest.mark.parametrize("handed_in", [False, True], ids=["engine", "connection"])
def test_a_crash_in_the_middle_leaves_nothing(
    empty_engine: Engine, empty_url: str, words: str, handed_in: bool
) -> None:
    dying = create_engine(empty_url, poolclass=NullPool)
    die_at(dying, words)
    with dying.connect() as connection, pytest.raises(RuntimeError, match="killed"):
        migrate.upgrade(connection if handed_in else dying)
    assert tables_of(empty_engine) <= {schema.VERSION_TABLE}
    assert migrate.current(empty_engine) is None
    migrate.upgrade(empty_engine)
    assert differences_of(empty_engine) == []


def test_a_killed_process_leaves_nothing(empty_engine: Engine, empty_url: str) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from sqlalchemy import create_engine, event
        from outbox.migrate import upgrade
        engine = create_engine(sys.argv[1])
        @event.listens_for(engine, "before_cursor_execute")
        def die(connection, cursor, statement, parameters, context, many):
            if "ix_outbox_event_failed" in statement:
                os.kill(os.getpid(), signal.SIGKILL)
        upgrade(engine)
    """)
    result = subprocess.run([sys.executable, "-c", program, empty_url], cwd=ROOT, check=False)
    assert result.returncode == -9
    migrate.upgrade(empty_engine, patience=30)
    assert differences_of(empty_engine) == []


def test_sqlite_wholly_empty_after_a_crash(sqlite_databases: Databases) -> None:
    """Python's sqlite3 alone would have committed each CREATE by itself."""
    with sqlite_databases.fresh(migrated=False) as url:
        engine = create_engine(url, poolclass=NullPool)
        die_at(engine, "ix_outbox_event_failed")
        with pytest.raises(RuntimeError, match="killed"):
            migrate.upgrade(engine)
        assert tables_of(engine) == set()


# -- engines of every kind ------------------------------------------------------------------------------------------


def begin_explicitly(engine: Engine) -> None:
    """The recipe of SQLAlchemy's documentation, which a host may well have followed."""

    @event.listens_for(engine, "connect")
    def _connect(driver, record):
        driver.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection):
        connection.exec_driver_sql("BEGIN")


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize(
    "settings",
    [
        {"isolation_level": "AUTOCOMMIT"},
        {"isolation_level": "SERIALIZABLE"},
        {"poolclass": NullPool},
        {"poolclass": StaticPool},
        {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1},
        {"execution_options": {"isolation_level": "AUTOCOMMIT"}},
    ],
    ids=str,
)
def test_whatever_the_engine_is_set_to(empty_url: str, settings: dict[str, object], fails: bool) -> None:
    upgrade_with(create_engine(empty_url, **settings), empty_url, fails)


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_an_engine_that_begins_explicitly(sqlite_databases: Databases, fails: bool) -> None:
    with sqlite_databases.fresh(migrated=False) as url:
        engine = create_engine(url)
        begin_explicitly(engine)
        upgrade_with(engine, url, fails)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3.connect(autocommit=) is new in Python 3.12")
@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("autocommit", [False, True])
def test_sqlite_with_the_drivers_own_transactions(sqlite_databases: Databases, autocommit: bool, fails: bool) -> None:
    with sqlite_databases.fresh(migrated=False) as url:
        upgrade_with(create_engine(url, connect_args={"autocommit": autocommit}), url, fails)


def upgrade_with(engine: Engine, url: str, fails: bool) -> None:
    plain = create_engine(url, poolclass=NullPool)
    try:
        if fails:
            die_at(engine, "ix_outbox_event_failed")
            with pytest.raises(RuntimeError, match="killed"):
                migrate.upgrade(engine)
            assert tables_of(plain) <= {schema.VERSION_TABLE}
        else:
            migrate.upgrade(engine)
            assert differences_of(plain) == []
    finally:
        engine.dispose()


def test_the_connections_isolation_is_put_back(pg_databases: Databases) -> None:
    with pg_databases.fresh(migrated=False) as url:
        engine = create_engine(url, poolclass=NullPool)
        for level in ("AUTOCOMMIT", "REPEATABLE READ", "READ COMMITTED"):
            with engine.connect() as connection:
                connection.execution_options(isolation_level=level)
                migrate.upgrade(connection)
                assert not connection.in_transaction()
                assert driver_of(connection).autocommit is (level == "AUTOCOMMIT")
                if level != "AUTOCOMMIT":
                    assert connection.get_isolation_level() == level


def test_sqlite_in_memory() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    migrate.upgrade(engine)
    assert differences_of(engine) == []
    engine.dispose()


# -- a connection handed in -----------------------------------------------------------------------------------------


def test_a_connection_is_left_in_no_transaction(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        migrate.upgrade(connection)
        assert not connection.in_transaction()
        migrate.upgrade(connection)
        assert not connection.in_transaction()
        assert migrate.current(connection) == schema.HEAD_REVISION
        assert not connection.in_transaction()
    assert differences_of(empty_engine) == []


@pytest.mark.parametrize("keeps", [True, False], ids=["commit", "rollback"])
def test_a_hosts_transaction_is_joined(empty_engine: Engine, keeps: bool) -> None:
    metadata = MetaData()
    Table("host", metadata, Column("id", Integer, primary_key=True))
    with empty_engine.connect() as connection:
        transaction = connection.begin()
        migrate.upgrade(connection)
        metadata.create_all(connection)
        assert transaction.is_active
        (transaction.commit if keeps else transaction.rollback)()
    assert tables_of(empty_engine) == ({"host", *TABLES} if keeps else set())


def test_a_transaction_that_is_none_is_refused(pg_databases: Databases) -> None:
    with pg_databases.fresh(migrated=False) as url:
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection, connection.begin(), pytest.raises(InputError) as caught:
            migrate.upgrade(connection)
        assert caught.value.code == "dispatch.transaction_required"


# -- beside the host's own Alembic ----------------------------------------------------------------------------------

HOST = MetaData()
HOST_TABLE = Table("host", HOST, Column("id", Integer, primary_key=True), CheckConstraint("id > 0", name="ck_host"))


def host_upgrade(connection: Connection) -> None:
    """A host's own migration, of which the version table's default name is the trace."""
    context = MigrationContext.configure(connection, opts={"transactional_ddl": True})
    context._ensure_version_table()
    connection.execute(text("INSERT INTO alembic_version (version_num) VALUES ('host7')"))
    HOST.create_all(connection)


@pytest.mark.parametrize("first", ["host", "outbox"])
def test_a_hosts_version_table_is_left_alone(empty_engine: Engine, first: str) -> None:
    for who in (first, "outbox" if first == "host" else "host"):
        if who == "host":
            with empty_engine.begin() as connection:
                host_upgrade(connection)
        else:
            migrate.upgrade(empty_engine)
    assert migrate.current(empty_engine) == schema.HEAD_REVISION
    migrate.downgrade(empty_engine, "base")
    assert tables_of(empty_engine) == {"host", "alembic_version", schema.VERSION_TABLE}
    with empty_engine.connect() as connection:
        assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["host7"]


def autogenerated(connection: Connection, metadata: MetaData, **options: object) -> list[object]:
    context = MigrationContext.configure(connection, opts=options)
    operations = produce_migrations(context, metadata).upgrade_ops
    assert operations is not None
    return [type(operation).__name__ for operation in operations.ops]


def test_a_hosts_autogenerate_leaves_our_tables_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        host_upgrade(connection)
    with engine.connect() as connection:
        assert "DropTableOp" in autogenerated(connection, HOST), "without the helper they would be dropped"
        connection.rollback()
        assert autogenerated(connection, HOST, include_name=migrate.include_name) == []


def test_our_autogenerate_leaves_a_hosts_tables_alone(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        host_upgrade(connection)
    result = alembic_command("check", OUTBOX_DATABASE_URL=database_url)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_hosts_own_new_table_is_still_found(engine: Engine) -> None:
    with engine.connect() as connection:
        assert autogenerated(connection, HOST, include_name=migrate.include_name) == ["CreateTableOp"]


def test_a_hosts_migration_can_call_us(empty_engine: Engine) -> None:
    """Alembic keeps the running migration in module globals, and ours must not clear the host's."""
    with empty_engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"transactional_ddl": True})
        with Operations.context(context):
            from alembic import op

            migrate.upgrade(op.get_bind())
            op.create_table("host", Column("id", Integer, primary_key=True))
    assert tables_of(empty_engine) == {"host", *TABLES}
    assert alembic.context._proxy is None  # type: ignore[attr-defined]


def test_a_hosts_logging_is_untouched(empty_engine: Engine) -> None:
    def state() -> list[object]:
        root, ours = logging.getLogger(), logging.getLogger("host.app")
        return [root.level, list(root.handlers), ours.level, ours.disabled, logging.getLogger("alembic").level]

    before = state()
    migrate.upgrade(empty_engine)
    migrate.render_sql(empty_engine.url)
    assert state() == before


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_database_of_a_newer_version(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaError, match="a newer one has migrated it") as caught:
        migrate.upgrade(engine)
    assert caught.value.code == "dispatch.migration_failed"
    assert caught.value.found == "9999"
    assert migrate.current(engine) == "9999"


def test_several_revisions(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outbox_alembic_version (version_num) VALUES ('0000')"))
    with pytest.raises(SchemaError) as caught:
        migrate.current(engine)
    assert caught.value.found == f"0000, {schema.HEAD_REVISION}"


@pytest.mark.parametrize("action", [migrate.upgrade, migrate.downgrade])
def test_an_unknown_revision_asked_for(engine: Engine, action) -> None:
    with pytest.raises(SchemaError) as caught:
        action(engine, "no_such")
    assert caught.value.code == "dispatch.migration_failed"


def test_a_table_in_the_way(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE TABLE outbox_event (id INTEGER)"))
    with pytest.raises(OutboxError) as caught:
        migrate.upgrade(empty_engine)
    assert caught.value.code == "dispatch.migration_failed"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("action", [migrate.upgrade, migrate.current], ids=["upgrade", "current"])
def test_no_server(action) -> None:
    with pytest.raises(DatabaseError) as caught:
        action(f"postgresql+psycopg://me:hunter2@127.0.0.1:{free_port()}/x")
    assert caught.value.code == "dispatch.database_unavailable"
    assert "hunter2" not in str(caught.value)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError) as caught:
        migrate.upgrade(f"sqlite:///{tmp_path}/none/x.sqlite3")
    assert caught.value.code == "dispatch.database_unavailable"


@pytest.mark.parametrize("fault", ["file", "folder"])
def test_sqlite_read_only(sqlite_databases: Databases, fault: str) -> None:
    with sqlite_databases.fresh(migrated=False) as url:
        path = make_url(url).database
        with pytest.raises(OutboxError) as caught:
            migrate.upgrade(f"sqlite:///file:{path}?mode=ro&uri=true")
    assert caught.value.code == "dispatch.database_unavailable"


@pytest.mark.parametrize("nothing", [None, 7, "", "no url:hunter2"], ids=str)
def test_no_database(nothing) -> None:
    with pytest.raises(InputError) as caught:
        migrate.upgrade(nothing)
    assert caught.value.code == "dispatch.connection_invalid"
    assert "hunter2" not in str(caught.value)


def test_an_unsupported_database() -> None:
    for action in (migrate.upgrade, migrate.render_sql):
        with pytest.raises(DatabaseError) as caught:
            action("mysql+pymysql://me:hunter2@127.0.0.1/x")
        assert caught.value.code == "dispatch.database_unsupported"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_a_url_that_names_no_driver(pg_url: str, scheme: str) -> None:
    assert migrate.current(pg_url.replace("postgresql+psycopg", scheme)) == schema.HEAD_REVISION


def test_a_url_gets_a_timeout_and_its_engine_is_disposed(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Engine] = []
    disposed: list[Engine] = []
    make = urls.make_engine

    def making(url, **arguments):
        made.append(make(url, **arguments))
        event.listen(made[-1], "engine_disposed", disposed.append)
        return made[-1]

    monkeypatch.setattr(migrate, "make_engine", making)
    migrate.upgrade(pg_url)
    assert disposed == made
    for url, seconds in ((pg_url, "10"), (make_url(pg_url).update_query_dict({"connect_timeout": "3"}), "3")):
        engine = make(url, poolclass=NullPool)
        with engine.connect() as connection:
            assert driver_of(connection).info.get_parameters()["connect_timeout"] == seconds


def test_check_schema_accepts_the_migrated_database(engine: Engine) -> None:
    with engine.connect() as connection:
        check_schema(connection)
        assert connection.scalar(select(1)) == 1
