"""Several processes on one database: forked, working side by side, and killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.dialects import sqlite
from tests.support import (
    PATIENCE,
    WORKER,
    T,
    claimed,
    dump,
    ids,
    make_outbox,
    note,
    notes,
    put,
    refused,
    response,
    row_count,
    together,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


# -- fork -----------------------------------------------------------------------------------------------------------


def in_fork(action: Callable[[], Any]) -> Any:
    """What ``action`` returns in a forked copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer = pickle.dumps(("returned", action()))
        except BaseException as error:  # whatever it is, the parent raises it
            answer = pickle.dumps(("raised", repr(error)))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        how, value = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert how == "returned", value
    return value


def sessions(outbox: Outbox) -> set[Any]:
    """The connection that the outbox's own engine would use, by a name that no other has."""
    connection = outbox._own().raw_connection()
    raw: Any = connection.dbapi_connection
    found = {raw.info.backend_pid} if hasattr(raw, "info") else {(os.getpid(), id(outbox._own().pool))}
    connection.close()
    return found


def work(outbox: Outbox, number: int) -> str:
    outbox.enqueue(note(number), now=T)
    claim = claimed(outbox)
    outbox.complete(claim, response(claim.event_id), now=T)
    return claim.event_id


@pytest.mark.parametrize("used", [True, False])
def test_a_forked_process_has_connections_of_its_own(outbox: Outbox, engine: Engine, used: bool) -> None:
    mine = set()
    if used:
        work(outbox, 1)
        mine = sessions(outbox)

    def child() -> tuple[Any, ...]:
        done = [work(outbox, number) for number in (2, 3)]
        return done, sessions(outbox), outbox._own().pool is engine.pool, outbox.health(now=T).status

    done, theirs, shared, health = in_fork(child)
    assert (done, shared, health) == (["note-2", "note-3"], False, "ok")
    assert not mine & theirs
    if used:
        assert sessions(outbox) == mine  # and they still answer
    assert work(outbox, 4) == "note-4"
    assert outbox._own().pool is engine.pool
    assert {row["status"] for row in dump(engine)} == {"succeeded"}


def test_a_fork_in_the_middle_of_a_hosts_transaction(outbox: Outbox, engine: Engine) -> None:
    put(outbox, "pending", 1)
    with engine.connect() as connection:
        connection.execute(text("SELECT count(*) FROM outbox_event"))
        assert in_fork(lambda: claimed(outbox).event_id) == "note-1"
        connection.rollback()
        outbox.enqueue(note(2), connection=connection)
        connection.commit()
    assert row_count(engine) == 2


def test_a_forked_host_that_has_begun_anew(outbox: Outbox, engine: Engine) -> None:
    put(outbox, "pending", 1)

    def child() -> Any:
        engine.dispose(close=False)  # as SQLAlchemy tells hosts to
        with engine.begin() as connection:
            outbox.enqueue(note(2), connection=connection, now=T)
        return [claim.event_id for claim in outbox.claim_batch(WORKER, now=T)], outbox._own().pool is engine.pool

    assert in_fork(child) == (["note-1", "note-2"], True)
    assert outbox.health(now=T).counts["leased"] == 2


def test_a_fork_of_a_fork(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(5), now=T)

    def claim() -> str:
        return claimed(outbox).event_id

    assert [claim(), *in_fork(lambda: [claim(), in_fork(claim), claim()]), claim()] == ids(5)


def test_threads_of_a_forked_process(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(60), now=T)

    def drain() -> list[str]:
        found = list[str]()
        while claims := outbox.claim_batch(WORKER, limit=7, now=T):
            found += [claim.event_id for claim in claims]
        return found

    found = in_fork(lambda: together(*[drain] * 4))
    assert sorted(event_id for each in found for event_id in each) == sorted(ids(60))


# -- other programs -------------------------------------------------------------------------------------------------

PROLOGUE = """
import json, sys
from sqlalchemy import create_engine
from tests.support import *

engine = create_engine(sys.argv[1])
outbox = make_outbox(engine)

def say(**words):
    print(json.dumps(words), flush=True)

outbox.health()
"""


