"""The worker: one thread talks to the database, many talk to the destinations.

The thread that calls :meth:`Worker.run` claims in batches, renews, and settles in micro-batches; each topic has a lane
of sender threads of its own, so that a slow destination holds up nobody else. The two sides meet in queues only.

Leases are the database's business, and the database's clock judges them. Here a lease is a deadline on the machine's
monotonic clock, counted from before the claim was asked for: always on the safe side of the real one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import queue
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from outbox.contracts.base import Destination
from outbox.dialects.base import Watch
from outbox.errors import DatabaseError, InputError, OutboxError
from outbox.records import Claim, Failure, Result, Settled
from outbox.store import MAX_BATCH, Outbox, check_destination, deliver
from outbox.values import check_int, check_seconds, check_token, describe, is_number

logger = logging.getLogger("outbox.worker")

#: A result waits so long for company before it is settled, in seconds.
FLUSH_SECONDS: Final = 0.005
#: Idle polling backs off between these, in seconds. It goes on beside whatever wakes the worker sooner.
SHORTEST_POLL: Final = 0.02
LONGEST_POLL: Final = 1.0
POLL_GROWTH: Final = 2.0
#: Claims begin so long before the oldest event of the last one, and at the very oldest every so often, in seconds: that
#: finds what was committed late, released, or made due in the past.
FLOOR_SLACK: Final = 0.5
SWEEP_SECONDS: Final = 1.0
#: How long an announcement of idleness holds, in seconds; it is renewed at half of that.
ANNOUNCED_SECONDS: Final = 30.0
#: A lane is idle once its polls are so far apart, and busy when it has had work for so long without a pause; seconds.
RESTING_POLL: Final = 0.08
BUSY_SECONDS: Final = 0.25
#: After a database error, in seconds; doubled up to the longest, and jittered so that workers do not return as one.
SHORTEST_OUTAGE_PAUSE: Final = 0.1
LONGEST_OUTAGE_PAUSE: Final = 5.0
#: A destination that overruns its own timeout is believed for so many more leases; then the event is left to others.
MAX_RENEWALS: Final = 5
#: A lane claims ahead what its senders finish in so many seconds, measured anew as often as the other says.
AHEAD_SECONDS: Final = 1.0
MEASURED_SECONDS: Final = 0.1
#: A rate limit lets so many seconds' worth of events go at once, or one event.
BURST_SECONDS: Final = 0.1
#: How often to look while a topic that has closed again admits more from moment to moment, in seconds.
RAMP_POLL: Final = 0.05
DEFAULT_CONCURRENCY: Final = 16
#: How long a worker that waits for its senders goes without a look at the database, where a topic may be paused.
LOOK_SECONDS: Final = 1.0
MAX_RATE: Final = 1e6
#: What stands between a claim and a topic's events for longer than a moment.
SHUT: Final = frozenset({"open", "held", "paused"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker has done since it started; every number counts events."""

    claimed: int = 0
    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    lost: int = 0
    released: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """A claim in this worker's hands, and until when it surely is."""

    claim: Claim
    deadline: float
    started_at: float | None = None
    renewals: int = 0
    lost: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """One topic: its destination, its senders and the claims that wait for them."""

    topic: str
    destination: Destination
    concurrency: int
    most_ahead: int
    limit: _RateLimit | None = None
    waiting: queue.SimpleQueue[_Held | None] = field(default_factory=queue.SimpleQueue)
    in_hand: int = 0
    claim_at: float = 0.0
    pause: float = SHORTEST_POLL
    drained: bool = False
    floor: float = 0.0
    sweep_at: float = 0.0
    announced_until: float = 0.0
    busy_since: float = math.inf
    shut: bool = False
    finished: int = 0
    finished_at: float = 0.0
    rate: float = 0.0
    measured_at: float = 0.0

    @property
    def capacity(self) -> int:
        """How many to have in hand: one for each sender, and ahead of them what they are known to finish soon.

        More would only keep events from other workers; fewer would make tiny claims.
        """
        return self.concurrency + min(self.most_ahead, max(self.concurrency, int(self.rate * AHEAD_SECONDS)))

    @property
    def room(self) -> int:
        """How many more to claim: none until half the hands are empty, so that claims come in batches."""
        capacity = self.capacity
        free = capacity - self.in_hand
        return free if 2 * free >= capacity else 0

    def measure(self, now: float) -> None:
        """See how fast the senders are while they have work: quick to believe more, slower to believe less."""
        seconds = now - self.measured_at
        if seconds < MEASURED_SECONDS:
            return
        if self.finished:
            self.rate = max(self.finished / seconds, self.rate / 2)
        self.finished, self.measured_at = 0, now

    def stalled(self, now: float, seconds: float) -> bool:
        """Whether no sender has come back for so long; what waits for them is better given back."""
        return bool(self.in_hand) and now - self.finished_at > seconds


