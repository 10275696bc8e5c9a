"""One migrator at a time, whichever process or thread it runs in, and nothing half made when one dies.

Each database has its own way, found here by the dialect's name. All are context managers over the connection that is
about to migrate; what the database says about its revision is to be read inside.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox.errors import DatabaseError, InputError

#: Our key among the database's advisory locks: the first eight bytes of SHA-256 of "outbox.migrate", as a bigint.
ADVISORY_KEY: Final = 1_152_047_312_153_713_616
_POLL_SECONDS: Final = (0.02, 0.25)


def migration_lock(connection: Connection, patience: float) -> AbstractContextManager[None]:
    """Hold the database for migrating on ``connection``.

    A connection in no transaction is left in none. One inside the host's transaction joins it: the lock then lasts
    until the host ends that transaction, and whether anything happened is the host's to decide.

    Raises:
        InputError: ``dispatch.transaction_required``, for a host's transaction that is none (autocommit).
        DatabaseError: ``dispatch.database_busy`` when somebody else holds it for longer than ``patience`` seconds;
            ``dispatch.database_unsupported``.
    """
    lock = _LOCKS.get(connection.dialect.name)
    if lock is None:
        supported = ", ".join(sorted(_LOCKS))
        raise DatabaseError("dispatch.database_unsupported", expected=supported, found=connection.dialect.name)
    return lock(connection, patience)


# -- PostgreSQL -----------------------------------------------------------------------------------------------------


@contextmanager
def _postgresql(connection: Connection, patience: float) -> Iterator[None]:
    if connection.in_transaction():
        if _driver(connection).autocommit:
            raise InputError("dispatch.transaction_required")
        _poll(lambda: _try_lock(connection, "pg_try_advisory_xact_lock"), patience)
        yield
        return
    with _read_committed(connection), _second_connection(connection.engine) as second:
        # Polled, never waited for: a session blocked inside pg_advisory_lock() holds a snapshot, and a CREATE INDEX
        # CONCURRENTLY of the one it waits for would wait for that snapshot in turn, for ever.
        _poll(lambda: _try_lock(second, "pg_try_advisory_lock"), patience)
        try:
            yield
        finally:
            with suppress(DBAPIError):  # the session is gone, and its lock with it
                second.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_KEY})


def _try_lock(connection: Connection, function: str) -> bool:
    return bool(connection.scalar(text(f"SELECT {function}(:key)"), {"key": ADVISORY_KEY}))


@contextmanager
def _read_committed(connection: Connection) -> Iterator[None]:
    """The isolation that migrations are written for, whatever the engine's default; put back afterwards."""
    before = "AUTOCOMMIT" if _driver(connection).autocommit else connection.get_isolation_level()
    connection.execution_options(isolation_level="READ COMMITTED")
    try:
        yield
    finally:
        if connection.in_transaction():  # reading the revision began it; every migration ended its own
            connection.rollback()
        if not connection.closed and not connection.invalidated:
            connection.execution_options(isolation_level=before)


@contextmanager
def _second_connection(engine: Engine) -> Iterator[Connection]:
    """A session to hold the lock: outside any transaction, so that it keeps no snapshot, and not from the host's pool,
    which may have one connection only."""
    pool = engine.pool.recreate()
    try:
        with Engine(pool, engine.dialect, engine.url).connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text("SET idle_session_timeout = 0"))
            yield connection
    finally:
        pool.dispose()


# -- SQLite ---------------------------------------------------------------------------------------------------------


@contextmanager
def _sqlite(connection: Connection, patience: float) -> Iterator[None]:
    # Python's sqlite3 begins a transaction before INSERT but not before CREATE TABLE, so that each statement of a
    # migration would be committed by itself. An explicit BEGIN IMMEDIATE makes the DDL one transaction, and at the same
    # time is the lock: SQLite has one writer.
    if connection.in_transaction():
        driver = _driver(connection)
        if not driver.in_transaction:
            _begin_immediate(driver, patience)
        yield
        return
    with connection.begin():
        driver = _driver(connection)
        if driver.in_transaction:  # a deferred one, begun for SQLAlchemy by the engine's settings; nothing is in it yet
            driver.execute("ROLLBACK")
        _begin_immediate(driver, patience)
        autocommit = getattr(driver, "autocommit", None) is True  # Python 3.12: commit() does nothing
        try:
            yield
        except BaseException:
            if autocommit:
                driver.execute("ROLLBACK")
            raise
        # Without WAL a reader keeps the file locked against the commit, which can then be tried again.
        commit = (lambda: driver.execute("COMMIT")) if autocommit else driver.commit
        _poll(lambda: _unless_busy(commit), patience)


def _begin_immediate(driver: Any, patience: float) -> None:
    (host_milliseconds,) = driver.execute("PRAGMA busy_timeout").fetchone()
    driver.execute("PRAGMA busy_timeout = 0")  # the patience is ours; SQLite's own may be longer
    try:
        _poll(lambda: _unless_busy(lambda: driver.execute("BEGIN IMMEDIATE")), patience)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {host_milliseconds}")


def _unless_busy(action: Callable[[], object]) -> bool:
    try:
        action()
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return False
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise DatabaseError("dispatch.database_unavailable", found=name) from None
    return True


# -- both -----------------------------------------------------------------------------------------------------------


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _poll(attempt: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    pause, longest = _POLL_SECONDS
    while not attempt():
        left = deadline - time.monotonic()
        if left <= 0:
            raise DatabaseError(
                "dispatch.database_busy", f"another process kept the database to itself for {patience:g} s"
            )
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # noqa: S311 - spreads out those who wait
        pause = min(longest, pause * 2)


_LOCKS: Final[Mapping[str, Callable[[Connection, float], AbstractContextManager[None]]]] = {
    "postgresql": _postgresql,
    "sqlite": _sqlite,
}
