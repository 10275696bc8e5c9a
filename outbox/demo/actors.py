"""Who takes part in the demo: the host, the remote server and the workers. The last two are processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from sqlalchemy import URL, Column, Engine, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.orm import Session

from outbox.contracts.cms import CMS_CHANGE
from outbox.demo.report import Row
from outbox.demo.server import read
from outbox.errors import OutboxError
from outbox.schema import outbox_event
from outbox.store import Outbox

KEY_ID: Final = "demo-key"
#: Every so-manieth change is rolled back.
ROLLBACK_EVERY: Final = 7

#: Short leases, so that the events of the worker that is killed need not be waited for long.
WORKER_OPTIONS: Final[Mapping[str, str]] = {
    "--timeout": "4", "--lease-seconds": "5", "--concurrency": "4", "--batch": "4", "--retry-base-seconds": "0.5",
    "--retry-max-seconds": "2", "--grace-seconds": "5",
}  # fmt: skip

_metadata = MetaData()
article = Table(
    "article",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("event_id", Text, nullable=False, unique=True),
    Column("source_id", Text, nullable=False),
    Column("body", Text, nullable=False),
)


#: Codes of the demo's own, beside :data:`outbox.errors.CODES`.
CODES: Final[dict[str, str]] = {
    "demo.database_in_use": "the demo wants a database without real events",
    "demo.server_failed": "the demo's server did not start, or does not answer",
    "demo.worker_failed": "a worker of the demo's ended by itself, or did not end when told to",
}


class DemoError(OutboxError):
    """The demo could not be run."""

    def __init__(self, code: str, found: str) -> None:
        super().__init__(code, CODES[code], found=found)


# -- the host -------------------------------------------------------------------------------------------------------


class Host:
    """A program that changes articles, and enqueues an event in the transaction of each change.

    Attributes:
        committed: ids of events whose transaction was committed.
        rolled_back: ids of those whose transaction was not.
    """

    def __init__(self, engine: Engine, changes: int) -> None:
        self._engine = engine
        self._outbox = Outbox(engine, contracts=(CMS_CHANGE,))
        self._changes = enumerate(sample_events(changes), start=1)
        self.done = False
        self.committed: set[str] = set()
        self.rolled_back: set[str] = set()
        _metadata.create_all(engine)

    def change(self) -> None:
        """Make the next change, if there is one."""
        following = next(self._changes, None)
        if following is None:
            self.done = True
            return
        number, event = following
        try:
            with Session(self._engine) as session, session.begin():
                self._write(session, event)
                _perhaps_change_mind(number)
        except _ChangeOfMindError:
            self.rolled_back.add(event["event_id"])
        else:
            self.committed.add(event["event_id"])

    def _write(self, session: Session, event: Mapping[str, Any]) -> None:
        source = event["localization"]
        values = {"event_id": event["event_id"], "source_id": source["source_id"], "body": source["source_text"]}
        session.execute(insert(article).values(values))
        self._outbox.enqueue(event, connection=session)

    def counts(self) -> Mapping[str, int]:
        """How many events are in which state."""
        return {str(status): count for status, count in self._outbox.health().counts.items()}

    def owner(self, event_id: str) -> str | None:
        """Which worker has an event."""
        query = select(outbox_event.c.lease_owner).where(outbox_event.c.event_id == event_id)
        with self._engine.connect() as connection:
            return connection.scalar(query)

    def events(self) -> dict[str, Row]:
        columns = outbox_event.c
        query = select(
            columns.event_id, columns.status, columns.payload_sha256, columns.receipt, columns.last_error_code
        )
        with self._engine.connect() as connection:
            return {
                name: Row(status, sha256, None if receipt is None else json.loads(receipt), code)
                for name, status, sha256, receipt, code in connection.execute(query)
            }

    def articles(self) -> frozenset[str]:
        with self._engine.connect() as connection:
            return frozenset(connection.scalars(select(article.c.event_id)))


class _ChangeOfMindError(Exception):
    """What a host may raise in mid-transaction."""


def _perhaps_change_mind(number: int) -> None:
    if number % ROLLBACK_EVERY == 0:
        raise _ChangeOfMindError


def sample_events(count: int) -> Iterator[dict[str, Any]]:
    """Real content changes; after the last of them the same ones again, as later revisions."""
    lines = files("outbox.demo").joinpath("events.jsonl").read_text(encoding="utf-8").splitlines()
    for number in range(count):
        event: dict[str, Any] = json.loads(lines[number % len(lines)])
        again = number // len(lines)
        if again:
            event["event_id"] += f":{again}"
            event["localization"]["source_revision"] += f".{again}"
        yield event


# -- processes ------------------------------------------------------------------------------------------------------


class Processes:
    """Child processes that do not outlive this object, whatever ends it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._running.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for log in self._logs.values():
            log.close()

    def start(
        self, name: str, arguments: list[str], environment: Mapping[str, str], *, piped: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a Python module as a process that logs to a file; ``piped`` to talk with it."""
        log = self._logs[name] = self.log(name).open("wb")
        self._running[name] = subprocess.Popen(  # noqa: S603 - a program of ours, with arguments of ours
            [sys.executable, "-m", *arguments],
            env=environment,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            process_group=0,  # Ctrl-C is for us; what becomes of the others is ours to say
        )
        return self._running[name]

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def __getitem__(self, name: str) -> subprocess.Popen[bytes]:
        return self._running[name]

    def ended(self) -> dict[str, int]:
        """Exit statuses of those that have ended."""
        return {name: each.returncode for name, each in self._running.items() if each.poll() is not None}


def clean_environment() -> dict[str, str]:
    """This process's, without settings that were meant for somebody else."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}


class RemoteServer:
    """The demo's server, in a process of its own."""

    def __init__(self, processes: Processes, key: str) -> None:
        process = processes.start("server", ["outbox.demo.server"], clean_environment(), piped=True)
        self.pid = process.pid
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{KEY_ID} {key}\n".encode("ascii"))
        process.stdin.flush()
        port = process.stdout.readline()
        if not port:
            raise DemoError("demo.server_failed", f"its log ends: {_tail(processes, 'server')}")
        self.port = int(port)
        self.origin = f"http://127.0.0.1:{self.port}"

    def ledger(self) -> dict[str, Any]:
        """All that the server knows."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/ledger")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException) as error:
            raise DemoError("demo.server_failed", type(error).__name__) from None
        finally:
            connection.close()
        return read(found)


class Workers:
    """``outbox worker`` processes."""

    def __init__(self, processes: Processes, url: URL, origin: str, key_file: Path) -> None:
        self._processes = processes
        self._environment = {
            **clean_environment(),
            # Not as arguments, which everybody on the machine can read.
            "OUTBOX_DATABASE_URL": url.render_as_string(hide_password=False),
            "OUTBOX_CMS_ORIGIN": origin,
            "OUTBOX_CMS_KEY_ID": KEY_ID,
            "OUTBOX_CMS_KEY_FILE": str(key_file),
        }
        self.pids: dict[str, int] = {}
        self.killed: list[str] = []

    def start(self) -> str:
        """Start another one and return its id."""
        name = f"worker-{len(self.pids) + 1}"
        options = [part for option in WORKER_OPTIONS.items() for part in option]
        arguments = ["outbox", "worker", "--worker-id", name, "--allow-loopback-http", "--verbose", *options]
        self.pids[name] = self._processes.start(name, arguments, self._environment).pid
        return name

    def all_run(self) -> bool:
        """Whether every one that has been started, and not been killed, has got to work."""
        return all(self._processes.log(name).stat().st_size for name in self.pids if name not in self.killed)

    def kill(self, name: str) -> None:
        """End one with SIGKILL: it gets to do nothing more."""
        self._processes[name].kill()
        self._processes[name].wait()
        self.killed.append(name)

    def check_alive(self) -> None:
        """Refuse to go on when one has ended by itself."""
        ended = self._processes.ended()
        for name in self.pids:
            if name in ended and name not in self.killed:
                tail = _tail(self._processes, name)
                raise DemoError("demo.worker_failed", f"{name} with status {ended[name]}; its log ends: {tail}")

    def stop(self, patience: float = 10) -> dict[str, int]:
        """Ask those that live to stop, and return their exit statuses."""
        alive = [name for name in self.pids if name not in self.killed]
        for name in alive:
            self._processes[name].send_signal(signal.SIGTERM)
        return {name: self._wait(name, patience) for name in alive}

    def _wait(self, name: str, patience: float) -> int:
        try:
            return self._processes[name].wait(patience)
        except subprocess.TimeoutExpired:
            raise DemoError("demo.worker_failed", f"{name} running {patience:g} s after SIGTERM") from None


def new_key(directory: Path) -> tuple[Path, str]:
    """A signing key, and the file it is in."""
    key = secrets.token_hex(32)
    path = directory / "key"
    path.touch(mode=0o600)
    path.write_text(f"{key}\n", encoding="ascii")
    return path, key


def _tail(processes: Processes, name: str) -> str:
    lines = processes.log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "(empty)"
