"""The same work by hand: what the shape costs with nothing between a program and its driver.

No checks, no fence beyond the token, no threads. This is the ceiling, not a competitor.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg

from benchmarks.databases import libpq, raw_sqlite
from benchmarks.events import RECEIPT, RESPONSE_SHA256, TOPIC

Row = Sequence[Any]
_CLAIMED = "id, event_id, payload, payload_sha256, attempts, max_attempts, lease_token, lease_expires_at"
_DUE = (
    "SELECT id FROM outbox_event WHERE topic = {topic} AND (status = 'pending' OR status = 'retry_wait')"
    " AND next_attempt_at <= {now} ORDER BY next_attempt_at, id LIMIT {limit}"
)


class Bare(ABC):
    """Claim and settle by hand, on one connection."""

    @abstractmethod
    def claim(self, limit: int) -> Sequence[Row]:
        """Lease up to ``limit`` events, in a transaction of its own."""

    @abstractmethod
    def settle(self, rows: Sequence[Row]) -> None:
        """Record that they were accepted, in a transaction of its own."""

    def drain(self, batch: int, limit: int | None = None) -> int:
        """Claim and settle until nothing is due, or ``limit`` events are done."""
        done = 0
        while (limit is None or done < limit) and (rows := self.claim(batch)):
            self.settle(rows)
            done += len(rows)
        return done


class BareSqlite(Bare):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def claim(self, limit: int) -> Sequence[Row]:
        now = time.time()
        due = _DUE.format(topic="?", now="?", limit="?")
        self._connection.execute("BEGIN IMMEDIATE")
        rows = self._connection.execute(
            "UPDATE outbox_event SET status = 'leased', attempts = attempts + 1, lease_owner = 'bare',"
            " lease_token = lower(hex(randomblob(16))), lease_expires_at = ?, updated_at = ?, last_error_code = NULL"
            f" WHERE id IN ({due}) RETURNING {_CLAIMED}",
            (now + 600, now, TOPIC, now, limit),
        ).fetchall()
        self._connection.execute("COMMIT")
        return rows

    def settle(self, rows: Sequence[Row]) -> None:
        now = time.time()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(
            "UPDATE outbox_event SET status = 'succeeded', lease_owner = NULL, lease_token = NULL,"
            " lease_expires_at = NULL, receipt = ?, response_sha256 = ?, updated_at = ?"
            " WHERE id = ? AND lease_token = ?",
            [(RECEIPT, RESPONSE_SHA256, now, row[0], row[6]) for row in rows],
        )
        self._connection.execute("COMMIT")


class BarePostgreSQL(Bare):
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def claim(self, limit: int) -> Sequence[Row]:
        now = time.time()
        due = _DUE.format(topic="%s", now="%s", limit="%s")
        return self._connection.execute(
            "UPDATE outbox_event SET status = 'leased', attempts = attempts + 1, lease_owner = 'bare',"
            " lease_token = gen_random_uuid()::text, lease_expires_at = %s, updated_at = %s, last_error_code = NULL"
            f" WHERE id = ANY(ARRAY({due} FOR UPDATE SKIP LOCKED)) RETURNING {_CLAIMED}",
            (now + 600, now, TOPIC, now, limit),
        ).fetchall()

    def settle(self, rows: Sequence[Row]) -> None:
        self._connection.execute(
            "UPDATE outbox_event AS e SET status = 'succeeded', lease_owner = NULL, lease_token = NULL,"
            " lease_expires_at = NULL, receipt = %s, response_sha256 = %s, updated_at = %s"
            " FROM unnest(%s::bigint[], %s::text[]) AS given(id, token)"
            " WHERE e.id = given.id AND e.lease_token = given.token",
            (RECEIPT, RESPONSE_SHA256, time.time(), [row[0] for row in rows], [row[6] for row in rows]),
        )


@contextmanager
def bare(url: str) -> Iterator[Bare]:
    """Bare SQL on the database at ``url``, with prepared statements where the driver has them."""
    if url.startswith("sqlite"):
        with raw_sqlite(url) as connection:
            yield BareSqlite(connection)
        return
    with psycopg.connect(libpq(url), autocommit=True, prepare_threshold=1) as server:
        yield BarePostgreSQL(server)


def post_all(url: str, bodies: Sequence[bytes], headers: dict[str, str], concurrency: int) -> float:
    """Requests a second of plain ``httpx.Client.post``: a client for each thread, and every answer read as JSON."""

    def send(mine: Sequence[bytes]) -> None:
        with httpx.Client() as client:
            for body in mine:
                client.post(url, content=body, headers=headers).raise_for_status().json()

    threads = [threading.Thread(target=send, args=(bodies[start::concurrency],)) for start in range(concurrency)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(bodies) / (time.perf_counter() - began)
