"""Bring a database to a revision, and say at which it is. The only module that imports Alembic.

``alembic upgrade head`` in a checkout, ``outbox migrate`` and :func:`upgrade` all come through
:func:`run_environment`, so that all of them take the same lock.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.config import fileConfig
from pathlib import Path
from typing import Any, Final

import alembic
from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from outbox.dialects.locks import migration_lock
from outbox.dialects.urls import make_engine, parse_url
from outbox.errors import DatabaseError, InputError, OutboxError, SchemaError
from outbox.schema import VERSION_TABLE, metadata

URL_VARIABLE: Final = "OUTBOX_DATABASE_URL"
#: How long an upgrade waits for another one to end. Building an index on a large table takes minutes.
LOCK_PATIENCE_SECONDS: Final = 600.0

#: How a database says that somebody else has what we need: SQLite's names, and PostgreSQL's lock_timeout.
_BUSY: Final = ("SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", "SQLITE_LOCKED", "55P03")

Database = Engine | Connection | URL | str

# Alembic's `op` and `context` are module globals: two runs in one process would write into each other's.
_one_run = threading.Lock()


# -- for hosts ------------------------------------------------------------------------------------------------------


def upgrade(database: Database, revision: str = "head", *, patience: float = LOCK_PATIENCE_SECONDS) -> None:
    """Bring the database to ``revision``. Safe to run from every process of a deploy at once.

    Args:
        database: an engine or URL; or a connection, which is left in no transaction if it was in none, and whose
            open transaction is otherwise joined and left to the caller to commit.
        patience: seconds to wait for somebody else's upgrade to end.

    Raises:
        SchemaError: ``dispatch.migration_failed``; nothing of the failed migration remains.
        DatabaseError: ``dispatch.database_busy``, ``dispatch.database_unavailable``, ``dispatch.database_unsupported``.
        InputError: ``dispatch.connection_invalid``, ``dispatch.transaction_required``.
    """
    with _connected(database) as connection:
        _run(command.upgrade, revision, connection, patience)


def downgrade(database: Database, revision: str, *, patience: float = LOCK_PATIENCE_SECONDS) -> None:
    """Take the database back to ``revision``; ``base`` drops the table and all events in it.

    Raises:
        The same as :func:`upgrade`.
    """
    with _connected(database) as connection:
        _run(command.downgrade, revision, connection, patience)


def current(database: Database) -> str | None:
    """The revision the database is at, or None when it has never been migrated.

    Raises:
        SchemaError: ``dispatch.schema_altered``, when it claims to be at several.
        DatabaseError: as for :func:`upgrade`.
    """
    with _connected(database) as connection, _mapped_errors():
        began = not connection.in_transaction()
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        heads = context.get_current_heads()
        if began:
            connection.rollback()
    if len(heads) > 1:
        raise SchemaError("dispatch.schema_altered", expected="one revision", found=", ".join(sorted(heads)))
    return heads[0] if heads else None


def render_sql(url: URL | str, revision: str = "head") -> str:
    """The SQL that :func:`upgrade` would run, for a database like the one ``url`` names. Nothing is connected to.

    Args:
        revision: the target, or ``from:to``. Without ``from`` the database is taken to be empty.

    Raises:
        SchemaError: ``dispatch.migration_failed``.
        InputError: ``dispatch.connection_invalid``.
    """
    output = io.StringIO()
    config = _config(output_buffer=output)
    config.attributes["url"] = parse_url(url)
    with _one_run, _host_context_kept(), _mapped_errors():
        command.upgrade(config, revision, sql=True)
    return output.getvalue()


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:  # noqa: ARG001 - Alembic's signature
    """Keep our tables out of a host's own autogenerate, which would otherwise write migrations that drop them.

    Give it to ``context.configure(include_name=…)`` in the host's ``env.py``; a host that has one already asks both.
    """
    return not (type_ == "table" and (name == VERSION_TABLE or name in metadata.tables))


def migrations_directory() -> Path:
    """Where ``env.py`` and the versions lie: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


# -- for env.py -----------------------------------------------------------------------------------------------------


def run_environment(context: Any) -> None:
    """Everything ``env.py`` does. ``context`` is Alembic's :class:`~alembic.runtime.environment.EnvironmentContext`.

    A connection may be handed in through ``config.attributes["connection"]``. Only the command line gets logging set up
    and its errors in Alembic's way, one line each.
    """
    attributes = context.config.attributes
    if "connection" in attributes:
        _migrate(context, attributes["connection"])
    elif context.is_offline_mode() and "url" in attributes:
        _print(context, attributes["url"])
    else:
        _run_command_line(context)


