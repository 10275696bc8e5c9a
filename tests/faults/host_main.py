"""A host process of the laboratory: it changes articles and enqueues an event with each change, until it is killed."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from sqlalchemy import Column, Engine, MetaData, Table, Text, insert

from outbox import Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.dialects.engines import program_engine
from tests.cms_events import event

metadata = MetaData()
article = Table("article", metadata, Column("event_id", Text, primary_key=True))


@dataclass(frozen=True)
class HostSettings:
    """What a host is told. It reports a line before each transaction and one after it."""

    url: str
    name: str
    report: str
    transactions: int
    seed: int
    max_attempts: int = 20


def main(settings: HostSettings) -> None:
    """Make changes until all are made, or until killed."""
    choose = random.Random(settings.seed)
    report = os.open(settings.report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    engine = program_engine(settings.url)
    outbox = Outbox(engine, contracts=(CMS_CHANGE,))
    for number in range(settings.transactions):
        ids = [f"{settings.name}:{number}:{part}" for part in range(choose.randint(1, 4))]
        keep = choose.random() > 0.25
        os.write(report, f"{'begin' if keep else 'doomed'} {' '.join(ids)}\n".encode())
        change(engine, outbox, ids, keep=keep, max_attempts=settings.max_attempts)
        os.write(report, f"{'committed' if keep else 'rolled-back'} {' '.join(ids)}\n".encode())
    engine.dispose()


def share(url: str, name: str, shared: int, own: int, seed: int) -> None:
    """Enqueue the events that all hosts enqueue, and some of this one's own, in an order of this one's own."""
    choose = random.Random(seed)
    engine = program_engine(url)
    outbox = Outbox(engine, contracts=(CMS_CHANGE,))
    names = [f"shared-{number}" for number in range(shared)] + [f"{name}-{number}" for number in range(own)]
    choose.shuffle(names)
    while names:
        batch = [event(event_id=names.pop()) for _ in range(min(len(names), choose.randint(1, 7)))]
        with engine.connect() as connection, connection.begin():
            outbox.enqueue_many(batch, connection=connection, max_attempts=20)
    outbox.enqueue_many([event(event_id=f"shared-{number}") for number in range(shared)], max_attempts=20)
    engine.dispose()


def change(engine: Engine, outbox: Outbox, ids: list[str], *, keep: bool, max_attempts: int = 20) -> None:
    """One transaction of a host: its own rows and the events about them, kept or not."""
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(insert(article), [{"event_id": event_id} for event_id in ids])
        for event_id in ids:
            outbox.enqueue(event(event_id=event_id), connection=connection, max_attempts=max_attempts)
        if not keep:
            transaction.rollback()