class Program:
    """A Python program on the database; it says JSON lines and goes on when it is told to."""

    def __init__(self, url: str, source: str) -> None:
        command = [sys.executable, "-c", PROLOGUE + source, url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def hears(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(PATIENCE)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.wait(PATIENCE) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def programs(url: str, *sources: str) -> Iterator[list[Program]]:
    started = [Program(url, source) for source in sources]
    try:
        yield started
    finally:
        for program in started:
            program.close()


DRAIN = """
say(ready=True)
sys.stdin.readline()
seen = []
destination = Scripted(lambda claim: seen.append(claim.event_id) or response(claim.event_id))
while outbox.run_once(destination, f"worker-{__import__('os').getpid()}") is not None:
    pass
say(seen=seen)
"""


def test_two_workers_share_the_work(outbox: Outbox, database_url: str) -> None:
    outbox.enqueue_many(notes(200))
    with programs(database_url, DRAIN, DRAIN) as workers:
        for worker in workers:
            assert worker.hears() == {"ready": True}
        for worker in workers:
            worker.go()
        seen = [worker.hears()["seen"] for worker in workers]
    assert sorted(seen[0] + seen[1]) == sorted(ids(200))
    health = outbox.health(deep=True)
    assert (health.status, health.due, health.counts["succeeded"]) == ("ok", 0, 200)


ENQUEUE = """
say(ready=True)
sys.stdin.readline()
say(created=[status.created_at for status in outbox.enqueue_many(EVENTS)])
"""


def test_two_hosts_enqueue_the_same_events(outbox: Outbox, database_url: str, engine: Engine) -> None:
    sources = [ENQUEUE.replace("EVENTS", events) for events in ("notes(100)", "reversed(notes(100))")]
    with programs(database_url, *sources) as hosts:
        for host in hosts:
            host.hears()
        for host in hosts:
            host.go()
        one, other = (host.hears()["created"] for host in hosts)
    assert one == list(reversed(other))
    assert sorted(row["event_id"] for row in dump(engine)) == sorted(ids(100))


CRASH_DELIVERING = """
def deliver(claim):
    say(event_id=claim.event_id, payload=claim.payload)
    sys.stdin.readline()

outbox.run_once(Scripted(deliver), WORKER, now=T)
"""


def test_a_crash_while_delivering_replays_the_very_same_event(outbox: Outbox, database_url: str) -> None:
    outbox.enqueue(note(), now=T)
    with programs(database_url, CRASH_DELIVERING) as (worker,):
        told = worker.hears()
        worker.kill()
    assert outbox.claim("worker-2", now=T + 599) is None
    claim = claimed(outbox, now=T + 600)
    assert (claim.event_id, claim.payload, claim.attempt) == (told["event_id"], told["payload"], 2)


OPEN_TRANSACTION = """
with engine.begin() as connection:
    outbox.enqueue_many(notes(3), connection=connection)
    say(enqueued=True)
    sys.stdin.readline()
"""


def test_a_host_that_crashes_before_its_commit(outbox: Outbox, database_url: str, engine: Engine) -> None:
    with programs(database_url, OPEN_TRANSACTION) as (host,):
        host.hears()
        assert row_count(engine) == 0
        host.kill()
    assert [status.status for status in outbox.enqueue_many(notes(3))] == ["pending"] * 3
    assert row_count(engine) == 3


def test_another_process_holds_sqlites_lock(sqlite_url: str, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(sqlite_url, connect_args={"timeout": 0})
    outbox = make_outbox(engine)
    outbox.health()
    monkeypatch.setattr(sqlite, "PATIENCE", 0.02)
    with programs(sqlite_url, OPEN_TRANSACTION) as (host,):
        host.hears()
        with refused("dispatch.database_busy", says="SQLITE_BUSY"):
            outbox.enqueue(note(9), now=T)
        monkeypatch.setattr(sqlite, "PATIENCE", PATIENCE)
        waited = threading.Event()

        def nap(seconds: float) -> None:
            waited.set()
            threading.Event().wait(seconds)

        monkeypatch.setattr(sqlite.time, "sleep", nap)

        def finish() -> None:
            assert waited.wait(PATIENCE), "nobody waited"
            host.go()

        status, _ = together(lambda: outbox.enqueue(note(9), now=T), finish)
        host.end()
    assert status.status == "pending"
    assert row_count(engine) == 4
