"""What only one database's catalog can say about a table, found by the dialect's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection, bindparam, text


def broken_indexes(connection: Connection, tables: Sequence[str]) -> frozenset[str]:
    """Names of indexes on ``tables`` that exist but do not serve.

    A CREATE INDEX CONCURRENTLY that failed leaves such a one behind: it costs every write, answers no query and
    enforces no uniqueness.
    """
    query = _BROKEN_INDEXES.get(connection.dialect.name)
    return query(connection, tables) if query is not None else frozenset()


def _postgresql(connection: Connection, tables: Sequence[str]) -> frozenset[str]:
    query = text(
        "SELECT index_class.relname FROM pg_catalog.pg_index"
        " JOIN pg_catalog.pg_class AS index_class ON index_class.oid = pg_index.indexrelid"
        " JOIN pg_catalog.pg_class AS table_class ON table_class.oid = pg_index.indrelid"
        " WHERE table_class.relname IN :tables AND pg_catalog.pg_table_is_visible(table_class.oid)"
        " AND NOT (pg_index.indisvalid AND pg_index.indisready AND pg_index.indislive)"
    ).bindparams(bindparam("tables", expanding=True))
    return frozenset(connection.scalars(query, {"tables": list(tables)}))


_BROKEN_INDEXES: Final[Mapping[str, Callable[[Connection, Sequence[str]], frozenset[str]]]] = {
    "postgresql": _postgresql,
}
