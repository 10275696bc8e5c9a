"""The frozen records that go in and out of the verbs. Times are UTC epoch seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from outbox.errors import InputError
from outbox.values import (
    MAX_ATTEMPTS,
    check_int,
    check_seconds,
    describe,
    is_number,
    is_sha256,
    is_text,
    is_token,
    sha256_hex,
)

Status = Literal["pending", "waiting", "leased", "retry_wait", "succeeded", "failed"]
#: What stands between a claim and a topic's events.
TopicGate = Literal["closed", "paused", "open", "held", "ramp"]
#: How far a failed attempt got: surely not sent; sent, perhaps arrived, and unanswered; or answered, with a refusal.
Arrival = Literal["unsent", "unknown", "refused"]
ARRIVALS: Final[tuple[Arrival, ...]] = ("unsent", "unknown", "refused")
STATUSES: Final[tuple[Status, ...]] = ("pending", "waiting", "leased", "retry_wait", "succeeded", "failed")


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased event in a worker's hands. Its fence is (id, owner, token, attempt, hash, expiry).

    Attributes:
        payload: the event's canonical JSON text, exactly as enqueued; kept out of ``repr``.
        attempt: this attempt's number, from 1.
        lease_expires_at: when another worker may take the event.
        headers: JSON text kept beside the event (trace context), or None.
        id: the row's surrogate key.
        due_at: since when the event had been due.
    """

    topic: str
    event_id: str
    payload: str = field(repr=False)
    payload_sha256: str
    attempt: int
    max_attempts: int
    lease_owner: str
    lease_token: str
    lease_expires_at: float
    id: int
    ordering_key: str | None = None
    headers: str | None = field(default=None, repr=False)
    due_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is kept of an accepted response: a few of its fields as canonical JSON, and the hash of all of it."""

    text: str
    response_sha256: str


@dataclass(frozen=True, slots=True)
class Success:
    """A result for :meth:`Outbox.settle`: the destination accepted the event with ``response``."""

    claim: Claim
    response: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """A result for :meth:`Outbox.settle`: this attempt failed.

    Attributes:
        retryable: False ends the event; True leaves that to the attempts left.
        retry_after: seconds the destination asked us to wait, a lower bound, or None.
        detail_hash: SHA-256 hex of whatever detail the host keeps elsewhere, or None.
        arrival: how far the attempt got.
        http_status: the status that the destination answered with, or None.
        outage: whether it says that the destination is down, and not that it refuses this event.
        gone: whether the destination wants nothing more, ever.
        seconds: how long the attempt took, or None.
    """

    claim: Claim
    error_code: str
    retryable: bool = True
    retry_after: float | None = None
    detail_hash: str | None = None
    arrival: Arrival = "unknown"
    http_status: int | None = None
    outage: bool = False
    gone: bool = False
    seconds: float | None = None


Result = Success | Failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt led to.

    Attributes:
        status: the event's state now.
        next_attempt_at: when it is due again; None once it is settled.
        error_code: None exactly when it succeeded.
    """

    event_id: str
    status: Status
    attempt: int
    max_attempts: int
    next_attempt_at: float | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class Settled:
    """One line of the answer to ``settle`` or ``release``.

    Attributes:
        claim: the claim as it was handed in.
        won: whether this claim's result was recorded.
        outcome: what became of the event; None when lost.
        error_code: why the claim lost (``dispatch.claim_lost`` and its kin); None when it won.
    """

    claim: Claim
    won: bool
    outcome: Outcome | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One attempt that failed.

    Attributes:
        attempt: its number, from 1; numbers begin anew when the event is redriven.
        ended_at: when it was recorded.
        seconds: how long it took, or None where nobody measured.
        arrival: ``unsent`` (surely), ``unknown`` (it may have arrived) or ``refused`` (the destination answered).
        http_status: the status that the destination answered with, or None.
    """

    attempt: int
    ended_at: float
    seconds: float | None
    error_code: str
    arrival: Arrival
    http_status: int | None
    detail_hash: str | None


@dataclass(frozen=True, slots=True)
class EventStatus:
    """An event as it stands in the table, without its payload.

    Attributes:
        failures: the newest of its failed attempts, at most 50, oldest first; only :meth:`Outbox.status` looks them up.
    """

    topic: str
    event_id: str
    payload_sha256: str
    status: Status
    attempts: int
    max_attempts: int
    next_attempt_at: float
    lease_expires_at: float | None
    lease_expired: bool
    last_error_code: str | None
    last_error_detail_hash: str | None
    receipt: Mapping[str, Any] | None
    response_sha256: str | None
    ordering_key: str | None
    redrives: int
    created_at: float
    updated_at: float
    failures: tuple[FailedAttempt, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """How a topic's destination fares.

    Attributes:
        state: ``closed`` (all is well), ``paused`` (by hand, or because the destination is gone for good), ``open`` (it
            counts as down, and only probes are sent), ``held`` (it asked to be left alone for a while) or ``ramp`` (it
            is back, and is taken up again little by little).
        since: since when, or None where that is not known.
        reason: why: what whoever paused it said, or an error code; None when closed.
        until: when the next probe is due, or the hold ends; None otherwise.
    """

    topic: str
    state: TopicGate
    since: float | None = None
    reason: str | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The outbox at a glance.

    Attributes:
        status: ``blocked`` when leases have expired unrecovered or events have failed, else ``ok``.
        counts: number of events in every state.
        due: events that a claim could take now.
        expired_leases: leases past their end that nobody has recovered yet.
        failed: events that ended without being accepted.
        oldest_due_age: seconds the longest-due event has been due, or None.
        approximate: states whose count is the database's estimate, since counting would cost too much.
        topics: how each topic's destination fares, by topic.
    """

    status: Literal["ok", "blocked"]
    counts: Mapping[Status, int]
    due: int
    expired_leases: int
    failed: int
    oldest_due_age: float | None
    approximate: tuple[str, ...] = ()
    topics: Mapping[str, TopicStatus] = field(default_factory=dict)


