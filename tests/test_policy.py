"""When a failed attempt is made again: exact arithmetic, without a clock."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import RetryPolicy
from outbox.policy import Decision
from tests.profiles import examples, settings
from tests.support import refused

DEFAULT = RetryPolicy()


def test_the_defaults() -> None:
    assert dataclasses.astuple(DEFAULT) == (5.0, 300.0, 3600.0, "proportional")


@pytest.mark.parametrize(
    ("attempt", "delay"), [(1, 5), (2, 10), (3, 20), (4, 40), (5, 80), (6, 160), (7, 300), (8, 300), (20, 300)]
)
def test_delays_double_up_to_the_longest(attempt: int, delay: float) -> None:
    assert DEFAULT.delay(attempt) == delay


@pytest.mark.parametrize(
    ("attempt", "asked", "delay"),
    [
        (1, None, 5), (1, 0, 5), (1, 4.9, 5), (1, 5, 5), (1, 5.5, 5.5), (1, 301, 301), (1, 3600, 3600), (1, 3601, 3600),
        (1, 1e300, 3600), (7, 299, 300), (7, 1000, 1000),
    ],
)  # fmt: skip
def test_a_destinations_wish_is_a_lower_bound_with_a_cap(attempt: int, asked: float | None, delay: float) -> None:
    assert DEFAULT.delay(attempt, asked) == delay


def test_the_cap_on_wishes_never_shortens_the_delay() -> None:
    assert RetryPolicy(base_delay_seconds=50, max_retry_after_seconds=1).delay(1, 10) == 50


@pytest.mark.parametrize(
    ("attempt", "max_attempts", "retryable", "decision"),
    [
        (1, 2, True, Decision("retry_wait", 105.0)),
        (19, 20, True, Decision("retry_wait", 400.0)),
        (2, 2, True, Decision("failed", 100.0)),
        (1, 1, True, Decision("failed", 100.0)),
        (1, 2, False, Decision("failed", 100.0)),
        (3, 2, True, Decision("failed", 100.0)),
    ],
)
def test_decisions(attempt: int, max_attempts: int, retryable: bool, decision: Decision) -> None:
    found = DEFAULT.decide(attempt=attempt, max_attempts=max_attempts, now=100.0, retryable=retryable)
    assert found == decision


@pytest.mark.parametrize("name", ["base_delay_seconds", "max_delay_seconds", "max_retry_after_seconds"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5", None, 86_400 * 365 + 1])
def test_numbers_that_make_no_schedule(name: str, value: Any) -> None:
    with refused("dispatch.policy_invalid"):
        RetryPolicy(**{name: value})


def test_the_longest_delay_is_at_least_the_first() -> None:
    assert RetryPolicy(base_delay_seconds=300, max_delay_seconds=300).delay(5) == 300
    with refused("dispatch.policy_invalid"):
        RetryPolicy(base_delay_seconds=301, max_delay_seconds=300)


def test_numbers_become_floats_and_stay_as_they_are() -> None:
    policy = RetryPolicy(base_delay_seconds=1)
    assert type(policy.base_delay_seconds) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.base_delay_seconds = 2.0  # type: ignore[misc]


@settings(max_examples=examples(150, 5000))
@given(
    base=st.floats(0.001, 1000),
    longest=st.floats(1000, 100_000),
    attempt=st.integers(1, 20),
    asked=st.none() | st.floats(0, 1e6),
)
def test_delays_never_shrink_and_keep_their_bounds(
    base: float, longest: float, attempt: int, asked: float | None
) -> None:
    policy = RetryPolicy(base, longest)
    delay = policy.delay(attempt, asked)
    assert base <= delay <= max(longest, policy.max_retry_after_seconds)
    assert delay >= min(asked or 0, policy.max_retry_after_seconds)
    assert policy.delay(attempt) <= policy.delay(attempt + 1) <= longest
