"""faststream-outbox: asyncpg, many workers, large fetches, and terminal writes flushed in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

BATCH = 100
WORKERS = 8


def drain(url: str, payloads: Sequence[str]) -> float:
    return asyncio.run(_drain(url, payloads))


async def _drain(url: str, payloads: Sequence[str]) -> float:
    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"), pool_size=WORKERS + 5)
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="outbox")
    broker = OutboxBroker(engine, outbox_table=table, logger=logging.getLogger("quiet"), log_level=logging.DEBUG)
    done = 0

    @broker.subscriber(
        "work", max_workers=WORKERS, fetch_batch_size=BATCH, terminal_flush_batch_size=BATCH, min_fetch_interval=0.01
    )
    async def work(body: str) -> None:
        nonlocal done
        done += bool(body)

    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await _publish(broker, engine, payloads)
    began = time.perf_counter()
    async with broker:
        await broker.start()
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            while done < len(payloads) or await connection.scalar(select(func.count()).select_from(table)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        took = time.perf_counter() - began
    await engine.dispose()
    return done / took


async def _publish(broker: OutboxBroker, engine: AsyncEngine, payloads: Sequence[str]) -> None:
    for start in range(0, len(payloads), 500):
        async with engine.begin() as connection:
            await broker.publish_batch(*payloads[start : start + 500], queue="work", session=connection)
