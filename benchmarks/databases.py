"""Databases to measure on: migrated, on disk, as durable as in production, and filled by SQL where that is quicker."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

import psutil
import psycopg
from sqlalchemy import URL, Engine, create_engine, make_url

from benchmarks.events import NUMBER, PAYLOAD_TEMPLATE, RECEIPT, RESPONSE_SHA256, TOPIC, payload
from outbox import Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.migrate import upgrade
from outbox.values import sha256_hex
from tests.postgres import LOOPBACK, PrivatePostgres

Loaded = Literal["pending", "succeeded", "retry_wait"]

_COLUMNS: Final = (
    "topic, event_id, payload, payload_sha256, status, attempts, max_attempts, redrives, next_attempt_at,"
    " last_error_code, receipt, response_sha256, created_at, updated_at"
)
#: Settings of our own server beside its defaults; fsync and synchronous_commit stay on.
POSTGRES_SETTINGS: Final = {"shared_buffers": "256MB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}


def engine(url: str, **options: Any) -> Engine:
    """An engine as a host would make it."""
    return create_engine(url, **{"pool_size": 10, "max_overflow": 20, **options})


def outbox(url: str) -> Outbox:
    return Outbox(engine(url), contracts=(CMS_CHANGE,))


class Databases(ABC):
    """Makes databases of one kind. Use it as a context manager."""

    name: str

    def __init__(self) -> None:
        self.number = itertools.count(1)
        self._prepared: dict[str, str] = {}
        self._kept = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    @abstractmethod
    def fresh(self, *, migrated: bool = True) -> AbstractContextManager[str]:
        """The URL of a database of its own, gone afterwards."""

    @abstractmethod
    def insert(self, url: str, first: int, count: int, values: dict[str, Any]) -> None:
        """Insert events ``first`` and the following with these columns, by SQL."""

    @abstractmethod
    def held_snapshot(self, url: str) -> AbstractContextManager[None]:
        """Another transaction that goes on seeing the database as it is now."""

    @abstractmethod
    def settle_in(self, url: str) -> None:
        """Bring the database to the state it would be in after a while: analysed, its log written."""

    def cpu(self) -> float:
        """Processor seconds that the server has spent on the connections that are open; 0 where there is no server."""
        return 0.0

    def prepared(self, key: str, fill: Callable[[str], None]) -> str:
        """The URL of a database that is filled once in a run."""
        if key not in self._prepared:
            url = self._kept.enter_context(self.fresh())
            fill(url)
            self.settle_in(url)
            self._prepared[key] = url
        return self._prepared[key]

    def load(self, url: str, count: int, status: Loaded = "pending", *, due_in: float = -60.0) -> int:
        """Fill in ``count`` events due ``due_in`` seconds from now; return the number of the first."""
        first = next(self.number)
        self.number = itertools.count(first + count)
        now = time.time()
        done = status == "succeeded"
        self.insert(
            url, first, count,
            {
                "status": status,
                "attempts": 0 if status == "pending" else 1,
                "next_attempt_at": now + due_in,
                "last_error_code": "network" if status == "retry_wait" else None,
                "receipt": RECEIPT if done else None,
                "response_sha256": RESPONSE_SHA256 if done else None,
                "created_at": now - 3600,
                "updated_at": now - 3600 if not done else now - 60,
            },
        )  # fmt: skip
        return first


class Sqlite(Databases):
    """Files in WAL mode with SQLite's own default of ``synchronous = FULL``."""

    name = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-bench-"))
        self._kept.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._files = itertools.count()

    @contextmanager
    def fresh(self, *, migrated: bool = True) -> Iterator[str]:
        path = self.directory / f"bench{next(self._files)}.sqlite3"
        url = f"sqlite:///{path}"
        if migrated:
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.close()
            upgrade(url)
        try:
            yield url
        finally:
            for leftover in self.directory.glob(f"{path.name}*"):
                leftover.unlink()

    def insert(self, url: str, first: int, count: int, values: dict[str, Any]) -> None:
        tail = (
            values["status"], values["attempts"], 5, 0, values["next_attempt_at"], values["last_error_code"],
            values["receipt"], values["response_sha256"], values["created_at"], values["updated_at"],
        )  # fmt: skip
        texts = ((number, payload(number)) for number in range(first, first + count))
        rows = ((TOPIC, f"bench:{number}", text, sha256_hex(text), *tail) for number, text in texts)
        places = ", ".join("?" * 14)
        with raw_sqlite(url) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(f"INSERT INTO outbox_event ({_COLUMNS}) VALUES ({places})", rows)
            connection.execute("COMMIT")

    @contextmanager
    def held_snapshot(self, url: str) -> Iterator[None]:
        with raw_sqlite(url) as connection:
            connection.execute("BEGIN")
            connection.execute("SELECT id FROM outbox_event LIMIT 1").fetchall()
            yield

    def settle_in(self, url: str) -> None:
        with raw_sqlite(url) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class PostgreSQL(Databases):
    """A server of our own (fsync on), or the one at ``url``."""

    name = "postgresql"

    def __init__(self, url: str | None = None) -> None:
        super().__init__()
        self._own = None if url else self._kept.enter_context(PrivatePostgres(POSTGRES_SETTINGS))
        self._url = make_url(url or self._own.url())  # type: ignore[union-attr]
        self._databases = itertools.count()
        self._prefix = f"outbox_bench_{time.time_ns():x}"
        self._template = self._create()
        upgrade(self._template)

    @contextmanager
    def fresh(self, *, migrated: bool = True) -> Iterator[str]:
        url = self._create(self._template if migrated else None)
        try:
            yield url
        finally:
            self._drop(url)

    def cpu(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._backends())

    def _backends(self) -> Iterator[psutil.Process]:
        pid = None if self._own is None else self._own.pid
        for process in [] if pid is None else psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):
                # As PostgreSQL calls them: "postgres: user database address(port) activity"; its own have no address.
                if LOOPBACK in " ".join(process.cmdline()):
                    yield process

    def _create(self, template: str | None = None) -> str:
        name = f"{self._prefix}_{next(self._databases)}"
        source = f" TEMPLATE {make_url(template).database}" if template else ""
        self._execute(f"CREATE DATABASE {name}{source}")
        url = self._url.set(database=name).render_as_string(hide_password=False)
        if template is None:
            self._kept.callback(self._drop, url)
        return url

    def _drop(self, url: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(libpq(self._url), autocommit=True) as connection:
            connection.execute(statement)

    def insert(self, url: str, first: int, count: int, values: dict[str, Any]) -> None:
        with psycopg.connect(libpq(url)) as connection:
            connection.execute(
                f"INSERT INTO outbox_event ({_COLUMNS})"
                " SELECT %(topic)s, 'bench:' || n, text, encode(sha256(convert_to(text, 'UTF8')), 'hex'), %(status)s,"
                " %(attempts)s, 5, 0, %(next_attempt_at)s, %(last_error_code)s, %(receipt)s, %(response_sha256)s,"
                " %(created_at)s, %(updated_at)s FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,"
                " LATERAL (SELECT replace(%(template)s, %(number)s, n::text) AS text) AS p ORDER BY n",
                {
                    **values,
                    "topic": TOPIC,
                    "first": first,
                    "last": first + count - 1,
                    "template": PAYLOAD_TEMPLATE,
                    "number": NUMBER,
                },
            )

    @contextmanager
    def held_snapshot(self, url: str) -> Iterator[None]:
        with psycopg.connect(libpq(url)) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM outbox_event WHERE id < 10")
            yield
            connection.rollback()

    def settle_in(self, url: str) -> None:
        with psycopg.connect(libpq(url), autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE outbox_event")
            connection.execute("CHECKPOINT")


@contextmanager
def raw_sqlite(url: str) -> Iterator[sqlite3.Connection]:
    """A plain connection with transactions in our own hands."""
    connection = sqlite3.connect(sqlite_path(url), isolation_level=None, timeout=30)
    try:
        yield connection
    finally:
        connection.close()


def sqlite_path(url: str) -> str:
    path = make_url(url).database
    assert path is not None
    return path


def libpq(url: str | URL) -> str:
    """The URL as drivers below SQLAlchemy take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
