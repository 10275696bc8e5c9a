"""Enqueue inside a host's transaction: it lives and dies with what the host does, and the host notices nothing else."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

from outbox import Outbox
from outbox.migrate import upgrade
from outbox.schema import VERSION_TABLE, outbox_event
from tests.databases import Databases, make_test_engine
from tests.support import (
    T,
    dump,
    leased,
    make_outbox,
    note,
    notes,
    put,
    raw_row,
    refused,
    response,
    row_count,
    statements,
    unchanged,
)


class Base(DeclarativeBase):
    pass


class Page(Base):
    """What the host itself has to store."""

    __tablename__ = "host_page"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """The engine, with a table of the host's own beside ours."""
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


def pages(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM host_page")).scalar_one())


def save(connection: Connection, number: int = 1) -> None:
    connection.execute(insert(Page).values(id=number, title="a page"))


# -- commit and rollback --------------------------------------------------------------------------------------------


def test_commit(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection:
        save(connection)
        status = outbox.enqueue(note(), connection=connection, now=T)
        assert connection.in_transaction()
        with unchanged(engine):
            pass
        assert row_count(engine) == 0
        connection.commit()
    assert (pages(engine), row_count(engine)) == (1, 1)
    assert status == outbox.status("note-1", now=T)


@pytest.mark.parametrize("first", ["host", "outbox"])
def test_rollback(outbox: Outbox, engine: Engine, first: str) -> None:
    """Also when ours is the first statement, and it is for us to begin."""
    with engine.connect() as connection:
        if first == "host":
            save(connection)
        outbox.enqueue_many(notes(3), connection=connection)
        connection.rollback()
        assert not connection.in_transaction()
    assert (pages(engine), row_count(engine)) == (0, 0)


def test_closing_without_a_commit_is_a_rollback(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection:
        outbox.enqueue(note(), connection=connection)
    assert row_count(engine) == 0


def test_a_begin_block(outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        save(connection)
        outbox.enqueue(note(), connection=connection)
    with pytest.raises(ZeroDivisionError), engine.begin() as connection:
        save(connection, 2)
        outbox.enqueue(note(2), connection=connection)
        raise ZeroDivisionError
    assert (pages(engine), [row["event_id"] for row in dump(engine)]) == (1, ["note-1"])


def test_several_enqueues_are_one_transaction(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection:
        outbox.enqueue(note(1), connection=connection)
        outbox.enqueue_many(notes(5), connection=connection)
        assert outbox.enqueue(note(5), connection=connection).status == "pending"
        connection.rollback()
        outbox.enqueue(note(6), connection=connection)
        connection.commit()
    assert [row["event_id"] for row in dump(engine)] == ["note-6"]


def test_a_savepoint_that_is_rolled_back(outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        save(connection)
        outbox.enqueue(note(1), connection=connection)
        savepoint = connection.begin_nested()
        save(connection, 2)
        outbox.enqueue(note(2), connection=connection)
        savepoint.rollback()
        with connection.begin_nested():
            outbox.enqueue(note(3), connection=connection)
    assert (pages(engine), [row["event_id"] for row in dump(engine)]) == (1, ["note-1", "note-3"])


# -- sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("kind", [sessionmaker, lambda engine: scoped_session(sessionmaker(engine))])
def test_sessions(outbox: Outbox, engine: Engine, kind: Callable[[Engine], Any], end: str) -> None:
    sessions = kind(engine)
    session = sessions if isinstance(sessions, scoped_session) else sessions()
    page = Page(id=1, title="a page")
    session.add(page)
    outbox.enqueue(note(), connection=session)
    assert page in session.new  # still the host's to flush
    getattr(session, end)()
    session.close()
    assert (pages(engine), row_count(engine)) == ((1, 1) if end == "commit" else (0, 0))


def test_a_session_after_a_flush_and_in_a_savepoint(outbox: Outbox, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Page(id=1, title="a page"))
        session.flush()
        nested = session.begin_nested()
        outbox.enqueue(note(1), connection=session)
        nested.rollback()
        outbox.enqueue(note(2), connection=session)
    assert (pages(engine), [row["event_id"] for row in dump(engine)]) == (1, ["note-2"])


def test_a_session_on_a_connection_of_its_hosts(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        save(connection)  # or pysqlite would not begin before the savepoint
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.enqueue(note(), connection=session)
            session.commit()
        transaction.rollback()
    assert row_count(engine) == 0


# -- refusals leave the transaction usable --------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["pending", "leased", "succeeded"])
def test_a_collision_changes_nothing_and_spoils_nothing(outbox: Outbox, engine: Engine, state: str) -> None:
    put(outbox, state, "taken")
    before = dump(engine)
    with engine.connect() as connection:
        save(connection)
        outbox.enqueue(note("mine"), connection=connection, now=T)
        mine = connection.execute(outbox_event.select()).all()
        for events in ([note("taken", "other")], [*notes(600), note("taken", "other"), note("mine")]):
            with refused("dispatch.idempotency_collision", event_id="note-taken"):
                outbox.enqueue_many(events, connection=connection)
            assert connection.execute(outbox_event.select()).all() == mine
        outbox.enqueue(note("after"), connection=connection)
        connection.commit()
    assert pages(engine) == 1
    after = dump(engine)
    assert after[: len(before)] == before
    assert [row["event_id"] for row in after[len(before) :]] == ["note-mine", "note-after"]


def test_a_bad_event_spoils_nothing(outbox: Outbox, engine: Engine) -> None:
    with engine.begin() as connection:
        save(connection)
        with refused("dispatch.change_invalid"):
            outbox.enqueue_many([note(), {"id": "bad"}], connection=connection)
        with refused("dispatch.max_attempts_invalid"):
            outbox.enqueue(note(), connection=connection, max_attempts=21)
        outbox.enqueue(note(2), connection=connection)
    assert (pages(engine), [row["event_id"] for row in dump(engine)]) == (1, ["note-2"])


def test_an_expired_lease_shows_inside_a_transaction_too(outbox: Outbox, engine: Engine) -> None:
    leased(outbox, lease_seconds=1)
    with engine.begin() as connection:
        assert outbox.enqueue(note(), connection=connection).lease_expired is True
        assert outbox.enqueue(note(), connection=connection, now=T + 0.5).lease_expired is False


# -- what cannot be joined ------------------------------------------------------------------------------------------


def test_autocommit_as_an_execution_option(outbox: Outbox, engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(2):  # also once the connection is known
            with refused("dispatch.transaction_required"):
                outbox.enqueue(note(), connection=connection)
        with connection.begin(), refused("dispatch.transaction_required"):
            outbox.enqueue(note(), connection=connection)
    assert row_count(engine) == 0


@pytest.mark.parametrize("how", ["at the engine", "as an option of the engine"])
def test_autocommit_of_an_engine(database_url: str, engine: Engine, engines: Any, how: str) -> None:
    if how == "at the engine":
        host = engines(database_url, isolation_level="AUTOCOMMIT")
    else:
        host = engine.execution_options(isolation_level="AUTOCOMMIT")
    outbox = make_outbox(host)
    for connect in (host.connect, host.begin, lambda: Session(host)):
        with connect() as connection, refused("dispatch.transaction_required"):
            outbox.enqueue(note(), connection=connection)
    assert row_count(engine) == 0


def test_a_connection_that_is_set_back_from_autocommit(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with refused("dispatch.transaction_required"):
            outbox.enqueue(note(), connection=connection)
        connection.rollback()
        connection.execution_options(isolation_level="SERIALIZABLE")
        outbox.enqueue(note(), connection=connection)
        connection.rollback()
    assert row_count(engine) == 0


@pytest.mark.parametrize(
    "garbage",
    [7, "sqlite://", object(), True, [], Session, Connection, lambda: None],
    ids=lambda value: repr(value)[:20],
)
def test_garbage(outbox: Outbox, garbage: Any) -> None:
    with refused("dispatch.connection_invalid"):
        outbox.enqueue(note(), connection=garbage)


def test_what_is_beside_a_connection(outbox: Outbox, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        for near in (engine, transaction, connection.connection, connection.connection.dbapi_connection):
            with refused("dispatch.connection_invalid"):
                outbox.enqueue(note(), connection=near)  # type: ignore[arg-type]


def closed(engine: Engine) -> Any:
    connection = engine.connect()
    connection.close()
    return connection


def invalidated(engine: Engine) -> Any:
    connection = engine.connect()
    connection.begin()
    connection.invalidate()
    return connection


def broken_session(engine: Engine) -> Any:
    session = Session(engine)
    session.add_all([Page(id=1, title="one"), Page(id=1, title="the same key")])
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever the database has for it
        session.flush()
    session.connection  # noqa: B018
    return session


def unbound_session(_: Engine) -> Any:
    return Session()


def ended_block(engine: Engine) -> Any:
    connection = engine.connect()
    with connection.begin() as transaction:
        transaction.rollback()
        with refused("dispatch.connection_invalid"):
            make_outbox(engine).enqueue(note(), connection=connection)
    connection.close()
    return connection


@pytest.mark.parametrize("make", [closed, invalidated, unbound_session, ended_block])
@pytest.mark.filterwarnings("ignore:New instance")
def test_connections_that_are_none_any_more(outbox: Outbox, engine: Engine, make: Callable[[Engine], Any]) -> None:
    host = make(engine)
    with refused("dispatch.connection_invalid"):
        outbox.enqueue(note(), connection=host)
    host.close()
    assert row_count(engine) == 0


@pytest.mark.filterwarnings("ignore:New instance")
def test_a_session_whose_flush_has_failed(outbox: Outbox, engine: Engine) -> None:
    session = Session(engine)
    session.begin_nested()
    session.add_all([Page(id=1, title="one"), Page(id=1, title="the same key")])
    with pytest.raises(Exception, match=r"(?i)unique|conflicts with persistent"):
        session.flush()
    outbox_error = None
    try:
        outbox.enqueue(note(), connection=session)
    except Exception as error:
        outbox_error = error
    assert getattr(outbox_error, "code", "dispatch.connection_invalid") == "dispatch.connection_invalid"
    session.close()
    assert row_count(engine) == 0


def test_a_transaction_that_has_failed_on_postgresql(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    with pg_engine.connect() as connection:
        for _ in range(2):
            with pytest.raises(Exception, match="division by zero"):
                connection.execute(text("SELECT 1 / 0"))
            with refused("dispatch.database_unavailable", says="25P02"):
                outbox.enqueue(note(), connection=connection)
            connection.rollback()
            outbox.enqueue(note(), connection=connection)
            connection.rollback()


def test_a_session_that_cannot_connect(engine: Engine) -> None:
    url = {"sqlite": "sqlite:////nowhere/at/all", "postgresql": "postgresql+psycopg://nobody@127.0.0.1:1/none"}
    gone = create_engine(url[engine.dialect.name])
    with Session(gone) as session, refused("dispatch.database_unavailable"):
        make_outbox(engine).enqueue(note(), connection=session)


# -- other databases ------------------------------------------------------------------------------------------------


def test_another_database_of_the_kind(outbox: Outbox, databases: Databases, engines: Any) -> None:
    with databases.fresh() as url, databases.fresh(migrated=False) as empty:
        for other in (engines(url), engines(empty)):
            with other.begin() as connection:
                for _ in range(2):
                    with refused("dispatch.connection_invalid", says="the outbox's database"):
                        outbox.enqueue(note(), connection=connection)
                connection.execute(text("SELECT 1"))
            other.dispose()


def test_a_database_of_another_kind(sqlite_engine: Engine, pg_engine: Engine, sqlite_databases: Databases) -> None:
    for ours, other in ((sqlite_engine, pg_engine), (pg_engine, sqlite_engine)):
        with other.begin() as connection, refused("dispatch.connection_invalid", says=ours.dialect.name):
            make_outbox(ours).enqueue(note(), connection=connection)


def test_another_engine_on_the_same_database(outbox: Outbox, database_url: str, engine: Engine, engines: Any) -> None:
    host = engines(database_url)
    for number in (1, 2):
        with host.begin() as connection:
            connection.execute(insert(Page).values(id=number, title="a page"))
            outbox.enqueue(note(number), connection=connection)
    assert (pages(engine), row_count(engine)) == (2, 2)


def test_two_hosts_take_turns_on_one_outbox(outbox: Outbox, database_url: str, engine: Engine, engines: Any) -> None:
    other = engines(database_url)
    for number, host in enumerate([engine, other, engine, other]):
        with host.begin() as connection:
            outbox.enqueue(note(number), connection=connection)
    assert row_count(engine) == 4


# -- the schema -----------------------------------------------------------------------------------------------------


def test_a_schema_that_is_not_there_is_found_before_anything_is_done(empty_engine: Engine) -> None:
    outbox = make_outbox(empty_engine)
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE TABLE mine (id INTEGER)"))
        for _ in range(2):
            with refused("dispatch.schema_altered", says="outbox migrate"):
                outbox.enqueue(note(), connection=connection)
        connection.execute(text("INSERT INTO mine VALUES (1)"))
    with empty_engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM mine")).scalar_one() == 1


def test_a_schema_that_is_altered_later_is_found_once_it_has_been_noticed(outbox: Outbox, engine: Engine) -> None:
    """One statement per enqueue leaves no room for asking each time; what any verb has found holds for all."""
    with engine.begin() as connection:
        outbox.enqueue(note(), connection=connection)
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = 'ffff'"))
    with refused("dispatch.schema_altered", says="ffff"):
        outbox.health()
    with engine.begin() as connection, refused("dispatch.schema_altered", says="ffff"):
        outbox.enqueue(note(2), connection=connection)
    assert row_count(engine) == 1


# -- cost -----------------------------------------------------------------------------------------------------------


def test_an_enqueue_is_one_statement_once_the_connection_is_known(outbox: Outbox, engine: Engine) -> None:
    for connect in (engine.connect, lambda: Session(engine)):
        with connect() as warm:
            outbox.enqueue(note("warm"), connection=warm)
        with connect() as host, statements(engine) as seen:
            outbox.enqueue(note(), connection=host)
            assert len(seen) == 1
            assert seen[0].startswith("INSERT INTO outbox_event")


# -- what the host has set stays set --------------------------------------------------------------------------------

VERBS: list[Callable[[Outbox], Any]] = [
    lambda outbox: outbox.enqueue(note(1), now=T),
    lambda outbox: outbox.enqueue_many(notes(3), now=T),
    lambda outbox: outbox.settle([], now=T),
    lambda outbox: outbox.claim_batch("worker-1", now=T, lease_seconds=1, limit=1),
    lambda outbox: outbox.status("note-1", now=T),
    lambda outbox: outbox.complete(outbox.claim("worker-1", now=T + 5), response("note-2"), now=T + 5),  # type: ignore[arg-type]
    lambda outbox: outbox.fail(outbox.claim("worker-1", now=T + 5), "refused", now=T + 5),  # type: ignore[arg-type]
    lambda outbox: outbox.redrive_all(now=T + 5),
    lambda outbox: outbox.health(deep=True),
    lambda outbox: outbox.ready(now=T + 5),
    lambda outbox: outbox.purge(older_than_seconds=0),
    lambda outbox: outbox.check(),
]


def use(outbox: Outbox) -> None:
    """Every kind of transaction of our own, and refusals in them."""
    for verb in VERBS:
        verb(outbox)
    with refused("dispatch.event_missing"):
        outbox.status("missing")
    with refused("dispatch.idempotency_collision"):
        outbox.enqueue(note(3, "other"))


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "SERIALIZABLE", "AUTOCOMMIT"])
def test_own_transactions_under_any_isolation_of_the_hosts(database_url: str, engines: Any, level: str) -> None:
    host = engines(database_url, isolation_level=level, pool_size=1, max_overflow=0)
    with host.connect() as connection:
        before = connection.get_isolation_level()
    use(make_outbox(host))
    with host.connect() as connection:
        assert connection.get_isolation_level() == before


def test_own_transactions_under_repeatable_read(pg_url: str, engines: Any) -> None:
    host = engines(pg_url, isolation_level="REPEATABLE READ", pool_size=1, max_overflow=0)
    use(make_outbox(host))
    with host.connect() as connection:
        assert connection.execute(text("SHOW transaction_isolation")).scalar_one() == "repeatable read"


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_own_transactions_are_read_committed(pg_url: str, pg_engine: Engine, engines: Any, level: str) -> None:
    """Another worker takes the only event just before our claim would; ours finds nothing, and does not fail."""
    outbox, other = make_outbox(engines(pg_url, isolation_level=level)), make_outbox(pg_engine)
    put(other, "pending")
    outbox.health()
    taken: list[Any] = []

    def meanwhile(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        if connection.engine.pool is outbox.engine.pool and statement.startswith("UPDATE") and not taken:
            taken.append(other.claim("worker-2", now=T))

    event.listen(Engine, "before_cursor_execute", meanwhile)
    try:
        assert outbox.claim("worker-1", now=T) is None
    finally:
        event.remove(Engine, "before_cursor_execute", meanwhile)
    assert taken[0].event_id == "note-1"


PSYCOPG_STATE = ("autocommit", "isolation_level", "read_only", "deferrable", "prepare_threshold", "row_factory")
SQLITE_STATE = ("isolation_level", "row_factory", "text_factory", "in_transaction", "total_changes")


def driver_state(connection: Connection) -> dict[str, Any]:
    raw: Any = connection.connection.dbapi_connection
    names = PSYCOPG_STATE if connection.dialect.name == "postgresql" else SQLITE_STATE[:-1]
    pragmas = ("busy_timeout", "foreign_keys", "synchronous", "journal_mode", "ignore_check_constraints", "query_only")
    more = {name: raw.execute(f"PRAGMA {name}").fetchall() for name in pragmas if connection.dialect.name == "sqlite"}
    return {name: getattr(raw, name) for name in names} | more


@pytest.mark.parametrize("level", [None, "SERIALIZABLE", "AUTOCOMMIT"])
def test_a_pooled_connection_comes_back_as_it_was(database_url: str, engines: Any, level: str | None) -> None:
    """Down to the driver's attributes: what it does from here on must be what it would have done."""
    arguments = {} if level is None else {"isolation_level": level}
    host = engines(database_url, pool_size=1, max_overflow=0, **arguments)
    with host.connect() as connection:
        raw, before = connection.connection.dbapi_connection, driver_state(connection)
    use(make_outbox(host))
    with host.connect() as connection:
        assert connection.connection.dbapi_connection is raw
        assert driver_state(connection) == before


def test_a_default_isolation_that_the_host_sets_on_its_sessions_stays(pg_url: str, engines: Any) -> None:
    host = engines(pg_url, pool_size=1, max_overflow=0)

    @event.listens_for(host, "connect")
    def _(raw: Any, record: Any) -> None:
        raw.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        raw.commit()

    use(make_outbox(host))
    with host.connect() as connection:
        assert connection.execute(text("SHOW transaction_isolation")).scalar_one() == "serializable"


# -- SQLite's ways of beginning -------------------------------------------------------------------------------------


def begin_by_hand(url: str, statement: str = "BEGIN") -> Engine:
    """SQLAlchemy's recipe for pysqlite: turn its own beginnings off, and begin in a listener."""
    engine = make_test_engine(url)

    @event.listens_for(engine, "connect")
    def _(raw: Any, record: Any) -> None:
        raw.isolation_level = None

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.exec_driver_sql(statement)

    return engine


@pytest.mark.parametrize("statement", ["BEGIN", "BEGIN IMMEDIATE"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("first", ["host", "outbox"])
def test_a_host_that_begins_by_hand(sqlite_url: str, statement: str, end: str, first: str) -> None:
    host = begin_by_hand(sqlite_url, statement)
    Base.metadata.create_all(host)
    outbox = make_outbox(host)
    with host.connect() as connection:
        if first == "host":
            save(connection)
        outbox.enqueue_many(notes(2), connection=connection, now=T)
        getattr(connection, end)()
        assert not connection.connection.dbapi_connection.in_transaction  # type: ignore[union-attr]
    with Session(host) as session:
        outbox.enqueue(note(3), connection=session, now=T)
        getattr(session, end)()
    assert row_count(host) == (3 if end == "commit" else 0)
    use(outbox)
    host.dispose()


def test_a_host_that_begins_by_hand_on_a_connection_it_calls_autocommit(sqlite_url: str) -> None:
    host = begin_by_hand(sqlite_url)
    with host.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT 1"))
        with refused("dispatch.transaction_required"):
            make_outbox(host).enqueue(note(), connection=connection)
    assert row_count(host) == 0
    host.dispose()


def test_no_beginning_at_all_is_autocommit(sqlite_url: str, sqlite_engine: Engine) -> None:
    host = make_test_engine(sqlite_url, connect_args={"isolation_level": None})
    for connect in (host.connect, host.begin, lambda: Session(host)):
        with connect() as connection, refused("dispatch.transaction_required"):
            make_outbox(host).enqueue(note(), connection=connection)
    with host.connect() as connection:
        connection.exec_driver_sql("BEGIN")  # begun after all
        make_outbox(host).enqueue(note(), connection=connection)
        connection.exec_driver_sql("ROLLBACK")
    assert row_count(sqlite_engine) == 0
    use(make_outbox(host))
    host.dispose()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has the attribute since Python 3.12")
@pytest.mark.parametrize("autocommit", [False, True])
def test_the_newer_autocommit_attribute(sqlite_url: str, autocommit: bool) -> None:
    host = make_test_engine(sqlite_url, connect_args={"autocommit": autocommit}, pool_size=1, max_overflow=0)
    outbox = make_outbox(host)
    with host.connect() as connection:
        if autocommit:
            with refused("dispatch.transaction_required"):
                outbox.enqueue(note(), connection=connection)
        else:
            outbox.enqueue(note(), connection=connection)
            connection.rollback()
    assert row_count(host) == 0
    use(outbox)
    with host.connect() as connection:
        assert connection.connection.dbapi_connection.autocommit is autocommit  # type: ignore[union-attr]
    host.dispose()


@pytest.mark.parametrize("pool", [None, StaticPool])
def test_one_connection_for_everything(pool: Any) -> None:
    """A database in memory, as hosts test with: it can be used, but not by two at the same time."""
    arguments = {} if pool is None else {"poolclass": pool}
    host = create_engine("sqlite://", connect_args={"check_same_thread": False}, **arguments)
    upgrade(host)
    Base.metadata.create_all(host)
    outbox = make_outbox(host)
    with host.connect() as connection:
        save(connection)
        outbox.enqueue(note("mine"), connection=connection, now=T)
        for verb in (lambda: outbox.claim("worker-1", now=T), lambda: outbox.status("note-mine"), outbox.health):
            with refused("dispatch.database_busy", says="transaction"):
                verb()
        assert connection.connection.dbapi_connection.in_transaction  # type: ignore[union-attr]
        connection.rollback()
    assert (pages(host), row_count(host)) == (0, 0)
    use(outbox)
    with host.begin() as connection:
        save(connection)
        outbox.enqueue(note("mine"), connection=connection, now=T)
    assert (pages(host), row_count(host)) == (1, 3)
    host.dispose()


def test_a_hosts_own_error_is_the_hosts(outbox: Outbox, engine: Engine) -> None:
    """Only what our own statements meet is translated."""
    with engine.connect() as connection:
        outbox.enqueue(note(), connection=connection)
        with pytest.raises(Exception, match=r"(?i)no such table|does not exist"):
            connection.execute(text("SELECT * FROM nowhere"))
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(":memory:").execute("SELECT * FROM nowhere")


def test_a_snapshot_that_cannot_see_the_other_hosts_event(pg_url: str, pg_engine: Engine, engines: Any) -> None:
    """Under REPEATABLE READ PostgreSQL cannot tell what the other stored; the host has to begin anew, and then can."""
    outbox = make_outbox(pg_engine)
    host = engines(pg_url, isolation_level="REPEATABLE READ")
    with host.connect() as connection:
        connection.execute(text("SELECT count(*) FROM outbox_event"))
        outbox.enqueue(note(), now=T)
        with refused("dispatch.database_busy", says="40001"):
            outbox.enqueue(note(), connection=connection)
        connection.rollback()
        assert outbox.enqueue(note(), connection=connection).created_at == T
        connection.commit()
    assert raw_row(pg_engine)["created_at"] == T


@pytest.fixture
def hasty(pg_url: str, engines: Any) -> Outbox:
    """An outbox whose every wait for a lock is an error."""
    return make_outbox(engines(pg_url, connect_args={"options": "-clock_timeout=1"}))


def test_nothing_a_worker_does_waits_for_a_hosts_open_transaction(hasty: Outbox, pg_engine: Engine) -> None:
    put(hasty, "failed", "failed")
    hasty.enqueue_many(notes(4), now=T)
    with pg_engine.connect() as connection:
        make_outbox(pg_engine).enqueue_many([note("open"), note("failed")], connection=connection, now=T)
        first, *others = hasty.claim_batch("worker-1", now=T)
        assert len(others) == 3
        hasty.renew([first], lease_seconds=700, now=T)
        hasty.complete(others[0], response(others[0].event_id), now=T)
        hasty.retry(others[1], "busy", now=T)
        hasty.release([others[2]], now=T)
        assert hasty.redrive_all(now=T) == 1
        assert hasty.purge(older_than_seconds=0, now=T) == 1
        assert hasty.health(deep=True, now=T).counts["pending"] == 2
        assert hasty.ready(now=T) is True
        hasty.announce("worker-1")
        hasty.withdraw("worker-1")
        connection.rollback()


def test_rows_that_a_host_has_locked_are_passed_over(hasty: Outbox, pg_engine: Engine) -> None:
    """Due ones and expired leases alike; the next claim finds them."""
    hasty.enqueue_many(notes(4), now=T)
    hasty.claim_batch("worker-1", limit=2, lease_seconds=1, now=T)
    with pg_engine.connect() as connection:
        locked = outbox_event.c.event_id.in_(["note-1", "note-3"])
        connection.execute(update(outbox_event).where(locked).values(redrives=0))
        assert [claim.event_id for claim in hasty.claim_batch("worker-2", now=T + 1)] == ["note-4", "note-2"]
        assert hasty.claim("worker-2", now=T + 1) is None
        connection.rollback()
    assert [claim.event_id for claim in hasty.claim_batch("worker-2", now=T + 1)] == ["note-3", "note-1"]


def test_the_hosts_settings_of_its_transaction_stay(outbox: Outbox, engine: Engine) -> None:
    """Also when an event's lease makes it ask what time it is."""
    leased(outbox)
    settings = {
        "postgresql": "SELECT name, setting FROM pg_settings ORDER BY name",
        "sqlite": "SELECT query_only, foreign_keys FROM pragma_query_only, pragma_foreign_keys",
    }[engine.dialect.name]
    with engine.begin() as connection:
        before = connection.execute(text(settings)).all()
        outbox.enqueue_many(notes(3), connection=connection)
        assert connection.execute(text(settings)).all() == before
