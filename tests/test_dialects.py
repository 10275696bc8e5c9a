"""What the databases have in common behind the verbs: the schema is proven first, and their errors become ours."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.dialects import mysql
from sqlalchemy.pool import QueuePool, StaticPool

from outbox import Failure, Outbox, RetryPolicy, Success, Worker
from outbox.dialects import dialect_for, postgresql, sqlite
from outbox.dialects.base import lease_end
from outbox.migrate import upgrade
from outbox.schema import HEAD_REVISION
from tests.databases import Databases, make_test_engine
from tests.support import (
    TOPIC,
    WORKER,
    Notes,
    Scripted,
    T,
    claimed,
    dump,
    ids,
    leased,
    make_outbox,
    note,
    notes,
    refused,
    response,
    row_count,
    statements,
    together,
    unchanged,
    until,
)
from tests.test_settle import fabricated

VERBS: dict[str, Callable[[Outbox], Any]] = {
    "enqueue": lambda outbox: outbox.enqueue(note(9)),
    "enqueue_many": lambda outbox: outbox.enqueue_many(notes(3)),
    "claim": lambda outbox: outbox.claim(WORKER),
    "claim_batch": lambda outbox: outbox.claim_batch(WORKER),
    "ready": lambda outbox: outbox.ready(),
    "complete": lambda outbox: outbox.complete(fabricated(), response()),
    "retry": lambda outbox: outbox.retry(fabricated(), "busy"),
    "fail": lambda outbox: outbox.fail(fabricated(), "refused"),
    "settle": lambda outbox: outbox.settle([Success(fabricated(), response()), Failure(fabricated(), "busy")]),
    "renew": lambda outbox: outbox.renew([fabricated()]),
    "release": lambda outbox: outbox.release([fabricated()]),
    "run_once": lambda outbox: outbox.run_once(Scripted(), WORKER),
    "status": lambda outbox: outbox.status("note-1"),
    "health": lambda outbox: outbox.health(),
    "deep health": lambda outbox: outbox.health(deep=True),
    "redrive": lambda outbox: outbox.redrive("note-1"),
    "redrive_all": lambda outbox: outbox.redrive_all(),
    "discard": lambda outbox: outbox.discard("note-1"),
    "pause": lambda outbox: outbox.pause(reason="why"),
    "resume": lambda outbox: outbox.resume(),
    "purge": lambda outbox: outbox.purge(older_than_seconds=0, include_failed=True),
    "check": lambda outbox: outbox.check(),
    "announce": lambda outbox: outbox.announce(WORKER),
    "withdraw": lambda outbox: outbox.withdraw(WORKER),
}


def test_the_list_of_verbs_is_whole() -> None:
    public = {name for name, value in vars(Outbox).items() if callable(value) and not name.startswith("_")}
    assert public - VERBS.keys() == {"watch", "gate"}  # which ask nothing, or not before they are started


# -- the outbox itself ----------------------------------------------------------------------------------------------


def test_databases_that_nobody_has_written_a_dialect_for() -> None:
    with refused("dispatch.database_unsupported", says="found oracle"):
        dialect_for("oracle")
    engine = Engine(QueuePool(lambda: None), mysql.dialect(), None)  # type: ignore[arg-type, no-untyped-call]
    with refused("dispatch.database_unsupported", says="postgresql or sqlite"):
        Outbox(engine, [Notes()])


class Nameless(Notes):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "contracts", [(), [None], [Notes], ["test.note"], [Notes("a b")], [Notes(""), Notes()], [Notes(), Notes()],
                  [Notes(7)], Notes(), None, 7, [Nameless()]],  # type: ignore[arg-type]
)  # fmt: skip
def test_contracts_that_form_no_set(contracts: Any) -> None:
    with refused("dispatch.contract_invalid"):
        Outbox(create_engine("sqlite://"), contracts)


@pytest.mark.parametrize("engine", [None, "sqlite://", object()])
def test_engines_that_are_none(engine: Any) -> None:
    with refused("dispatch.connection_invalid"):
        Outbox(engine, [Notes()])


@pytest.mark.parametrize("policy", [5, "fast", object(), RetryPolicy])
def test_policies_that_are_none(policy: Any) -> None:
    with refused("dispatch.policy_invalid"):
        Outbox(create_engine("sqlite://"), [Notes()], policy)


def test_an_outbox_says_what_it_is_without_its_url() -> None:
    engine = create_engine("postgresql+psycopg://user:s3cret@nowhere/db")
    outbox = make_outbox(engine, "one", "two")
    assert repr(outbox) == "<Outbox on postgresql for one, two>"
    assert outbox.topics == ("one", "two")


def test_an_outbox_is_made_without_asking_the_database() -> None:
    make_outbox(create_engine("sqlite:////nowhere/at/all"))


@pytest.mark.parametrize(
    ("now", "seconds", "end"),
    [(T, 600, T + 600), (0, 5e-324, 5e-324), (T, 1e-300, 1000000.0000000001), (1e300, 1, None)],
)
def test_a_lease_always_ends_after_it_began(now: float, seconds: float, end: float | None) -> None:
    found = lease_end(now, seconds)
    assert found > now
    assert end is None or found == end


# -- the schema -----------------------------------------------------------------------------------------------------

ALTERATIONS: dict[str, str] = {
    "another revision": "UPDATE outbox_alembic_version SET version_num = 'ffff'",
    "no revision": "DELETE FROM outbox_alembic_version",
    "no version table": "DROP TABLE outbox_alembic_version",
    "no events": "DROP TABLE outbox_event",
    "no idle workers": "DROP TABLE outbox_idle",
    "a column more": "ALTER TABLE outbox_event ADD COLUMN more TEXT",
    "a column renamed": "ALTER TABLE outbox_event RENAME COLUMN headers TO heads",
    "an index less": "DROP INDEX ix_outbox_event_due",
    "a unique index more": "CREATE UNIQUE INDEX more ON outbox_event (payload_sha256)",
    "a column of idle workers": "ALTER TABLE outbox_idle ADD COLUMN more TEXT",
}
#: What SQLite cannot do to a table.
ONLY_POSTGRESQL: dict[str, str] = {
    "a check less": "ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_lease",
    "another type": "ALTER TABLE outbox_event ALTER COLUMN redrives TYPE bigint",
    "a column that may be empty": "ALTER TABLE outbox_event ALTER COLUMN topic DROP NOT NULL",
    "a check replaced": "ALTER TABLE outbox_event DROP CONSTRAINT ck_outbox_event_status,"
    " ADD CONSTRAINT ck_outbox_event_status CHECK (status <> '')",
    "a uniqueness less": "ALTER TABLE outbox_event DROP CONSTRAINT uq_outbox_event_topic_event_id",
}


def alter(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def every_verb_refuses(outbox: Outbox) -> None:
    for verb in VERBS.values():
        with refused("dispatch.schema_altered") as caught:
            verb(outbox)
        assert caught.value.found
        assert HEAD_REVISION in str(caught.value.expected)


def test_an_empty_database(empty_engine: Engine) -> None:
    outbox = make_outbox(empty_engine)
    every_verb_refuses(outbox)
    with refused("dispatch.schema_altered", says="run `outbox migrate`"):
        outbox.health()


@pytest.mark.parametrize("statement", ALTERATIONS.values(), ids=ALTERATIONS)
def test_an_altered_schema_is_found_before_anything_is_done(engine: Engine, statement: str) -> None:
    """By an outbox that is new, and by one that has been in use since before."""
    old = make_outbox(engine)
    old.enqueue(note(), now=T)
    alter(engine, statement)
    for outbox in (make_outbox(engine), old):
        every_verb_refuses(outbox)
    if statement.startswith(("UPDATE", "DELETE", "CREATE")):
        assert row_count(engine) == 1


@pytest.mark.parametrize("statement", ONLY_POSTGRESQL.values(), ids=ONLY_POSTGRESQL)
def test_an_altered_schema_on_postgresql(pg_engine: Engine, statement: str) -> None:
    old = make_outbox(pg_engine)
    old.enqueue(note(), now=T)
    alter(pg_engine, statement)
    for outbox in (make_outbox(pg_engine), old):
        with unchanged(pg_engine):
            every_verb_refuses(outbox)


def test_what_was_altered_is_named_and_can_be_put_back(engine: Engine) -> None:
    outbox = make_outbox(engine)
    outbox.health()
    alter(engine, "CREATE UNIQUE INDEX more ON outbox_event (payload_sha256)")
    with refused("dispatch.schema_altered", says="index more is not one of ours"):
        outbox.health()
    alter(engine, "DROP INDEX more")
    assert outbox.health().status == "ok"


def test_an_index_of_a_dbas_own_does_not_matter(engine: Engine) -> None:
    outbox = make_outbox(engine)
    outbox.health()
    alter(engine, "CREATE INDEX mine ON outbox_event (created_at)")
    assert outbox.health().status == "ok"


def test_the_schema_is_looked_at_once(engine: Engine) -> None:
    outbox = make_outbox(engine)
    with statements(engine) as first:
        outbox.health()
    with statements(engine) as second:
        outbox.health()
    assert len(first) > len(second)
    outbox.enqueue_many(notes(2))
    outbox.claim(WORKER)
    with statements(engine) as claim:
        outbox.claim(WORKER)
    assert len([line for line in claim if not line.startswith(("BEGIN", "COMMIT"))]) == 2


# -- errors of the database -----------------------------------------------------------------------------------------

UNREACHABLE = {
    "sqlite": "sqlite:////nowhere/at/all.sqlite3",
    "postgresql": "postgresql+psycopg://nobody:s3cret@127.0.0.1:1/s3cret?connect_timeout=5",
}


@pytest.mark.parametrize("url", UNREACHABLE.values(), ids=UNREACHABLE)
def test_a_database_that_cannot_be_reached(url: str) -> None:
    outbox = make_outbox(create_engine(url))
    for verb in VERBS.values():
        with refused("dispatch.database_unavailable") as caught:
            verb(outbox)
        assert "s3cret" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_pool_that_has_run_dry(database_url: str, engines: Any) -> None:
    host = engines(database_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    with host.connect(), refused("dispatch.database_unavailable", says="TimeoutError"):
        make_outbox(host).health()


def test_a_database_that_may_only_be_read(sqlite_url: str, sqlite_engine: Engine) -> None:
    make_outbox(sqlite_engine).enqueue(note(), now=T)
    path = sqlite_url.removeprefix("sqlite:///")
    host = create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    outbox = make_outbox(host)
    assert outbox.status("note-1", now=T).status == "pending"
    with refused("dispatch.database_unavailable", says="SQLITE_READONLY"):
        outbox.claim(WORKER, now=T)
    host.dispose()


def test_a_connection_that_is_cut(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        outbox.enqueue(note(), now=T)  # on another connection, which goes back to the pool
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        connection.execute(text(f"{others} AND pid <> pg_backend_pid()"))
        gone = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        until(lambda: connection.execute(gone).scalar_one() == 1, "the others gone")
        with refused("dispatch.database_unavailable"):
            outbox.health()
    assert outbox.status("note-1", now=T).status == "pending"


def test_a_connection_that_is_cut_in_the_middle(pg_engine: Engine) -> None:
    """Nothing of the transaction remains, and the connection's settings need no putting back."""
    outbox = make_outbox(pg_engine)
    outbox.enqueue(note(), now=T)

    def cut(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if connection.engine.pool is pg_engine.pool and statement.startswith("UPDATE"):
            with psycopg.connect(
                pg_engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True
            ) as c:
                c.execute("SELECT pg_terminate_backend(%s)", [connection.connection.dbapi_connection.info.backend_pid])

    event.listen(Engine, "before_cursor_execute", cut)
    try:
        with refused("dispatch.database_unavailable"):
            outbox.claim(WORKER, now=T)
    finally:
        event.remove(Engine, "before_cursor_execute", cut)
    assert claimed(outbox).attempt == 1


@pytest.mark.parametrize(
    ("setting", "state"), [("lock_timeout = 50", "55P03"), ("statement_timeout = 50", "57014")]
)  # fmt: skip
def test_timeouts_of_postgresql_are_busy(
    pg_url: str, pg_engine: Engine, engines: Any, setting: str, state: str
) -> None:
    host = engines(pg_url, connect_args={"options": f"-c {setting.replace(' ', '')}"})
    outbox = make_outbox(host)
    outbox.enqueue(note(), now=T)
    with pg_engine.begin() as connection:
        connection.execute(text("LOCK TABLE outbox_event"))
        for verb in (lambda: outbox.enqueue(note(2)), lambda: outbox.claim(WORKER), outbox.health):
            with refused("dispatch.database_busy", says=state):
                verb()
    assert outbox.health(now=T).due == 1


def test_a_deadlock_is_busy(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    outbox.health()
    barrier = threading.Barrier(2)

    def enqueue(*numbers: int) -> str:
        with pg_engine.connect() as connection:
            outbox.enqueue(note(numbers[0]), connection=connection)
            barrier.wait(20)
            try:
                outbox.enqueue(note(numbers[1]), connection=connection)
                connection.commit()
            except Exception as error:
                return getattr(error, "code", repr(error))
        return "done"

    assert sorted(together(lambda: enqueue(1, 2), lambda: enqueue(2, 1))) == ["dispatch.database_busy", "done"]


# -- waiting for SQLite ---------------------------------------------------------------------------------------------


@contextmanager
def locked(engine: Engine, how: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """Somebody else, who shares nothing with us but the file, holds its lock."""
    other = sqlite3.connect(str(engine.url.database), isolation_level=None, check_same_thread=False, timeout=30)
    try:
        other.execute(f"BEGIN {how}")
        yield other
    finally:
        if other.in_transaction:
            other.execute("ROLLBACK")
        other.close()


WRITING = [name for name in VERBS if name not in ("ready", "status", "health", "deep health", "check")]


@pytest.fixture
def impatient(sqlite_url: str, engines: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A host without any patience of its own; ours is what the test sets."""
    monkeypatch.setattr(sqlite, "PATIENCE", 0.02)
    engine: Engine = engines(sqlite_url, connect_args={"timeout": 0})
    return engine


def test_a_locked_database_is_busy_after_all(impatient: Engine) -> None:
    outbox = make_outbox(impatient)
    outbox.enqueue(note(), now=T)
    with unchanged(impatient), locked(impatient):
        for name in WRITING:
            with refused("dispatch.database_busy", says="SQLITE_BUSY"):
                VERBS[name](outbox)
        assert outbox.status("note-1", now=T).status == "pending"  # with WAL, readers need not wait
        assert outbox.health(deep=True, now=T).due == 1
    outbox.claim(WORKER, now=T)


def test_a_hosts_own_transaction_has_the_hosts_own_patience(impatient: Engine) -> None:
    outbox = make_outbox(impatient)
    outbox.health()
    with impatient.connect() as connection, locked(impatient):
        with refused("dispatch.database_busy"):
            outbox.enqueue(note(), connection=connection)
        connection.rollback()
    assert row_count(impatient) == 0


class Tries:
    """Counts how often something is tried on SQLite, and lets the test act when it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = threading.Event()
        monkeypatch.setattr(sqlite, "PATIENCE", 30)
        monkeypatch.setattr(sqlite.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.seen.set()
        threading.Event().wait(seconds)


def test_a_locked_database_is_waited_for(impatient: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = make_outbox(impatient)
    outbox.health()
    tries = Tries(monkeypatch)
    with locked(impatient) as other:

        def finish() -> None:
            assert tries.seen.wait(30), "nobody waited"
            other.execute("COMMIT")

        status, _ = together(lambda: outbox.enqueue(note(), now=T), finish)
    assert status.status == "pending"


@pytest.mark.parametrize("verb", ["status", "health", "enqueue", "claim"])
def test_without_wal_readers_wait_too(impatient: Engine, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    outbox = make_outbox(impatient)
    outbox.enqueue(note(1), now=T)
    with impatient.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
    outbox.health()
    with locked(impatient, "EXCLUSIVE"), refused("dispatch.database_busy"):
        VERBS[verb](outbox)
    tries = Tries(monkeypatch)
    with locked(impatient, "EXCLUSIVE") as other:

        def finish() -> None:
            assert tries.seen.wait(30), "nobody waited"
            other.execute("COMMIT")

        together(lambda: VERBS[verb](outbox), finish)


def test_without_wal_a_commit_waits_for_readers(impatient: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = make_outbox(impatient)
    with impatient.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
    outbox.health()

    def reader_meets_commit() -> None:
        with locked(impatient, "DEFERRED") as other:
            other.execute("SELECT count(*) FROM outbox_event").fetchall()

            def finish() -> None:
                assert tries.seen.wait(30), "nobody waited"
                other.execute("COMMIT")

            together(lambda: outbox.enqueue(note(), now=T), finish)

    tries = Tries(monkeypatch)
    reader_meets_commit()
    assert row_count(impatient) == 1


def test_a_transaction_that_fails_leaves_no_lock(impatient: Engine) -> None:
    outbox = make_outbox(impatient)
    outbox.enqueue(note(), now=T)
    for act, code in (
        (lambda: outbox.enqueue(note(1, "other")), "dispatch.idempotency_collision"),
        (lambda: outbox.redrive("missing"), "dispatch.event_missing"),
        (lambda: outbox.status("missing"), "dispatch.event_missing"),
    ):
        with refused(code):
            act()
        with locked(impatient, "EXCLUSIVE"):
            pass


def watching(outbox: Outbox, act: Callable[[], Any]) -> None:
    """Whether a watch is woken by what somebody does after it has begun."""
    woken = threading.Event()
    watch = outbox.watch()
    watch.start(woken.set)
    watch.rest(True)
    try:
        assert woken.wait(30), "not woken for what came before it began to watch"
        woken.clear()
        act()
        assert woken.wait(30), "not woken"
    finally:
        watch.close()


def autocommit_settings() -> list[dict[str, Any]]:
    newer = [{"autocommit": False}, {"autocommit": True}] if sys.version_info >= (3, 12) else []
    return [{}, {"isolation_level": None}, *newer]


@pytest.mark.parametrize("arguments", autocommit_settings())
def test_a_watch_sees_commits_and_holds_nothing(sqlite_url: str, engines: Any, arguments: dict[str, Any]) -> None:
    engine = engines(sqlite_url, connect_args=arguments)
    outbox = make_outbox(engine)

    def act() -> None:
        outbox.enqueue(note())
        with locked(engine, "EXCLUSIVE") as other:
            other.execute("ROLLBACK")
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0

    watching(outbox, act)


def test_a_database_in_memory_is_polled(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    upgrade(engine)
    outbox = make_outbox(engine)
    outbox.enqueue_many(notes(20))
    destination = Scripted()
    Worker(outbox, {TOPIC: destination}, concurrency=2).run(until_idle=True)
    assert sorted(claim.event_id for claim in destination.seen) == sorted(ids(20))
    assert outbox.health(deep=True).counts["succeeded"] == 20
    engine.dispose()


# -- one database only ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", ["PORTION_ROWS", "PORTION_CHARACTERS"])
def test_large_batches_go_in_portions(pg_engine: Engine, monkeypatch: pytest.MonkeyPatch, largest: str) -> None:
    monkeypatch.setattr(postgresql, largest, {"PORTION_ROWS": 3, "PORTION_CHARACTERS": 100}[largest])
    outbox = make_outbox(pg_engine)
    outbox.health()
    with statements(pg_engine) as seen:
        outbox.enqueue_many(list(reversed(notes(10))), now=T)
    assert len([line for line in seen if line.startswith("INSERT")]) == 4
    assert [row["event_id"] for row in dump(pg_engine)] == list(reversed(ids(10)))
    with unchanged(pg_engine), refused("dispatch.idempotency_collision"):
        outbox.enqueue_many([*notes(20), note("last"), note(1, "other")])


def test_the_clock_is_the_databases_on_postgresql(pg_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = make_outbox(pg_engine)
    monkeypatch.setattr("time.time", lambda: T)
    assert outbox.enqueue(note()).created_at > 1_700_000_000
    assert claimed(outbox, now=None).lease_expires_at > 1_700_000_000


def test_the_clock_is_the_machines_on_sqlite(sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = make_outbox(sqlite_engine)
    monkeypatch.setattr("outbox.dialects.sqlite.time.time", lambda: T)
    assert [status.created_at for status in outbox.enqueue_many(notes(2))] == [T, T]
    assert claimed(outbox, now=None).lease_expires_at == T + 600
    assert outbox.health().oldest_due_age == 0


def test_tables_found_by_the_search_path(pg_databases: Databases, engines: Any) -> None:
    """The same names in two schemas of one database are two outboxes."""
    with pg_databases.fresh(migrated=False) as url:
        plain = engines(url)
        with plain.begin() as connection:
            for name in ("one", "two"):
                connection.execute(text(f"CREATE SCHEMA {name}"))
        one, two = (engines(url, connect_args={"options": f"-csearch_path={name}"}) for name in ("one", "two"))
        upgrade(one)
        upgrade(two)
        outbox = make_outbox(one)
        outbox.enqueue_many(notes(2), now=T)
        assert (row_count(one), row_count(two)) == (2, 0)
        with two.begin() as connection, refused("dispatch.connection_invalid"):
            outbox.enqueue(note(3), connection=connection)
        assert claimed(outbox).event_id == "note-1"
        assert make_outbox(two).claim(WORKER, now=T) is None
        for engine in (plain, one, two):
            engine.dispose()


def test_a_host_that_disposes_of_its_engine(engine: Engine) -> None:
    outbox = make_outbox(engine)
    claim = leased(outbox)
    engine.dispose()
    assert outbox.complete(claim, response(), now=T).status == "succeeded"
    assert outbox._own().pool is engine.pool  # and no second pool beside the host's new one
    with engine.begin() as connection:
        outbox.enqueue(note(2), connection=connection)
    assert row_count(engine) == 2


def test_an_engine_with_options_is_the_same_database(engine: Engine) -> None:
    host = engine.execution_options(isolation_level="SERIALIZABLE", logging_token="host")
    outbox = make_outbox(host)
    with host.begin() as connection:
        outbox.enqueue(note(), connection=connection)
    with engine.begin() as connection:
        outbox.enqueue(note(2), connection=connection)
    assert len(outbox.claim_batch(WORKER)) == 2


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_sqlalchemys_own_log_does_not_tell_payloads(
    engine: Engine, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    """Whatever a host has set for all of SQLAlchemy."""
    caplog.set_level(level, "sqlalchemy")
    outbox = make_outbox(engine)
    outbox.enqueue(note(1, "s3cret"), now=T)
    outbox.enqueue_many([note(1, "s3cret"), note(2, "s3cret")], now=T)
    outbox.settle([Success(claim, response(claim.event_id)) for claim in outbox.claim_batch(WORKER, now=T)], now=T)
    outbox.health(deep=True)
    assert outbox.status("note-1").status == "succeeded"
    assert "INSERT INTO outbox_event" in caplog.text
    assert "s3cret" not in caplog.text


def test_listeners_of_the_host_do_not_see_our_transactions(database_url: str) -> None:
    host = make_test_engine(database_url)
    seen = []
    for name in ("begin", "commit", "rollback", "before_cursor_execute"):
        event.listen(host, name, lambda *_, name=name: seen.append(name))
    outbox = make_outbox(host)
    outbox.enqueue(note(), now=T)
    outbox.complete(claimed(outbox), response(), now=T)
    assert seen == []
    assert outbox.status("note-1", topic=TOPIC).status == "succeeded"
    host.dispose()
