"""Engines for programs of our own: with limits on every wait, so that a worker is never held for ever.

A host makes its own engine and knows its own limits. The command line has to bring some along. What differs between
databases is one :class:`Kind` each, found by SQLAlchemy's name of the database.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, event, text
from sqlalchemy.exc import ArgumentError, SAWarning

from outbox.dialects import dialect_for
from outbox.dialects.urls import parse_url
from outbox.errors import DatabaseError, InputError

#: How long the answer to one statement is waited for, in seconds, unless something else is asked for.
ANSWER_SECONDS: Final = 60.0

#: Drivers for URLs that name none. ``postgres://`` is what many hosting services hand out.
_DRIVERS: Final[Mapping[str, str]] = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a database of one kind needs.

    Attributes:
        connect: arguments of the driver's ``connect``; those that the URL gives itself are left to it.
        pooled: the same, behind a pooler that gives every transaction another session.
        check_there: refuses a URL where connecting would make an empty database.
        place: makes a throw-away place for a demo in the database, as a context manager over its URL.
        bound: ends the connections of an engine that do not answer a statement within so many seconds.
        reasons: what a connection error's text may hold, and what that means in words that quote nothing.
    """

    connect: Mapping[str, Any]
    pooled: Mapping[str, Any]
    check_there: Callable[[URL], None]
    place: Callable[[URL, str, bool], AbstractContextManager[URL]]
    bound: Callable[[Engine, float], None]
    reasons: Mapping[str, str] = field(default_factory=dict)


def program_url(url: str | URL) -> URL:
    """A URL as a program of ours uses it: PostgreSQL through psycopg 3 unless it names another driver.

    Raises:
        InputError: ``dispatch.connection_invalid``.
        DatabaseError: ``dispatch.database_unsupported``.
    """
    if isinstance(url, str):
        scheme, separator, rest = url.strip().partition("://")
        url = f"{_DRIVERS.get(scheme, scheme)}{separator}{rest}"
    return parse_url(url)


def program_engine(
    url: str | URL, *, create: bool = False, pooled: bool = False, answer_seconds: float | None = ANSWER_SECONDS
) -> Engine:
    """An engine whose every wait ends.

    Args:
        create: whether connecting may make a database that is not there, as SQLite does.
        pooled: whether the URL leads to a pooler in transaction mode: nothing may then be left in a session.
        answer_seconds: how long to wait for the answer to one statement; None for statements that may take hours.

    Raises:
        InputError: ``dispatch.connection_invalid``.
        DatabaseError: ``dispatch.database_unavailable``, ``dispatch.database_unsupported``.
    """
    url = program_url(url)
    kind = _KINDS[url.get_backend_name()]
    if not create:
        kind.check_there(url)
    defaults = kind.pooled if pooled else kind.connect
    arguments = {key: value for key, value in defaults.items() if key not in url.query}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)  # of options in the URL that would be ignored
            engine = create_engine(url, connect_args=arguments, pool_pre_ping=True, hide_parameters=True)
    except SAWarning:
        raise InputError("dispatch.connection_invalid", "the URL has an option that the driver does not take") from None
    except (ArgumentError, ImportError):
        found = url.drivername
        raise DatabaseError("dispatch.database_unsupported", expected="sqlite or postgresql", found=found) from None
    if answer_seconds is not None:
        kind.bound(engine, answer_seconds)
    return engine


def shown(url: URL) -> str:
    """The URL for people: without its password, and without options, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def reason(url: URL, error: BaseException) -> str | None:
    """Why connecting failed, in words of ours; None where the driver's text is not one we know."""
    said = str(getattr(error.__context__, "orig", "")).lower()
    found = _KINDS[url.get_backend_name()].reasons
    return next((words for part, words in found.items() if part in said), None)


def throw_away_place(url: URL, name: str, *, keep: bool) -> AbstractContextManager[URL]:
    """A place called ``name`` for a demo's tables, which touches nothing else that is in the database.

    Args:
        keep: whether what is in it stays afterwards.

    Raises:
        DatabaseError: ``dispatch.database_unavailable``, when there is no making one.
        InputError: ``dispatch.connection_invalid``, when the database is in use for something else.
    """
    return _KINDS[url.get_backend_name()].place(url, name, keep)


