"""Database dialects, found by SQLAlchemy's name of the database."""

from __future__ import annotations

from typing import Final

from outbox.dialects.base import Dialect
from outbox.dialects.postgresql import PostgreSQLDialect
from outbox.dialects.sqlite import SQLiteDialect
from outbox.errors import DatabaseError

_DIALECTS: Final[dict[str, type[Dialect]]] = {dialect.name: dialect for dialect in (SQLiteDialect, PostgreSQLDialect)}


def dialect_for(name: str) -> Dialect:
    """The dialect for a database by SQLAlchemy's name of it.

    Raises:
        DatabaseError: ``dispatch.database_unsupported``.
    """
    try:
        return _DIALECTS[name]()
    except KeyError:
        expected = " or ".join(sorted(_DIALECTS))
        raise DatabaseError("dispatch.database_unsupported", expected=expected, found=name) from None
