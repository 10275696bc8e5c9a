"""``run_once``: one event claimed, delivered and settled, whatever the destination does."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import QueuePool

from outbox import Claim, DeliveryFailed, Failure, Outbox, Outcome, Success
from outbox.store import deliver
from outbox.values import sha256_hex
from tests.support import (
    TOPIC,
    WORKER,
    Scripted,
    T,
    claimed,
    leased,
    make_outbox,
    note,
    notes,
    poison,
    put,
    raw_row,
    refused,
    response,
)
from tests.test_enqueue import forbidden

DETAIL = "0123456789abcdef" * 4


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


def raising(error: BaseException) -> Callable[[Claim], Any]:
    def act(_: Claim) -> Any:
        raise error

    return act


def test_an_event_is_delivered_and_settled(outbox: Outbox) -> None:
    outbox.enqueue_many(notes(2), now=T)
    destination = Scripted()

    assert outbox.run_once(destination, WORKER, now=T) == Outcome("note-1", "succeeded", 1, 5, None, None)
    assert outbox.run_once(destination, WORKER, now=T) == Outcome("note-2", "succeeded", 1, 5, None, None)
    assert outbox.run_once(destination, WORKER, now=T) is None

    assert [claim.event_id for claim in destination.seen] == ["note-1", "note-2"]
    assert outbox.status("note-1").receipt == {"place": 7}


def test_nothing_due_is_nothing_delivered(outbox: Outbox) -> None:
    destination = Scripted()
    assert outbox.run_once(destination, WORKER) is None
    assert destination.seen == []


def test_the_destination_gets_the_claim(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)
    destination = Scripted()
    outbox.run_once(destination, "worker-7", lease_seconds=50, now=T)
    (claim,) = destination.seen
    assert (claim.lease_owner, claim.lease_expires_at, claim.attempt) == ("worker-7", T + 50, 1)


def test_the_event_is_leased_and_committed_while_it_is_delivered(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)

    def look(claim: Claim) -> Any:
        assert outbox.status(claim.event_id, now=T).status == "leased"
        assert outbox.claim("worker-2", now=T) is None
        outbox.enqueue(note(2), now=T)  # no lock is held over a delivery
        return response(claim.event_id)

    outcome = outbox.run_once(Scripted(look), WORKER, now=T)
    assert outcome is not None
    assert outcome.status == "succeeded"


@pytest.mark.parametrize("max_attempts", [1, 2])
@pytest.mark.parametrize("retryable", [True, False])
def test_a_declared_failure(outbox: Outbox, max_attempts: int, retryable: bool) -> None:
    outbox.enqueue(note(), max_attempts=max_attempts, now=T)
    error = DeliveryFailed("http_status", retryable=retryable, retry_after=60, detail_hash=DETAIL)

    outcome = outbox.run_once(Scripted(raising(error)), WORKER, now=T)

    again = retryable and max_attempts > 1
    status, due = ("retry_wait", T + 60) if again else ("failed", None)
    assert outcome == Outcome("note-1", status, 1, max_attempts, due, "http_status")  # type: ignore[arg-type]
    found = outbox.status("note-1")
    assert (found.last_error_code, found.last_error_detail_hash) == ("http_status", DETAIL)


class UnshowableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("s3cret")

    __str__ = __repr__


class Halfmade(DeliveryFailed):
    """A host's own failure that forgets to say what it is."""

    def __init__(self) -> None:
        Exception.__init__(self, "s3cret")


def misspelt(**changes: Any) -> DeliveryFailed:
    error = DeliveryFailed("network", retryable=True)
    for name, value in changes.items():
        setattr(error, name, value)
    return error


UNDECLARED: dict[str, Exception] = {
    "any": KeyError("s3cret"),
    "an error of ours": __import__("outbox").InputError("dispatch.event_invalid", found="s3cret"),
    "text that is no text": ValueError("s3cret \ud800"),
    "one that cannot be shown": UnshowableError(),
    "a failure half made": Halfmade(),
    "a failure with no code": misspelt(code="No Code s3cret"),
    "a failure with a wish that is none": misspelt(retry_after=math.nan),
    "a failure with a detail that is no hash": misspelt(detail_hash="s3cret"),
}


