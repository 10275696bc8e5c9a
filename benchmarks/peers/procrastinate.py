"""procrastinate: the asynchronous psycopg connector, asynchronous tasks, and as much concurrency as helps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import procrastinate

from benchmarks.databases import libpq

CONCURRENCY = 20


def drain(url: str, payloads: Sequence[str]) -> float:
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    return asyncio.run(_drain(libpq(url), payloads))


async def _drain(dsn: str, payloads: Sequence[str]) -> float:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, max_size=CONCURRENCY + 5))
    done = 0

    @app.task(name="work")
    async def work(payload: str) -> None:
        nonlocal done
        done += bool(payload)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await work.batch_defer_async(*({"payload": text} for text in payloads))
        began = time.perf_counter()
        await app.run_worker_async(wait=False, concurrency=CONCURRENCY, install_signal_handlers=False)
        took = time.perf_counter() - began
    assert done == len(payloads), f"{done} of {len(payloads)}"
    return done / took
