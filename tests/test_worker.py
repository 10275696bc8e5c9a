"""The worker against both databases, with destinations whose every step a test can see and hold."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import (
    Claim,
    DatabaseError,
    DeliveryFailed,
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
    assert (worker.stats.succeeded, worker.stats.released) == (2, 8)
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


@pytest.mark.parametrize(("lease", "expected"), [(2.0, 4), (9.0, 16), (600.0, 40)])
def test_never_claims_more_than_it_can_start_within_half_the_lease(outbox: Outbox, lease: float, expected: int) -> None:
    fill(outbox, 80)
    gate = Gate()
    destination = Scripted(gate, timeout=1.0)
    worker = Worker(outbox, {"test.plain": destination}, concurrency=4, batch=20, lease_seconds=lease)
    with running(worker):
        until(lambda: worker.stats.claimed >= expected or outbox.health().due == 80 - expected, "its hands full")
        assert outbox.health().counts["leased"] <= expected
        worker.stop()
        gate.open()


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
    monkeypatch.setattr(outbox, "settle", fails_with(DatabaseError("dispatch.database_busy")))
    monkeypatch.setattr(outbox, "renew", fails_with(DatabaseError("dispatch.database_busy")))
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