def check_attempt(arrival: object, http_status: object, seconds: object) -> None:
    """Refuse what cannot be said of an attempt.

    Raises:
        InputError: ``dispatch.error_invalid``.
    """
    if arrival not in ARRIVALS:
        raise InputError("dispatch.error_invalid", expected=f"an arrival of {', '.join(ARRIVALS)}")
    if http_status is not None:
        check_int(http_status, code="dispatch.error_invalid", lowest=100, highest=999)
    if seconds is not None:
        check_seconds(seconds, code="dispatch.error_invalid", zero=True)


def check_claim(claim: object) -> Claim:
    """Refuse what :meth:`Outbox.claim` cannot have made.

    Raises:
        InputError: ``dispatch.claim_invalid``.
    """
    if not isinstance(claim, Claim):
        raise InputError("dispatch.claim_invalid", expected="a Claim", found=describe(claim))
    wrong = _claim_fault(claim)
    if wrong is not None:
        event_id = claim.event_id if is_token(claim.event_id) else None
        raise InputError("dispatch.claim_invalid", event_id=event_id, expected=wrong)
    return claim


def _claim_fault(claim: Claim) -> str | None:
    numbers = (claim.attempt, claim.max_attempts, claim.id)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        return "whole numbers for id, attempt and max_attempts"
    if not 1 <= claim.id < 2**63:
        return "the id of a row"
    if not 1 <= claim.attempt <= claim.max_attempts <= MAX_ATTEMPTS:
        return f"1 <= attempt <= max_attempts <= {MAX_ATTEMPTS}"
    if not (is_token(claim.topic) and is_token(claim.event_id)):
        return "tokens for topic and event_id"
    if not (is_token(claim.lease_owner, 128) and is_token(claim.lease_token, 128)):
        return "tokens for lease_owner and lease_token"
    if not is_number(claim.lease_expires_at):
        return "a finite lease_expires_at"
    if not (is_text(claim.payload) and is_sha256(claim.payload_sha256)):
        return "a payload and its SHA-256"
    try:
        if sha256_hex(claim.payload) != claim.payload_sha256:
            return "a payload that hashes to payload_sha256"
    except UnicodeEncodeError:
        return "a payload in valid Unicode"
    return None
