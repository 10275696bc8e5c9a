"""The doubles that ship in ``outbox.testing``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Claim, DeliveryFailed, InputError, Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.destinations.cms import CMSDestination, HMACSigner
from outbox.testing import Clock, Gate, LedgerServer, Manner, ScriptedDestination, cms_response
from outbox.testing.ledger import (
    ACCEPT,
    BREAK_OFF,
    DROP,
    DROP_UNREAD,
    FLOOD,
    HANG,
    REFUSE,
    RESET,
    TRICKLE,
    UNAVAILABLE,
    late,
)
from outbox.values import canonical_json, sha256_hex
from tests.cms_events import event


def claim_of(event_id: str, **changes: Any) -> Claim:
    payload = canonical_json(event(event_id=event_id, **changes), code="test")
    return Claim("cms.change", event_id, payload, sha256_hex(payload), 1, 5, "w1", "0" * 32, 1.0, 1)


# -- clock ------------------------------------------------------------------------------------------------------------


def test_a_clock_moves_only_when_told() -> None:
    clock = Clock(100.0)
    assert (clock(), clock()) == (100.0, 100.0)
    assert (clock.advance(0.5), clock()) == (100.5, 100.5)
    assert (clock.advance(-1), clock.set(7)) == (99.5, 7.0)
    assert repr(clock) == "Clock(7.0)"


@pytest.mark.parametrize("now", [-1, float("nan"), True, None, "now"])
def test_a_clock_shows_only_times(now: Any) -> None:
    with pytest.raises(InputError) as caught:
        Clock(now)
    assert caught.value.code == "dispatch.time_invalid"


def test_leases_expire_without_waiting(sqlite_engine: Engine) -> None:
    outbox, clock = Outbox(sqlite_engine, contracts=(CMS_CHANGE,)), Clock()
    outbox.enqueue(event(), now=clock())
    outbox.claim("w1", lease_seconds=60, now=clock())
    assert outbox.claim("w2", now=clock()) is None
    clock.advance(60)
    claim = outbox.claim("w2", now=clock())
    assert claim is not None
    assert claim.attempt == 2


# -- scripted destination ---------------------------------------------------------------------------------------------


def test_a_destination_follows_its_script_and_then_accepts() -> None:
    destination = ScriptedDestination(timeout=2)
    busy, odd = DeliveryFailed("busy", retryable=True), cms_response("event-1", job_count=7)
    destination.script("event-1", busy, ValueError("no"))
    destination.script("event-1", odd, lambda claim: cms_response(claim.event_id, plan_id="mine"))
    claim = claim_of("event-1")
    with pytest.raises(DeliveryFailed):
        destination.deliver(claim)
    with pytest.raises(ValueError, match="no"):
        destination.deliver(claim)
    assert destination.deliver(claim) == odd
    assert destination.deliver(claim)["plan_id"] == "mine"
    assert destination.deliver(claim) == cms_response("event-1")
    assert destination.deliver(claim_of("event-2")) == cms_response("event-2")
    assert (destination.attempts("event-1"), destination.attempts("event-2"), len(destination.claims)) == (5, 1, 6)


def test_a_gate_holds_a_delivery_until_it_is_opened() -> None:
    destination, gate, answers = ScriptedDestination(), Gate(), list[Any]()
    destination.script("event-1", gate)
    thread = threading.Thread(target=lambda: answers.append(destination.deliver(claim_of("event-1"))))
    thread.start()
    gate.wait_for_arrival()
    assert (destination.wait_for(1)[0].event_id, answers) == ("event-1", [])
    gate.open()
    thread.join(30)
    assert answers == [cms_response("event-1")]


def test_waiting_for_what_does_not_come_is_said() -> None:
    with pytest.raises(AssertionError, match="0 deliveries instead of 1"):
        ScriptedDestination().wait_for(1, seconds=0.01)
    with pytest.raises(AssertionError, match="no delivery came"):
        Gate().wait_for_arrival(seconds=0.01)


# -- ledger server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[LedgerServer]:
    with LedgerServer() as server:
        yield server


def destination_for(server: LedgerServer, *, key: bytes | None = None, timeout: float = 10.0) -> CMSDestination:
    signer = HMACSigner(server.key_id, key or server.key)
    return CMSDestination(server.origin, signer, timeout=timeout, allow_loopback_http=True)


def test_an_event_is_taken_up_once_and_answered_alike(server: LedgerServer) -> None:
    claim = claim_of("event-1")
    with destination_for(server) as destination:
        first, second = destination.deliver(claim), destination.deliver(claim)
    assert second == {**first, "inserted_jobs": 0}
    entry = server.ledger.events["event-1"]
    assert (entry.requests, entry.accepted, entry.replays) == (2, 1, 1)
    assert entry.payload_sha256 == claim.payload_sha256
    assert CMS_CHANGE.accept("event-1", first) == entry.receipt
    assert (server.ledger.accepted, server.ledger.replays, server.ledger.requests) == (frozenset({"event-1"}), 1, 2)


@pytest.mark.parametrize(
    ("manner", "code", "accepted"),
    [
        (UNAVAILABLE, "service_unavailable", False),
        (REFUSE, "content_not_translatable", False),
        (Manner("busy", accepts=False, error="too_fast", status=429, retry_after="7"), "too_fast", False),
        (DROP, "network", True),
        (DROP_UNREAD, "network", False),
        (BREAK_OFF, "network", True),
        (RESET, "network", True),
        (TRICKLE, "network", True),
        (HANG, "network", True),
        (late(30), "network", True),
        (FLOOD, "response_size", True),
    ],
    ids=lambda value: value.name if isinstance(value, Manner) else None,
)
def test_every_manner_is_what_a_destination_sees(
    server: LedgerServer, manner: Manner, code: str, accepted: bool
) -> None:
    server.behave(manner)
    slow = manner.wait or manner.answer in ("trickle", "silence")
    with destination_for(server, timeout=0.3 if slow else 10.0) as destination:
        with pytest.raises(DeliveryFailed) as caught:
            destination.deliver(claim_of("event-1"))
        assert caught.value.code == code
        assert caught.value.retry_after == (7.0 if manner.retry_after else None)
        assert ("event-1" in server.ledger.accepted) == accepted
        assert server.ledger.manners == {manner.name: 1}
        server.behave(ACCEPT)
        if manner is REFUSE:  # for good
            with pytest.raises(DeliveryFailed):
                destination.deliver(claim_of("event-1"))
            assert server.ledger.refused == {"event-1"}
        else:
            destination.deliver(claim_of("event-1"))
            assert server.ledger.accepted == {"event-1"}


def test_what_is_not_signed_with_the_key_is_not_taken(server: LedgerServer) -> None:
    with destination_for(server, key=b"another") as destination, pytest.raises(DeliveryFailed) as caught:
        destination.deliver(claim_of("event-1"))
    assert (caught.value.code, caught.value.retryable) == ("signature_invalid", False)
    assert (server.ledger.events, server.ledger.bad_signatures) == ({}, 1)


def test_an_altered_event_is_noticed(server: LedgerServer) -> None:
    with destination_for(server) as destination:
        destination.deliver(claim_of("event-1"))
        destination.deliver(claim_of("event-1", site_id="other"))
    assert server.ledger.altered == 1


def test_a_script_decides_by_event_and_request() -> None:
    with (
        LedgerServer(lambda arrival: DROP if (arrival.number, arrival.request) == (1, 1) else ACCEPT) as server,
        destination_for(server) as destination,
    ):
        destination.deliver(claim_of("event-1"))
        with pytest.raises(DeliveryFailed):
            destination.deliver(claim_of("event-2"))
        destination.deliver(claim_of("event-2"))
        assert server.ledger.manners == {"accept": 2, "drop": 1}
        assert json.dumps(server.ledger.events["event-2"].receipt)


def test_a_server_closes_with_requests_in_hand() -> None:
    server = LedgerServer(HANG)
    with server:
        thread = threading.Thread(target=_fail, args=(server,))
        thread.start()
        while not server.ledger.held:
            thread.join(0.01)
    thread.join(30)
    assert not thread.is_alive()


def _fail(server: LedgerServer) -> None:
    with destination_for(server) as destination, pytest.raises(DeliveryFailed):
        destination.deliver(claim_of("event-1"))
