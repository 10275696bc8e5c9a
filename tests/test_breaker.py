"""The breaker: what opens a topic, who may try it, how it is taken up again, and what that costs the events."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, delete, select

from outbox import Claim, DeliveryFailed, Failure, Outbox, Success
from outbox.breaker import TopicState, spares
from outbox.policy import BreakerPolicy, RetryPolicy
from outbox.records import Result, Settled
from outbox.schema import outbox_attempt, outbox_event, outbox_topic
from outbox.values import sha256_hex
from tests import outage
from tests.databases import Databases, make_test_engine
from tests.support import (
    PATIENCE,
    TOPIC,
    WORKER,
    Scripted,
    T,
    claimed,
    dump,
    make_outbox,
    note,
    notes,
    poison,
    raw_row,
    refused,
    response,
    together,
)

OTHER = "test.other"
POLICY = BreakerPolicy()


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


def down(claim: Claim, **more: Any) -> Failure:
    """The destination answered 503."""
    return Failure(
        claim, **{"error_code": "http_status", "arrival": "refused", "http_status": 503, "outage": True} | more
    )


def unsent(claim: Claim, **more: Any) -> Failure:
    return Failure(claim, **{"error_code": "network.unsent", "arrival": "unsent", "outage": True} | more)


def refusal(claim: Claim, **more: Any) -> Failure:
    return Failure(
        claim, **{"error_code": "http_status", "retryable": False, "arrival": "refused", "http_status": 422} | more
    )


def well(claim: Claim) -> Success:
    return Success(claim, response(claim.event_id))


def odd(claim: Claim) -> Failure:
    """Something of our own went wrong; the destination was not even asked."""
    return Failure(claim, "signing")


def made(name: str = "note-1", token: str | None = None, *, expires: float = T + 600) -> Claim:
    payload = json.dumps({"id": name})
    return Claim(TOPIC, name, payload, sha256_hex(payload), 1, 5, WORKER, token or f"token-{name}", expires, 1)


def state_of(engine: Engine, topic: str = TOPIC) -> TopicState | None:
    with engine.connect() as connection:
        row = connection.execute(select(outbox_topic).where(outbox_topic.c.topic == topic)).one_or_none()
    return None if row is None else TopicState(*row)


def gate(outbox: Outbox, now: float, topic: str = TOPIC) -> str:
    return outbox.health(now=now).topics[topic].state


def settled(outbox: Outbox, results: Sequence[Result], now: float) -> list[Settled]:
    lines = outbox.settle(results, now=now)
    assert all(line.won for line in lines), lines
    return lines


def recorded(engine: Engine) -> list[int]:
    """The attempt numbers that were recorded, in order."""
    with engine.connect() as connection:
        return list(connection.execute(select(outbox_attempt.c.attempt).order_by(outbox_attempt.c.id)).scalars())


def opened(outbox: Outbox, events: int = 10, now: float = T, run: int = 5) -> None:
    """``events`` of them, of which as many failed as it takes: open since ``now``, the first probe a second later."""
    outbox.enqueue_many(notes(events), now=T)
    settled(outbox, [down(claim) for claim in outbox.claim_batch(WORKER, limit=run, now=now)], now)
    assert gate(outbox, now) == "open"


# -- the rules alone ------------------------------------------------------------------------------------------------


def after(state: TopicState, *results: Result, now: float = T, policy: BreakerPolicy = POLICY) -> TopicState:
    for result in results:
        state = state.after(result, now, policy)
    return state


def run_of(count: int) -> list[Failure]:
    return [down(made(f"note-{number}")) for number in range(count)]


def test_a_run_opens_and_shorter_ones_do_not() -> None:
    state = after(TopicState(TOPIC), *run_of(4))
    assert (state.gate(T, POLICY), state.failures) == ("closed", 4)
    assert after(after(state, well(made("other"))), *run_of(4)).opened_at is None
    state = after(state, down(made("note-9"), error_code="last"))
    assert (state.gate(T, POLICY), state.opened_at, state.error_code, state.probe_at) == ("open", T, "last", T + 1)


def test_one_event_counts_once_unless_it_surely_never_left() -> None:
    assert after(TopicState(TOPIC), *[down(made())] * 50).failures == 1
    assert after(TopicState(TOPIC), *[unsent(made())] * 5).opened_at == T
    mixed = after(TopicState(TOPIC), down(made()), unsent(made()), down(made()))
    assert mixed.failures == 2


@pytest.mark.parametrize("answer", [well(made("x")), refusal(made("x")), refusal(made("x"), http_status=409)])
def test_any_answer_ends_a_run_and_an_outage(answer: Result) -> None:
    closed = after(TopicState(TOPIC), *run_of(4), answer)
    assert closed == TopicState(TOPIC)
    back = after(TopicState(TOPIC), *run_of(5), answer, now=T + 3)
    assert back == TopicState(TOPIC, closed_at=T + 3)
    assert back.gate(T + 3, POLICY) == "ramp"


def test_what_proves_nothing_neither_counts_nor_closes() -> None:
    state = after(TopicState(TOPIC), *run_of(4))
    assert after(state, odd(made("x"))) == state
    state = after(TopicState(TOPIC), *run_of(5))
    assert after(state, odd(made("x"))) == state


def test_a_probe_that_proves_nothing_makes_room_for_another() -> None:
    probe = made("probe")
    state = after(TopicState(TOPIC), *run_of(5)).claimed([probe], T + 1, POLICY)
    assert not state.allowance(T + 599, 9, POLICY)
    state = after(state, odd(probe), now=T + 5)
    assert (state.probes, state.probe_at, state.probe_token, state.error_code) == (0, T + 6, None, "signing")


def test_pauses_double_to_their_longest() -> None:
    state, now, pauses = after(TopicState(TOPIC), *run_of(5)), T, []
    for number in range(9):
        assert state.probe_at is not None
        pauses.append(state.probe_at - now)
        now = state.probe_at
        assert state.allowance(now - 1e-3, 100, POLICY) == 0
        assert state.allowance(now, 100, POLICY) == 1
        state = state.claimed([made(f"probe-{number}")], now, POLICY)
        state = after(state, down(made(f"probe-{number}")), now=now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert POLICY.pause(10**6) == 60


@pytest.mark.parametrize(("asked", "pause"), [(None, 1), (0.0, 1), (0.5, 1), (30.0, 30), (1e9, 3600)])
def test_a_wish_for_later_bounds_the_pause_from_below(asked: float | None, pause: float) -> None:
    state = after(TopicState(TOPIC), *run_of(4), down(made("last"), retry_after=asked))
    assert state.probe_at == T + pause


def test_a_wish_that_comes_once_it_is_open_holds_the_probe_too() -> None:
    state = after(TopicState(TOPIC), *run_of(5), down(made("in flight"), retry_after=120))
    assert state.allowance(T + 119, 1, POLICY) == 0
    assert state.status(T + 1, POLICY).until == T + 120
    assert state.allowance(T + 120, 1, POLICY) == 1
    assert state.resumed(T + 5).allowance(T + 5, 1, POLICY) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_one_wish_holds_without_opening(status: int) -> None:
    state = after(TopicState(TOPIC), down(made(), http_status=status, retry_after=90))
    assert state.gate(T + 89, POLICY) == "held"
    assert state.allowance(T + 89, 100, POLICY) == 0
    assert state.gate(T + 90, POLICY) == "closed"
    assert state.allowance(T + 90, 100, POLICY) == 100
    shorter = after(state, down(made("x"), http_status=status, retry_after=1))
    assert shorter.held_until == T + 90
    assert after(state, well(made("y"))).held_until == T + 90
    longest = after(TopicState(TOPIC), down(made(), http_status=status, retry_after=1e9))
    assert longest.held_until == T + 3600


@pytest.mark.parametrize("status", [500, 502, 504])
def test_other_statuses_wishes_are_their_events_own(status: int) -> None:
    assert after(TopicState(TOPIC), down(made(), http_status=status, retry_after=90)).held_until is None


def test_a_ramp_ends_with_the_second_failure_in_a_row() -> None:
    ramp = after(TopicState(TOPIC), *run_of(5), well(made("probe")))
    once = after(ramp, down(made("a")))
    assert once.gate(T, POLICY) == "ramp"
    assert after(once, down(made("a"))).gate(T, POLICY) == "ramp"
    assert after(once, well(made("b")), down(made("c"))).gate(T, POLICY) == "ramp"
    again = after(once, down(made("b")))
    assert (again.gate(T, POLICY), again.probes, again.probe_at, again.closed_at) == ("open", 0, T + 1, None)
    later = after(ramp, down(made("a")), down(made("b")), now=T + 20)
    assert later.gate(T + 20, POLICY) == "closed"


def test_a_ramp_doubles() -> None:
    state = TopicState(TOPIC, closed_at=T)
    assert [state.allowance(T + second, 1000, POLICY) for second in (0, 2, 4, 3, 19.99)] == [10, 20, 40, 28, 1000]
    assert state.allowance(T + 20, 1000, POLICY) == 1000
    state = state.claimed([made(str(number)) for number in range(8)], T, POLICY)
    assert [state.allowance(T + second, 1000, POLICY) for second in (0, 2, 4)] == [2, 12, 32]
    assert state.allowance(T - 100, 1000, POLICY) == 2


def test_a_long_ramp_of_short_doublings() -> None:
    """The number of events outgrows every float long before the ramp ends."""
    policy = BreakerPolicy(ramp_doubling_seconds=0.001, ramp_seconds=86_400)
    assert TopicState(TOPIC, closed_at=T).allowance(T + 86_399, 1000, policy) == 1000


def test_gone_pauses_and_stays_paused() -> None:
    state = after(TopicState(TOPIC), refusal(made(), http_status=410, gone=True))
    assert (state.gate(T, POLICY), state.paused_at, state.pause_reason) == ("paused", T, "gone")
    again = after(state, refusal(made("x"), http_status=410, gone=True), well(made("y")), now=T + 9)
    assert (again.paused_at, again.gate(T + 9, POLICY)) == (T, "paused")
    by_hand = TopicState(TOPIC).paused("maintenance", T)
    assert after(by_hand, refusal(made(), gone=True)).pause_reason == "maintenance"
    assert state.resumed(T + 10) == TopicState(TOPIC)


def test_a_pause_outlasts_what_happens_meanwhile() -> None:
    state = after(TopicState(TOPIC).paused("maintenance", T), *run_of(5))
    assert (state.gate(T, POLICY), state.opened_at) == ("paused", T)
    assert after(state, well(made("probe"))).gate(T, POLICY) == "paused"
    resumed = state.resumed(T + 0.5)
    assert (resumed.gate(T + 0.5, POLICY), resumed.allowance(T + 0.5, 10, POLICY)) == ("open", 1)


def test_without_a_breaker_nothing_opens_and_what_is_open_is_passed_over() -> None:
    policy = BreakerPolicy(enabled=False)
    assert after(TopicState(TOPIC), *run_of(50), policy=policy) == TopicState(TOPIC)
    assert after(TopicState(TOPIC), down(made(), retry_after=60), policy=policy).allowance(T, 9, policy) == 9
    opened = after(TopicState(TOPIC), *run_of(5))
    for state in (opened, replace(TopicState(TOPIC), held_until=T + 60), TopicState(TOPIC, closed_at=T)):
        assert (state.gate(T, policy), state.allowance(T, 1000, policy)) == ("closed", 1000)
    assert not spares(opened, down(made()), policy)
    assert opened.paused("by hand", T).allowance(T, 9, policy) == 0


times = st.floats(0, 200_000, allow_nan=False)
wishes = st.none() | st.floats(0, 1e6)
policies = st.builds(
    BreakerPolicy, failures=st.integers(1, 8), first_probe_seconds=st.floats(0.01, 60),
    max_probe_seconds=st.floats(60, 600), max_retry_after_seconds=st.floats(1, 1e4), ramp_events=st.integers(1, 1000),
    ramp_doubling_seconds=st.floats(1e-3, 100), ramp_seconds=st.floats(0.01, 1e5), enabled=st.sampled_from([True] * 4 + [False]),
)  # fmt: skip


@st.composite
def failures(draw: Any, claim: Claim) -> Result:
    if draw(st.integers(0, 5)) == 0:
        return well(claim)
    status = draw(st.sampled_from([None, 410, 422, 429, 500, 503]))
    return Failure(
        claim, "busy", draw(st.booleans()), draw(wishes), None, draw(st.sampled_from(["unsent", "unknown", "refused"])),
        status, draw(st.booleans()), draw(st.integers(0, 20)) == 0,
    )  # fmt: skip


def hold_together(state: TopicState, now: float, policy: BreakerPolicy) -> None:
    """What is true of every state at any time."""
    gate = state.gate(now, policy)
    for limit in (1, 7, 1000):
        allowed = state.allowance(now, limit, policy)
        assert 0 <= allowed <= limit
        assert allowed == limit if gate == "closed" else True
        assert allowed == 0 if gate in ("paused", "held") else True
        assert allowed <= 1 if gate == "open" else True
    assert (state.opened_at is None) == (state.probe_at is None)
    assert (state.paused_at is None) == (state.pause_reason is None)
    assert state.probe_token is None or state.opened_at is not None
    assert state.failures >= 0
    assert state.probes >= 0
    assert state.ramp_claimed >= 0
    assert state.closed_at is None or state.opened_at is None
    assert state.status(now, policy).state == gate


@settings(max_examples=150, deadline=None)
@given(st.data(), policies)
def test_any_history_at_any_times(data: st.DataObject, policy: BreakerPolicy) -> None:
    """Clocks may step in either direction, and results may come from claims of any age."""
    state, claims = TopicState(TOPIC), [made("note-0")]
    for step in range(data.draw(st.integers(1, 25))):
        now = data.draw(times)
        act = data.draw(st.sampled_from(["claim", "settle", "settle", "release", "renew", "pause", "resume"]))
        claim = data.draw(st.sampled_from(claims))
        if act == "claim" and (room := state.allowance(now, 3, policy)):
            new = [made(f"note-{step % 4}", f"{step}-{each}", expires=now + 10) for each in range(room)]
            state = state.claimed(new, now, policy)
            claims += new
        elif act == "settle":
            state = state.after(data.draw(failures(claim)), now, policy)
        elif act == "release":
            state = state.released({claim.lease_token}, now)
        elif act == "renew":
            state = state.renewed({claim.lease_token}, now + 10)
        elif act == "pause":
            state = state.paused("by hand", now)
        elif act == "resume":
            state = state.resumed(now)
        hold_together(state, now, policy)


@settings(max_examples=150, deadline=None)
@given(st.data(), policies)
def test_never_two_probes_at_once(data: st.DataObject, policy: BreakerPolicy) -> None:
    policy = replace(policy, enabled=True)
    state, now = TopicState(TOPIC, opened_at=0.0, error_code="down", probe_at=0.0), 0.0
    probes: dict[str, Claim] = {}
    for step in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.sampled_from([0.0, 0.5, 5.0, 100.0]))
        probes = {token: claim for token, claim in probes.items() if claim.lease_expires_at > now}
        act = data.draw(st.sampled_from(["claim", "claim", "settle", "release", "renew"]))
        if act == "claim" and state.allowance(now, 5, policy):
            assert not probes
            claim = made(f"note-{step}", expires=now + 10)
            state = state.claimed([claim], now, policy)
            probes[claim.lease_token] = claim
        elif act == "renew" and probes:
            (claim,) = probes.values()
            probes[claim.lease_token] = replace(claim, lease_expires_at=now + 10)
            state = state.renewed({claim.lease_token}, now + 10)
        elif act == "release" and probes:
            state = state.released(set(probes), now)
            probes = {}
        elif act == "settle":
            claim = probes.popitem()[1] if probes and data.draw(st.booleans()) else made("in flight")
            state = state.after(data.draw(st.sampled_from([down(claim), odd(claim), unsent(claim)])), now, policy)
        assert state.gate(now, policy) == "open"


# -- what opens a topic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together_", [True, False], ids=["in one settle", "one by one"])
def test_failures_of_distinct_events_open(outbox: Outbox, engine: Engine, together_: bool) -> None:
    outbox.enqueue_many(notes(8), now=T)
    claims = outbox.claim_batch(WORKER, limit=6, now=T)
    for some in [claims] if together_ else [[claim] for claim in claims]:
        settled(outbox, [down(claim) for claim in some], T + 1)
    state = state_of(engine)
    assert state is not None
    assert (state.opened_at, state.error_code, state.failures, state.probe_at) == (T + 1, "http_status", 5, T + 2)
    attempts = [row["attempts"] for row in dump(engine)]
    assert attempts == [1, 1, 1, 1, 0, 0, 0, 0]  # the fifth opened it, the sixth found it open
    assert [row["status"] for row in dump(engine)] == ["retry_wait"] * 6 + ["pending"] * 2
    assert recorded(engine) == [1, 1, 1, 1]
    assert outbox.claim_batch(WORKER, now=T + 1.9) == []
    assert not outbox.ready(now=T + 1.9)
    assert outbox.ready(now=T + 2)
    assert outbox.health(deep=True, now=T + 1).topics[TOPIC].until == T + 2


def test_one_bad_event_alone_never_opens_it(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), max_attempts=20, now=T)
    now = T
    for attempt in range(1, 21):
        now += 400
        assert settled(outbox, [down(claimed(outbox, now))], now)[0].outcome is not None
        assert gate(outbox, now) == "closed"
        assert raw_row(engine)["attempts"] == attempt
    assert outbox.status("note-1").status == "failed"
    outbox.enqueue_many(notes(5)[1:], now=now)
    assert len(outbox.claim_batch(WORKER, now=now)) == 4


def test_one_bad_event_among_good_ones_never_opens_it(outbox: Outbox) -> None:
    outbox.enqueue(note("bad"), max_attempts=20, now=T)
    now = T
    for number in range(20):
        now += 400
        outbox.enqueue_many([note(f"{number}-{each}") for each in range(3)], now=now)
        claims = outbox.claim_batch(WORKER, now=now)
        settled(outbox, [down(c) if c.event_id == "note-bad" else well(c) for c in claims], now)
        assert gate(outbox, now) == "closed"
    assert outbox.status("note-bad").status == "failed"


def test_what_surely_never_left_counts_on_one_event(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(note(), now=T)
    for number in range(5):
        settled(outbox, [unsent(claimed(outbox, T + 400 * number))], T + 400 * number)
    assert gate(outbox, T + 1600) == "open"
    assert (raw_row(engine)["attempts"], raw_row(engine)["status"]) == (4, "retry_wait")


def test_refusals_never_open_it(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(50), now=T)
    results = [
        refusal(c, http_status=400 + n, retryable=n % 2 == 0) for n, c in enumerate(outbox.claim_batch(WORKER, now=T))
    ]
    settled(outbox, results, T)
    assert gate(outbox, T) == "closed"
    assert outbox.health(now=T).topics[TOPIC].since is None


def test_a_failure_that_will_not_be_retried_counts_but_is_not_spared(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(6), now=T)
    settled(outbox, [down(claim, retryable=False) for claim in outbox.claim_batch(WORKER, now=T)], T)
    assert gate(outbox, T) == "open"
    assert {(row["status"], row["attempts"]) for row in dump(engine)} == {("failed", 1)}
    assert recorded(engine) == [1] * 6


def test_lost_claims_do_not_count(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(5), now=T)
    claims = outbox.claim_batch(WORKER, now=T)
    settled(outbox, [well(claim) for claim in claims[:4]], T)
    lines = outbox.settle([down(claim) for claim in claims], now=T)
    assert [line.won for line in lines] == [False] * 4 + [True]
    state = state_of(engine)
    assert state is not None
    assert (state.failures, state.opened_at) == (1, None)
    assert {row["status"] for row in dump(engine)} == {"succeeded", "retry_wait"}


def test_breakers_that_are_switched_off(engine: Engine, outbox: Outbox) -> None:
    off = make_outbox(engine, breaker=BreakerPolicy(enabled=False))
    off.enqueue_many(notes(20), now=T)
    settled(off, [down(claim, retry_after=60) for claim in off.claim_batch(WORKER, limit=10, now=T)], T)
    assert gate(off, T) == "closed"
    assert {row["attempts"] for row in dump(engine)[:10]} == {1}
    # Another program may have opened it all the same.
    settled(outbox, [down(claim) for claim in outbox.claim_batch(WORKER, limit=5, now=T)], T)
    assert gate(outbox, T) == "open"
    assert gate(off, T) == "closed"
    claims = off.claim_batch(WORKER, now=T)
    assert len(claims) == 5
    settled(off, [down(claim) for claim in claims], T)
    assert {row["attempts"] for row in dump(engine)[15:]} == {1}
    off.pause(reason="by hand", now=T)
    assert off.claim_batch(WORKER, now=T + 400) == []


# -- probes ---------------------------------------------------------------------------------------------------------


def test_one_probe_at_a_time_for_all(outbox: Outbox, engine: Engine) -> None:
    other = make_outbox(engine)
    opened(outbox)
    (probe,) = other.claim_batch("worker-2", limit=100, lease_seconds=60, now=T + 1)
    for each in (outbox, other):
        assert each.claim_batch(WORKER, now=T + 30) == []
        assert each.health(now=T + 30).topics[TOPIC].until == T + 61
    settled(outbox, [down(probe)], T + 31)
    assert other.claim_batch(WORKER, now=T + 32.9) == []
    assert len(other.claim_batch(WORKER, now=T + 33)) == 1


def test_threads_get_one_probe_between_them(outbox: Outbox, engine: Engine) -> None:
    opened(outbox, events=40)
    outboxes = [outbox, make_outbox(engine)] * 4
    now = T + 1
    for _ in range(3):
        found = together(*[lambda each=each, now=now: each.claim_batch(WORKER, limit=50, now=now) for each in outboxes])
        (probe,) = [claim for claims in found for claim in claims]
        settled(outbox, [down(probe)], now)
        state = state_of(engine)
        assert state is not None
        assert state.probe_at is not None
        now = state.probe_at


def test_threads_that_fail_at_once_open_it_once(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(40), now=T)
    claims = outbox.claim_batch(WORKER, now=T)
    together(*[lambda some=claims[n::8]: settled(outbox, [down(c) for c in some], T) for n in range(8)])
    state = state_of(engine)
    assert state is not None
    assert (state.opened_at, state.failures, state.probe_at, state.probes) == (T, 5, T + 1, 0)
    used = sum(row["attempts"] for row in dump(engine))
    # Each thread may have decided before it could see another's failures.
    assert 4 <= used <= 8 * 4
    assert len(recorded(engine)) == used


def test_a_probe_that_succeeds_closes_it(outbox: Outbox, engine: Engine) -> None:
    opened(outbox, events=60)
    settled(outbox, [well(claimed(outbox, T + 1))], T + 2)
    status = outbox.health(now=T + 2).topics[TOPIC]
    assert (status.state, status.since, status.reason, status.until) == ("ramp", T + 2, None, None)
    assert len(outbox.claim_batch(WORKER, limit=50, now=T + 2)) == 10
    assert outbox.claim_batch(WORKER, limit=50, now=T + 2) == []
    assert not outbox.ready(now=T + 2)
    assert len(outbox.claim_batch(WORKER, limit=7, now=T + 4)) == 7
    assert len(outbox.claim_batch(WORKER, limit=50, now=T + 4)) == 3
    assert gate(outbox, T + 22) == "closed"
    assert len(outbox.claim_batch(WORKER, limit=50, now=T + 22)) == 39


def test_a_refused_probe_closes_it_too(outbox: Outbox) -> None:
    opened(outbox)
    settled(outbox, [refusal(claimed(outbox, T + 1))], T + 2)
    assert gate(outbox, T + 2) == "ramp"


def test_what_was_in_flight_closes_it_too(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(8), now=T)
    claims = outbox.claim_batch(WORKER, limit=6, now=T)
    settled(outbox, [down(claim) for claim in claims[:5]], T)
    probe = claimed(outbox, T + 1)
    settled(outbox, [well(claims[5])], T + 2)
    assert gate(outbox, T + 2) == "ramp"
    settled(outbox, [down(probe)], T + 3)  # the probe's own failure is now one of the ramp
    assert gate(outbox, T + 3) == "ramp"


def test_what_was_in_flight_and_fails_late_is_spared_and_moves_no_probe(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(8), now=T)
    claims = outbox.claim_batch(WORKER, limit=6, now=T)
    settled(outbox, [down(claim) for claim in claims[:5]], T)
    before = state_of(engine)
    settled(outbox, [down(claims[5])], T + 0.5)
    assert state_of(engine) == before
    assert (raw_row(engine, "note-6")["attempts"], raw_row(engine, "note-6")["status"]) == (0, "retry_wait")
    assert claimed(outbox, T + 1).event_id == "note-7"


def lapse(outbox: Outbox, engine: Engine, probe: Claim) -> float:
    return probe.lease_expires_at


def give_back(outbox: Outbox, engine: Engine, probe: Claim) -> float:
    (line,) = outbox.release([probe], now=T + 2)
    assert line.won
    return T + 2


def vanish(outbox: Outbox, engine: Engine, probe: Claim) -> float:
    with engine.begin() as connection:
        connection.execute(delete(outbox_event).where(outbox_event.c.id == probe.id))
    outbox.settle([down(probe)], now=T + 2)
    return probe.lease_expires_at


def come_late(outbox: Outbox, engine: Engine, probe: Claim) -> float:
    (line,) = outbox.settle([well(probe)], now=probe.lease_expires_at)
    assert line.error_code == "dispatch.lease_expired"
    return probe.lease_expires_at


def stumble(outbox: Outbox, engine: Engine, probe: Claim) -> float:
    settled(outbox, [odd(probe)], T + 2)
    return T + 3


@pytest.mark.parametrize("lose", [lapse, give_back, vanish, come_late, stumble])
def test_a_probe_that_is_lost_is_replaced(
    outbox: Outbox, engine: Engine, lose: Callable[[Outbox, Engine, Claim], float]
) -> None:
    opened(outbox)
    probe = claimed(outbox, T + 1, lease_seconds=60)
    at = lose(outbox, engine, probe)
    assert outbox.claim_batch(WORKER, now=at - 0.01) == []
    (other,) = make_outbox(engine).claim_batch("worker-2", now=at)
    assert gate(outbox, at) == "open"
    settled(outbox, [well(other)], at)
    assert gate(outbox, at) == "ramp"


def test_a_renewed_probe_is_still_the_only_one(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    probe = claimed(outbox, T + 1, lease_seconds=10)
    (renewed,) = outbox.renew([probe], lease_seconds=30, now=T + 10)
    assert outbox.claim_batch(WORKER, now=T + 12) == []
    assert outbox.health(now=T + 12).topics[TOPIC].until == T + 40
    settled(outbox, [down(renewed)], T + 39)
    state = state_of(engine)
    assert state is not None
    assert (state.probes, state.probe_at) == (1, T + 41)


def test_a_probe_whose_payload_was_tampered_with(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    poison(engine, "note-6")
    (probe,) = outbox.claim_batch(WORKER, now=T + 1)
    assert probe.event_id == "note-7"
    assert outbox.status("note-6").last_error_code == "dispatch.payload_integrity"
    assert outbox.claim_batch(WORKER, now=T + 1) == []


def test_nothing_due_is_no_probe(outbox: Outbox, engine: Engine) -> None:
    opened(outbox, events=5)
    before = state_of(engine)
    assert outbox.claim_batch(WORKER, now=T + 5) == []
    assert state_of(engine) == before
    outbox.enqueue(note("new"), now=T + 5)
    assert len(outbox.claim_batch(WORKER, now=T + 5)) == 1


def test_leases_are_recovered_while_a_topic_is_shut(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(2), now=T)
    claimed(outbox, T, lease_seconds=5)
    outbox.pause(reason="maintenance", now=T)
    assert not outbox.ready(now=T + 4)
    assert outbox.ready(now=T + 5)
    assert outbox.claim_batch(WORKER, now=T + 5) == []
    assert outbox.health(now=T + 5).status == "ok"
    assert not outbox.ready(now=T + 5)


# -- what it costs the events ---------------------------------------------------------------------------------------


def test_attempts_are_spared_for_as_long_as_it_takes(outbox: Outbox, engine: Engine) -> None:
    opened(outbox, events=6)
    now = T
    for _ in range(40):
        now += 400
        for claim in outbox.claim_batch(WORKER, now=now):
            settled(outbox, [down(claim)], now)
    rows = dump(engine)
    assert [row["attempts"] for row in rows] == [1, 1, 1, 1, 0, 0]
    assert {row["status"] for row in rows} <= {"pending", "retry_wait"}
    assert recorded(engine) == [1, 1, 1, 1]
    assert outbox.health(deep=True, now=now).counts["failed"] == 0
    (line,) = settled(outbox, [well(claimed(outbox, now + 400))], now + 400)
    assert line.outcome is not None
    assert line.outcome.attempt <= 2


def test_the_last_attempt_is_spared_too(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    outbox.enqueue(note("last"), max_attempts=1, now=T - 1)
    (line,) = settled(outbox, [down(claimed(outbox, T + 1))], T + 1)
    assert line.outcome is not None
    assert (line.outcome.event_id, line.outcome.status, line.outcome.attempt) == ("note-last", "retry_wait", 0)
    assert outbox.status("note-last").failures == ()
    (line,) = outbox.release([claimed(outbox, T + 400)], now=T + 400)
    assert line.won
    assert outbox.health(deep=True, now=T + 400).counts["failed"] == 0


def test_a_wish_for_later_is_heeded_by_the_event_and_the_topic(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(3), now=T)
    (line,) = settled(outbox, [down(claimed(outbox, T), http_status=429, retry_after=100)], T)
    assert line.outcome is not None
    assert (line.outcome.next_attempt_at, line.outcome.attempt) == (T + 100, 1)
    status = outbox.health(now=T + 99).topics[TOPIC]
    assert (status.state, status.reason, status.until) == ("held", "retry_after", T + 100)
    assert outbox.claim_batch(WORKER, now=T + 99) == []
    assert len(outbox.claim_batch(WORKER, now=T + 100)) == 3
    assert recorded(engine) == [1]


def test_gone_pauses_until_somebody_resumes(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(3), now=T)
    settled(outbox, [refusal(claimed(outbox, T), http_status=410, gone=True)], T + 1)
    status = outbox.health(now=T + 1).topics[TOPIC]
    assert (status.state, status.since, status.reason, status.until) == ("paused", T + 1, "gone", None)
    assert outbox.claim(WORKER, now=T + 9999) is None
    assert outbox.resume(now=T + 9999).state == "closed"
    assert outbox.claim(WORKER, now=T + 9999) is not None


def test_deliveries_say_it_themselves(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(6), now=T)
    error = DeliveryFailed("http_status", retryable=True, arrival="refused", http_status=502, outage=True)

    def act(claim: Claim) -> Any:
        raise error

    for _ in range(5):
        outbox.run_once(Scripted(act), WORKER, now=T)
    assert gate(outbox, T) == "open"
    assert outbox.run_once(Scripted(), WORKER, now=T) is None
    outcome = outbox.run_once(Scripted(), WORKER, now=T + 1)
    assert outcome is not None
    assert (outcome.event_id, outcome.status) == ("note-6", "succeeded")
    assert gate(outbox, T + 1) == "ramp"


def test_a_bad_event_that_an_outage_leaves_behind_keeps_no_good_one_waiting(engine: Engine) -> None:
    """It probes alone for as long as nothing else is there; what comes then has the very next probe."""
    outbox = make_outbox(engine, retry=RetryPolicy(base_delay_seconds=1, max_delay_seconds=1))
    outbox.enqueue(note("bad"), max_attempts=9, now=T)
    for number in range(5):
        settled(outbox, [unsent(claimed(outbox, T + number))], T + number)
    now = T + 5
    for _ in range(8):
        settled(outbox, [down(claimed(outbox, now))], now)
        state = state_of(engine)
        assert state is not None
        assert state.probe_at is not None
        assert raw_row(engine, "note-bad")["next_attempt_at"] == state.probe_at
        now = state.probe_at
    outbox.enqueue(note("good"), now=now - 1)
    assert claimed(outbox, now).event_id == "note-good"


def test_two_bad_events_open_it_between_them_and_any_good_one_closes_it(outbox: Outbox) -> None:
    outbox.enqueue_many([note("bad-1"), note("bad-2")], max_attempts=20, now=T)
    now = T
    while gate(outbox, now) != "open":
        for claim in outbox.claim_batch(WORKER, limit=1, now=now):
            settled(outbox, [down(claim)], now)
        now += 30
    outbox.enqueue(note("good"), now=now)
    tried = list[str]()
    while gate(outbox, now) == "open":
        now += 60
        claim = claimed(outbox, now)
        tried.append(claim.event_id)
        settled(outbox, [well(claim) if claim.event_id == "note-good" else down(claim)], now)
    assert len(tried) <= 3
    assert gate(outbox, now) == "ramp"


# -- pauses by hand, several topics, several programs ---------------------------------------------------------------


def test_pause_and_resume(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(3), now=T)
    claim = claimed(outbox)
    status = outbox.pause(reason="maintenance", now=T + 1)
    assert (status.state, status.since, status.reason, status.until) == ("paused", T + 1, "maintenance", None)
    assert outbox.gate(TOPIC) == status
    assert outbox.claim_batch(WORKER, now=T + 2) == []
    settled(outbox, [well(claim)], T + 2)  # what is in flight ends as it may
    again = outbox.pause(reason="still", now=T + 3)
    assert (again.since, again.reason) == (T + 1, "still")
    assert outbox.resume(now=T + 4).state == "closed"
    assert outbox.resume(now=T + 4).state == "closed"
    assert len(outbox.claim_batch(WORKER, now=T + 4)) == 2


@pytest.mark.parametrize("reason", ["", " x", "x" * 257, "two\nlines", "\ud800", None, 7])
def test_bad_reasons(outbox: Outbox, engine: Engine, reason: Any) -> None:
    with refused("dispatch.reason_invalid"):
        outbox.pause(reason=reason)
    assert state_of(engine) is None


def test_resuming_sends_a_probe_at_once(outbox: Outbox) -> None:
    opened(outbox, now=T)
    for claim in outbox.claim_batch(WORKER, now=T + 1):
        settled(outbox, [down(claim, retry_after=3000)], T + 1)
    assert outbox.claim_batch(WORKER, now=T + 100) == []
    assert outbox.resume(now=T + 100).state == "open"
    assert len(outbox.claim_batch(WORKER, now=T + 100)) == 1
    assert outbox.claim_batch(WORKER, now=T + 100) == []


def test_topics_fare_each_on_its_own(engine: Engine) -> None:
    outbox = make_outbox(engine, TOPIC, OTHER)
    for topic in (TOPIC, OTHER):
        outbox.enqueue_many(notes(10), topic=topic, now=T)
    ours = outbox.claim_batch(WORKER, topic=TOPIC, limit=5, now=T)
    theirs = outbox.claim_batch(WORKER, topic=OTHER, limit=5, now=T)
    mixed = [result for pair in zip(ours, theirs, strict=True) for result in (down(pair[0]), well(pair[1]))]
    settled(outbox, mixed, T)
    topics = outbox.health(now=T).topics
    assert (topics[TOPIC].state, topics[OTHER].state) == ("open", "closed")
    assert (outbox.gate(TOPIC).state, outbox.gate(OTHER).state) == ("open", "closed")
    assert outbox.claim_batch(WORKER, topic=TOPIC, now=T) == []
    assert len(outbox.claim_batch(WORKER, topic=OTHER, limit=3, now=T)) == 3
    outbox.pause(OTHER, reason="by hand", now=T)
    assert (gate(outbox, T, TOPIC), gate(outbox, T, OTHER)) == ("open", "paused")
    with refused("dispatch.topic_unknown"):
        outbox.gate("unheard.of")
    with refused("dispatch.topic_unknown"):
        outbox.pause("unheard.of", reason="x")


def test_another_outbox_finds_it_as_it_is(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    other = make_outbox(engine)
    assert other.gate(TOPIC).state == "closed"  # it has not had a look yet
    assert other.claim_batch(WORKER, now=T + 0.5) == []
    assert other.gate(TOPIC) == outbox.health(now=T + 0.5).topics[TOPIC]
    assert other.gate(TOPIC).state == "open"


_ELSEWHERE = """
import json, sys
from sqlalchemy import create_engine
from tests.support import make_outbox, T
outbox = make_outbox(create_engine(sys.argv[1]))
status = outbox.health(now=T + 1).topics["test.note"]
print(json.dumps([status.state, status.since, status.reason, len(outbox.claim_batch("elsewhere", now=T + 1))]))
"""


def test_another_process_finds_it_as_it_is(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run([sys.executable, "-c", _ELSEWHERE, url], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["open", T, "http_status", 1]
    assert outbox.claim_batch(WORKER, now=T + 1) == []


def test_clocks_that_step_back(outbox: Outbox, engine: Engine) -> None:
    opened(outbox)
    assert outbox.claim_batch(WORKER, now=T - 500) == []
    assert gate(outbox, T - 500) == "open"
    settled(outbox, [well(claimed(outbox, T + 1))], T + 1)
    outbox.enqueue_many([note(f"old-{number}") for number in range(20)], now=T - 600)
    assert (
        len(outbox.claim_batch(WORKER, limit=50, now=T - 500)) == 10
    )  # a ramp that has not begun has its first events
    assert outbox.claim_batch(WORKER, limit=50, now=T - 500) == []
    assert outbox.health(now=T - 500).topics[TOPIC].state == "ramp"


def test_the_log_names_the_topic_and_nothing_else(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    opened(outbox)
    settled(outbox, [well(claimed(outbox, T + 1))], T + 2)
    outbox.pause(reason="s3cret", now=T + 2)
    outbox.resume(now=T + 2)
    said = [record.getMessage() for record in caplog.records if record.name == "outbox"]
    assert [line.split(":")[0] for line in said] == [
        f"topic {TOPIC} is open", f"topic {TOPIC} is closed again", f"topic {TOPIC} is paused", f"topic {TOPIC} is resumed",
    ]  # fmt: skip
    assert "s3cret" not in caplog.text


# -- all at once ----------------------------------------------------------------------------------------------------


class Flapping:
    """A destination that is up for so many deliveries and then down for as many, whoever asks."""

    def __init__(self, period: int) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._count = 0

    def result(self, claim: Claim) -> Result:
        with self._lock:
            self._count += 1
            up = self._count // self._period % 2 == 0
        return well(claim) if up else down(claim) if self._count % 3 else unsent(claim)


@pytest.mark.parametrize("period", [7, 40])
def test_threads_before_a_destination_that_flaps(engine: Engine, period: int) -> None:
    """Nothing waits for ever, deadlocks, fails or is lost, however often a topic opens and closes."""
    quick = BreakerPolicy(
        first_probe_seconds=0.001, max_probe_seconds=0.01, ramp_doubling_seconds=0.01, ramp_seconds=0.05
    )
    retry = RetryPolicy(base_delay_seconds=0.001, max_delay_seconds=0.01)
    destination, topics, errors = Flapping(period), (TOPIC, OTHER), list[BaseException]()
    first = make_outbox(engine, *topics, retry=retry, breaker=quick)
    for topic in topics:
        first.enqueue_many(notes(100), topic=topic, max_attempts=20)
        first.enqueue_many(
            [note(f"keyed-{number}") for number in range(10)], topic=topic, ordering_key="k", max_attempts=20
        )

    def work(number: int) -> None:
        outbox = make_outbox(engine, *topics, retry=retry, breaker=quick)
        deadline = time.monotonic() + PATIENCE
        while outbox.health().counts["succeeded"] < 220 and not errors:
            assert time.monotonic() < deadline, outbox.health()
            claims = [
                claim for topic in topics for claim in outbox.claim_batch(f"worker-{number}", topic=topic, limit=9)
            ]
            unused = claims[:1] if len(claims) % 5 == 4 else []
            lines = outbox.release(unused) + outbox.settle([destination.result(c) for c in claims[len(unused) :]])
            assert all(line.won for line in lines)

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not errors
    rows = dump(engine)
    assert {row["status"] for row in rows} == {"succeeded"}
    assert sum(row["attempts"] for row in rows) == len(rows) + len(recorded(engine))
    assert first.health(deep=True).status == "ok"


# -- an hour's outage -----------------------------------------------------------------------------------------------


def test_an_hours_outage(databases: Databases) -> None:
    """10,000 events, a server that is down for an hour: none fails, hardly any uses an attempt, and all resumes soon."""
    with databases.fresh() as url:
        engine = make_test_engine(url)
        try:
            figures = outage.simulate(engine)
        finally:
            engine.dispose()
    assert (figures.succeeded, figures.failed) == (outage.EVENTS, 0)
    assert figures.attempts_max <= 2
    assert figures.attempts_total <= outage.EVENTS + POLICY.failures - 1
    assert figures.recorded == figures.attempts_total - outage.EVENTS
    assert 50 < figures.probes <= 6 + 3600 / POLICY.max_probe_seconds + 1
    assert figures.resumed_after <= POLICY.max_probe_seconds
    assert figures.worst_excess <= 0