class _RateLimit:
    """A token bucket: how many more events may be claimed now, so that no more than ``rate`` a second are sent."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._tokens = self._burst
        self._at = time.monotonic()

    def allowance(self, now: float) -> int:
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return int(self._tokens)

    def take(self, events: int) -> None:
        self._tokens -= events

    def pause(self) -> float:
        """Seconds until about half a burst may be claimed, or one event."""
        return max(0.0, max(1.0, self._burst / 2) - self._tokens) / self.rate


class Worker:
    """Delivers a database's due events until told to stop.

    Args:
        outbox: the outbox to claim from.
        destinations: where each topic's events go; every topic needs a contract in the outbox.
        worker_id: a token of at most 128 characters, unique among live workers; by default host, pid and a random part.
        concurrency: sender threads for each topic, or a mapping from topics to their numbers (16 where it says none).
        rate_limits: the most events a second that this worker sends to each topic, or a mapping from topics to that;
            others are not limited.
        batch: how many events one claim or settle moves at most.
        lease_seconds: how long a claim is ours; must outlast every destination's timeout.
        grace_seconds: how long a stopping worker waits for deliveries in flight.
        wake_ups: be woken by new work; without, poll only. Turn it off behind a pooler in transaction mode, where
            LISTEN does not work.
        observer: called with every settled line, on the thread that runs the worker; must be quick.

    Raises:
        InputError: ``dispatch.topic_unknown``, ``dispatch.client_invalid``, ``dispatch.lease_invalid``,
            ``dispatch.lease_too_short``, ``dispatch.worker_invalid``, ``dispatch.limit_invalid``.
    """

    def __init__(
        self,
        outbox: Outbox,
        destinations: Mapping[str, Destination],
        *,
        worker_id: str | None = None,
        concurrency: int | Mapping[str, int] = 16,
        rate_limits: float | Mapping[str, float] | None = None,
        batch: int = 100,
        lease_seconds: float = 600,
        grace_seconds: float = 20,
        wake_ups: bool = True,
        observer: Callable[[Settled], None] | None = None,
    ) -> None:
        self.worker_id = check_token(
            _unique_id() if worker_id is None else worker_id, code="dispatch.worker_invalid", longest=128
        )
        check_int(batch, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)
        if not destinations or not set(destinations) <= set(outbox.topics):
            raise InputError("dispatch.topic_unknown", expected=f"destinations for any of: {', '.join(outbox.topics)}")
        for destination in destinations.values():
            check_destination(destination, lease_seconds)
        senders = _of_topics(concurrency, destinations, _check_concurrency, DEFAULT_CONCURRENCY)
        rates = _of_topics({} if rate_limits is None else rate_limits, destinations, _check_rate, None)
        self._outbox = outbox
        self._batch = batch
        self._lease_seconds = float(lease_seconds)
        self._grace_seconds = check_seconds(grace_seconds, code="dispatch.limit_invalid", zero=True)
        self._observer = observer
        self._lanes = {
            topic: _Lane(topic, each, senders[topic], 2 * batch, _rate_limit(rates[topic]))
            for topic, each in destinations.items()
        }
        self._held: dict[str, _Held] = {}  # by token: an event whose lease ran out may come back beside itself
        self._done: queue.SimpleQueue[tuple[_Held, Result | None] | None] = queue.SimpleQueue()
        self._results: list[tuple[_Held, Result]] = []
        self._unsent: list[_Held] = []
        self._oldest_result_at = 0.0
        self._stopping = False  # no Event: its lock may be held by the very code that a signal handler interrupts
        self._woken = threading.Event()
        self._watch = outbox.watch() if wake_ups else Watch()
        self._outage = _Outage()
        self._renew_at = 0.0
        self._look_at = 0.0
        self._counts = dict.fromkeys(WorkerStats.__dataclass_fields__, 0)

    @property
    def outbox(self) -> Outbox:
        """The outbox it claims from."""
        return self._outbox

    @property
    def stats(self) -> WorkerStats:
        """What has been done so far."""
        return WorkerStats(**self._counts)

    def stop(self) -> None:
        """Claim no more, finish what is in flight, give back what was never sent, and return from :meth:`run`.

        May be called from any thread and from a signal handler.
        """
        self._stopping = True
        self._done.put(None)

    def run(self, *, until_idle: bool = False) -> WorkerStats:
        """Deliver until :meth:`stop` is called, or, with ``until_idle``, until nothing is due any more.

        A database that goes away is waited for; what its leases no longer cover is left to be delivered again.

        Raises:
            SchemaError: ``dispatch.schema_altered``: the database is no longer the one this program was written for.
        """
        watch = self._watch
        senders = self._start_senders()
        try:
            watch.start(self._wake)
            while not self._stopping and not (until_idle and self._idle()):
                self._turn()
            self._wind_down()
        finally:
            self._stopping = True
            for lane, _ in senders:
                lane.waiting.put(None)
            watch.close()
            self._withdraw()
        return self.stats

    def _wake(self) -> None:
        if not self._woken.is_set():  # one wake-up in the queue is enough
            self._woken.set()
            self._done.put(None)

    # -- one turn of the loop ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._collect(self._patience())
        if self._woken.is_set():
            self._woken.clear()
            for lane in self._lanes.values():
                lane.claim_at = lane.sweep_at = 0.0
        if self._outage.over():
            try:
                self._settle()
                self._give_back()
                self._renew()
                self._look()
                for lane in self._lanes.values():
                    self._claim(lane)
                    self._heed(lane)
                self._announce()
            except DatabaseError as error:
                self._outage.began(error)
            else:
                self._outage.ended()
        self._forget_expired()

    def _collect(self, patience: float) -> None:
        """Take what the senders have finished, waiting for the first of it."""
        try:
            finished = self._done.get(timeout=patience) if patience > 0 else self._done.get_nowait()
            while True:
                if finished is not None:
                    self._finished(*finished)
                finished = self._done.get_nowait()
        except queue.Empty:
            return

    def _finished(self, held: _Held, result: Result | None) -> None:
        lane = self._lanes[held.claim.topic]
        lane.finished += 1
        lane.finished_at = time.monotonic()
        if result is None:
            self._unsent.append(held)
            return
        if not self._results:
            self._oldest_result_at = time.monotonic()
        self._results.append((held, result))

    def _patience(self) -> float:
        """How long this thread may sleep before it has something to do on its own."""
        now = time.monotonic()
        if not self._outage.over():
            return max(0.0, min(self._outage.until - now, 0.1))
        times = [self._renew_at, self._look_at] if self._held else []
        if self._results:
            times.append(now if self._flush_due() else self._oldest_result_at + FLUSH_SECONDS)
        times += [lane.claim_at for lane in self._lanes.values() if lane.room]
        return max(0.0, min((at - now for at in times), default=LONGEST_POLL))

    # -- claim ------------------------------------------------------------------------------------------------------

    def _claim(self, lane: _Lane) -> None:
        asked_at = time.monotonic()
        lane.measure(asked_at)
        if asked_at < lane.claim_at or not (room := self._room(lane, asked_at)):
            return
        sweeping = asked_at >= lane.sweep_at
        if sweeping:
            lane.sweep_at = asked_at + SWEEP_SECONDS
        claims: list[Claim] = []
        # Reading first keeps an idle worker from taking SQLite's write lock at every commit of the host's.
        if lane.pause == SHORTEST_POLL or self._outbox.ready(topic=lane.topic):
            claims = self._outbox.claim_batch(
                self.worker_id,
                topic=lane.topic,
                limit=room,
                lease_seconds=self._lease_seconds,
                due_from=0.0 if sweeping else lane.floor,
            )
        self._take(lane, claims, asked_at + self._lease_seconds)
        self._look_at = asked_at + LOOK_SECONDS
        if claims:
            lane.floor = max(0.0, claims[0].due_at - FLOOR_SLACK)
        if self._outbox.gate(lane.topic).state == "ramp":
            # There may be more than the ramp lets through, so neither idle nor drained.
            lane.claim_at, lane.pause, lane.drained = asked_at + RAMP_POLL, SHORTEST_POLL, False
        elif len(claims) == room:
            lane.claim_at, lane.pause = 0.0, SHORTEST_POLL
        elif not sweeping:
            lane.claim_at = lane.sweep_at = 0.0  # nothing more above the floor; look below it before resting
        else:
            self._rest(lane, empty=not claims)

    def _room(self, lane: _Lane, now: float) -> int:
        """How many to claim now."""
        room = min(lane.room, self._batch)
        if not room or lane.stalled(now, self._lease_seconds):
            return 0
        if lane.limit is None:
            return room
        allowed = lane.limit.allowance(now)
        if not allowed:
            lane.claim_at = now + lane.limit.pause()
        return min(room, allowed)

    def _take(self, lane: _Lane, claims: list[Claim], deadline: float) -> None:
        if claims and not lane.in_hand:
            lane.finished_at = time.monotonic()
        if lane.limit is not None:
            lane.limit.take(len(claims))
        for claim in claims:
            held = _Held(claim, deadline)
            self._held[claim.lease_token] = held
            lane.waiting.put(held)
        self._counts["claimed"] += len(claims)
        lane.in_hand += len(claims)
        lane.drained = False
        if claims:
            lane.busy_since = min(lane.busy_since, time.monotonic())

    def _look(self) -> None:
        """See how the topics fare, where for a while no claim or settle has shown it by the way."""
        now = time.monotonic()
        if self._held and now >= self._look_at:
            self._outbox.check()
            self._look_at = now + LOOK_SECONDS

    def _heed(self, lane: _Lane) -> None:
        """Give back what no sender has begun when the topic opens, is held or is paused.

        Once, when it happens: what is claimed from an open topic afterwards is its probe.
        """
        shut = self._outbox.gate(lane.topic).state in SHUT
        if shut and not lane.shut:
            self._recall(lane)
        elif lane.shut and not shut:
            lane.claim_at, lane.pause = 0.0, SHORTEST_POLL
        lane.shut = shut

    @staticmethod
    def _rest(lane: _Lane, *, empty: bool) -> None:
        lane.drained = empty
        lane.sweep_at = 0.0
        lane.claim_at = time.monotonic() + (lane.pause if empty else SHORTEST_POLL)
        lane.pause = min(lane.pause * POLL_GROWTH, LONGEST_POLL) if empty else SHORTEST_POLL
        if empty:
            lane.busy_since = math.inf

    def _announce(self) -> None:
        """Let hosts know which lanes are idle, and look once more: what they committed before they knew is silent.

        Withdrawn when there has been work for a moment without a pause, so that hosts under load do not notify.
        """
        resting = [lane for lane in self._lanes.values() if lane.drained and not lane.shut]
        self._watch.rest(bool(resting))
        if not self._watch.announced:
            return
        now = time.monotonic()
        if any(lane.announced_until and lane.busy_since < now - BUSY_SECONDS for lane in self._lanes.values()):
            self._outbox.withdraw(self.worker_id)
            for lane in self._lanes.values():
                lane.announced_until = 0.0
        for lane in resting:
            if lane.announced_until < now + ANNOUNCED_SECONDS / 2 and lane.pause >= RESTING_POLL:
                self._outbox.announce(self.worker_id, topic=lane.topic, seconds=ANNOUNCED_SECONDS)
                lane.announced_until = now + ANNOUNCED_SECONDS
                lane.claim_at = 0.0

    def _withdraw(self) -> None:
        if any(lane.announced_until for lane in self._lanes.values()):
            try:
                self._outbox.withdraw(self.worker_id)
            except OutboxError as error:  # it runs out by itself
                logger.debug("%s", error)

    # -- settle -----------------------------------------------------------------------------------------------------

    def _settle(self, *, at_once: bool = False) -> None:
        if not self._results or not (at_once or self._flush_due()):
            return
        batch = self._results[:MAX_BATCH]
        lines = self._outbox.settle((_current(held, result) for held, result in batch), jitter=True)
        self._look_at = time.monotonic() + LOOK_SECONDS
        del self._results[: len(batch)]
        for line in lines:
            self._drop(line.claim)
            if line.claim.ordering_key is not None:  # the next of its key may be due now
                self._lanes[line.claim.topic].claim_at = 0.0
            self._report(line)

    def _flush_due(self) -> bool:
        """Whether to wait no longer for company: there is enough, it has been long, or nobody else is coming."""
        full = len(self._results) >= min(self._batch, len(self._held) - len(self._unsent))
        return full or time.monotonic() >= self._oldest_result_at + FLUSH_SECONDS

    def _give_back(self) -> None:
        if not self._unsent:
            return
        lines = self._outbox.release(held.claim for held in self._unsent if not held.lost)
        for held in self._unsent:
            self._drop(held.claim)
        self._unsent.clear()
        self._counts["released"] += sum(line.won for line in lines)

    def _report(self, line: Settled) -> None:
        if line.outcome is None:
            self._counts["lost"] += 1
            logger.warning("lost event %s of %s: %s", line.claim.event_id, line.claim.topic, line.error_code)
        else:
            outcome = line.outcome
            self._counts[{"retry_wait": "retried"}.get(outcome.status, outcome.status)] += 1
            if outcome.status != "succeeded":
                level = logging.ERROR if outcome.status == "failed" else logging.INFO
                logger.log(
                    level, "event %s of %s: attempt %d of %d: %s, now %s", outcome.event_id, line.claim.topic,
                    outcome.attempt, outcome.max_attempts, outcome.error_code, outcome.status,
                )  # fmt: skip
        if self._observer is not None:
            try:
                self._observer(line)
            except Exception as error:  # noqa: BLE001 - a host's observer must not stop delivery
                logger.error("observer raised %s", type(error).__name__)

    def _drop(self, claim: Claim) -> None:
        del self._held[claim.lease_token]
        self._lanes[claim.topic].in_hand -= 1

    # -- leases -----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Renew what has used up half its lease, queued or in flight."""
        now = time.monotonic()
        if now < self._renew_at or not self._held:
            return
        self._renew_at = now + self._lease_seconds / 8
        for lane in self._lanes.values():
            if lane.stalled(now, self._lease_seconds):
                self._recall(lane)
        settling = {held.claim.lease_token for held, _ in self._results}
        late = [
            held
            for token, held in self._held.items()
            if held.deadline - now < self._lease_seconds / 2
            and token not in settling and not held.lost
            and (held.started_at is None or held.renewals < MAX_RENEWALS)
        ]  # fmt: skip
        for start in range(0, len(late), MAX_BATCH):
            self._renew_some(late[start : start + MAX_BATCH])

    def _renew_some(self, late: Iterable[_Held]) -> None:
        late = list(late)
        asked_at = time.monotonic()
        claims = self._outbox.renew((held.claim for held in late), lease_seconds=self._lease_seconds)
        renewed = {claim.lease_token: claim for claim in claims}
        for held in late:
            claim = renewed.get(held.claim.lease_token)
            if claim is None:
                held.lost = True
                logger.warning("lost event %s of %s while it was in hand", held.claim.event_id, held.claim.topic)
            else:
                # The deadline last: a sender that sees the new one must not see the old claim.
                held.claim, held.renewals = claim, held.renewals + 1
                held.deadline = asked_at + self._lease_seconds

    def _forget_expired(self) -> None:
        """Drop results that could not be recorded in their lease's time: the event is somebody else's by now."""
        if self._outage.over():
            return
        now = time.monotonic()
        expired = [held for held, _ in self._results if held.deadline < now]
        self._results = [(held, result) for held, result in self._results if held.deadline >= now]
        for held in expired:
            self._counts["lost"] += 1
            self._drop(held.claim)
            logger.warning("lost event %s of %s: dispatch.lease_expired", held.claim.event_id, held.claim.topic)

    # -- senders ----------------------------------------------------------------------------------------------------

    def _start_senders(self) -> list[tuple[_Lane, threading.Thread]]:
        senders = []
        for lane in self._lanes.values():
            for number in range(lane.concurrency):
                name = f"outbox-{lane.topic}-{number}"
                # Daemons, so that a destination that never returns cannot keep the process from exiting.
                thread = threading.Thread(target=self._send, args=(lane,), name=name, daemon=True)
                thread.start()
                senders.append((lane, thread))
        return senders

    def _send(self, lane: _Lane) -> None:
        while (held := lane.waiting.get()) is not None:
            result: Result | None = None
            # Whatever cannot end before its lease does is not begun.
            in_time = time.monotonic() + lane.destination.timeout < held.deadline
            if in_time and not held.lost and not self._stopping:
                held.started_at = time.monotonic()
                result = _deliver(lane.destination, held.claim)
            self._done.put((held, result))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        nothing_in_hand = not self._held and not self._results and not self._unsent
        return nothing_in_hand and all(lane.drained for lane in self._lanes.values()) and self._outage.over()

    def _wind_down(self) -> None:
        """Wait for what is in flight, settle it, and give back what was never sent."""
        self._stopping = True
        for lane in self._lanes.values():  # whose senders may be busy for as long as the grace period
            self._recall(lane)
        deadline = time.monotonic() + self._grace_seconds
        while self._held and time.monotonic() < deadline:
            self._collect(min(0.05, self._grace_seconds))
            try:
                self._settle(at_once=True)
                self._give_back()
                self._renew()
            except DatabaseError as error:
                self._outage.began(error)
                time.sleep(min(SHORTEST_OUTAGE_PAUSE, self._grace_seconds))
        for held in self._held.values():
            logger.warning(
                "event %s of %s is left to its lease: no answer within the grace period",
                held.claim.event_id, held.claim.topic,
            )  # fmt: skip

    def _recall(self, lane: _Lane) -> None:
        """Take back what no sender of the lane has begun."""
        try:
            while (held := lane.waiting.get_nowait()) is not None:
                self._unsent.append(held)
        except queue.Empty:
            return


