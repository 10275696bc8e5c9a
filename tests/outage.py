"""A destination that is down for an hour, in simulated time: what that costs the events, and how it is taken up again.

    python -m tests.outage [URL ...]

prints the figures for migrated databases at the URLs, or for a SQLite file of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, create_engine, func, select

from outbox import Claim, Failure, Outbox, Success
from outbox.migrate import upgrade
from outbox.policy import BreakerPolicy, RetryPolicy
from outbox.records import Result
from outbox.schema import outbox_attempt, outbox_event
from tests.plain import Plain

EVENTS = 10_000
OUTAGE_SECONDS = 3600.0
MAX_ATTEMPTS = 5
WORKERS = 4
BATCH = 100
#: How long a delivery takes, and so how far a worker's settle is behind its claim.
DELIVERY_SECONDS = 0.25
BEGAN = 1_000_000.0
TOPIC = "test.plain"


@dataclass(frozen=True)
class Figures:
    """What was seen.

    Attributes:
        probes: events that were sent while the topic was open.
        resumed_after: seconds from the server's recovery to the first delivery.
        drained_after: seconds from the server's recovery to the last delivery.
        recorded: failed attempts in the database.
        worst_excess: by how many events the claims since the topic closed ever exceeded what the ramp allows; at most 0.
    """

    database: str
    events: int
    outage_seconds: float
    probes: int
    attempts_max: int
    attempts_total: int
    recorded: int
    succeeded: int
    failed: int
    resumed_after: float
    drained_after: float
    worst_excess: float

    @property
    def attempts_mean(self) -> float:
        return self.attempts_total / self.events


class _Simulation:
    """Workers that claim, deliver in no time of ours, and settle, on a clock that jumps from one doing to the next."""

    def __init__(self, engine: Engine, events: int, outage_seconds: float) -> None:
        self.policy = BreakerPolicy()
        self.outbox = Outbox(engine, [Plain(TOPIC)], RetryPolicy(), self.policy)
        self.events = events
        self.up_at = BEGAN + outage_seconds
        self.now = BEGAN
        self.in_flight: list[tuple[float, list[Claim]]] = []
        self.probes = 0
        self.delivered = 0
        self.first_at = self.last_at = float("inf")
        self.closed_at: float | None = None
        self.claimed_since = 0
        self.worst_excess = float("-inf")

    def run(self) -> None:
        names = [{"id": f"event-{number}"} for number in range(self.events)]
        for start in range(0, self.events, 1000):
            self.outbox.enqueue_many(names[start : start + 1000], max_attempts=MAX_ATTEMPTS, now=BEGAN)
        while self.delivered < self.events:
            self._settle()
            claimed = self._claim()
            self._wait(claimed=claimed)
            assert self.now < self.up_at + 3600, "not drained an hour after the server was back"

    def _settle(self) -> None:
        due = [claims for at, claims in self.in_flight if at <= self.now]
        self.in_flight = [(at, claims) for at, claims in self.in_flight if at > self.now]
        for claims in due:
            lines = self.outbox.settle([self._deliver(claim) for claim in claims], now=self.now)
            assert all(line.won for line in lines)
            delivered = sum(line.outcome is not None and line.outcome.status == "succeeded" for line in lines)
            self.delivered += delivered
            if delivered:
                self.first_at, self.last_at = min(self.first_at, self.now), self.now

    def _deliver(self, claim: Claim) -> Result:
        if self.now - DELIVERY_SECONDS >= self.up_at:
            return Success(claim, {"echo": claim.event_id})
        return Failure(claim, "http_status", arrival="refused", http_status=503, outage=True)

    def _claim(self) -> bool:
        """Each worker that has nothing in flight claims; whether any found something."""
        found = False
        for number in range(WORKERS - len(self.in_flight)):
            claims = self.outbox.claim_batch(f"worker-{number}", limit=BATCH, now=self.now)
            state = self.outbox.gate(TOPIC).state
            if claims:
                found = True
                self.in_flight.append((self.now + DELIVERY_SECONDS, claims))
            self.probes += len(claims) if state == "open" else 0
            self._hold_against_the_ramp(state, len(claims))
        return found

    def _hold_against_the_ramp(self, state: str, claimed: int) -> None:
        if state != "ramp":
            return
        since = self.outbox.gate(TOPIC).since
        if since != self.closed_at:
            self.closed_at, self.claimed_since = since, 0
        assert since is not None
        self.claimed_since += claimed
        self.worst_excess = max(self.worst_excess, self.claimed_since - self.policy.allowed(self.now - since))

    def _wait(self, *, claimed: bool) -> None:
        """To the next delivery's end or the next probe, whichever comes first; in a ramp a little."""
        times = [at for at, _ in self.in_flight]
        gate = self.outbox.gate(TOPIC)
        if gate.state == "open" and gate.until is not None and gate.until > self.now:
            times.append(gate.until)
        elif len(self.in_flight) < WORKERS and not claimed:
            times.append(self.now + DELIVERY_SECONDS)
        self.now = max(self.now, min(times, default=self.now + DELIVERY_SECONDS))


def simulate(engine: Engine, events: int = EVENTS, outage_seconds: float = OUTAGE_SECONDS) -> Figures:
    """Let a server be down from the first event on, and see how the outbox on a migrated, empty database takes it."""
    simulation = _Simulation(engine, events, outage_seconds)
    simulation.run()
    counts = simulation.outbox.health(now=simulation.now).counts
    attempts = outbox_event.c.attempts
    with engine.connect() as connection:
        most, total = connection.execute(select(func.max(attempts), func.sum(attempts))).one()
        recorded = connection.execute(select(func.count()).select_from(outbox_attempt)).scalar_one()
    return Figures(
        engine.dialect.name, events, outage_seconds, simulation.probes, most, total, recorded, counts["succeeded"],
        counts["failed"], simulation.first_at - simulation.up_at, simulation.last_at - simulation.up_at,
        simulation.worst_excess,
    )  # fmt: skip


def table(found: Sequence[Figures]) -> str:
    """The figures, a database a line."""
    heads = (
        "database", "events", "outage s", "probes sent", "attempts max", "attempts mean", "failed", "first delivery s",
        "drained s",
    )  # fmt: skip
    rows = [heads] + [
        (
            each.database, f"{each.events:,}", f"{each.outage_seconds:,.0f}", str(each.probes), str(each.attempts_max),
            f"{each.attempts_mean:.4f}", str(each.failed), f"{each.resumed_after:.2f}", f"{each.drained_after:.2f}",
        )
        for each in found
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(urls: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = []
        for url in urls or [f"sqlite:///{Path(directory) / 'outage.sqlite3'}"]:
            upgrade(url)
            engine = create_engine(url)
            found.append(simulate(engine))
            engine.dispose()
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
