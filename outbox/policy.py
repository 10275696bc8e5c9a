"""When a failed attempt is made again, and when a destination is left alone: pure arithmetic, no clock and no dice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from outbox.errors import InputError
from outbox.values import check_int, check_seconds, describe

Jitter = Literal["none", "proportional", "full"]

_LONGEST: Final = 86_400.0 * 365


class Decision(NamedTuple):
    """Where a failed attempt leads, and when the event is due (``now`` itself once it has failed)."""

    status: Literal["retry_wait", "failed"]
    next_attempt_at: float


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off: ``min(max_delay, base_delay * 2 ** (attempt - 1))`` seconds after each failure.

    A destination's Retry-After is a lower bound on that, itself bounded by ``max_retry_after_seconds``, so that a
    hostile or broken server cannot park an event for a year.

    The verbs are exact. A worker spreads its retries, so that what failed together does not come back together:
    ``proportional`` waits between half the delay and all of it, ``full`` between nothing and all of it.

    Raises:
        InputError: ``dispatch.policy_invalid``.
    """

    base_delay_seconds: float = 5.0
    max_delay_seconds: float = 300.0
    max_retry_after_seconds: float = 3600.0
    jitter: Jitter = "proportional"

    def __post_init__(self) -> None:
        _check_durations(self, "base_delay_seconds", "max_delay_seconds", "max_retry_after_seconds")
        if self.max_delay_seconds < self.base_delay_seconds:
            raise InputError("dispatch.policy_invalid", expected="max_delay_seconds of at least base_delay_seconds")
        if self.jitter not in get_args(Jitter):
            expected = f"a jitter of {', '.join(get_args(Jitter))}"
            raise InputError("dispatch.policy_invalid", expected=expected, found=describe(self.jitter))

    def delay(self, attempt: int, retry_after: float | None = None, *, luck: float | None = None) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (from 1).

        Args:
            luck: a random number in [0, 1] that the jitter goes by; None for the plain doubling.
        """
        backoff = min(self.max_delay_seconds, self.base_delay_seconds * 2.0 ** (attempt - 1))
        if luck is not None:
            backoff *= {"none": 1.0, "proportional": 1.0 - luck / 2, "full": 1.0 - luck}[self.jitter]
        if retry_after is None:
            return backoff
        return max(backoff, min(retry_after, self.max_retry_after_seconds))

    def decide(
        self,
        *,
        attempt: int,
        max_attempts: int,
        now: float,
        retryable: bool,
        retry_after: float | None = None,
        luck: float | None = None,
    ) -> Decision:
        """What becomes of an event whose attempt number ``attempt`` failed at ``now``."""
        if not retryable or attempt >= max_attempts:
            return Decision("failed", now)
        return Decision("retry_wait", now + self.delay(attempt, retry_after, luck=luck))


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a topic whose destination is down is left alone, and how it is taken up again.

    Attributes:
        failures: how many failures in a row that speak of the destination, each on another event, open the topic. An
            attempt that surely never left this machine counts on any event: it cannot be the event's fault.
        first_probe_seconds: the pause before the first probe; it doubles with every probe that fails.
        max_probe_seconds: the longest such pause, unless the destination asks for a longer one.
        max_retry_after_seconds: the longest that a destination can ask to be left alone.
        ramp_events: how many events may be claimed at once when the topic has closed again.
        ramp_doubling_seconds: in how many seconds that number doubles.
        ramp_seconds: after so many seconds there is no limit any more.
        enabled: False for no breaker at all; topics can still be paused by hand.

    Raises:
        InputError: ``dispatch.policy_invalid``.
    """

    failures: int = 5
    first_probe_seconds: float = 1.0
    max_probe_seconds: float = 60.0
    max_retry_after_seconds: float = 3600.0
    ramp_events: int = 10
    ramp_doubling_seconds: float = 2.0
    ramp_seconds: float = 20.0
    enabled: bool = True

    def __post_init__(self) -> None:
        for name in ("failures", "ramp_events"):
            check_int(getattr(self, name), code="dispatch.policy_invalid", lowest=1, highest=1000)
        names = ("first_probe_seconds", "max_probe_seconds", "max_retry_after_seconds")
        _check_durations(self, *names, "ramp_doubling_seconds", "ramp_seconds")
        if self.max_probe_seconds < self.first_probe_seconds:
            raise InputError("dispatch.policy_invalid", expected="max_probe_seconds of at least first_probe_seconds")

    def pause(self, probes: int, retry_after: float | None = None) -> float:
        """Seconds until the next probe, after so many that failed."""
        pause = min(self.max_probe_seconds, self.first_probe_seconds * 2.0 ** min(probes, 64))
        return max(pause, self.obeyed(retry_after))

    def obeyed(self, retry_after: float | None) -> float:
        """How much of a Retry-After is obeyed, in seconds."""
        return min(retry_after or 0.0, self.max_retry_after_seconds)

    def allowed(self, seconds: float) -> float:
        """How many events may have been claimed ``seconds`` after the topic closed again."""
        if seconds >= self.ramp_seconds:
            return float("inf")
        doublings: float = max(seconds, 0.0) / self.ramp_doubling_seconds
        return float(self.ramp_events * 2.0 ** min(doublings, 64.0))


def _check_durations(policy: object, *names: str) -> None:
    for name in names:
        value = check_seconds(getattr(policy, name), code="dispatch.policy_invalid", longest=_LONGEST)
        object.__setattr__(policy, name, value)
