"""What the model found, each told once in one piece."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from outbox import ClaimLostError, Failure, InputError, Outbox, Success
from tests.model.model import Echo

NOW = 1_000_000.0


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, [Echo("alpha")])


def enqueue(outbox: Outbox, *ids: str, now: float = NOW) -> None:
    outbox.enqueue_many([{"id": event_id, "n": 0} for event_id in ids], now=now)


def test_a_claim_beside_its_own_past_still_wins(outbox: Outbox) -> None:
    """Both have one token; which of them the database knows is told by the expiry alone."""
    enqueue(outbox, "e1")
    (old,) = outbox.claim_batch("w", now=NOW)
    (new,) = outbox.renew([old], now=NOW + 1)

    (newer,) = outbox.renew([new, old], now=NOW + 2)
    assert newer.lease_expires_at > new.lease_expires_at

    lines = outbox.settle([Failure(old, "a"), Success(newer, {"echo": "e1"}), Failure(newer, "b")], now=NOW + 3)
    assert [line.won for line in lines] == [False, True, False]
    assert outbox.status("e1", now=NOW + 3).status == "succeeded"


def test_each_loser_of_one_token_has_its_own_reason(outbox: Outbox) -> None:
    enqueue(outbox, "e1")
    (old,) = outbox.claim_batch("w", lease_seconds=10, now=NOW)
    (new,) = outbox.renew([old], lease_seconds=20, now=NOW)
    lines = outbox.settle([Failure(new, "a"), Failure(old, "a"), Failure(new, "a")], now=NOW + 20)
    assert [line.error_code for line in lines] == [
        "dispatch.lease_expired", "dispatch.claim_lost", "dispatch.lease_expired",
    ]  # fmt: skip


@pytest.mark.parametrize(("again", "code"), [(False, "dispatch.claim_missing"), (True, "dispatch.claim_lost")])
def test_a_purged_event_is_missing_until_it_is_enqueued_again(outbox: Outbox, again: bool, code: str) -> None:
    """Whoever has its id by now: SQLite gives the highest one away again."""
    enqueue(outbox, "e1")
    claim = outbox.claim("w", now=NOW)
    assert claim is not None
    outbox.complete(claim, {"echo": "e1"}, now=NOW)
    assert outbox.purge(older_than_seconds=0, now=NOW) == 1
    enqueue(outbox, "e1" if again else "e2")
    with pytest.raises(ClaimLostError) as lost:
        outbox.fail(claim, "late", now=NOW)
    assert lost.value.code == code


def test_events_of_a_time_to_come_do_not_stand_in_the_way_of_a_redrive(outbox: Outbox) -> None:
    """After a clock has stepped back: they cannot be made due before they were made, but the others can."""
    enqueue(outbox, "tomorrow", now=NOW + 100)
    enqueue(outbox, "today")
    claims = {claim.event_id: claim for claim in outbox.claim_batch("w", now=NOW + 100)}
    outbox.fail(claims["tomorrow"], "network", now=NOW + 100)
    outbox.fail(claims["today"], "network", now=NOW + 101)
    assert outbox.redrive_all(limit=1, now=NOW) == 1
    assert outbox.status("today", now=NOW).status == "pending"
    assert outbox.status("tomorrow", now=NOW).status == "failed"


def test_what_was_given_back_says_when_it_is_due(outbox: Outbox) -> None:
    enqueue(outbox, "e1")
    (claim,) = outbox.claim_batch("w", now=NOW + 5)
    (line,) = outbox.release([claim], now=NOW + 6)
    assert line.outcome is not None
    assert line.outcome.next_attempt_at == NOW == outbox.status("e1", now=NOW).next_attempt_at


def test_a_renewal_of_nothing_still_refuses_a_bad_time(outbox: Outbox) -> None:
    with pytest.raises(InputError) as refused:
        outbox.renew([], now=-1)
    assert refused.value.code == "dispatch.time_invalid"
    assert outbox.renew([], now=1) == []