# -- SQLite ---------------------------------------------------------------------------------------------------------


def _check_file(url: URL) -> None:
    if url.database and url.database != ":memory:" and "uri" not in url.query and not Path(url.database).exists():
        raise DatabaseError(
            "dispatch.database_unavailable", "there is no such database file; `outbox migrate` would make it"
        )


def _leave_unbound(engine: Engine, seconds: float) -> None:
    """A file always answers; a locked one is waited for where the lock is taken."""
    del engine, seconds


@contextmanager
def _file(url: URL, name: str, keep: bool) -> Iterator[URL]:
    """A file of the demo's own, in WAL mode."""
    del name
    if not url.database or url.database == ":memory:":
        raise InputError("dispatch.connection_invalid", expected="an SQLite file, since several processes share it")
    path = Path(url.database)
    if path.exists() and path.stat().st_size:
        raise InputError("dispatch.connection_invalid", expected="an SQLite file that is not there yet, or empty")
    try:
        engine = create_engine(url)
        with dialect_for("sqlite").mapped_errors(), engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        engine.dispose()
        yield url
    finally:
        if not keep:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)


# -- PostgreSQL -----------------------------------------------------------------------------------------------------


@contextmanager
def _schema(url: URL, name: str, keep: bool) -> Iterator[URL]:
    """A schema of the demo's own, on the search path of every connection made from the URL."""
    place = url.update_query_dict({"options": f"-csearch_path={name} {_POSTGRESQL_OPTIONS}"})
    engine = program_engine(url)
    try:
        with dialect_for("postgresql").mapped_errors(), engine.begin() as connection:
            connection.execute(text(f'CREATE SCHEMA "{name}"'))
        try:
            yield place
        finally:
            if not keep:
                with dialect_for("postgresql").mapped_errors(), engine.begin() as connection:
                    connection.execute(text(f'DROP SCHEMA "{name}" CASCADE'))
    finally:
        engine.dispose()


def _bound(engine: Engine, seconds: float) -> None:
    if engine.dialect.driver != "psycopg":  # another driver's limits are the URL's business
        return
    from outbox.dialects.bounded import bounded  # noqa: PLC0415 - programs on SQLite need no PostgreSQL driver

    kind = bounded(seconds)

    def connect(_dialect: Any, _record: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
        return kind.connect(*arguments, **options)

    event.listen(engine, "do_connect", connect)


# What is stuck behind a lock gives up, is mapped to dispatch.database_busy and tried again.
_POSTGRESQL_OPTIONS: Final = "-clock_timeout=10s"

_SQLITE: Final[Mapping[str, Any]] = {"timeout": 10.0}
_POSTGRESQL: Final[Mapping[str, Any]] = {
    "application_name": "outbox",
    "connect_timeout": 10,
    # A peer that is gone without a word is noticed in about a minute when idle, in half of one when asked.
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_KINDS: Final[Mapping[str, Kind]] = {
    "sqlite": Kind(_SQLITE, _SQLITE, _check_file, _file, _leave_unbound),
    "postgresql": Kind(
        {**_POSTGRESQL, "options": _POSTGRESQL_OPTIONS},
        # Poolers refuse options; what is prepared in one session is not there in the next.
        {**_POSTGRESQL, "prepare_threshold": None},
        lambda _: None,
        _schema,
        _bound,
        {
            "password authentication failed": "the password or user was refused",
            "no password supplied": "a password is needed",
            "no pg_hba.conf entry": "the server lets nobody in from here (pg_hba.conf)",
            "does not exist": "there is no such database or role",
            "connection refused": "nobody listens there",
            "timeout": "no answer in time",
            "too many": "the server has no connection left",
            "starting up": "the server is starting up",
            "unsupported startup parameter": "a pooler refused the session's options: give --pooler",
            "resolve": "the host name is unknown",
            "name or service not known": "the host name is unknown",
            "no such file": "there is no such socket or certificate file",
            "invalid": "the URL has an option that the driver does not take",
        },
    ),
}