def _run_command_line(context: Any) -> None:
    if context.config.cmd_opts is not None and context.config.config_file_name is not None:
        fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    try:
        url = _command_line_url(context)
        if context.is_offline_mode():
            _print(context, url)
            return
        with _connected(url) as connection, _mapped_errors():
            _migrate(context, connection)
    except OutboxError as error:
        raise CommandError(str(error)) from None


def _command_line_url(context: EnvironmentContext) -> URL:
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get(URL_VARIABLE)
    if not url:
        raise InputError("dispatch.connection_invalid", f"no database: set {URL_VARIABLE}, or give -x url=...")
    return parse_url(url)


def _migrate(context: EnvironmentContext, connection: Connection) -> None:
    patience = context.config.attributes.get("patience", LOCK_PATIENCE_SECONDS)
    with migration_lock(connection, patience):
        context.configure(
            connection=connection,
            target_metadata=metadata,
            version_table=VERSION_TABLE,
            transaction_per_migration=True,
            transactional_ddl=True,  # Alembic would not use it on SQLite, where the lock has made it true
            include_name=_only_ours,
        )
        _refuse_unknown_revisions(context)
        with context.begin_transaction():
            context.run_migrations()


def _print(context: EnvironmentContext, url: URL) -> None:
    context.configure(
        dialect_name=url.get_backend_name(),
        target_metadata=metadata,
        literal_binds=True,
        version_table=VERSION_TABLE,
        transaction_per_migration=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _only_ours(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:  # noqa: ARG001 - the same
    # In the host's database, our own autogenerate sees the host's tables just as the host's sees ours.
    return type_ != "table" or name in metadata.tables


def _refuse_unknown_revisions(context: EnvironmentContext) -> None:
    known = {script.revision for script in context.script.walk_revisions()}
    unknown = sorted(set(context.get_context().get_current_heads()) - known)
    if unknown:
        raise SchemaError(
            "dispatch.migration_failed",
            "the database is at a revision this version of outbox does not know; a newer one has migrated it",
            expected=f"one of {', '.join(sorted(known))}",
            found=", ".join(unknown),
        )


# -- running --------------------------------------------------------------------------------------------------------


def _run(action: Any, revision: str, connection: Connection, patience: float) -> None:
    config = _config()
    config.attributes.update(connection=connection, patience=patience)
    if not _one_run.acquire(timeout=patience):
        raise DatabaseError("dispatch.database_busy", f"another thread has been migrating for {patience:g} s")
    try:
        with _host_context_kept(), _mapped_errors():
            action(config, revision)
    finally:
        _one_run.release()


@contextmanager
def _host_context_kept() -> Iterator[None]:
    """Let a host call us from its own ``env.py`` or migration: Alembic forgets the outer run when an inner one ends."""
    kept = [getattr(module, "_proxy", None) for module in (alembic.context, alembic.op)]
    try:
        yield
    finally:
        for proxy in kept:
            if proxy is not None:
                proxy._install_proxy()  # noqa: SLF001 - no public way; a test holds Alembic to it


def _config(**arguments: Any) -> Config:
    config = Config(**arguments)
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _connected(database: Database) -> Iterator[Connection]:
    if isinstance(database, Connection):
        yield database
    elif isinstance(database, Engine):
        with _mapped_errors():
            connection = database.connect()
        with connection:
            yield connection
    else:
        engine = make_engine(database)
        try:
            with _connected(engine) as connection:
                yield connection
        finally:
            engine.dispose()


# -- errors ---------------------------------------------------------------------------------------------------------


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Let only errors of ours out. Foreign ones are not chained: their text can quote values and whole rows."""
    try:
        yield
    except CommandError as error:
        raise SchemaError("dispatch.migration_failed", str(error)) from None
    except SQLAlchemyError as error:
        raise _translated(error) from None


def _translated(error: SQLAlchemyError) -> OutboxError:
    name = _name(error)
    if name.endswith(_BUSY):
        return DatabaseError("dispatch.database_busy", found=name)
    refused = name.endswith("SQLITE_ERROR")  # a wrong statement, which SQLite's driver calls operational
    if (
        isinstance(error, DBAPIError)
        and (error.connection_invalidated or isinstance(error, OperationalError))
        and not refused
    ):
        return DatabaseError("dispatch.database_unavailable", found=name)
    return SchemaError("dispatch.migration_failed", "the database refused a migration", found=name)


def _name(error: SQLAlchemyError) -> str:
    """The database's own code for it, which is content-free, else the exception's class."""
    original = getattr(error, "orig", None)
    code = getattr(original, "sqlstate", None) or getattr(original, "sqlite_errorname", None)
    return f"{type(original or error).__name__}{f' {code}' if code else ''}"