@pytest.mark.parametrize("error", UNDECLARED.values(), ids=UNDECLARED)
def test_an_undeclared_exception_fails_the_event(
    outbox: Outbox, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.enqueue(note(), now=T)
    outcome = outbox.run_once(Scripted(raising(error)), WORKER, now=T)
    assert outcome == Outcome("note-1", "failed", 1, 5, None, "dispatch.client_failure")
    assert f"destination raised {type(error).__name__} on event note-1" in caplog.text
    assert "s3cret" not in caplog.text
    assert len(outbox.status("note-1").last_error_detail_hash or "") == 64


def test_of_an_undeclared_exception_the_hash_is_kept(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)
    outbox.run_once(Scripted(raising(KeyError("s3cret"))), WORKER, now=T)
    assert outbox.status("note-1").last_error_detail_hash == sha256_hex("KeyError('s3cret')")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_interruption_is_no_result(outbox: Outbox, error: BaseException) -> None:
    outbox.enqueue(note(), now=T)
    with pytest.raises(type(error)):
        outbox.run_once(Scripted(raising(error)), WORKER, now=T)
    assert outbox.status("note-1", now=T).status == "leased"


@pytest.mark.parametrize("answer", [None, "ok", {}, response("note-2"), response() | {"more": object()}])
def test_a_response_that_the_contract_refuses(outbox: Outbox, answer: Any) -> None:
    outbox.enqueue(note(), now=T)
    outcome = outbox.run_once(Scripted(lambda _: answer), WORKER, now=T)
    assert outcome == Outcome("note-1", "failed", 1, 5, None, "dispatch.response_invalid")


# -- losing the claim while delivering ------------------------------------------------------------------------------


def taken(outbox: Outbox, claim: Claim) -> None:
    outbox.release([claim], now=T)
    claimed(outbox)


def settled_by_another(outbox: Outbox, claim: Claim) -> None:
    outbox.complete(claim, response(), now=T)


@pytest.mark.parametrize("lose", [taken, settled_by_another])
@pytest.mark.parametrize(
    "act", [lambda c: response(), raising(KeyError()), raising(DeliveryFailed("x", retryable=True))]
)
def test_losing_the_claim_is_raised(outbox: Outbox, engine: Engine, lose: Any, act: Any) -> None:
    outbox.enqueue(note(), now=T)
    after = {}

    def deliver(claim: Claim) -> Any:
        lose(outbox, claim)
        after.update(raw_row(engine))
        return act(claim)

    with refused("dispatch.claim_lost", event_id="note-1"):
        outbox.run_once(Scripted(deliver), WORKER, now=T)
    assert raw_row(engine) == after


def test_a_delivery_that_outlasts_its_lease(outbox: Outbox) -> None:
    """The clock is asked afresh: here the lease ends while the event is delivered, observed rather than waited for."""
    outbox.enqueue(note())

    def deliver(claim: Claim) -> Any:
        while not outbox.status("note-1").lease_expired:
            pass
        return response()

    with refused("dispatch.lease_expired", event_id="note-1"):
        outbox.run_once(Scripted(deliver, timeout=0.01), WORKER, lease_seconds=0.02)


def test_a_given_time_serves_for_all_of_it(outbox: Outbox) -> None:
    outbox.enqueue(note(), now=T)
    outbox.run_once(Scripted(timeout=1), WORKER, lease_seconds=2, now=T)
    assert outbox.status("note-1").updated_at == T


def test_poison_is_raised_and_not_delivered(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(2), now=T)
    poison(engine)
    destination = Scripted()
    with refused("dispatch.payload_integrity", event_id="note-1"):
        outbox.run_once(destination, WORKER, now=T)
    outbox.run_once(destination, WORKER, now=T)
    assert [claim.event_id for claim in destination.seen] == ["note-2"]


def test_topics(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    outbox.enqueue(note(), topic="two", now=T)
    destination = Scripted()
    assert outbox.run_once(destination, WORKER, topic="one", now=T) is None
    assert outbox.run_once(destination, WORKER, topic="two", now=T) is not None
    with refused("dispatch.topic_unknown"):
        outbox.run_once(destination, WORKER, now=T)


# -- refused before anything is claimed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "destination",
    [None, object(), lambda claim: claim, Scripted, Scripted(timeout=None), *[
        Scripted(timeout=value) for value in (0, -1, math.nan, math.inf, True, "5", [], 10**400)
    ]],
)  # fmt: skip
def test_destinations_that_are_none(apart: Outbox, destination: Any) -> None:
    with refused("dispatch.client_invalid"):
        apart.run_once(destination, WORKER)


def test_a_destination_whose_deliver_is_no_function(apart: Outbox) -> None:
    destination = Scripted()
    destination.deliver = "now"  # type: ignore[method-assign, assignment]
    with refused("dispatch.client_invalid"):
        apart.run_once(destination, WORKER)


@pytest.mark.parametrize(("timeout", "lease"), [(5, 5), (5, 4.999), (600, 600), (1e9, 86_400)])
def test_a_lease_must_outlast_the_timeout(apart: Outbox, timeout: float, lease: float) -> None:
    with refused("dispatch.lease_too_short"):
        apart.run_once(Scripted(timeout=timeout), WORKER, lease_seconds=lease)


def test_a_lease_that_just_outlasts_it(outbox: Outbox) -> None:
    put(outbox, "pending")
    assert outbox.run_once(Scripted(timeout=5), WORKER, lease_seconds=5.001, now=T) is not None


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *(
            ("dispatch.lease_invalid", {"lease_seconds": value})
            for value in (0, -1, 86_401, math.nan, True, "60", None)
        ),
        ("dispatch.worker_invalid", {"worker_id": "a b"}),
        ("dispatch.worker_invalid", {"worker_id": "w" * 129}),
        ("dispatch.topic_unknown", {"topic": "other"}),
        ("dispatch.time_invalid", {"now": math.inf}),
    ],
)
def test_bad_arguments(apart: Outbox, code: str, arguments: dict[str, Any]) -> None:
    with refused(code):
        apart.run_once(Scripted(), **{"worker_id": WORKER, **arguments})


