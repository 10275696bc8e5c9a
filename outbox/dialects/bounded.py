"""PostgreSQL connections on which no wait for an answer is endless.

Keep-alives and ``tcp_user_timeout`` notice a peer whose machine or network has gone. They do not notice one that still
acknowledges what it is sent and never answers: a frozen server, a proxy that has lost the other side. libpq would wait
for ever, and a worker with it.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

R = TypeVar("R")


class BoundedConnection(psycopg.Connection[Any]):
    """Closes itself and raises ``OperationalError`` when one wait for the server lasts longer than ``patience``."""

    patience: float = 60.0

    def wait(self, gen: Generator[Any, Any, R], *arguments: Any, **options: Any) -> R:
        try:
            return super().wait(_until(gen, time.monotonic() + self.patience), *arguments, **options)
        except _NoAnswerError:
            self.pgconn.finish()  # it may still answer one day, and then to another question
            raise


class _NoAnswerError(psycopg.OperationalError):
    """The server has not answered in time."""


def bounded(patience: float) -> type[BoundedConnection]:
    """A kind of connection with this patience, in seconds."""
    return type("BoundedConnection", (BoundedConnection,), {"patience": patience})


def _until(waits: Generator[Any, Any, R], deadline: float) -> Generator[Any, Any, R]:
    """The same waits, ended at the deadline. The driver looks in at every interval, ready or not."""
    try:
        wanted = next(waits)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() >= deadline:
                waits.close()
                raise _NoAnswerError("the server has not answered in time")
            wanted = waits.send(ready)
    except StopIteration as end:
        result: R = end.value
        return result
