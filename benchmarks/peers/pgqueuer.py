"""PgQueuer: asyncpg, a direct connection for the manager, batches larger than the default, and its own autovacuum
settings, as its guide to performance tuning says. Tables stay ``durable``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
from pgqueuer.db import AsyncpgDriver
from pgqueuer.domain.types import QueueExecutionMode
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from benchmarks.databases import libpq

BATCH = 100


def drain(url: str, payloads: Sequence[str]) -> float:
    return asyncio.run(_drain(libpq(url), payloads))


async def _drain(dsn: str, payloads: Sequence[str]) -> float:
    connection = await asyncpg.connect(dsn)
    manager = QueueManager(Queries(AsyncpgDriver(connection)))
    await manager.queries.install()
    await manager.queries.optimize_autovacuum()
    for start in range(0, len(payloads), 1000):
        part: list[bytes | None] = [text.encode() for text in payloads[start : start + 1000]]
        await manager.queries.enqueue(["work"] * len(part), part, [0] * len(part))
    done = 0

    @manager.entrypoint("work")
    async def work(_: Job) -> None:
        nonlocal done
        done += 1

    began = time.perf_counter()
    await manager.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=1), mode=QueueExecutionMode.drain)
    took = time.perf_counter() - began
    await connection.close()
    assert done == len(payloads), f"{done} of {len(payloads)}"
    return done / took
