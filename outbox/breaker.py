"""The breaker: when a topic's destination counts as down, who may try it, and how it is taken up again. Pure.

One :class:`TopicState` per topic stands in the database, so that all workers see the same. What becomes of it is
decided here, result by result, from the state, the result and the time::

            a run of failures that              the probe, or any event
            speak of the destination            in flight, was answered
    closed ------------------------> open ------------------------------> ramp ----> closed
                                     |  ^                                  |   (after ramp_seconds)
                                     +--+ a probe failed:                  +--> open (the second such failure in a row)
                                          the pause doubles

Beside that a topic can be paused by hand, and held because the destination named a time with Retry-After.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outbox.policy import BreakerPolicy
from outbox.records import Claim, Failure, Result, Success, TopicGate, TopicStatus

#: HTTP statuses whose Retry-After speaks for the whole destination (RFC 9110, 10.2.3; RFC 6585, 4).
HOLDING: Final = frozenset({429, 503})
#: So many failures in a row end a ramp. Not one, which may be the fault of its event.
RAMP_FAILURES: Final = 2


@dataclass(frozen=True, slots=True)
class TopicState:
    """A row of ``outbox_topic``; a topic without one is closed and always was. Times are UTC epoch seconds.

    Attributes:
        paused_at: since when it is paused by hand, or None.
        failures: length of the present run of failures that speak of the destination.
        last_failed_event: the event that was counted last.
        opened_at: since when the breaker is open, or None.
        error_code: the code of the failure that opened it or, since, of the last probe.
        probes: how many have failed since.
        probe_at: when the next may be sent; while one is under way, when its lease ends.
        probe_token: the lease token of the one under way.
        held_until: the destination asked to be left alone until then.
        closed_at: when the ramp began.
        ramp_claimed: how many events have been claimed since.
    """

    topic: str
    paused_at: float | None = None
    pause_reason: str | None = None
    failures: int = 0
    last_failed_event: str | None = None
    opened_at: float | None = None
    error_code: str | None = None
    probes: int = 0
    probe_at: float | None = None
    probe_token: str | None = None
    held_until: float | None = None
    closed_at: float | None = None
    ramp_claimed: int = 0

    def gate(self, now: float, policy: BreakerPolicy) -> TopicGate:
        """What stands between a claim and the topic's events."""
        if self.paused_at is not None:
            return "paused"
        if not policy.enabled:  # though somebody else's may be
            return "closed"
        if self.opened_at is not None:
            return "open"
        if self.held_until is not None and now < self.held_until:
            return "held"
        return "ramp" if self.ramping(now, policy) else "closed"

    def ramping(self, now: float, policy: BreakerPolicy) -> bool:
        return self.closed_at is not None and now - self.closed_at < policy.ramp_seconds

    def allowance(self, now: float, limit: int, policy: BreakerPolicy) -> int:
        """How many of ``limit`` events may be claimed now."""
        gate = self.gate(now, policy)
        if gate == "open":
            return 1 if self.next_probe() <= now else 0
        if gate == "ramp":
            assert self.closed_at is not None
            return max(0, min(limit, math.floor(policy.allowed(now - self.closed_at) - self.ramp_claimed)))
        return limit if gate == "closed" else 0

    def next_probe(self) -> float:
        """When the next probe may be sent: not before what the destination has asked for with any of its answers."""
        assert self.probe_at is not None
        return max(self.probe_at, self.held_until or 0.0)

    def claimed(self, claims: Sequence[Claim], now: float, policy: BreakerPolicy) -> TopicState:
        """The state once ``claims`` have been made: one of them may be the probe."""
        gate = self.gate(now, policy)
        if not claims or gate not in ("open", "ramp"):
            return self
        if gate == "open":
            # If nobody settles it, somebody else may try once its lease has ended.
            return replace(self, probe_token=claims[0].lease_token, probe_at=claims[0].lease_expires_at)
        return replace(self, ramp_claimed=self.ramp_claimed + len(claims))

    def renewed(self, tokens: Iterable[str], expires_at: float) -> TopicState:
        """The state once leases have been moved: a probe's turn lasts for as long as its lease."""
        if self.probe_token is None or self.probe_token not in tokens:
            return self
        return replace(self, probe_at=expires_at)

    def released(self, tokens: Iterable[str], now: float) -> TopicState:
        """The state once claims have been given back unsent."""
        if self.probe_token is None or self.probe_token not in tokens:
            return self
        return replace(self, probe_token=None, probe_at=now)

    def paused(self, reason: str, now: float) -> TopicState:
        """Paused by hand; when it already is, only for another reason."""
        return replace(self, paused_at=now if self.paused_at is None else self.paused_at, pause_reason=reason)

    def resumed(self, now: float) -> TopicState:
        """No longer paused; an open breaker's next probe may be sent at once, and no Retry-After holds it."""
        probe_at = None if self.opened_at is None else now
        return replace(self, paused_at=None, pause_reason=None, held_until=None, probe_at=probe_at, probe_token=None)

    def after(self, result: Result, now: float, policy: BreakerPolicy) -> TopicState:
        """The state once a result is known."""
        if isinstance(result, Success):
            return self._answered(now)
        if result.outage:
            state = self._failed(result, now, policy)
        elif result.http_status is not None:
            state = self._answered(now)
        else:
            state = self._probed(result, now, policy)
        return state.paused("gone", now) if result.gone and state.paused_at is None else state

    def _answered(self, now: float) -> TopicState:
        if self.opened_at is not None:
            return TopicState(self.topic, self.paused_at, self.pause_reason, closed_at=now)
        return replace(self, failures=0, last_failed_event=None) if self.failures else self

    def _failed(self, failure: Failure, now: float, policy: BreakerPolicy) -> TopicState:
        if not policy.enabled:
            return self
        state = self._counted(failure, now, policy) if self.opened_at is None else self._probed(failure, now, policy)
        if failure.retry_after is not None and failure.http_status in HOLDING:
            return replace(state, held_until=max(self.held_until or 0.0, now + policy.obeyed(failure.retry_after)))
        return state

    def _counted(self, failure: Failure, now: float, policy: BreakerPolicy) -> TopicState:
        event_id = failure.claim.event_id
        if failure.arrival != "unsent" and event_id == self.last_failed_event:
            return self
        run = self.failures + 1
        if run < (min(RAMP_FAILURES, policy.failures) if self.ramping(now, policy) else policy.failures):
            return replace(self, failures=run, last_failed_event=event_id)
        return replace(
            self, failures=run, last_failed_event=event_id, opened_at=now, error_code=failure.error_code, probes=0,
            probe_at=now + policy.pause(0, failure.retry_after), probe_token=None, closed_at=None, ramp_claimed=0,
        )  # fmt: skip

    def _probed(self, failure: Failure, now: float, policy: BreakerPolicy) -> TopicState:
        """A probe that proved nothing, or that the destination is still down. Others in flight change nothing."""
        if self.opened_at is None or failure.claim.lease_token != self.probe_token:
            return self
        probes = self.probes + failure.outage
        pause = policy.pause(probes, failure.retry_after)
        return replace(self, error_code=failure.error_code, probes=probes, probe_at=now + pause, probe_token=None)

    def status(self, now: float, policy: BreakerPolicy) -> TopicStatus:
        """The state in the words of ``health``."""
        gate = self.gate(now, policy)
        since = {"paused": self.paused_at, "open": self.opened_at, "ramp": self.closed_at}.get(gate)
        until = self.next_probe() if gate == "open" else self.held_until if gate == "held" else None
        reason = {"paused": self.pause_reason, "open": self.error_code, "held": "retry_after"}.get(gate)
        return TopicStatus(self.topic, gate, since, reason, until)


def spares(state: TopicState, result: Result, policy: BreakerPolicy) -> bool:
    """Whether an attempt is not counted: it failed for the destination's sake while the topic is (or became) open."""
    if not policy.enabled or state.opened_at is None:
        return False
    return isinstance(result, Failure) and result.outage and result.retryable