class _Outage:
    """The database's bad weather: how long to leave it alone, and one line when it begins and when it ends."""

    def __init__(self) -> None:
        self.until = 0.0
        self._pause = 0.0

    def over(self) -> bool:
        return time.monotonic() >= self.until

    def began(self, error: DatabaseError) -> None:
        log = logger.warning if not self._pause else logger.debug
        log("%s; waiting for the database", error)
        self._pause = min(max(self._pause * 2, SHORTEST_OUTAGE_PAUSE), LONGEST_OUTAGE_PAUSE)
        self.until = time.monotonic() + self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def ended(self) -> None:
        if self._pause:
            logger.warning("the database is back")
        self._pause = 0.0


def _of_topics(given: Any, topics: Iterable[str], check: Callable[[Any], T], default: T) -> dict[str, T]:
    """One value for each topic: the same for all, or by a mapping.

    Raises:
        InputError: ``dispatch.topic_unknown``, and what ``check`` raises.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(topics, check(given))
    if not set(given) <= set(topics):
        raise InputError("dispatch.topic_unknown", expected=f"any of: {', '.join(topics)}")
    return {topic: check(given[topic]) if topic in given else default for topic in topics}


def _rate_limit(rate: float | None) -> _RateLimit | None:
    return None if rate is None else _RateLimit(rate)


def _check_concurrency(value: Any) -> int:
    return check_int(value, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)


def _check_rate(value: Any) -> float | None:
    if not is_number(value) or not 0 < value <= MAX_RATE:
        expected = f"events a second in (0, {MAX_RATE:g}]"
        raise InputError("dispatch.limit_invalid", expected=expected, found=describe(value))
    return float(value)


def _deliver(destination: Destination, claim: Claim) -> Result:
    try:
        return deliver(destination, claim)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a sender would end the thread and strand the claim
        logger.error("destination raised %s on event %s", type(error).__name__, claim.event_id)
        return Failure(claim, "dispatch.client_failure", retryable=False)


def _current(held: _Held, result: Result) -> Result:
    """The result under the claim as it is now: a renewed one has replaced the one that the sender was given."""
    return result if result.claim is held.claim else dataclasses.replace(result, claim=held.claim)


def _unique_id() -> str:
    """Host, process and a random part: two workers never share an id, and a person can tell where one runs."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
