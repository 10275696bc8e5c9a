"""From a database URL to an engine, without repeating the URL in an error: it may hold a password."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import DatabaseError, InputError

#: What a connection gets unless the URL says otherwise. libpq by itself waits for an answer for ever; SQLite's file is
#: always there, and waiting for its lock is done where the lock is taken.
_CONNECT: Final[Mapping[str, Mapping[str, Any]]] = {
    "postgresql": {"connect_timeout": 10, "application_name": "outbox"},
    "sqlite": {},
}

#: URLs that name no driver mean the one we depend on. ``postgres`` is what many hosting services write.
_DRIVERLESS: Final = ("postgres", "postgresql")


def parse_url(url: object) -> URL:
    """A URL as SQLAlchemy's, of a database that we support.

    Raises:
        InputError: ``dispatch.connection_invalid``.
        DatabaseError: ``dispatch.database_unsupported``.
    """
    if not isinstance(url, str | URL):
        raise InputError("dispatch.connection_invalid", expected="a database URL", found=type(url).__name__)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError("dispatch.connection_invalid", "this is not a database URL that can be read") from None
    if parsed.drivername in _DRIVERLESS:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in _CONNECT:
        raise _unsupported(parsed)
    return parsed


def make_engine(url: URL | str, **arguments: Any) -> Engine:
    """An engine for a database we support; ``arguments`` go to :func:`sqlalchemy.create_engine`.

    Raises:
        InputError: ``dispatch.connection_invalid``.
        DatabaseError: ``dispatch.database_unsupported``, also when the URL's driver is not installed.
    """
    url = parse_url(url)
    defaults = {key: value for key, value in _CONNECT[url.get_backend_name()].items() if key not in url.query}
    try:
        return create_engine(url, connect_args=defaults, **arguments)
    except (ArgumentError, ImportError):
        raise _unsupported(url) from None


def _unsupported(url: URL) -> DatabaseError:
    return DatabaseError("dispatch.database_unsupported", expected="sqlite or postgresql+psycopg", found=url.drivername)
