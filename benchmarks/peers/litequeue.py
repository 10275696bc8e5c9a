"""litequeue: pop and done, one message after another. It sets WAL and ``synchronous = NORMAL`` itself, so its commits
are not on disk when they return, unlike ours."""

from __future__ import annotations

import time
from collections.abc import Sequence

from litequeue import LiteQueue

from benchmarks.databases import sqlite_path


def drain(url: str, payloads: Sequence[str]) -> float:
    queue = LiteQueue(sqlite_path(url))
    with queue.transaction():
        for text in payloads:
            queue.put(text)
    done = 0
    began = time.perf_counter()
    while (message := queue.pop()) is not None:
        queue.done(message.message_id)
        done += 1
    took = time.perf_counter() - began
    queue.close()
    assert done == len(payloads), f"{done} of {len(payloads)}"
    return done / took
