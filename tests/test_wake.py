"""Waking idle workers, and leaving busy ones and their hosts alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from outbox import InputError, Outbox, Worker
from outbox import worker as worker_module
from outbox.dialects import postgresql
from tests.plain import Gate, Plain, Scripted, fill, running, until


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, [Plain()])


@pytest.fixture
def pg_outbox(pg_engine: Engine) -> Outbox:
    return Outbox(pg_engine, [Plain()])


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once idle, only a wake-up can help."""
    monkeypatch.setattr(worker_module, "LONGEST_POLL", 3600.0)
    monkeypatch.setattr(worker_module, "POLL_GROWTH", 1e6)


def idle_rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT topic, worker_id FROM outbox_idle")).all())


@contextmanager
def listening(engine: Engine) -> Iterator[Callable[[], int]]:
    """Counts the notifications that hosts send."""
    raw = engine.raw_connection()
    connection: Any = raw.dbapi_connection
    raw.detach()
    connection.autocommit = True
    connection.execute(f"LISTEN {postgresql.CHANNEL}")
    try:
        yield lambda: sum(1 for _ in connection.notifies(timeout=0))
    finally:
        connection.close()


def test_new_work_wakes_an_idle_worker(outbox: Outbox, no_polling: None) -> None:
    destination = Scripted()
    worker = Worker(outbox, {"test.plain": destination})
    with running(worker):
        until(lambda: worker._lanes["test.plain"].drained, "the worker idle")
        until(lambda: not worker._watch.announced or bool(idle_rows(outbox.engine)), "the worker announced")
        for number in range(3):
            outbox.enqueue({"id": f"late-{number}"})
            until(lambda n=number: len(destination.seen) == n + 1, "the new event delivered")  # type: ignore[misc]


def test_polling_alone_finds_new_work(outbox: Outbox, engine: Engine) -> None:
    destination = Scripted()
    worker = Worker(outbox, {"test.plain": destination}, wake_ups=False)
    with running(worker):
        until(lambda: worker._lanes["test.plain"].drained, "the worker idle")
        outbox.enqueue({"id": "late"})
        until(lambda: len(destination.seen) == 1, "the new event delivered")
    assert idle_rows(engine) == []


def test_a_host_notifies_only_while_a_worker_is_idle(pg_outbox: Outbox, pg_engine: Engine) -> None:
    with listening(pg_engine) as notifications:
        pg_outbox.enqueue({"id": "before"})
        assert notifications() == 0
        gate = Gate()
        destination = Scripted(lambda claim: gate(claim) if claim.event_id == "busy" else None)
        worker = Worker(pg_outbox, {"test.plain": destination}, concurrency=1)
        with running(worker):
            until(lambda: bool(idle_rows(pg_engine)), "the idle worker announced")
            pg_outbox.enqueue({"id": "wakes"})
            until(lambda: notifications() == 1, "one notification")
            until(lambda: len(destination.seen) == 2, "it delivered")
            # Kept busy, it takes its announcement back, and hosts fall silent.
            numbers = iter(range(100_000))

            def keep_busy() -> bool:
                pg_outbox.enqueue_many([{"id": f"load-{next(numbers)}"} for _ in range(20)])
                return not idle_rows(pg_engine)

            until(keep_busy, "the announcement withdrawn")
            notifications()
            pg_outbox.enqueue({"id": "busy"})
            pg_outbox.enqueue({"id": "silent"})
            assert notifications() == 0 or bool(idle_rows(pg_engine))
            gate.open()
        assert idle_rows(pg_engine) == []


def test_nothing_is_notified_before_the_host_commits(pg_outbox: Outbox, pg_engine: Engine) -> None:
    pg_outbox.announce("worker-1")
    with listening(pg_engine) as notifications:
        with pg_engine.connect() as connection, connection.begin() as transaction:
            pg_outbox.enqueue({"id": "undone"}, connection=connection)
            transaction.rollback()
        with pg_engine.connect() as connection, connection.begin():
            pg_outbox.enqueue({"id": "done"}, connection=connection)
            assert notifications() == 0
        until(lambda: notifications() == 1, "the notification, once committed")


@pytest.mark.parametrize("stale", [-1.0, 0.0])
def test_an_announcement_that_has_run_out_is_not_believed(pg_outbox: Outbox, pg_engine: Engine, stale: float) -> None:
    pg_outbox.announce("gone", seconds=stale)
    with listening(pg_engine) as notifications:
        pg_outbox.enqueue({"id": "unheard"})
        pg_outbox.announce("here")
        pg_outbox.enqueue({"id": "heard"})
        until(lambda: notifications() == 1, "only the second")
    assert [row.worker_id for row in idle_rows(pg_engine)] == ["here"]


def test_a_listener_that_is_cut_off_listens_again(pg_outbox: Outbox, pg_engine: Engine, no_polling: None) -> None:
    destination = Scripted()
    worker = Worker(pg_outbox, {"test.plain": destination})
    listeners = text("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()")

    def pids() -> set[int]:
        with pg_engine.connect() as connection:
            return set(connection.scalars(listeners))

    with running(worker):
        until(lambda: len(pids()) == 1, "the worker listening")
        (first,) = pids()
        with pg_engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": first})
        until(lambda: bool(pids() - {first}), "a new listener")
        until(lambda: bool(idle_rows(pg_engine)), "the worker announced")
        pg_outbox.enqueue({"id": "after"})
        until(lambda: len(destination.seen) == 1, "the event delivered")


def test_enqueue_stays_one_statement(outbox: Outbox, engine: Engine) -> None:
    statements: list[str] = []
    outbox.announce("worker-1")
    with engine.connect() as connection, connection.begin():
        outbox.enqueue({"id": "warm"}, connection=connection)
        event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        outbox.enqueue({"id": "counted"}, connection=connection)
        assert len(statements) == 1


@pytest.mark.parametrize("verb", ["announce", "withdraw"])
def test_a_worker_id_must_be_a_token(outbox: Outbox, verb: str) -> None:
    with pytest.raises(InputError) as refused:
        getattr(outbox, verb)("not a token")
    assert refused.value.code == "dispatch.worker_invalid"


def test_a_worker_that_stops_takes_its_announcement_back(pg_outbox: Outbox, pg_engine: Engine) -> None:
    fill(pg_outbox, 3)
    with running(Worker(pg_outbox, {"test.plain": Scripted()})):
        until(lambda: bool(idle_rows(pg_engine)), "the idle worker announced")
    assert idle_rows(pg_engine) == []


def test_the_watch_thread_ends_with_its_worker(outbox: Outbox) -> None:
    before = threading.active_count()
    with running(Worker(outbox, {"test.plain": Scripted()})):
        pass
    until(lambda: not any(thread.name == "outbox-watch" for thread in threading.enumerate()), "no watch left")
    until(lambda: threading.active_count() <= before, "no sender left")
