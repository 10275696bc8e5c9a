"""The story of the demo, from an empty database to the comparison."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, inspect, select

from outbox.demo.actors import DemoError, Host, Processes, RemoteServer, Workers, new_key
from outbox.demo.report import DatabaseSide, Report, ServerSide, compare
from outbox.demo.view import Facts, View, view_for_output
from outbox.dialects import dialect_for
from outbox.dialects.engines import program_engine, program_url, shown, throw_away_place
from outbox.migrate import upgrade
from outbox.records import STATUSES
from outbox.schema import EVENT_TABLE, outbox_event

#: Seconds after which it has failed, however far it has got; and for how long the host spreads its changes.
TIME_LIMIT: Final = 90.0
CHANGES_SECONDS: Final = 5.0
RESTART_AFTER: Final = 1.0
#: What of the ledger is shown on the way.
_SHOWN: Final = {
    "requests": "requests", "unavailable": "answered 503", "dropped": "dropped", "slow": "answered slowly",
}  # fmt: skip
_OPEN: Final = frozenset(STATUSES) - {"succeeded", "failed"}
_TICK: Final = 0.04
_LOOK_EVERY: Final = 0.2


def play(database_url: str | None, *, events: int, keep: bool) -> int:
    """Run the demo and return its exit status."""
    with ExitStack() as stack:
        stack.enter_context(_terminated_like_interrupted())
        directory = stack.enter_context(_directory(keep))
        url = program_url(database_url or f"sqlite:///{directory / 'demo.sqlite3'}")
        _refuse_database_in_use(url)
        name = f"outbox_demo_{secrets.token_hex(4)}"
        place = stack.enter_context(throw_away_place(url, name, keep=keep))
        report = _perform(view := view_for_output(), place, directory, events)
        view.report(report)
        if keep:
            view.remark(f"kept: logs and ledger.json in {directory}, events in {_where(place, name)}")
    return 0 if report.agrees else 1


def _where(place: URL, name: str) -> str:
    return f"{shown(place)}{f', schema {name}' if name in str(place.query) else ''}"


def _perform(view: View, url: URL, directory: Path, events: int) -> Report:
    """Everything but making and removing the place."""
    with ExitStack() as stack:
        engine = program_engine(url)
        stack.callback(engine.dispose)
        stack.enter_context(dialect_for(engine.dialect.name).mapped_errors())
        upgrade(engine)
        view.remark(f"migrated {shown(url)}")
        processes = stack.enter_context(Processes(directory))
        key_file, key = new_key(directory)
        server = RemoteServer(processes, key)
        view.remark(f"the remote server listens at {server.origin}: pid {server.pid}")
        workers = Workers(processes, url, server.origin, key_file)
        host = Host(engine, events)
        with view.running():
            Story(view, host, server, workers, events).tell()
        _stop(view, workers)
        ledger = read_ledger(server)
        (directory / "ledger.json").write_text(json.dumps(ledger, indent=1), encoding="utf-8")
        return compare(read_database(host), ServerSide.of(ledger), killed=len(workers.killed))


def read_ledger(server: RemoteServer) -> dict[str, Any]:
    """The server's side of the story."""
    return server.ledger()


def read_database(host: Host) -> DatabaseSide:
    """The host's side of the story."""
    return DatabaseSide(
        frozenset(host.committed), frozenset(host.rolled_back), events=host.events(), articles=host.articles()
    )


def _stop(view: View, workers: Workers) -> None:
    view.remark("SIGTERM to the workers, which finish and exit")
    statuses = workers.stop()
    view.remark("exit statuses: " + ", ".join(f"{name} {status}" for name, status in statuses.items()))


class Story:
    """What happens while the host works, told in small steps."""

    def __init__(self, view: View, host: Host, server: RemoteServer, workers: Workers, changes: int) -> None:
        self._view = view
        self._host = host
        self._server = server
        self._workers = workers
        self._changes = changes
        self._began = time.monotonic()
        self._change_at = self._look_at = self._began
        self._restart_at: float | None = None
        self._settled = False

    def tell(self) -> None:
        """From the first change to the last settled event, or to the time limit."""
        for _ in range(2):
            self._start_worker()
        while not self._settled and time.monotonic() < self._began + TIME_LIMIT:
            self._change()
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_EVERY
                self._look()
            self._restart()
            time.sleep(_TICK)
        if self._settled:
            self._view.remark("everything is settled")
        else:
            self._view.remark(f"not everything was settled within {TIME_LIMIT:g} s")

    def _start_worker(self) -> None:
        name = self._workers.start()
        self._view.remark(f"{name} starts: pid {self._workers.pids[name]}")

    def _change(self) -> None:
        while not self._host.done and time.monotonic() >= self._change_at:
            self._host.change()
            self._change_at += CHANGES_SECONDS / self._changes

    def _look(self) -> None:
        ledger = self._server.ledger()
        counts = self._host.counts()
        made = len(self._host.committed) + len(self._host.rolled_back)
        self._view.progress(Facts(self._changes, made, counts, {words: ledger[name] for name, words in _SHOWN.items()}))
        if ledger["held"] is not None and not ledger["cut_off"]:
            self._kill_sender(ledger["held"])
        self._workers.check_alive()
        # Not before the new worker runs, since that is how it goes on after a crash.
        restarted = self._restart_at is None and self._workers.all_run()
        self._settled = self._host.done and restarted and not any(counts[status] for status in _OPEN)

    def _kill_sender(self, event_id: str) -> None:
        owner = self._host.owner(event_id)
        if owner not in self._workers.pids or owner in self._workers.killed:
            return
        self._view.remark(f"the server has {event_id} in its ledger and has not answered yet:")
        self._view.remark(f"SIGKILL to {owner}, pid {self._workers.pids[owner]}, which waits for that answer")
        self._workers.kill(owner)
        self._restart_at = time.monotonic() + RESTART_AFTER

    def _restart(self) -> None:
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._restart_at = None
            self._start_worker()


def _refuse_database_in_use(url: URL) -> None:
    """A demo beside real events would be confusing, and its load unkind.

    Raises:
        DemoError: ``demo.database_in_use``.
    """
    engine = program_engine(url, create=True)
    try:
        with dialect_for(engine.dialect.name).mapped_errors(), engine.connect() as connection:
            if not inspect(connection).has_table(EVENT_TABLE):
                return
            if connection.execute(select(outbox_event.c.id).limit(1)).first() is None:
                return
    finally:
        engine.dispose()
    raise DemoError("demo.database_in_use", shown(url))


@contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does: with everything cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
