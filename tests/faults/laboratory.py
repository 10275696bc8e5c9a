"""Where a fault is let loose: a database, a receiver with a ledger, hosts that enqueue, worker processes, a verdict."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from sqlalchemy import Engine, create_engine, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from outbox import DatabaseError, Outbox, OutboxError
from outbox.contracts.cms import CMS_CHANGE
from outbox.migrate import upgrade
from outbox.schema import outbox_event
from outbox.testing.ledger import ACCEPT, REFUSE, Arrival, LedgerServer, Manner
from tests.cms_events import event
from tests.faults import worker_main
from tests.faults.worker_main import Settings, read_report
from tests.postgres import PrivatePostgres

MAX_ATTEMPTS = 20
#: One host transaction in so many is rolled back; one event in so many is refused by the receiver for good.
ROLLBACK_EVERY = 7
REFUSE_EVERY = 40
REFUSED = "content_not_translatable"
#: The receiver knows by the name which events to refuse, so that the lab knows too.
REFUSED_MARK = "refuse"
PATIENCE = 60.0
#: Where in its directory a lab keeps an SQLite database; logs and reports are beside it.
DISK = "disk"
STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Result:
    """What came of one fault on one database.

    Attributes:
        disturbances: how often something was killed, cut, stopped or held.
        duplicates: requests for events that the receiver had taken up already.
        lost: committed events that the receiver neither took up nor refused. Has to be 0.
        stale: results that came too late and were refused.
        recovery: seconds from the end of the fault until everything was settled that had been committed by then.
        problems: one sentence for each promise that was broken.
    """

    fault: str
    database: str
    events: int
    disturbances: int
    duplicates: int
    lost: int
    stale: int
    recovery: float
    seconds: float
    problems: tuple[str, ...] = ()


class Place(Protocol):
    """Where databases come from."""

    name: str

    def fresh(self, directory: Path) -> AbstractContextManager[str]:
        """The URL of a migrated database of its own."""


class SqlitePlace:
    name = "sqlite"

    @contextmanager
    def fresh(self, directory: Path) -> Iterator[str]:
        url = f"sqlite:///{directory / 'outbox.sqlite3'}"
        engine = create_engine(url)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        engine.dispose()
        upgrade(url)
        yield url


class PostgresPlace:
    """A private server, durable as in production, that faults may stop and start."""

    name = "postgresql"

    def __init__(self, server: PrivatePostgres) -> None:
        self.server = server
        self._number = itertools.count()

    @contextmanager
    def fresh(self, directory: Path) -> Iterator[str]:
        # Not dropped afterwards: the server is thrown away as a whole.
        name = f"lab_{next(self._number)}"
        with self._server() as connection:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        yield self._url(name)

    @cached_property
    def _template(self) -> str:
        with self._server() as connection:
            connection.exec_driver_sql("CREATE DATABASE lab_template")
        upgrade(self._url("lab_template"))
        return "lab_template"

    def _url(self, name: str) -> str:
        return make_url(self.server.url()).set(database=name).render_as_string(hide_password=False)

    @contextmanager
    def _server(self) -> Iterator[Any]:
        engine = create_engine(self.server.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            yield connection
        engine.dispose()


class StuckError(AssertionError):
    """What the lab waited for did not come."""


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Return once ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise StuckError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, context: Any, settings: Settings) -> None:
        self.settings = settings
        self.killed = False
        self.process: BaseProcess = context.Process(target=worker_main.main, args=(settings,), name=settings.name)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: int) -> None:
        """Send a signal, once the worker has said that it hears them: before, most of them would end it."""
        until(self._hears, f"{self.settings.name} hears signals")
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _hears(self) -> bool:
        return not self.process.is_alive() or any("ready" in line for line in self.lines())

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.join(PATIENCE)

    def stop(self) -> str | None:
        """Ask it to stop; what is wrong with how it did, if anything."""
        if self.killed:
            return None
        self.send(signal.SIGTERM)
        self.process.join(STOP_SECONDS)
        name = self.settings.name
        if self.process.is_alive():
            self.kill()
            return f"{name} hung: it did not stop within {STOP_SECONDS:g} s of SIGTERM"
        if self.process.exitcode:
            return f"{name} ended with status {self.process.exitcode}; its log ends: {_tail(self.settings.log)}"
        return None

    def lines(self) -> list[dict[str, Any]]:
        return read_report(Path(self.settings.report))


class Lab:
    """One fault's world. Everything that was started in it has ended when its ``with`` block has.

    Attributes:
        url: the database, reached directly.
        events: how many events the fault is asked for, as a measure; rolled back ones come on top.
        committed: ids of events whose transaction was committed, and the state each is to end in.
        rolled_back: ids of those whose transaction was not.
        disturbances: how often something was killed, cut, stopped or held.
    """

    def __init__(self, fault: str, place: Place, directory: Path, *, events: int, seed: int, deadline: float) -> None:
        self.fault = fault
        self.place = place
        self.directory = directory
        self.disk = directory / DISK
        self.events = events
        self.choose = random.Random(f"{seed}:{fault}:{place.name}")
        self.deadline = deadline
        self.committed: dict[str, str] = {}
        self.rolled_back: set[str] = set()
        self.disturbances = 0
        self.problems: list[str] = []
        self.workers: list[WorkerProcess] = []
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.worker_main", "tests.faults.host_main"])
        self._host: threading.Thread | None = None
        self._processes: list[BaseProcess] = []
        self._ended_at = math.inf
        self._before: set[str] = set()
        self._began_at = time.monotonic()

    def __enter__(self) -> Self:
        self.disk.mkdir(parents=True, exist_ok=True)
        try:
            self.url = self._stack.enter_context(self.place.fresh(self.disk))
            self.engine: Engine = create_engine(self.url, pool_pre_ping=True)
            self._stack.callback(self.engine.dispose)
            self.outbox = Outbox(self.engine, contracts=(CMS_CHANGE,))
            self.server = self._stack.enter_context(LedgerServer(manner_of()))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.deadline = 0.0  # which ends a host that is still trying
        if self._host is not None:
            self._host.join(PATIENCE)
        for process in self._processes:
            process.kill()  # a stopped one as well
            process.join(PATIENCE)
        self._stack.close()

    def enter(self, resource: Any) -> Any:
        """Use a context manager until the lab closes."""
        return self._stack.enter_context(resource)

    # -- hosts ----------------------------------------------------------------------------------------------------

    def enqueue(self, count: int) -> None:
        """Commit ``count`` more events, in transactions of a few, and roll some others back."""
        last = len(self.committed) + count
        while len(self.committed) < last:
            self._transaction(min(self.choose.randint(1, 5), last - len(self.committed)))

    def _transaction(self, count: int) -> None:
        number = next(self._numbers)
        doomed = number % ROLLBACK_EVERY == 0
        names = [f"{'doomed' if doomed else 'kept'}-{number}-{part}" for part in range(count)]
        if not doomed:
            names = [
                f"{REFUSED_MARK}-{name}" if (len(self.committed) + part) % REFUSE_EVERY == REFUSE_EVERY - 1 else name
                for part, name in enumerate(names)
            ]
        while not self._attempt(names, doomed=doomed):
            self.check_time()
            time.sleep(0.05)
        if doomed:
            self.rolled_back.update(names)
        else:
            self.committed.update((name, "failed" if name.startswith(REFUSED_MARK) else "succeeded") for name in names)

    def _attempt(self, names: list[str], *, doomed: bool) -> bool:
        """A host's transaction. One that ended without an answer may have been committed: it is made again, and being
        idempotent comes to the same."""
        try:
            with self.engine.connect() as connection, connection.begin() as transaction:
                self.outbox.enqueue_many(
                    [event(event_id=name) for name in names], connection=connection, max_attempts=MAX_ATTEMPTS
                )
                if doomed:
                    transaction.rollback()
        except (SQLAlchemyError, DatabaseError):
            return False
        return True

    @contextmanager
    def enqueuing(self, count: int, *, pause: float = 0.004) -> Iterator[None]:
        """A host that commits ``count`` events at its own pace meanwhile."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(0, count, 5):
                    self.enqueue(5)
                    time.sleep(pause)
            except BaseException as error:
                errors.append(error)

        self._host = thread = threading.Thread(target=work, name="host", daemon=True)
        thread.start()
        yield
        thread.join(PATIENCE)
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise StuckError("the host is still enqueuing")

    # -- workers --------------------------------------------------------------------------------------------------

    def start(self, **settings: Any) -> WorkerProcess:
        """Start another worker process, on the lab's own database and receiver unless told otherwise."""
        name = f"worker-{len(self.workers) + 1}"
        report, log = (str(self.directory / f"{name}.{kind}") for kind in ("jsonl", "log"))
        defaults = Settings(url=self.url, origin=self.server.origin, name=name, report=report, log=log)
        worker = WorkerProcess(self._context, replace(defaults, **settings))
        self.workers.append(worker)
        self._processes.append(worker.process)
        return worker

    def process(self, target: Callable[..., None], *arguments: Any) -> BaseProcess:
        """A process of another kind, started and left to the fault."""
        process: BaseProcess = self._context.Process(target=target, args=arguments)
        process.start()
        self._processes.append(process)
        return process

    def disturbed(self, times: int = 1) -> None:
        self.disturbances += times
        self._ended_at, self._before = time.monotonic(), set(self.committed)

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise StuckError("the time given to this run is over")

    # -- looking --------------------------------------------------------------------------------------------------

    def wait_for_requests(self, more: int) -> None:
        """Return once ``more`` further requests have reached the receiver, or nothing is left to send."""
        wanted = self.server.ledger.requests + more
        until(lambda: self.server.ledger.requests >= wanted or self.finished(), f"{more} more requests")

    def wait_for_claims(self) -> None:
        """Return once some event is leased."""
        until(lambda: self.counts().get("leased", 0) > 0, "a claim")

    def counts(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(connection.scalars(select(outbox_event.c.status)))

    def settled(self) -> bool:
        try:
            return not self.counts().keys() - {"succeeded", "failed"}
        except SQLAlchemyError:
            return False

    def finished(self) -> bool:
        """Whether everything is settled and nobody is going to enqueue any more."""
        return not (self._host is not None and self._host.is_alive()) and self.settled()

    def wait_until_settled(self, seconds: float = PATIENCE) -> None:
        """Wait for the end of everything committed so far."""
        until(self.settled, f"everything settled (now {dict(self.counts())})", seconds)

    # -- the verdict ----------------------------------------------------------------------------------------------

    def conclude(self) -> Result:
        """Wait for the end, stop the workers, and hold the two sides against each other."""
        self.wait_until_settled()
        stopping = [threading.Thread(target=self._stop, args=(worker,)) for worker in self.workers]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        ledger, lines = self.server.ledger, self._settled_lines()
        lost = self.committed.keys() - ledger.accepted - ledger.refused
        self.problems += self._disagreements(lines, lost)
        return Result(
            fault=self.fault,
            database=self.place.name,
            events=len(self.committed),
            disturbances=self.disturbances,
            duplicates=ledger.replays,
            lost=len(lost),
            stale=sum(not line["won"] for line in lines),
            recovery=self._recovery(lines),
            seconds=time.monotonic() - self._began_at,
            problems=tuple(self.problems),
        )

    def _stop(self, worker: WorkerProcess) -> None:
        problem = worker.stop()
        if problem is not None:
            self.problems.append(problem)

    def _recovery(self, lines: list[dict[str, Any]]) -> float:
        before = self._before or self.committed.keys()
        last = max((line["at"] for line in lines if line["won"] and line["event_id"] in before), default=0.0)
        return max(0.0, last - self._ended_at)

    def _settled_lines(self) -> list[dict[str, Any]]:
        return [line for worker in self.workers for line in worker.lines() if "won" in line]

    def _disagreements(self, lines: list[dict[str, Any]], lost: set[str]) -> Iterator[str]:
        ledger = self.server.ledger
        with self.engine.connect() as connection:
            rows = {row.event_id: row for row in connection.execute(select(outbox_event))}
        ends = [line for line in lines if line["won"] and line["status"] in ("succeeded", "failed")]
        winners = Counter(line["event_id"] for line in ends)
        faults: dict[str, Any] = {
            "committed, and not in the ledger": lost,
            "committed, and not in the outbox": self.committed.keys() - rows.keys(),
            "in the outbox, and not committed": rows.keys() - self.committed.keys(),
            "rolled back, and sent": ledger.events.keys() & self.rolled_back,
            "sent, and never enqueued": ledger.events.keys() - self.committed.keys() - self.rolled_back,
            "not in the state they should be in": [
                f"{name} ({rows[name].status}, {rows[name].last_error_code})"
                for name, status in self.committed.items() if name in rows and rows[name].status != status
            ],
            "succeeded, and not taken up": [
                name for name, row in rows.items() if row.status == "succeeded" and name not in ledger.accepted
            ],
            "receipts that differ": [
                name for name, row in rows.items()
                if row.status == "succeeded" and json.loads(row.receipt) != ledger.events[name].receipt
            ],
            "settled for good more than once": [name for name, times in winners.items() if times > 1],
            "settled by an attempt that was not the last": [
                line["event_id"] for line in ends if rows[line["event_id"]].attempts != line["attempt"]
            ],
            "taken up more than once": [name for name, entry in ledger.events.items() if entry.accepted > 1],
        }  # fmt: skip
        yield from (f"{what}: {_some(names)}" for what, names in faults.items() if names)
        if ledger.altered or ledger.bad_signatures or ledger.malformed:
            yield f"requests altered on the way: {ledger.altered + ledger.bad_signatures + ledger.malformed}"
        try:
            self.outbox.health(deep=True)
        except OutboxError as error:
            yield f"deep health: {error}"


def manner_of(treat: Callable[[Arrival], Manner] | None = None) -> Callable[[Arrival], Manner]:
    """Refuse for good what is marked for it; the rest as ``treat`` says."""

    def script(arrival: Arrival) -> Manner:
        if arrival.event_id.startswith(REFUSED_MARK):
            return REFUSE
        return ACCEPT if treat is None else treat(arrival)

    return script


def _some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _tail(path: str) -> str:
    lines = Path(path).read_text(errors="replace").strip().splitlines() if Path(path).exists() else []
    return lines[-1] if lines else "(empty)"
