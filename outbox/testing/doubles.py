"""A clock and a destination that do what a test tells them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from outbox.contracts.cms import RESPONSE_SCHEMA
from outbox.errors import InputError
from outbox.records import Claim
from outbox.values import check_now, check_seconds

#: How long anything here waits for somebody else before it says that the test is stuck, in seconds.
PATIENCE: Final = 30.0


class Clock:
    """A clock that stands still until it is told to move; every verb takes what it shows as ``now=clock()``.

    Raises:
        InputError: ``dispatch.time_invalid``.
    """

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._lock = threading.Lock()
        self._now = _time(now)

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Move by ``seconds``, backwards when negative, and return the new time."""
        with self._lock:
            self._now = _time(self._now + seconds)
            return self._now

    def set(self, now: float) -> float:
        """Step to ``now``, in either direction."""
        with self._lock:
            self._now = _time(now)
            return self._now

    def __repr__(self) -> str:
        return f"Clock({self()!r})"


class Gate:
    """Holds a delivery until a test opens it.

    Attributes:
        arrived: set once a delivery waits here.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let through whatever waits here or will come."""
        self._open.set()

    def wait_for_arrival(self, seconds: float = PATIENCE) -> None:
        """Return once a delivery waits here.

        Raises:
            AssertionError: none came.
        """
        if not self.arrived.wait(seconds):
            raise AssertionError(f"no delivery came to the gate within {seconds:g} s")

    def pass_through(self) -> None:
        """Wait here for the gate to open, on the thread that delivers."""
        self.arrived.set()
        if not self._open.wait(PATIENCE):
            raise AssertionError(f"nobody opened the gate within {PATIENCE:g} s")


#: What one delivery does: give this response, raise this, wait here and then do as usual, or whatever the call does.
Step = Mapping[str, Any] | BaseException | Gate | Callable[[Claim], Mapping[str, Any]]


class ScriptedDestination:
    """A destination that remembers every claim and does as its script says, event by event.

    Each delivery of an event takes the next step of its script; after the last one, and without a script, the event is
    accepted.

        destination.script("event-1", DeliveryFailed("busy", retryable=True), gate)

    Args:
        timeout: what the destination declares; it is not enforced here.
        respond: makes the response to an accepted claim. By default the one the CMS contract asks for.
    """

    def __init__(self, *, timeout: float = 1.0, respond: Callable[[Claim], Mapping[str, Any]] | None = None) -> None:
        self.timeout = check_seconds(timeout, code="dispatch.client_invalid")
        self._respond = respond or _accept
        self._changed = threading.Condition()
        self._scripts: dict[str, deque[Step]] = {}
        self._claims: list[Claim] = []

    @property
    def claims(self) -> list[Claim]:
        """Every claim handed in, in the order in which its delivery began."""
        with self._changed:
            return list(self._claims)

    def attempts(self, event_id: str) -> int:
        """How often the event was handed in."""
        return sum(claim.event_id == event_id for claim in self.claims)

    def script(self, event_id: str, *steps: Step) -> None:
        """What the event's next deliveries do, one step each; added to what was said before."""
        with self._changed:
            self._scripts.setdefault(event_id, deque()).extend(steps)

    def wait_for(self, count: int, seconds: float = PATIENCE) -> list[Claim]:
        """The claims, once there are ``count`` of them.

        Raises:
            AssertionError: there are fewer after ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._claims) >= count, seconds):
                raise AssertionError(f"{len(self._claims)} deliveries instead of {count} after {seconds:g} s")
            return list(self._claims)

    def deliver(self, claim: Claim) -> Mapping[str, Any]:
        """Do the event's next step."""
        with self._changed:
            self._claims.append(claim)
            self._changed.notify_all()
            script = self._scripts.get(claim.event_id)
            step = script.popleft() if script else self._respond
        if isinstance(step, Gate):
            step.pass_through()
            step = self._respond
        if isinstance(step, BaseException):
            raise step
        return step(claim) if callable(step) else step


def cms_response(event_id: str, **changes: Any) -> dict[str, Any]:
    """What the CMS localization service answers to an event it takes up, with ``changes``."""
    return {
        "schema": RESPONSE_SCHEMA,
        "event_id": event_id,
        "plan_id": "plan-1",
        "job_count": 1,
        "inserted_jobs": 1,
        "status": "enqueued",
        **changes,
    }


def _accept(claim: Claim) -> Mapping[str, Any]:
    return cms_response(claim.event_id)


def _time(now: float) -> float:
    checked = check_now(now)
    if checked is None:
        raise InputError("dispatch.time_invalid", expected="UTC epoch seconds", found="None")
    return checked
