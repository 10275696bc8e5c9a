"""Work for processes of their own: workers and hosts, told to go by a pipe."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from benchmarks.databases import engine, outbox
from benchmarks.events import TOPIC, NoOp, event, response
from outbox import Outbox, Worker
from outbox.contracts.cms import CMS_CHANGE
from outbox.destinations.cms import CMSDestination, HMACSigner
from outbox.records import Claim, Settled

# Forked from a server that has everything imported and no threads: at once, and as clean as one that was spawned.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.children"])

SIGNER = HMACSigner("bench-1", b"k" * 32)


def cms(origin: str) -> CMSDestination:
    return CMSDestination(origin, SIGNER, allow_loopback_http=True)


@contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, BaseProcess]]:
    """A process that runs ``work(pipe, *arguments)``; a pipe to it that is ready when it is."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield here, process
    finally:
        process.join(0.5)
        if process.is_alive():
            process.terminate()
            process.join()


def drain(pipe: Connection, url: str, origin: str | None, concurrency: int) -> None:
    """Say when ready, drain when told to, and answer with the number of events delivered."""
    destination = NoOp() if origin is None else cms(origin)
    worker = Worker(outbox(url), {TOPIC: destination}, concurrency=concurrency)
    pipe.send("ready")
    pipe.recv()
    pipe.send(worker.run(until_idle=True).succeeded)


class _Stamping:
    """A destination that tells when a request arrives."""

    timeout = 30.0

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def deliver(self, claim: Claim) -> dict[str, Any]:
        self._pipe.send((claim.event_id, time.monotonic()))
        return response(claim.event_id)


def stand_by(pipe: Connection, url: str, wake_ups: bool) -> None:
    """Run a worker for ever and report when each event arrives at its destination."""
    worker = Worker(outbox(url), {TOPIC: _Stamping(pipe)}, wake_ups=wake_ups)
    pipe.send("ready")
    worker.run()


def remember(pipe: Connection, url: str, events: int, steps: int) -> None:
    """Drain, and answer with the resident memory in bytes after each of ``steps`` parts."""
    seen, readings, process = 0, list[int](), psutil.Process(os.getpid())

    def observe(_: Settled) -> None:
        nonlocal seen
        seen += 1
        if seen % (events // steps) == 0:
            readings.append(process.memory_info().rss)

    Worker(outbox(url), {TOPIC: NoOp()}, observer=observe).run(until_idle=True)
    pipe.send(readings)


def host(pipe: Connection, url: str, first: int, seconds: float) -> None:
    """Commit one event after another in transactions of its own, and answer with how many a second."""
    own = engine(url, pool_size=1)
    box = Outbox(own, contracts=(CMS_CHANGE,))
    with own.begin() as connection:
        box.enqueue(event(first), connection=connection)
    pipe.send("ready")
    pipe.recv()
    began, done = time.monotonic(), 0
    while (took := time.monotonic() - began) < seconds:
        done += 1
        with own.begin() as connection:
            box.enqueue(event(first + done), connection=connection)
    pipe.send(done / took)
