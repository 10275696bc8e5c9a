"""Whether a database is what the migrations made: asked before an outbox does anything else.

Everything here reads catalogs and the version table, changes nothing, and raises nothing for what is missing, so that
it can be asked inside a host's transaction without spoiling it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Dialect,
    Index,
    Select,
    Table,
    UniqueConstraint,
    column,
    inspect,
    select,
    table,
)
from sqlalchemy.exc import CompileError

from outbox.dialects.catalog import broken_indexes
from outbox.errors import SchemaError
from outbox.schema import HEAD_REVISION, VERSION_TABLE, metadata

_SHOWN: Final = 3
_TO_RUN: Final = "run `outbox migrate` or `alembic upgrade head`"

_REVISIONS: Final[Select[Any]] = select(column("version_num")).select_from(table(VERSION_TABLE))

# A row of what the inspector says about a column, index or constraint.
_Found = Mapping[str, Any]


def check_schema(connection: Connection) -> None:
    """Refuse a database that is not at the migration head, or whose tables are not the declared ones.

    Raises:
        SchemaError: ``dispatch.schema_altered``, saying which revision was found and what to run.
    """
    catalog = _Catalog.read(connection)
    if catalog.revisions != (HEAD_REVISION,):
        raise SchemaError(
            "dispatch.schema_altered",
            f"the database is not at the revision this version of outbox needs: {_TO_RUN}"
            " (a database of a newer version needs that version of outbox)",
            expected=f"revision {HEAD_REVISION}",
            found=_revisions_in_words(catalog.revisions),
        )
    differences = list(_table_differences(catalog, connection.dialect))
    if differences:
        more = len(differences) - _SHOWN
        raise SchemaError(
            "dispatch.schema_altered",
            f"a table was changed after revision {HEAD_REVISION} made it; undo that"
            " (`alembic upgrade head --sql` prints how it was made; upgrading again does not repair it)",
            expected=f"the tables as of revision {HEAD_REVISION}",
            found="; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else ""),
        )


def table_differences(connection: Connection) -> list[str]:
    """Every way in which the database differs from :mod:`outbox.schema`, one sentence each; empty when it does not.

    More than was declared is a difference too, except for indexes that enforce nothing: those are a DBA's own business.
    """
    catalog = _Catalog.read(connection)
    differences = list(_table_differences(catalog, connection.dialect))
    if catalog.revisions != (HEAD_REVISION,):
        differences.insert(0, f"revision: expected {HEAD_REVISION}, found {_revisions_in_words(catalog.revisions)}")
    return differences


class _Catalog(NamedTuple):
    """What the database says, by table name. A table that is not there is in none of the mappings."""

    revisions: tuple[str, ...] | None
    columns: Mapping[str, list[_Found]]
    primary_keys: Mapping[str, _Found]
    indexes: Mapping[str, list[_Found]]
    uniques: Mapping[str, list[_Found]]
    checks: Mapping[str, list[_Found]]
    foreign_keys: Mapping[str, list[_Found]]
    broken: frozenset[str]

    @classmethod
    def read(cls, connection: Connection) -> _Catalog:
        inspector = inspect(connection)
        names = sorted(metadata.tables)
        columns = _by_name(inspector.get_multi_columns(filter_names=[*names, VERSION_TABLE]))
        present = [name for name in names if name in columns]

        def ask(what: Any) -> Mapping[str, Any]:
            return _by_name(what(filter_names=present)) if present else {}

        return cls(
            revisions=_revisions(connection, columns.get(VERSION_TABLE)),
            columns=columns,
            primary_keys=ask(inspector.get_multi_pk_constraint),
            indexes=ask(inspector.get_multi_indexes),
            uniques=ask(inspector.get_multi_unique_constraints),
            checks=ask(inspector.get_multi_check_constraints),
            foreign_keys=ask(inspector.get_multi_foreign_keys),
            broken=broken_indexes(connection, present) if present else frozenset(),
        )


def _by_name(found: Mapping[tuple[str | None, str], Any]) -> dict[str, Any]:
    return {name: rows for (_, name), rows in found.items()}


def _revisions(connection: Connection, columns: list[_Found] | None) -> tuple[str, ...] | None:
    if columns is None or "version_num" not in {column["name"] for column in columns}:
        return None
    return tuple(sorted(connection.scalars(_REVISIONS)))


def _revisions_in_words(revisions: tuple[str, ...] | None) -> str:
    if revisions is None:
        return f"no revision (there is no table {VERSION_TABLE})"
    if not revisions:
        return f"no revision ({VERSION_TABLE} is empty)"
    return f"revision {' and '.join(revisions)}"


# -- comparing ------------------------------------------------------------------------------------------------------


def _table_differences(catalog: _Catalog, dialect: Dialect) -> Iterator[str]:
    for name, declared in sorted(metadata.tables.items()):
        if name not in catalog.columns:
            yield f"table {name} is missing"
            continue
        yield from _compare(
            f"column {name}.",
            {item.name: _declared_column(item, dialect) for item in declared.columns},
            {item["name"]: _found_column(item, dialect) for item in catalog.columns[name]},
        )
        declared_key = [item.name for item in declared.primary_key.columns]
        found_key = list(catalog.primary_keys.get(name, {}).get("constrained_columns", ()))
        yield from _compare(f"primary key of {name}", {"": ", ".join(declared_key)}, {"": ", ".join(found_key)})
        yield from _index_differences(declared, catalog, dialect)
        yield from _constraint_differences(declared, catalog)


def _index_differences(table: Table, catalog: _Catalog, dialect: Dialect) -> Iterator[str]:
    declared = {str(index.name): _declared_index(index, dialect) for index in table.indexes}
    found = {
        index["name"]: _found_index(index, dialect)
        for index in catalog.indexes.get(table.name, ())
        if index["name"] in declared or (index["unique"] and "duplicates_constraint" not in index)
    }
    yield from _compare("index ", declared, found)
    for name in sorted(catalog.broken & declared.keys()):
        yield f"index {name}: expected a working index, found one the database marks invalid; drop and create it again"


def _constraint_differences(table: Table, catalog: _Catalog) -> Iterator[str]:
    uniques = [item for item in table.constraints if isinstance(item, UniqueConstraint)]
    yield from _compare(
        "unique constraint ",
        {str(item.name): ", ".join(column.name for column in item.columns) for item in uniques},
        _named((item, _found_unique(item)) for item in catalog.uniques.get(table.name, ())),
    )
    checks = [item for item in table.constraints if isinstance(item, CheckConstraint)]
    yield from _compare(
        "check constraint ",
        {str(item.name): normalised(item.sqltext) for item in checks},
        _named((item, _found_check(item)) for item in catalog.checks.get(table.name, ())),
    )
    yield from _compare(
        f"foreign key of {table.name} on ",
        {
            ", ".join(key.column_keys): f"{key.referred_table.name} ({', '.join(e.column.name for e in key.elements)})"
            for key in table.foreign_key_constraints
        },
        {
            ", ".join(key["constrained_columns"]): f"{key['referred_table']} ({', '.join(key['referred_columns'])})"
            for key in catalog.foreign_keys.get(table.name, ())
        },
    )


def _compare(what: str, declared: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name, expected in declared.items():
        if name not in found:
            yield f"{what}{name} is missing"
        elif found[name] != expected:
            yield f"{what}{name}: expected {expected or 'none'}, found {found[name] or 'none'}"
    for name in sorted(found.keys() - declared.keys()):
        yield f"{what}{name} is not one of ours"


def _named(found: Iterable[tuple[_Found, str]]) -> dict[str, str]:
    return {item.get("name") or f"(unnamed: {words})": words for item, words in found}


# -- both sides in the same words -----------------------------------------------------------------------------------


def _declared_column(column: Column[Any], dialect: Dialect) -> str:
    numbered = dialect.supports_identity_columns and column.identity is not None
    return _column(column.type.compile(dialect=dialect), bool(column.nullable), numbered, False)


def _found_column(found: _Found, dialect: Dialect) -> str:
    try:
        kind = found["type"].compile(dialect=dialect)
    except CompileError:  # a type SQLAlchemy does not know compiles to nothing, and is none of ours
        kind = "an unknown type"
    return _column(kind, found["nullable"], found.get("identity") is not None, found.get("computed") is not None)


def _column(kind: str, nullable: bool, numbered: bool, computed: bool) -> str:
    words = (kind, "NULL" if nullable else "NOT NULL", "IDENTITY" if numbered else "", "GENERATED" if computed else "")
    return " ".join(word for word in words if word)


def _declared_index(index: Index, dialect: Dialect) -> str:
    options = index.dialect_options[dialect.name]
    columns = [str(getattr(expression, "name", expression)) for expression in index.expressions]
    return _index(columns, bool(index.unique), options.get("where"), options.get("using"))


def _found_index(found: _Found, dialect: Dialect) -> str:
    options = found.get("dialect_options", {})
    names = found.get("expressions") or found["column_names"]
    sorting = found.get("column_sorting", {})
    columns = [" ".join((str(name), *sorting.get(name, ()))) for name in names]
    return _index(
        columns, bool(found["unique"]), options.get(f"{dialect.name}_where"), options.get(f"{dialect.name}_using")
    )


def _index(columns: Iterable[str], unique: bool, where: object, using: object) -> str:
    predicate = f" where {normalised(where)}" if where is not None else ""
    return f"{'unique ' if unique else ''}{f'{using} ' if using else ''}on {', '.join(columns)}{predicate}"


def _found_unique(found: _Found) -> str:
    options = found.get("dialect_options", {})
    kinder = " nulls not distinct" if options.get("postgresql_nulls_not_distinct") else ""
    return ", ".join(found["column_names"]) + kinder


def _found_check(found: _Found) -> str:
    unproven = " (not valid)" if found.get("dialect_options", {}).get("not_valid") else ""
    return normalised(found["sqltext"]) + unproven


def normalised(sql: object) -> str:
    """An SQL condition without what a database adds or leaves out when it prints one back: parentheses, casts such as
    ``::text``, white space and the case of letters."""
    bare = _OPERATOR.sub(r" \1 ", _CAST.sub("", str(sql).lower()))
    return " ".join(bare.replace("(", " ").replace(")", " ").split())


_CAST: Final = re.compile(r"::\s*(?:double precision|character varying|[a-z_][a-z0-9_]*)(?:\[\])?")
_OPERATOR: Final = re.compile(r"([<>=!]+)")
