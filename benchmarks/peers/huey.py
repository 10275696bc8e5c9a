"""huey on SQLite: no result store, WAL, and one worker thread without the consumer around it, which is its fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence

from huey import SqliteHuey

from benchmarks.databases import sqlite_path


def drain(url: str, payloads: Sequence[str]) -> float:
    """As huey comes: it leaves ``synchronous`` at SQLite's FULL, as we do."""
    return _drain(SqliteHuey("bench", filename=sqlite_path(url), results=False), payloads)


def drain_unsafely(url: str, payloads: Sequence[str]) -> float:
    """With ``fsync=False``, where a power cut may lose what was committed."""
    return _drain(SqliteHuey("bench", filename=sqlite_path(url), results=False, fsync=False), payloads)


def _drain(queue: SqliteHuey, payloads: Sequence[str]) -> float:
    done = 0

    @queue.task()
    def work(payload: str) -> None:
        nonlocal done
        done += bool(payload)

    with queue.storage.db(commit=True) as cursor:  # in one transaction; enqueueing is not what is measured
        rows = [(queue.storage.name, queue.serialize_task(work.s(text)), 0) for text in payloads]
        cursor.executemany("INSERT INTO task (queue, data, priority) VALUES (?, ?, ?)", rows)
    began = time.perf_counter()
    while (task := queue.dequeue()) is not None:
        queue.execute(task)
    took = time.perf_counter() - began
    queue.storage.close()
    assert done == len(payloads), f"{done} of {len(payloads)}"
    return done / took
