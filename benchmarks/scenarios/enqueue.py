"""What an event costs the host's transaction, beside a bare Core insert of the very same row."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Engine, insert

from benchmarks.databases import Databases, engine
from benchmarks.events import TOPIC, event, payload
from benchmarks.harness import Bench, Measure, Scenario, at_most, timed
from outbox import Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.schema import outbox_event
from outbox.values import sha256_hex


def _row(number: int) -> dict[str, Any]:
    text, now = payload(number), time.time()
    return {
        "topic": TOPIC,
        "event_id": f"bench:{number}",
        "payload": text,
        "payload_sha256": sha256_hex(text),
        "status": "pending",
        "attempts": 0,
        "max_attempts": 5,
        "redrives": 0,
        "next_attempt_at": now,
        "created_at": now,
        "updated_at": now,
    }


class _Host:
    """A host that enqueues by us or by hand, in transactions of its own."""

    def __init__(self, own: Engine) -> None:
        self.engine = own
        self.outbox = Outbox(own, contracts=(CMS_CHANGE,))
        self.numbers = itertools.count(1)

    def by_us(self, connection: Connection, events: list[dict[str, Any]]) -> None:
        for each in events:
            self.outbox.enqueue(each, connection=connection)

    def by_hand(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            connection.execute(insert(outbox_event), row)

    def many_by_us(self, connection: Connection, events: list[dict[str, Any]]) -> None:
        self.outbox.enqueue_many(events, connection=connection)

    def many_by_hand(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        connection.execute(insert(outbox_event), rows)

    def take(self, count: int) -> Iterator[int]:
        return itertools.islice(self.numbers, count)


def _within(host: _Host, count: int, *, ours: bool, many: bool = False) -> Measure:
    """Microseconds an event in one transaction, its commit left out."""
    act = (host.many_by_us if many else host.by_us) if ours else (host.many_by_hand if many else host.by_hand)

    def measure() -> float:
        values = [event(n) if ours else _row(n) for n in host.take(count)]
        with host.engine.begin() as connection:
            return timed(lambda: act(connection, values)) * 1e6 / count

    return measure


def _committed(host: _Host, count: int, *, ours: bool) -> Measure:
    """Microseconds an event, each in a transaction of its own, its commit included."""
    act = host.by_us if ours else host.by_hand

    def commit_each(values: list[dict[str, Any]]) -> None:
        for value in values:
            with host.engine.begin() as connection:
                act(connection, [value])

    def measure() -> float:
        values = [event(n) if ours else _row(n) for n in host.take(count)]
        return timed(lambda: commit_each(values)) * 1e6 / count

    return measure


def _enqueue(bench: Bench, databases: Databases) -> None:
    count = bench.size(1000, 200)
    with databases.fresh() as url:
        host = _Host(engine(url))
        _within(host, 20, ours=True)()
        _within(host, 20, ours=False)()
        for what, made, budget in (
            ("enqueue / bare Core insert, inside one transaction", _within, at_most(1.5)),
            ("enqueue / bare Core insert, a transaction each with its commit", _committed, None),
        ):
            size = count if budget else count // 4
            found = bench.alternate({"ours": made(host, size, ours=True), "bare": made(host, size, ours=False)}, 5)
            bench.ratio(
                what,
                found["ours"],
                found["bare"],
                unit="µs",
                names=("ours", "bare"),
                budget=budget,
                cpu=(found.cpu["ours"], found.cpu["bare"]),
            )
        host.engine.dispose()


def _enqueue_many(bench: Bench, databases: Databases) -> None:
    with databases.fresh() as url:
        host = _Host(engine(url))
        for count in (100, 1000):
            ours, bare = _within(host, count, ours=True, many=True), _within(host, count, ours=False, many=True)
            ours(), bare()
            found = bench.alternate({"ours": ours, "bare": bare}, bench.size(9, 5))
            what = f"enqueue_many of {count} / bare Core insert of {count} rows"
            bench.ratio(
                what,
                found["ours"],
                found["bare"],
                unit="µs/event",
                names=("ours", "bare"),
                cpu=(found.cpu["ours"], found.cpu["bare"]),
            )
        host.engine.dispose()


ENQUEUE = Scenario("enqueue", "enqueue in a host's transaction beside a bare Core insert of the same row", _enqueue)
ENQUEUE_MANY = Scenario("enqueue-many", "enqueue_many beside a bare Core insert of many rows", _enqueue_many)
