"""The worker against both databases, with destinations whose every step a test can see and hold."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from sqlalchemy import Engine, text

from outbox import (
    BreakerPolicy,
    Claim,
    DatabaseError,
    DeliveryFailed,
    Failure,
    InputError,
    Outbox,
    RetryPolicy,
    SchemaError,
    Settled,
    Worker,
)
from outbox import worker as worker_module
from tests.plain import PATIENCE, Gate, Plain, Scripted, fails_with, fill, running, until


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, [Plain()], RetryPolicy(base_delay_seconds=60, max_delay_seconds=300))


def test_drains_in_due_order_and_reports_every_event(outbox: Outbox) -> None:
    ids = fill(outbox, 300)
    destination, lines = Scripted(), list[Settled]()

    stats = Worker(outbox, {"test.plain": destination}, concurrency=1, batch=32, observer=lines.append).run(
        until_idle=True
    )

    assert [claim.event_id for claim in destination.seen] == ids
    assert (stats.claimed, stats.succeeded, stats.lost) == (300, 300, 0)
    assert sorted(line.claim.event_id for line in lines) == sorted(ids)
    assert all(line.won for line in lines)
    assert outbox.health(deep=True).counts["succeeded"] == 300


def test_two_workers_share_without_overlap(outbox: Outbox) -> None:
    ids = fill(outbox, 400)
    destination = Scripted()
    workers = [Worker(outbox, {"test.plain": destination}, concurrency=4, batch=20) for _ in range(2)]
    threads = [threading.Thread(target=worker.run, kwargs={"until_idle": True}) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 3)

    until(lambda: outbox.health().counts["succeeded"] == 400, "all settled")
    assert sorted(claim.event_id for claim in destination.seen) == sorted(ids)


@pytest.mark.parametrize(
    ("act", "status", "code"),
    [
        (fails_with(DeliveryFailed("network", retryable=True)), "retry_wait", "network"),
        (fails_with(DeliveryFailed("refused", retryable=False)), "failed", "refused"),
        (fails_with(KeyError("secret")), "failed", "dispatch.client_failure"),
        (fails_with(SystemExit(3)), "failed", "dispatch.client_failure"),
        (lambda _: {"echo": "another"}, "failed", "dispatch.response_invalid"),
        (lambda _: object(), "failed", "dispatch.response_invalid"),
    ],
)
def test_failures_end_as_declared_and_stop_nobody(
    outbox: Outbox, act: Callable[[Claim], Any], status: str, code: str
) -> None:
    fill(outbox, 3)
    destination = Scripted(lambda claim: act(claim) if claim.event_id == "event-1" else None)

    stats = Worker(outbox, {"test.plain": destination}, concurrency=1).run(until_idle=True)

    assert stats.succeeded == 2
    found = outbox.status("event-1")
    assert (found.status, found.last_error_code, found.attempts) == (status, code, 1)


def test_a_retry_waits_at_least_as_long_as_it_was_asked_to(outbox: Outbox) -> None:
    fill(outbox, 1)
    busy = Scripted(fails_with(DeliveryFailed("busy", retryable=True, retry_after=900)))
    Worker(outbox, {"test.plain": busy}).run(until_idle=True)
    found = outbox.status("event-0")
    assert found.next_attempt_at - found.updated_at == pytest.approx(900, abs=1e-3)


def test_a_poisoned_row_stops_nobody(outbox: Outbox, engine: Engine) -> None:
    fill(outbox, 3)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_event SET payload = '{}' WHERE event_id = 'event-0'"))
    stats = Worker(outbox, {"test.plain": Scripted()}, concurrency=1, batch=1).run(until_idle=True)
    assert stats.succeeded == 2
    assert outbox.status("event-0").last_error_code == "dispatch.payload_integrity"


def test_what_becomes_due_below_the_floor_is_not_left_behind(outbox: Outbox, engine: Engine) -> None:
    """Events dated in the past, as a host that commits late makes them, while the worker is busy above them."""
    fill(outbox, 50)
    now = outbox.status("event-0").created_at
    numbers, late_seen = itertools.count(), threading.Event()
    deadline = time.monotonic() + PATIENCE

    def deliver(claim: Claim) -> None:
        if claim.event_id == "event-10":
            outbox.enqueue({"id": "late"}, now=now - 3600)
        if claim.event_id == "late":
            late_seen.set()
        # Never idle until then: with nothing left above its floor any worker would look below it.
        elif not late_seen.is_set() and time.monotonic() < deadline:
            outbox.enqueue_many([{"id": f"more-{next(numbers)}"} for _ in range(2)])

    Worker(outbox, {"test.plain": Scripted(deliver)}, concurrency=1, batch=1).run(until_idle=True)
    assert late_seen.is_set()
    assert time.monotonic() < deadline
    assert outbox.health().due == 0


def test_an_idle_worker_finds_new_work(outbox: Outbox) -> None:
    destination = Scripted()
    with running(Worker(outbox, {"test.plain": destination})):
        for number in range(3):
            outbox.enqueue({"id": f"late-{number}"})
            until(lambda n=number: len(destination.seen) == n + 1, "the new event delivered")  # type: ignore[misc]
    assert outbox.health().counts["succeeded"] == 3


def test_a_long_delivery_is_renewed_and_sent_once(outbox: Outbox) -> None:
    fill(outbox, 1)
    gate = Gate()
    destination = Scripted(gate, timeout=0.2)
    with running(Worker(outbox, {"test.plain": destination}, lease_seconds=1.0)):
        until(lambda: len(destination.seen) == 1, "the delivery begun")
        first = destination.seen[0].lease_expires_at
        until(lambda: (outbox.status("event-0").lease_expires_at or 0) > first + 1, "the lease renewed")
        gate.open()
        until(lambda: outbox.status("event-0").status == "succeeded", "the event settled by the renewed claim")
    assert len(destination.seen) == 1


def test_a_destination_that_never_returns_loses_the_event_to_others(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_RENEWALS", 1)
    fill(outbox, 1)
    gate, healthy = Gate(), Scripted()
    stuck = Scripted(gate, timeout=0.1)
    worker = Worker(outbox, {"test.plain": stuck}, lease_seconds=0.4, concurrency=1, grace_seconds=PATIENCE)
    with running(worker):
        until(lambda: len(stuck.seen) == 1, "the delivery begun")
        until(lambda: outbox.status("event-0").lease_expired, "the lease run out")
        # The stuck worker may take it up again itself first, and then has to let it go again.
        until(
            lambda: bool(Worker(outbox, {"test.plain": healthy}).run(until_idle=True) and healthy.seen),
            "the event delivered by another",
        )
        before = outbox.status("event-0")
        gate.open()
        until(lambda: worker.stats.lost >= 1, "the stale result refused and counted")
    assert len(healthy.seen) == 1
    assert before.status == "succeeded"
    assert outbox.status("event-0") == before


def test_stopping_finishes_what_is_in_flight_and_gives_back_the_rest(outbox: Outbox) -> None:
    fill(outbox, 10)
    gate = Gate()
    destination = Scripted(gate)
    worker = Worker(outbox, {"test.plain": destination}, concurrency=2)
    with running(worker):
        until(lambda: len(destination.seen) == 2, "two in flight")
        worker.stop()
        until(lambda: outbox.health().counts["pending"] == 8, "the unsent given back")
        gate.open()
    assert (worker.stats.succeeded, worker.stats.released) == (2, 2)
    assert {outbox.status(f"event-{n}").attempts for n in range(2, 10)} == {0}
    assert len(destination.seen) == 2


def test_a_worker_outlives_a_delivery_past_its_grace(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    fill(outbox, 1)
    gate = Gate()
    destination = Scripted(gate)
    worker = Worker(outbox, {"test.plain": destination}, grace_seconds=0.05)
    with running(worker):
        until(lambda: len(destination.seen) == 1, "the delivery begun")
    assert outbox.status("event-0").status == "leased"
    assert "left to its lease" in caplog.text
    gate.open()


def test_claims_ahead_only_what_its_senders_finish_soon(outbox: Outbox) -> None:
    """A slow destination's events are left to other workers; a fast one's are claimed in full batches."""
    fill(outbox, 400)
    gate = Gate()
    slow = Worker(outbox, {"test.plain": Scripted(gate)}, concurrency=4, batch=20)
    with running(slow):
        until(lambda: slow.stats.claimed == 8, "one at work and one ahead for each sender")
        assert outbox.health().counts["leased"] == 8
        slow.stop()
        gate.open()
    lane = slow._lanes["test.plain"]
    lane.rate, lane.in_hand = 1e9, 0
    assert (lane.capacity, lane.room) == (44, 44)


def test_what_waits_for_senders_that_never_come_back_is_given_to_others(outbox: Outbox) -> None:
    fill(outbox, 3)
    gate, healthy = Gate(), Scripted()
    stuck = Scripted(gate, timeout=0.1)
    worker = Worker(outbox, {"test.plain": stuck}, lease_seconds=0.5, concurrency=1, grace_seconds=PATIENCE)
    with running(worker):
        until(lambda: worker.stats.claimed == 2, "one begun and one waiting")
        until(lambda: worker.stats.released == 1, "the one that waited given back")
        until(
            lambda: bool(Worker(outbox, {"test.plain": healthy}).run(until_idle=True) and len(healthy.seen) >= 2),
            "the others delivered by another",
        )
        gate.open()


def test_a_rate_limit_is_kept_and_drains_all_the_same(outbox: Outbox) -> None:
    fill(outbox, 40)
    destination, began = Scripted(), time.monotonic()
    Worker(outbox, {"test.plain": destination}, rate_limits={"test.plain": 50}).run(until_idle=True)
    assert len(destination.seen) == 40
    assert time.monotonic() - began >= (40 - 5) / 50  # five at once, and a fiftieth of a second for each after that


@pytest.mark.parametrize(("rate", "burst"), [(0.5, 1), (5, 1), (50, 5), (1000, 100)])
def test_a_rate_limit_never_lets_more_than_its_burst_go_at_once(rate: float, burst: int) -> None:
    limit = worker_module._RateLimit(rate)
    now, taken = time.monotonic(), 0
    for step in range(200):
        allowed = limit.allowance(now + step * 0.01)
        assert allowed <= burst
        assert (taken := taken + allowed) <= burst + rate * step * 0.01 + 1e-6
        limit.take(allowed)
    assert taken >= rate * 1.99 - 1
    assert limit.allowance(now + 2 + limit.pause()) >= 1


def test_each_topic_has_its_own_concurrency(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain("one"), Plain("many")])
    gate = Gate()
    one, many = Scripted(gate), Scripted(gate)
    for topic in ("one", "many"):
        outbox.enqueue_many([{"id": f"{topic}-{n}"} for n in range(20)], topic=topic)
    with running(Worker(outbox, {"one": one, "many": many}, concurrency={"one": 1})):
        until(lambda: (len(one.seen), len(many.seen)) == (1, 16), "each lane full")
        gate.open()


def down(claim: Claim) -> NoReturn:
    raise DeliveryFailed("network", retryable=True, outage=True)


def test_an_open_topic_gives_back_what_was_not_sent_and_is_probed_and_taken_up_again(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain()], breaker=BreakerPolicy(first_probe_seconds=0.05, max_probe_seconds=0.1))
    fill(outbox, 60)
    up = threading.Event()
    destination = Scripted(lambda claim: None if up.is_set() else down(claim))
    worker = Worker(outbox, {"test.plain": destination}, concurrency=1)
    with running(worker):
        until(lambda: outbox.health().topics["test.plain"].state == "open", "the topic open")
        until(lambda: outbox.health().counts["leased"] <= 1, "nothing held but the probe")
        seen = len(destination.seen)
        until(lambda: len(destination.seen) >= seen + 2, "probes")
        assert {outbox.status(f"event-{n}").attempts for n in range(60)} <= {0, 1}
        up.set()
        until(lambda: outbox.health().counts["succeeded"] >= 50, "everything delivered but what waits for its retry")
        assert outbox.health().topics["test.plain"].state in ("ramp", "closed")
        assert worker.stats.failed == 0


def test_a_paused_topic_is_let_alone(outbox: Outbox) -> None:
    fill(outbox, 5)
    outbox.pause(reason="their migration")
    destination = Scripted()
    with running(Worker(outbox, {"test.plain": destination})):
        until(lambda: outbox.gate("test.plain").state == "paused", "the pause seen")
        assert destination.seen == []
        outbox.resume()
        until(lambda: len(destination.seen) == 5, "everything delivered once resumed")


def test_a_pause_takes_back_what_no_sender_has_begun(outbox: Outbox) -> None:
    fill(outbox, 5)
    gate = Gate()
    destination = Scripted(gate)
    with running(Worker(outbox, {"test.plain": destination}, concurrency=1)):
        until(lambda: outbox.health().counts["leased"] == 2, "one in flight and one ahead")
        outbox.pause(reason="their migration")
        until(lambda: outbox.health().counts["leased"] == 1, "the one ahead given back")
        gate.open()
        until(lambda: outbox.health().counts["succeeded"] == 1, "the one in flight settled")
        assert outbox.health().counts["pending"] == 4


def test_draining_goes_on_through_a_ramp(engine: Engine) -> None:
    policy = BreakerPolicy(failures=1, first_probe_seconds=0.01, ramp_events=2, ramp_doubling_seconds=0.1)
    outbox = Outbox(engine, [Plain()], breaker=policy)
    fill(outbox, 30)
    outbox.settle([Failure(claim, "network", outage=True) for claim in outbox.claim_batch("other", limit=1)])
    destination = Scripted()
    until(outbox.ready, "time for the probe")
    assert Worker(outbox, {"test.plain": destination}).run(until_idle=True).succeeded >= 29  # one waits for its retry


def test_ordered_events_are_delivered_one_after_another(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain()])
    keys = [f"key-{n}" for n in range(5)]
    for number in range(10):
        for key in keys:
            outbox.enqueue({"id": f"{key}:{number:02}"}, ordering_key=key)
    destination = Scripted()
    Worker(outbox, {"test.plain": destination}, concurrency=4).run(until_idle=True)
    for key in keys:
        seen = [claim.event_id for claim in destination.seen if claim.ordering_key == key]
        assert seen == [f"{key}:{number:02}" for number in range(10)]


def test_what_cannot_end_within_its_lease_is_not_begun(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(outbox, 1)
    destination = Scripted(timeout=1.0)
    worker = Worker(outbox, {"test.plain": destination}, lease_seconds=2.0, concurrency=1)
    claim_batch = outbox.claim_batch

    def late_answer(*args: Any, **kwargs: Any) -> list[Claim]:
        claims = claim_batch(*args, **kwargs)
        for lane in worker._lanes.values():
            lane.destination.timeout = 2.5
        worker.stop()
        return claims

    monkeypatch.setattr(outbox, "claim_batch", late_answer)
    worker.run()
    assert destination.seen == []
    assert (worker.stats.released, outbox.status("event-0").attempts) == (1, 0)


def test_a_database_that_goes_away_is_waited_for(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(outbox, 50)
    dialect, away = outbox._dialect, threading.Event()
    begin = dialect.begin
    refused = []

    def weather(*args: Any, **kwargs: Any) -> Any:
        if away.is_set():
            refused.append(1)
            raise DatabaseError("dispatch.database_unavailable")
        return begin(*args, **kwargs)

    monkeypatch.setattr(dialect, "begin", weather)
    gate = Gate()
    destination = Scripted(gate)
    worker = Worker(outbox, {"test.plain": destination}, concurrency=4)
    with running(worker):
        until(lambda: len(destination.seen) == 4, "deliveries in flight")
        away.set()
        gate.open()
        until(lambda: len(refused) >= 2, "settling refused")
        away.clear()
        until(lambda: outbox.health().counts["succeeded"] == 50, "everything settled after all")
    assert len(destination.seen) == 50
    assert caplog.text.count("waiting for the database") == 1
    assert "the database is back" in caplog.text


def test_results_the_database_would_not_take_in_time_are_let_go(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(outbox, 1)

    def busy(*_: Any, **__: Any) -> NoReturn:
        raise DatabaseError("dispatch.database_busy")

    monkeypatch.setattr(outbox, "settle", busy)
    monkeypatch.setattr(outbox, "renew", busy)
    worker = Worker(outbox, {"test.plain": Scripted(timeout=0.1)}, lease_seconds=0.5)
    with running(worker):
        until(lambda: worker.stats.lost == 1, "the result dropped once its lease was over")
    assert not worker._held


def test_an_altered_schema_ends_the_worker(outbox: Outbox, engine: Engine) -> None:
    fill(outbox, 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_alembic_version SET version_num = 'ffff'"))
    with pytest.raises(SchemaError, match="ffff"):
        Worker(outbox, {"test.plain": Scripted()}).run(until_idle=True)


def test_a_slow_destination_starves_no_other(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain("slow"), Plain("fast")])
    gate, fast = Gate(), Scripted()
    slow = Scripted(gate)
    for topic in ("slow", "fast"):
        outbox.enqueue_many([{"id": f"{topic}-{n}"} for n in range(60)], topic=topic)
    with running(Worker(outbox, {"slow": slow, "fast": fast}, concurrency=2, batch=10)):
        until(lambda: len(slow.seen) == 2, "the slow lane full")
        until(lambda: len(fast.seen) == 60, "the fast lane drained meanwhile")
        gate.open()


def test_an_observer_that_fails_is_only_logged(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    fill(outbox, 2)

    def observer(_: Settled) -> None:
        raise RuntimeError("secret")

    stats = Worker(outbox, {"test.plain": Scripted()}, observer=observer).run(until_idle=True)
    assert stats.succeeded == 2
    assert "observer raised RuntimeError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"worker_id": "a b"}, "dispatch.worker_invalid"),
        ({"worker_id": "w" * 129}, "dispatch.worker_invalid"),
        ({"concurrency": 0}, "dispatch.limit_invalid"),
        ({"concurrency": True}, "dispatch.limit_invalid"),
        ({"concurrency": {"test.plain": 0}}, "dispatch.limit_invalid"),
        ({"concurrency": {"other": 1}}, "dispatch.topic_unknown"),
        ({"rate_limits": {"test.plain": 0}}, "dispatch.limit_invalid"),
        ({"rate_limits": {"test.plain": True}}, "dispatch.limit_invalid"),
        ({"rate_limits": {"test.plain": float("nan")}}, "dispatch.limit_invalid"),
        ({"rate_limits": {"other": 1}}, "dispatch.topic_unknown"),
        ({"rate_limits": 0}, "dispatch.limit_invalid"),
        ({"rate_limits": "5"}, "dispatch.limit_invalid"),
        ({"batch": 1001}, "dispatch.limit_invalid"),
        ({"lease_seconds": 5.0}, "dispatch.lease_too_short"),
        ({"lease_seconds": 86_401}, "dispatch.lease_invalid"),
        ({"grace_seconds": -1}, "dispatch.limit_invalid"),
        ({"destinations": {}}, "dispatch.topic_unknown"),
        ({"destinations": {"other": Scripted()}}, "dispatch.topic_unknown"),
        ({"destinations": {"test.plain": object()}}, "dispatch.client_invalid"),
        ({"destinations": {"test.plain": Scripted(timeout=0)}}, "dispatch.client_invalid"),
    ],
)
def test_bad_arguments_are_refused(outbox: Outbox, arguments: dict[str, Any], code: str) -> None:
    arguments = {"destinations": {"test.plain": Scripted()}, **arguments}
    with pytest.raises(InputError) as refused:
        Worker(outbox, **arguments)
    assert refused.value.code == code


def test_worker_ids_are_unique(outbox: Outbox) -> None:
    ids = {Worker(outbox, {"test.plain": Scripted()}).worker_id for _ in range(50)}
    assert len(ids) == 50
