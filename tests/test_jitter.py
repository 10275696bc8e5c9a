"""When a failed event is due again: policies per topic, and how a worker spreads what failed together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import QueuePool

from outbox import Failure, Outbox, RetryPolicy, Settled
from outbox.policy import Jitter
from tests.support import TOPIC, WORKER, Notes, T, claimed, leased, make_outbox, notes, refused
from tests.test_enqueue import forbidden

OTHER = "test.other"


@pytest.fixture
def nowhere() -> Engine:
    """For outboxes that are refused before they ask any database."""
    return create_engine("sqlite://", creator=forbidden, poolclass=QueuePool)


def policy(jitter: Jitter = "proportional", base: float = 100.0, longest: float = 1000.0) -> RetryPolicy:
    return RetryPolicy(base, longest, max_retry_after_seconds=3600, jitter=jitter)


def delays(outbox: Outbox, count: int = 200, *, jitter: bool = True, retry_after: float | None = None) -> list[float]:
    outbox.enqueue_many(notes(count), now=T)
    results = [
        Failure(claim, "busy", retry_after=retry_after) for claim in outbox.claim_batch(WORKER, limit=count, now=T)
    ]
    found = [waits(line) for line in outbox.settle(results, jitter=jitter, now=T)]
    assert len(found) == count
    return found


def waits(line: Settled) -> float:
    assert line.outcome is not None
    assert line.outcome.next_attempt_at is not None
    return line.outcome.next_attempt_at - T


# -- policies per topic ---------------------------------------------------------------------------------------------


def test_each_topic_by_its_own(engine: Engine) -> None:
    outbox = make_outbox(engine, TOPIC, OTHER, retry={OTHER: policy(base=7)})
    for topic in (TOPIC, OTHER):
        outbox.enqueue_many(notes(1), topic=topic, now=T)
    ours = outbox.retry(claimed(outbox, topic=TOPIC), "busy", now=T)
    theirs = outbox.retry(claimed(outbox, topic=OTHER), "busy", now=T)
    assert (ours.next_attempt_at, theirs.next_attempt_at) == (T + 5, T + 7)  # one that is not named has the default


@pytest.mark.parametrize("retry", [{}, None, {TOPIC: RetryPolicy()}])
def test_without_one_it_is_the_default(engine: Engine, retry: Any) -> None:
    outbox = make_outbox(engine, retry=retry)
    assert outbox.retry(leased(outbox), "busy", now=T).next_attempt_at == T + 5


@pytest.mark.parametrize(
    "retry", [{"unheard.of": RetryPolicy()}, {TOPIC: RetryPolicy(), "": RetryPolicy()}, {7: RetryPolicy()}]
)
def test_unknown_topics(nowhere: Engine, retry: Any) -> None:
    with refused("dispatch.topic_unknown"):
        make_outbox(nowhere, retry=retry)


@pytest.mark.parametrize(
    "retry", [{TOPIC: None}, {TOPIC: 5}, {TOPIC: {}}, 5, 0, "", "often", [RetryPolicy()], [], False]
)
def test_what_is_no_policy(nowhere: Engine, retry: Any) -> None:
    with refused("dispatch.policy_invalid"):
        make_outbox(nowhere, retry=retry)


@pytest.mark.parametrize("breaker", [5, 0, False, {}, RetryPolicy()])
def test_what_is_no_breaker(nowhere: Engine, breaker: Any) -> None:
    with refused("dispatch.policy_invalid"):
        make_outbox(nowhere, breaker=breaker)


@pytest.mark.parametrize("jitter", ["", "half", None, True, 1, ["none"]])
def test_what_is_no_jitter(jitter: Any) -> None:
    with refused("dispatch.policy_invalid"):
        RetryPolicy(jitter=jitter)


def test_a_mapping_that_changes_later_changes_nothing(engine: Engine) -> None:
    given = {TOPIC: policy()}
    outbox = make_outbox(engine, retry=given)
    given[TOPIC] = policy(base=1)
    assert outbox.retry(leased(outbox), "busy", now=T).next_attempt_at == T + 100


# -- spreading ------------------------------------------------------------------------------------------------------

RANGES: dict[Jitter, tuple[float, float]] = {"none": (100, 100), "proportional": (50, 100), "full": (0, 100)}


@pytest.mark.parametrize("jitter", RANGES)
def test_a_batch_is_spread(engine: Engine, jitter: Jitter) -> None:
    lowest, highest = RANGES[jitter]
    found = delays(make_outbox(engine, retry=policy(jitter)))
    assert lowest <= min(found) <= max(found) <= highest
    if jitter == "none":
        return
    assert len(set(found)) > 190
    middle = (lowest + highest) / 2
    assert 60 < sum(each < middle for each in found) < 140  # of 200, evenly: further off once in 10 ** 8 runs


@pytest.mark.parametrize("jitter", RANGES)
def test_the_verbs_and_a_plain_settle_are_exact(engine: Engine, jitter: Jitter) -> None:
    outbox = make_outbox(engine, retry=policy(jitter))
    assert outbox.retry(leased(outbox, "one"), "busy", now=T).next_attempt_at == T + 100
    assert set(delays(outbox, 20, jitter=False)) == {100}


@pytest.mark.parametrize("jitter", RANGES)
@pytest.mark.parametrize(("asked", "lowest"), [(80.0, 80.0), (100.0, 100.0), (500.0, 500.0), (1e9, 3600.0)])
def test_a_wish_bounds_it_from_below(engine: Engine, jitter: Jitter, asked: float, lowest: float) -> None:
    found = delays(make_outbox(engine, retry=policy(jitter)), 50, retry_after=asked)
    assert min(found) >= lowest
    assert max(found) <= max(lowest, 100)


def test_what_ends_is_not_spread(engine: Engine) -> None:
    outbox = make_outbox(engine, retry=policy("full"))
    (line,) = outbox.settle([Failure(leased(outbox, max_attempts=1), "busy")], jitter=True, now=T)
    assert line.outcome is not None
    assert (line.outcome.status, line.outcome.next_attempt_at) == ("failed", None)


def test_what_an_outage_spares_is_spread_too(engine: Engine) -> None:
    outbox = make_outbox(engine, retry=policy("full"))
    outbox.enqueue_many(notes(50), now=T)
    results = [Failure(claim, "down", outage=True) for claim in outbox.claim_batch(WORKER, now=T)]
    found = [waits(line) for line in outbox.settle(results, jitter=True, now=T)]
    assert len(set(found)) > 40
    assert 0 <= min(found) <= max(found) <= 100


def test_each_topic_is_spread_by_its_own(engine: Engine) -> None:
    outbox = Outbox(engine, [Notes(TOPIC), Notes(OTHER)], {TOPIC: policy("none"), OTHER: policy("full", base=10)})
    claims = []
    for topic in (TOPIC, OTHER):
        outbox.enqueue_many(notes(20), topic=topic, now=T)
        claims += outbox.claim_batch(WORKER, topic=topic, now=T)
    found: dict[str, list[float]] = {TOPIC: [], OTHER: []}
    for line in outbox.settle([Failure(claim, "busy") for claim in claims], jitter=True, now=T):
        found[line.claim.topic].append(waits(line))
    assert set(found[TOPIC]) == {100}
    assert max(found[OTHER]) <= 10
    assert len(set(found[OTHER])) > 15


# -- the arithmetic -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(RANGES)), st.floats(0.001, 1e4), st.floats(1, 100), st.integers(1, 20),
    st.none() | st.floats(0, 1e9), st.floats(0, 1), st.floats(0.001, 1e6),
)  # fmt: skip
def test_any_delay(
    jitter: Jitter, base: float, stretch: float, attempt: int, asked: float | None, luck: float, cap: float
) -> None:
    retry = RetryPolicy(base, base * stretch, cap, jitter)
    plain = retry.delay(attempt)
    assert base <= plain <= base * stretch
    assert plain == min(base * stretch, base * 2.0 ** (attempt - 1))
    spread = retry.delay(attempt, luck=luck)
    assert {"none": plain, "proportional": plain / 2, "full": 0.0}[jitter] - 1e-9 * plain <= spread <= plain
    obeyed = min(asked or 0.0, cap)
    assert retry.delay(attempt, asked, luck=luck) == max(spread, obeyed)
    decision = retry.decide(attempt=attempt, max_attempts=20, now=T, retryable=True, retry_after=asked, luck=luck)
    assert decision.status == ("failed" if attempt == 20 else "retry_wait")
    assert decision.next_attempt_at >= T
