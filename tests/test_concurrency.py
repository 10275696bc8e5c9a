"""Many at once on one database: worker processes with threads, hosts, and transactions that stay open."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from outbox import Outbox, Worker
from outbox.contracts.cms import CMS_CHANGE
from outbox.testing import ScriptedDestination
from tests.cms_events import event
from tests.databases import Databases
from tests.faults.host_main import share
from tests.faults.laboratory import Lab, until

PATIENCE = 60.0
SHARED, OWN, HOSTS, WORKERS = 30, 20, 3, 3


class Borrowed:
    """The databases of the other tests, as a place for a lab."""

    def __init__(self, name: str, databases: Databases) -> None:
        self.name = name
        self._databases = databases

    def fresh(self, directory: Path) -> Any:
        return self._databases.fresh()


def test_processes_threads_and_hosts_at_once(backend: str, databases: Databases, tmp_path: Path) -> None:
    """Nothing is lost and, since nothing fails, nothing is sent twice: also what every host enqueues."""
    place = Borrowed(backend, databases)
    with Lab("many", place, tmp_path, events=0, seed=1, deadline=float("inf")) as lab:
        for _ in range(WORKERS):
            lab.start(concurrency=4, batch=5, lease=100.0, timeout=50.0)
        hosts = [lab.process(share, lab.url, f"host-{number}", SHARED, OWN, number) for number in range(HOSTS)]
        for host in hosts:
            host.join(PATIENCE)
        assert [host.exitcode for host in hosts] == [0] * HOSTS
        names = [f"shared-{number}" for number in range(SHARED)]
        names += [f"host-{host}-{number}" for host in range(HOSTS) for number in range(OWN)]
        lab.committed = dict.fromkeys(names, "succeeded")
        result = lab.conclude()
        assert not result.problems
        assert (result.lost, result.duplicates, result.stale) == (0, 0, 0)
        assert {entry.requests for entry in lab.server.ledger.events.values()} == {1}
        workers = {line["event_id"]: worker for worker in lab.workers for line in worker.lines() if "won" in line}
        assert len(workers) == len(names)


@contextmanager
def working(outbox: Outbox, destination: ScriptedDestination, **settings: Any) -> Iterator[list[Worker]]:
    """Two workers on threads of this process, stopped afterwards."""
    options = {"concurrency": 4, "batch": 10, "lease_seconds": 100.0, **settings}
    workers = [Worker(outbox, {CMS_CHANGE.topic: destination}, **options) for _ in range(2)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)


def outbox_on(engine: Engine) -> Outbox:
    return Outbox(engine, contracts=(CMS_CHANGE,))


def enqueue(outbox: Outbox, prefix: str, count: int, connection: Connection | None = None) -> set[str]:
    names = [f"{prefix}-{number}" for number in range(count)]
    outbox.enqueue_many([event(event_id=name) for name in names], connection=connection)
    return set(names)


def delivered(destination: ScriptedDestination) -> set[str]:
    return {claim.event_id for claim in destination.claims}


def succeeded(outbox: Outbox, count: int) -> Callable[[], bool]:
    return lambda: outbox.health().counts["succeeded"] == count


# -- PostgreSQL: nothing waits ----------------------------------------------------------------------------------------


class LockWatcher:
    """Looks, again and again, for sessions of this database that wait for a lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.looks = 0
        self.waiting: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        query = text(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            # Two workers that announce themselves at once are nobody's open transaction.
            " AND EXISTS (SELECT FROM unnest(pg_blocking_pids(pid)) AS blocking JOIN pg_stat_activity AS other"
            "             ON other.pid = blocking WHERE other.state LIKE 'idle in transaction%')"
        )
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not self._stop.wait(0.002):
                self.looks += 1
                self.waiting += connection.scalars(query).all()


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_workers_wait_for_no_hosts_transaction(isolation: str, pg_engine: Engine) -> None:
    """A host leaves its transaction open with events in it; workers claim and settle everything else to the end."""
    outbox, destination = outbox_on(pg_engine), ScriptedDestination(timeout=50)
    others = enqueue(outbox, "before", 100)
    with (
        pg_engine.connect().execution_options(isolation_level=isolation) as host,
        host.begin() as transaction,
        LockWatcher(pg_engine) as locks,
    ):
        open_ones = enqueue(outbox, "open", 20, host)
        enqueue(outbox, "before", 100, host)  # what is there already, joined by nobody
        with working(outbox, destination):
            others |= enqueue(outbox, "after", 100)
            until(succeeded(outbox, 200), "everything that is committed")
            others |= enqueue(outbox, "woken", 20)  # workers are idle now, and so the enqueue notifies
            until(succeeded(outbox, 220), "everything that is committed")
            looks = locks.looks
            until(lambda: locks.looks > looks, "one more look at the locks")
            assert delivered(destination) == others
            assert not locks.waiting
            transaction.commit()
            until(succeeded(outbox, 240), "what the host has committed at last")
    assert delivered(destination) == others | open_ones
    assert len(destination.claims) == 240


