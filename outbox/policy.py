"""When a failed attempt is made again: pure arithmetic on attempt, time and hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from outbox.errors import InputError
from outbox.values import check_seconds


class Decision(NamedTuple):
    """Where a failed attempt leads, and when the event is due (``now`` itself once it has failed)."""

    status: Literal["retry_wait", "failed"]
    next_attempt_at: float


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off: ``min(max_delay, base_delay * 2 ** (attempt - 1))`` seconds after each failure.

    A destination's Retry-After is a lower bound on that, itself bounded by ``max_retry_after_seconds``, so that a
    hostile or broken server cannot park an event for a year.

    Raises:
        InputError: ``dispatch.policy_invalid``.
    """

    base_delay_seconds: float = 5.0
    max_delay_seconds: float = 300.0
    max_retry_after_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("base_delay_seconds", "max_delay_seconds", "max_retry_after_seconds"):
            value = check_seconds(getattr(self, name), code="dispatch.policy_invalid", longest=86_400 * 365)
            object.__setattr__(self, name, value)
        if self.max_delay_seconds < self.base_delay_seconds:
            raise InputError("dispatch.policy_invalid", expected="max_delay_seconds of at least base_delay_seconds")

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (from 1)."""
        backoff = min(self.max_delay_seconds, self.base_delay_seconds * 2.0 ** (attempt - 1))
        if retry_after is None:
            return backoff
        return max(backoff, min(retry_after, self.max_retry_after_seconds))

    def decide(
        self, *, attempt: int, max_attempts: int, now: float, retryable: bool, retry_after: float | None = None
    ) -> Decision:
        """What becomes of an event whose attempt number ``attempt`` failed at ``now``."""
        if not retryable or attempt >= max_attempts:
            return Decision("failed", now)
        return Decision("retry_wait", now + self.delay(attempt, retry_after))
