"""awa (its core is Rust): one queue with many workers and a pool of ``queues * 4 + 20``, as its notes on benchmarking
advise; jobs enqueued by COPY."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from awa import AsyncClient

from benchmarks.databases import libpq

WORKERS = 128


@dataclass
class Work:
    payload: str


def drain(url: str, payloads: Sequence[str]) -> float:
    return asyncio.run(_drain(libpq(url), payloads))


async def _drain(dsn: str, payloads: Sequence[str]) -> float:
    client = AsyncClient(dsn, max_connections=24)
    await client.migrate()
    await client.install_queue_storage()
    done, all_done = 0, asyncio.Event()

    @client.task(Work, queue="work")
    async def work(_: object) -> None:
        nonlocal done
        done += 1
        if done == len(payloads):
            all_done.set()

    for start in range(0, len(payloads), 5000):
        await client.enqueue_many_copy([Work(text) for text in payloads[start : start + 5000]], queue="work")
    began = time.perf_counter()
    await client.start([("work", WORKERS)], poll_interval_ms=10)
    await all_done.wait()
    took = time.perf_counter() - began  # the last completions are still being flushed: to its advantage
    await client.shutdown()
    await client.close()
    return done / took
