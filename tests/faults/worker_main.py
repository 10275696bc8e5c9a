"""A worker process of the laboratory, put together as the command line does it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox import Outbox, RetryPolicy, Settled, Worker
from outbox.cli.serve import stopping
from outbox.contracts.cms import CMS_CHANGE
from outbox.destinations.cms import CMSDestination, HMACSigner
from outbox.dialects.engines import program_engine
from outbox.records import Claim
from outbox.testing.ledger import KEY, KEY_ID


@dataclass(frozen=True)
class Settings:
    """What a worker is told.

    Attributes:
        report: where it writes a line of JSON for every result that it settled or could not settle.
        declared_timeout: the timeout it claims to have, when that is a lie.
        clock_offset: seconds by which SIGUSR1 steps its clock.
    """

    url: str
    origin: str
    name: str
    report: str
    log: str
    lease: float = 1.5
    timeout: float = 0.7
    declared_timeout: float | None = None
    concurrency: int = 4
    batch: int = 20
    base_delay: float = 0.05
    max_delay: float = 0.4
    grace: float = 5.0
    clock_offset: float = 0.0
    answer_seconds: float | None = 60.0


class Overrunning:
    """A destination that takes longer than it says."""

    def __init__(self, inner: CMSDestination, timeout: float) -> None:
        self._inner = inner
        self.timeout = timeout

    def deliver(self, claim: Claim) -> Mapping[str, Any]:
        return self._inner.deliver(claim)


class Report:
    """A file that survives its writer: a line for every result."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, line: Settled) -> None:
        status = None if line.outcome is None else line.outcome.status
        self.say(event_id=line.claim.event_id, attempt=line.claim.attempt, won=line.won, status=status,
                 code=line.error_code, at=time.monotonic())  # fmt: skip

    def say(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def main(settings: Settings) -> None:
    """Work until told to stop."""
    threading.current_thread().name = settings.name
    _log_to(settings.log)
    report = Report(settings.report)
    _steppable_clock(settings.clock_offset)
    engine = program_engine(settings.url, answer_seconds=settings.answer_seconds)
    policy = RetryPolicy(base_delay_seconds=settings.base_delay, max_delay_seconds=settings.max_delay)
    outbox = Outbox(engine, contracts=(CMS_CHANGE,), retry=policy)
    cms = CMSDestination(settings.origin, HMACSigner(KEY_ID, KEY), timeout=settings.timeout, allow_loopback_http=True)
    worker = Worker(
        outbox,
        {CMS_CHANGE.topic: Overrunning(cms, settings.declared_timeout or settings.timeout)},
        worker_id=settings.name,
        concurrency=settings.concurrency,
        batch=settings.batch,
        lease_seconds=settings.lease,
        grace_seconds=settings.grace,
        observer=report,
    )
    with stopping(worker.stop):
        report.say(ready=True)  # from here on signals are heard
        stats = worker.run()
    report.say(stats={name: getattr(stats, name) for name in type(stats).__dataclass_fields__})
    engine.dispose()


def _log_to(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )


def _steppable_clock(offset: float) -> None:
    """SIGUSR1 steps what this process takes for the time; nothing else of the process notices."""
    if not offset:
        return
    real, shift = time.time, [0.0]
    time.time = lambda: real() + shift[0]

    def step(*_: object) -> None:
        shift[0] += offset

    signal.signal(signal.SIGUSR1, step)


def read_report(path: Path) -> list[dict[str, Any]]:
    """The lines of a report; one that its writer did not live to finish is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]
