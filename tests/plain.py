"""A contract, a destination and a way of waiting that the tests of the engine share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outbox import Claim, Contract, InputError, Outbox, Worker

PATIENCE = 20.0  # seconds


class Plain(Contract):
    """An event is an object with an id; an answer echoes it."""

    def __init__(self, topic: str = "test.plain") -> None:
        self.topic = topic

    def check(self, event: Any) -> str:
        return str(event["id"])

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        if response != {"echo": event_id}:
            raise InputError("dispatch.response_invalid")
        return {"echo": event_id}


class Scripted:
    """Does what ``act`` says, and remembers what it was asked to deliver."""

    def __init__(self, act: Callable[[Claim], Any] | None = None, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self.seen: list[Claim] = []
        self._act = act

    def deliver(self, claim: Claim) -> Mapping[str, Any]:
        self.seen.append(claim)
        answer = self._act(claim) if self._act else None
        return {"echo": claim.event_id} if answer is None else answer


class Gate:
    """Deliveries stop here until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self, _: Claim) -> None:
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.005)


@contextmanager
def running(worker: Worker) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def fill(outbox: Outbox, count: int, **more: Any) -> list[str]:
    ids = [f"event-{number}" for number in range(count)]
    outbox.enqueue_many([{"id": event_id} for event_id in ids], **more)
    return ids


def fails_with(error: BaseException) -> Callable[[Claim], Any]:
    def act(_: Claim) -> Any:
        raise error

    return act
