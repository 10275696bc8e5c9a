"""The databases every test can ask for.

``engine`` and its kin come once per database; ``sqlite_…`` and ``pg_…`` are for what only one of them can show. Each
test gets databases of its own, and all fixtures of one test that share a prefix are about the same database.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest
from sqlalchemy import Engine

from tests.databases import BACKENDS, Databases, PostgresDatabases, SharedServer, SqliteDatabases, make_test_engine

_SHARED = pytest.StashKey[Path]()
_OWNED = pytest.StashKey[IO[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # A run in the background of a script inherits "ignore SIGINT", and so would every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", None)
    config.stash[_SHARED] = Path(worker["outbox_shared"] if worker else tempfile.mkdtemp(prefix="outbox-tests-"))
    if worker is None:
        config.stash[_OWNED] = SharedServer(config.stash[_SHARED]).own()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["outbox_shared"] = str(node.config.stash[_SHARED])


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and _SHARED in config.stash:
        SharedServer(config.stash[_SHARED]).stop()
        config.stash[_OWNED].close()


@pytest.fixture(autouse=True)
def _logger_as_imported() -> Iterator[None]:
    """The command line, run inside a test, takes the package's logger over; the next test finds it as it was."""
    logger = logging.getLogger("outbox")
    before = logger.propagate, logger.level, list(logger.handlers)
    yield
    logger.propagate, logger.handlers = before[0], before[2]
    logger.setLevel(before[1])


# -- what the others are made of ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> str:
    """URL of the shared PostgreSQL server's ``postgres`` database, as a role that may create databases."""
    try:
        return SharedServer(request.config.stash[_SHARED]).url()
    except RuntimeError as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> SqliteDatabases:
    return SqliteDatabases(tmp_path_factory.mktemp("databases"))


@pytest.fixture(scope="session")
def pg_databases(postgres_server: str, worker_id: str, request: pytest.FixtureRequest) -> Iterator[PostgresDatabases]:
    run = request.config.stash[_SHARED].name.rpartition("-")[2].lower()
    databases = PostgresDatabases(postgres_server, f"outbox_{run}_{worker_id}")
    yield databases
    databases.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """``sqlite`` or ``postgresql``: what ``engine``, ``database_url``, ``empty_engine`` and ``empty_url`` are for."""
    return str(request.param)


@pytest.fixture
def databases(backend: str, request: pytest.FixtureRequest) -> Databases:
    """The maker of databases of ``backend``, for a test that needs more of them."""
    name = {"sqlite": "sqlite_databases", "postgresql": "pg_databases"}[backend]
    maker: Databases = request.getfixturevalue(name)
    return maker


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """A ``create_engine`` whose engines are disposed of before their databases are dropped."""
    with ExitStack() as stack:

        def make(url: str, **arguments: Any) -> Engine:
            engine = make_test_engine(url, **arguments)
            stack.callback(engine.dispose)
            return engine

        yield make


# -- a migrated database, and one with nothing in it ----------------------------------------------------------------


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """URL of a migrated database, for both kinds; a string that a subprocess can use."""
    with databases.fresh() as url:
        yield url


@pytest.fixture
def engine(database_url: str, engines: Callable[..., Engine]) -> Engine:
    """An engine on ``database_url``."""
    return engines(database_url)


@pytest.fixture
def empty_url(databases: Databases) -> Iterator[str]:
    """URL of a database with nothing in it."""
    with databases.fresh(migrated=False) as url:
        yield url


@pytest.fixture
def empty_engine(empty_url: str, engines: Callable[..., Engine]) -> Engine:
    """An engine on ``empty_url``."""
    return engines(empty_url)


@pytest.fixture
def sqlite_url(sqlite_databases: SqliteDatabases) -> Iterator[str]:
    """URL of a migrated SQLite database."""
    with sqlite_databases.fresh() as url:
        yield url


@pytest.fixture
def sqlite_engine(sqlite_url: str, engines: Callable[..., Engine]) -> Engine:
    """An engine on ``sqlite_url``."""
    return engines(sqlite_url)


@pytest.fixture
def pg_url(pg_databases: PostgresDatabases) -> Iterator[str]:
    """URL of a migrated PostgreSQL database."""
    with pg_databases.fresh() as url:
        yield url


@pytest.fixture
def pg_engine(pg_url: str, engines: Callable[..., Engine]) -> Engine:
    """An engine on ``pg_url``."""
    return engines(pg_url)