# -- nothing that the payload says gets out -------------------------------------------------------------------------


def test_deliver_returns_whatever_happened() -> None:
    claim = Claim(TOPIC, "note-1", "{}", "0" * 64, 1, 5, WORKER, "t" * 32, T + 600, 1)
    assert deliver(Scripted(), claim) == Success(claim, response())
    declared = DeliveryFailed("network", retryable=True, retry_after=5)
    result = deliver(Scripted(raising(declared)), claim)
    assert isinstance(result, Failure)
    assert result.seconds is not None
    assert result == Failure(claim, "network", True, 5.0, None, seconds=result.seconds)


def quoting(claim: Claim) -> Any:
    raise ValueError(claim.payload)


@pytest.mark.parametrize("act", [quoting, lambda claim: claim.payload, lambda claim: {"id": claim.payload}])
def test_nothing_content_bearing_gets_out(
    outbox: Outbox, engine: Engine, act: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "outbox")
    outbox.enqueue(note(1, "s3cret"), now=T)
    shown = [repr(outbox.run_once(Scripted(act), WORKER, now=T)), repr(outbox.status("note-1")), repr(outbox)]
    assert "s3cret" not in "".join(shown) + caplog.text


def test_nothing_content_bearing_in_any_error(outbox: Outbox, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Also not in what a traceback shows of the exceptions behind it."""
    caplog.set_level("DEBUG", "outbox")
    claim = leased(outbox, "s3cret-free")
    event = note(1, "s3cret")
    outbox.enqueue(event, now=T)
    held = claimed(outbox)
    poisoned = note(2, "s3cret")
    outbox.enqueue(poisoned, now=T)
    poison(engine, "note-2", "s3cret too")
    failing: list[Callable[[], Any]] = [
        lambda: outbox.enqueue(note(1, "s3cret and more")),
        lambda: outbox.enqueue({"s3cret": 1}),
        lambda: outbox.enqueue(note(3, "s3cret\ud800")),
        lambda: outbox.enqueue(note(3, "s3cret" * 1_000_000)),
        lambda: outbox.enqueue(event, connection="s3cret"),  # type: ignore[arg-type]
        lambda: outbox.claim(WORKER, now=T),
        lambda: outbox.complete(held, {"id": "s3cret"}, now=T),
        lambda: outbox.complete(held, response() | {"s3cret": "\ud800"}, now=T),
        lambda: outbox.complete(held, response(), now=T + 600),
        lambda: outbox.retry(held, "s3cret code"),
        lambda: outbox.fail(held, "busy", detail_hash="s3cret"),
        lambda: outbox.complete("s3cret", {}),  # type: ignore[arg-type]
        lambda: outbox.claim("s3cret worker"),
        lambda: outbox.status("s3cret event"),
        lambda: outbox.enqueue(event, topic="s3cret"),
    ]
    for act in failing:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it must not tell
            act()
        told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        shown = [line for line in told.splitlines() if "s3cret" in line and "lambda:" not in line]  # but for our source
        assert not shown, shown
    assert "s3cret" not in caplog.text.replace("s3cret-free", "")
    assert claim.event_id == "note-s3cret-free"