def test_what_is_rolled_back_at_last_is_never_sent(pg_engine: Engine) -> None:
    outbox, destination = outbox_on(pg_engine), ScriptedDestination(timeout=50)
    with pg_engine.connect() as host, host.begin() as transaction:
        enqueue(outbox, "open", 20, host)
        with working(outbox, destination):
            others = enqueue(outbox, "other", 20)
            until(succeeded(outbox, 20), "everything that is committed")
            transaction.rollback()
            others |= enqueue(outbox, "later", 20)
            until(succeeded(outbox, 40), "everything that is committed")
    assert delivered(destination) == others


# -- SQLite: one writer, and readers that hold nobody up --------------------------------------------------------------


def test_workers_wait_for_the_writer_and_go_on(sqlite_engine: Engine) -> None:
    """SQLite has one writer. While that is a host, workers wait, which the host does not notice, and then go on."""
    refused = threading.Event()

    class Cursor(sqlite3.Cursor):
        def execute(self, statement: str, *parameters: Any) -> Any:
            try:
                return super().execute(statement, *parameters)
            except sqlite3.OperationalError:
                if statement == "BEGIN IMMEDIATE":
                    refused.set()
                raise

    class Connection(sqlite3.Connection):
        def cursor(self, *_: Any) -> Any:
            return Cursor(self)

        def execute(self, *arguments: Any) -> Any:
            return Cursor(self).execute(*arguments)

    outbox = outbox_on(sqlite_engine)
    destination = ScriptedDestination(timeout=50)
    names = enqueue(outbox, "before", 20)
    workers_engine = create_engine(sqlite_engine.url, connect_args={"factory": Connection, "timeout": 0.01})
    with sqlite_engine.connect() as host:
        host.exec_driver_sql("BEGIN IMMEDIATE")
        names |= enqueue(outbox, "open", 20, host)
        with working(outbox_on(workers_engine), destination):
            assert refused.wait(PATIENCE)
            assert outbox.health().counts["pending"] == 20  # readers see what is committed, and wait for nobody
            assert not destination.claims
            host.exec_driver_sql("COMMIT")
            until(succeeded(outbox, 40), "everything")
    workers_engine.dispose()
    assert delivered(destination) == names
    assert len(destination.claims) == 40


def test_readers_hold_nobody_up(sqlite_engine: Engine) -> None:
    """In WAL mode a reader keeps its snapshot for as long as it likes, and hosts and workers write on."""
    outbox, destination = outbox_on(sqlite_engine), ScriptedDestination(timeout=50)
    names = enqueue(outbox, "before", 20)
    query = "SELECT count(*) FROM outbox_event WHERE status = 'pending'"
    with sqlite_engine.connect() as reader:
        reader.exec_driver_sql("BEGIN")
        assert reader.exec_driver_sql(query).scalar_one() == 20
        with working(outbox, destination):
            names |= enqueue(outbox, "after", 20)
            until(succeeded(outbox, 40), "everything")
        assert reader.exec_driver_sql(query).scalar_one() == 20
        reader.exec_driver_sql("ROLLBACK")
        assert reader.exec_driver_sql(query).scalar_one() == 0
    assert delivered(destination) == names
