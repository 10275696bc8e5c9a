"""The questions every database has to answer, for any test runner and any engine on a migrated database.

Each case works on a topic of its own, which it leaves empty, and at a time long ago, when no lease of other rows had
ended: so it neither minds nor touches them. Nothing waits for time to pass.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Engine, delete, event, update
from sqlalchemy.orm import Session

from outbox.contracts.base import Contract, DeliveryFailed
from outbox.errors import ClaimLostError, InputError, OutboxError
from outbox.policy import RetryPolicy
from outbox.records import Claim, EventStatus, Failure, Result, Success
from outbox.schema import outbox_event
from outbox.store import Outbox
from outbox.testing.doubles import PATIENCE, Clock, Gate, ScriptedDestination
from outbox.values import check_token, sha256_hex
from outbox.worker import Worker

T = TypeVar("T")

LONG_AGO: Final = 1_000_000_000.0
LEASE: Final = 60.0
BASE_DELAY: Final = 5.0
LONGEST_DELAY: Final = 40.0
RESPONSE: Final[Mapping[str, Any]] = {"ok": True, "kept": "yes"}
DETAIL: Final = sha256_hex("detail")


class Note(Contract):
    """A contract as small as one can be: ``{"id": …, "text": …}``, answered by ``{"ok": true, "kept": …}``."""

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def check(self, event: Any) -> str:
        if not isinstance(event, dict) or set(event) != {"id", "text"} or not isinstance(event["text"], str):
            raise InputError("dispatch.change_invalid", expected="an object with id and text")
        return check_token(event["id"], code="dispatch.change_invalid")

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        if not isinstance(response, dict) or response.get("ok") is not True:
            raise InputError("dispatch.response_invalid", event_id=event_id, expected="ok")
        return {"kept": response.get("kept")}


class World:
    """What a case works with: an outbox on a topic of its own, a clock, and events by number."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clock = Clock(LONG_AGO)
        self.run = uuid4().hex[:12]
        self.topic = f"conformance.{self.run}"
        self.outbox = Outbox(
            engine,
            contracts=(Note(self.topic),),
            retry=RetryPolicy(base_delay_seconds=BASE_DELAY, max_delay_seconds=LONGEST_DELAY),
        )

    def id(self, number: int) -> str:
        return f"{self.run}:{number}"

    def event(self, number: int, text: str = "text") -> dict[str, Any]:
        return {"id": self.id(number), "text": text}

    def put(self, *numbers: int, max_attempts: int = 5) -> list[EventStatus]:
        """Enqueue events in an order that is also their due order."""
        return self.outbox.enqueue_many(
            [self.event(number) for number in numbers], max_attempts=max_attempts, now=self.clock()
        )

    def claim(self, worker: str = "w1", *, lease: float = LEASE) -> Claim:
        claim = self.outbox.claim(worker, lease_seconds=lease, now=self.clock())
        if claim is None:
            raise AssertionError("an event is due, and claim() returned None")
        return claim

    def claims(self, worker: str = "w1", *, limit: int = 100, lease: float = LEASE) -> list[Claim]:
        return self.outbox.claim_batch(worker, limit=limit, lease_seconds=lease, now=self.clock())

    def numbers(self, claims: list[Claim]) -> list[int]:
        return [int(claim.event_id.rpartition(":")[2]) for claim in claims]

    def status(self, number: int) -> EventStatus:
        return self.outbox.status(self.id(number), now=self.clock())

    def is_due(self) -> bool:
        return self.outbox.ready(now=self.clock())

    def tamper(self, number: int, **values: Any) -> None:
        """Change a row behind the outbox's back."""
        with self.engine.begin() as connection:
            changed = update(outbox_event).where(outbox_event.c.event_id == self.id(number)).values(**values)
            same("rows tampered with", connection.execute(changed).rowcount, 1)

    def clear(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(delete(outbox_event).where(outbox_event.c.topic == self.topic))

    def destination(self) -> ScriptedDestination:
        return ScriptedDestination(respond=lambda _: RESPONSE)


@dataclass(frozen=True, slots=True)
class Case:
    """One question. Call it with an engine on a migrated database; ``str`` is its name."""

    name: str
    question: str
    ask: Callable[[World], None]

    def __call__(self, engine: Engine) -> None:
        """Ask it.

        Raises:
            AssertionError: the answer is wrong. Whatever else is raised is a wrong answer too, where none was due.
        """
        world = World(engine)
        try:
            self.ask(world)
        finally:
            world.clear()

    def __str__(self) -> str:
        return self.name


_cases: list[Case] = []


def _case(ask: Callable[[World], None]) -> Callable[[World], None]:
    _cases.append(Case(ask.__name__, (ask.__doc__ or "").strip(), ask))
    return ask


# Checked by hand, since `assert` says little outside a runner that rewrites it, and nothing under `python -O`.


def same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r}, found {found!r}")


@contextmanager
def refused(code: str) -> Iterator[None]:
    try:
        yield
    except OutboxError as error:
        same("error code", error.code, code)
    else:
        raise AssertionError(f"expected {code}, and nothing was raised")


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Call all of them at the same moment, each on a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def call(function: Callable[[], T]) -> T:
        barrier.wait(PATIENCE)
        return function()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


class _Row(NamedTuple):
    """What a status shows, without times."""

    status: str
    attempts: int
    error: str | None
    receipt: Mapping[str, Any] | None


def shown(status: EventStatus) -> _Row:
    return _Row(status.status, status.attempts, status.last_error_code, status.receipt)


# -- states -----------------------------------------------------------------------------------------------------------


@_case
def enqueued_is_pending(world: World) -> None:
    """An enqueued event is pending, due at once, and shows the hash of what was given."""
    (put,) = world.put(1)
    found = world.status(1)
    same("the answer to enqueue", put, found)
    same("state", shown(found), ("pending", 0, None, None))
    same("due", found.next_attempt_at, world.clock())
    payload = json.dumps(world.event(1), sort_keys=True, separators=(",", ":"))
    same("hash", found.payload_sha256, sha256_hex(payload))


@_case
def claimed_is_leased(world: World) -> None:
    """A claim carries the payload, counts its attempt, and is a lease until its expiry."""
    world.put(1)
    claim = world.claim("w1")
    same("payload", json.loads(claim.payload), world.event(1))
    same("attempt", (claim.attempt, claim.max_attempts, claim.lease_owner), (1, 5, "w1"))
    same("expiry", claim.lease_expires_at, world.clock() + LEASE)
    found = world.status(1)
    same("state", shown(found), ("leased", 1, None, None))
    same("lease", (found.lease_expires_at, found.lease_expired), (claim.lease_expires_at, False))
    same("a second claim", world.outbox.claim("w2", now=world.clock()), None)


@_case
def completed_keeps_its_receipt(world: World) -> None:
    """A completed event has succeeded and keeps its receipt and the hash of the whole response."""
    world.put(1)
    outcome = world.outbox.complete(world.claim(), RESPONSE, now=world.clock())
    same("outcome", (outcome.status, outcome.next_attempt_at, outcome.error_code), ("succeeded", None, None))
    found = world.status(1)
    same("state", shown(found), ("succeeded", 1, None, {"kept": "yes"}))
    same("hash", found.response_sha256, sha256_hex('{"kept":"yes","ok":true}'))
    same("due", world.is_due(), False)


@_case
def retried_waits_ever_longer(world: World) -> None:
    """Each failed attempt waits twice as long as the one before, up to the longest delay; the last one ends it."""
    world.put(1, max_attempts=6)
    for attempt, delay in enumerate((5.0, 10.0, 20.0, 40.0, 40.0), start=1):
        outcome = world.outbox.retry(world.claim(), "busy", detail_hash=DETAIL, now=world.clock())
        same("outcome", (outcome.status, outcome.next_attempt_at), ("retry_wait", world.clock() + delay))
        found = world.status(1)
        same("state", shown(found), ("retry_wait", attempt, "busy", None))
        same("detail", found.last_error_detail_hash, DETAIL)
        world.clock.advance(delay)
    outcome = world.outbox.retry(world.claim(), "busy", now=world.clock())
    same("outcome", (outcome.status, outcome.next_attempt_at, outcome.error_code), ("failed", None, "busy"))


@_case
def retry_after_is_a_lower_bound(world: World) -> None:
    """A destination's Retry-After lengthens the wait and never shortens it."""
    world.put(1, 2)
    first, second = world.claims()
    longer = world.outbox.retry(first, "busy", retry_after=30.0, now=world.clock())
    shorter = world.outbox.retry(second, "busy", retry_after=0.5, now=world.clock())
    same("longer", longer.next_attempt_at, world.clock() + 30.0)
    same("shorter", shorter.next_attempt_at, world.clock() + BASE_DELAY)


@_case
def failed_is_for_good(world: World) -> None:
    """A failed event is not due whatever time it is, and keeps why it failed."""
    world.put(1)
    world.outbox.fail(world.claim(), "refused", detail_hash=DETAIL, now=world.clock())
    world.clock.advance(1_000_000)
    same("state", shown(world.status(1)), ("failed", 1, "refused", None))
    same("due", world.is_due(), False)


@_case
def redriven_begins_anew(world: World) -> None:
    """A redriven event is pending with all its attempts; only a failed one can be redriven."""
    world.put(1)
    with refused("dispatch.redrive_invalid"):
        world.outbox.redrive(world.id(1), now=world.clock())
    world.outbox.fail(world.claim(), "refused", now=world.clock())
    redriven = world.outbox.redrive(world.id(1), now=world.clock())
    same("state", (shown(redriven), redriven.redrives), (("pending", 0, None, None), 1))
    same("attempt", world.claim().attempt, 1)


@_case
def purged_only_when_settled(world: World) -> None:
    """Purging deletes what succeeded, failed events only when asked, and never what is still to be sent."""
    world.put(1, 2, 3, 4)
    world.outbox.complete(world.claim(), RESPONSE, now=world.clock())
    world.outbox.fail(world.claim(), "refused", now=world.clock())
    world.claim()
    world.clock.advance(10)

    def purge(**arguments: Any) -> int:
        return world.outbox.purge(topic=world.topic, now=world.clock(), **arguments)

    same("too young", purge(older_than_seconds=11), 0)
    same("succeeded", purge(older_than_seconds=10), 1)
    same("failed", purge(older_than_seconds=10, include_failed=True), 1)
    same("the rest", [world.status(number).status for number in (3, 4)], ["leased", "pending"])
    for number in (1, 2):
        with refused("dispatch.event_missing"):
            world.status(number)


# -- idempotency ------------------------------------------------------------------------------------------------------


@_case
def enqueued_again_is_the_same_event(world: World) -> None:
    """The same event again returns it as it stands, in whatever state, and changes nothing."""

    def again() -> None:
        before = world.status(1)
        (found,) = world.put(1)
        same("the answer", shown(found), shown(before))
        same("the row", world.status(1), before)

    world.put(1)
    again()
    claim = world.claim()
    again()
    world.outbox.retry(claim, "busy", now=world.clock())
    again()
    world.clock.advance(LONGEST_DELAY)
    world.outbox.complete(world.claim(), RESPONSE, now=world.clock())
    again()


@_case
def enqueued_otherwise_collides(world: World) -> None:
    """Another payload or another number of attempts under a known id is refused, and changes nothing."""
    world.put(1)
    before = world.status(1)
    with refused("dispatch.idempotency_collision"):
        world.outbox.enqueue(world.event(1, "other"), now=world.clock())
    with refused("dispatch.idempotency_collision"):
        world.outbox.enqueue(world.event(1), max_attempts=4, now=world.clock())
    same("the row", world.status(1), before)


@_case
def enqueued_many_all_or_nothing(world: World) -> None:
    """One collision undoes a whole call; an event given twice in one call is stored once."""
    world.put(1)
    with refused("dispatch.idempotency_collision"):
        world.outbox.enqueue_many([world.event(2), world.event(3), world.event(1, "other")], now=world.clock())
    for number in (2, 3):
        with refused("dispatch.event_missing"):
            world.status(number)
    found = world.outbox.enqueue_many([world.event(4), world.event(5), world.event(4)], now=world.clock())
    same("answers", [status.event_id for status in found], [world.id(number) for number in (4, 5, 4)])
    same("claimed", world.numbers(world.claims()), [1, 4, 5])


# -- fencing ----------------------------------------------------------------------------------------------------------


def _every_way_to_settle(world: World, claim: Claim, code: str) -> None:
    """Every way to settle ``claim`` loses with ``code``."""
    settling: list[Callable[[], object]] = [
        lambda: world.outbox.complete(claim, RESPONSE, now=world.clock()),
        lambda: world.outbox.retry(claim, "late", now=world.clock()),
        lambda: world.outbox.fail(claim, "late", now=world.clock()),
    ]
    for settle in settling:
        with refused(code):
            settle()
    (line,) = world.outbox.settle([Success(claim, RESPONSE)], now=world.clock())
    same("settle", (line.won, line.outcome, line.error_code), (False, None, code))
    (line,) = world.outbox.release([claim], now=world.clock())
    same("release", (line.won, line.error_code), (False, code))
    same("renew", world.outbox.renew([claim], now=world.clock()), [])


@_case
def stale_owner_never_wins(world: World) -> None:
    """Once another worker has the event, the first one's claim can do nothing, and the second one's can."""
    world.put(1)
    stale = world.claim("w1")
    world.clock.advance(LEASE)
    current = world.claim("w2")
    same("attempt", current.attempt, 2)
    same("tokens differ", stale.lease_token == current.lease_token, False)
    _every_way_to_settle(world, stale, "dispatch.claim_lost")
    same("state", shown(world.status(1)), ("leased", 2, None, None))
    world.outbox.complete(current, RESPONSE, now=world.clock())
    _every_way_to_settle(world, stale, "dispatch.claim_lost")
    same("state", shown(world.status(1)), ("succeeded", 2, None, {"kept": "yes"}))


@_case
def expired_lease_settles_nothing(world: World) -> None:
    """From its very expiry on a lease settles nothing, even when nobody else has taken the event."""
    world.put(1)
    claim = world.claim()
    world.clock.set(claim.lease_expires_at)
    same("expired", world.status(1).lease_expired, True)
    _every_way_to_settle(world, claim, "dispatch.lease_expired")


@_case
def settled_once_only(world: World) -> None:
    """A claim that has been settled cannot be settled again."""
    world.put(1)
    claim = world.claim()
    world.outbox.complete(claim, RESPONSE, now=world.clock())
    _every_way_to_settle(world, claim, "dispatch.claim_lost")


@_case
def purged_claim_is_missing(world: World) -> None:
    """A claim on a row that is no more says so, also when another event has come since."""
    world.put(1)
    claim = world.claim()
    world.outbox.complete(claim, RESPONSE, now=world.clock())
    world.outbox.purge(older_than_seconds=0, topic=world.topic, now=world.clock())
    world.put(2)
    _every_way_to_settle(world, claim, "dispatch.claim_missing")
    same("the other event", shown(world.status(2)), ("pending", 0, None, None))


@_case
def clock_that_stepped_back_settles_nothing(world: World) -> None:
    """A time before the event's last change is refused."""
    world.put(1)
    claim = world.claim()
    world.clock.advance(-1)
    _every_way_to_settle(world, claim, "dispatch.clock_regressed")


@_case
def forged_claim_loses(world: World) -> None:
    """A claim with another owner, token, attempt or expiry than the row's is lost."""
    world.put(1)
    claim = world.claim()
    changes: list[dict[str, Any]] = [
        {"lease_owner": "w2"}, {"lease_token": "0" * 32}, {"attempt": 2}, {"lease_expires_at": world.clock() + 61},
    ]  # fmt: skip
    for change in changes:
        _every_way_to_settle(world, replace(claim, **change), "dispatch.claim_lost")
    world.outbox.complete(claim, RESPONSE, now=world.clock())


# -- recovery ---------------------------------------------------------------------------------------------------------


@_case
def expired_lease_is_recovered(world: World) -> None:
    """An event whose owner vanished is due again when its lease ends, and fails when its attempts are used up."""
    world.put(1, max_attempts=2)
    world.claim("w1")
    world.clock.advance(LEASE - 0.001)
    same("a moment before", (world.is_due(), world.claims()), (False, []))
    world.clock.advance(0.001)
    same("due", world.is_due(), True)
    same("claimed again", world.claim("w2").attempt, 2)
    world.clock.advance(LEASE)
    same("no attempt left", world.claims("w3"), [])
    same("state", shown(world.status(1)), ("failed", 2, "lease_expired", None))


@_case
def recovered_keeps_its_code(world: World) -> None:
    """What a claim recovers and does not take waits for its retry, due now, with the code ``lease_expired``."""
    world.put(1, 2)
    world.claims("w1")
    world.clock.advance(LEASE)
    same("one of two", len(world.claims("w2", limit=1)), 1)
    found = world.status(2)
    same("the other", shown(found), ("retry_wait", 1, "lease_expired", None))
    same("due", found.next_attempt_at, world.clock())


# -- due order --------------------------------------------------------------------------------------------------------


@_case
def claimed_in_due_order(world: World) -> None:
    """The longest due come first; of equally long due ones, those enqueued first."""
    world.clock.advance(10)
    world.put(3, 1)
    world.clock.advance(-5)
    world.put(2)
    world.clock.advance(10)
    world.put(4)
    same("order", world.numbers(world.claims(limit=3)), [2, 3, 1])
    same("the rest", world.numbers(world.claims()), [4])


@_case
def not_claimed_before_it_is_due(world: World) -> None:
    """An event is claimed from its very due time on, and not before."""
    world.put(1)
    world.outbox.retry(world.claim(), "busy", now=world.clock())
    world.clock.advance(BASE_DELAY - 0.001)
    same("before", (world.is_due(), world.claims()), (False, []))
    world.clock.advance(0.001)
    same("at the time", world.numbers(world.claims()), [1])


@_case
def claims_are_bounded(world: World) -> None:
    """A batch is as large as asked for and no larger; an empty one means that nothing is due."""
    world.put(*range(1, 8))
    same("sizes", [len(world.claims(limit=3)) for _ in range(4)], [3, 3, 1, 0])


# -- settling many ----------------------------------------------------------------------------------------------------


@_case
def settled_each_for_itself(world: World) -> None:
    """In one call some win and some lose, in the order given, and none spoils another."""
    world.put(1, 2, 3, 4, 5)
    won, gone, retried, bad, failed = world.claims()
    world.outbox.complete(gone, RESPONSE, now=world.clock())
    results: list[Result] = [
        Success(gone, RESPONSE), Success(won, RESPONSE), Failure(retried, "busy"), Success(bad, {"ok": False}),
        Failure(failed, "refused", retryable=False),
    ]  # fmt: skip
    lines = world.outbox.settle(results, now=world.clock())
    same("claims", [line.claim for line in lines], [result.claim for result in results])
    same("won", [line.won for line in lines], [False, True, True, True, True])
    outcomes = [line.outcome.status if line.outcome else line.error_code for line in lines]
    same("outcomes", outcomes, ["dispatch.claim_lost", "succeeded", "retry_wait", "failed", "failed"])
    same("refused response", world.status(4).last_error_code, "dispatch.response_invalid")


@_case
def refused_before_anything_changes(world: World) -> None:
    """One malformed result refuses the whole call, and nothing changes."""
    world.put(1, 2)
    good, other = world.claims()
    with refused("dispatch.error_invalid"):
        world.outbox.settle([Success(good, RESPONSE), Failure(other, "No Code")], now=world.clock())
    with refused("dispatch.claim_invalid"):
        world.outbox.settle([Success(good, RESPONSE), Success(replace(other, payload="{}"), RESPONSE)])
    same("states", [world.status(number).status for number in (1, 2)], ["leased", "leased"])


# -- quarantine -------------------------------------------------------------------------------------------------------


@_case
def tampered_payload_is_never_handed_out(world: World) -> None:
    """A payload that no longer proves itself is quarantined; the batch goes on without it."""
    world.put(1, 2, 3)
    world.tamper(2, payload='{"id":"other","text":"text"}')
    same("claimed", world.numbers(world.claims()), [1, 3])
    same("state", shown(world.status(2)), ("failed", 1, "dispatch.payload_integrity", None))


@_case
def tampered_payload_is_said(world: World) -> None:
    """A single claim raises what it found, and the next one finds the next event."""
    world.put(1, 2)
    world.tamper(1, payload=json.dumps(world.event(1), indent=1))
    with refused("dispatch.payload_integrity"):
        world.claim()
    same("next", world.numbers([world.claim()]), [2])


# -- renew and release ------------------------------------------------------------------------------------------------


@_case
def renewed_replaces_the_claim(world: World) -> None:
    """A renewed claim lasts longer, the one before it is lost, and only live ones are renewed."""
    world.put(1, 2)
    first, gone = world.claims()
    world.outbox.complete(gone, RESPONSE, now=world.clock())
    world.clock.advance(30)
    (renewed,) = world.outbox.renew([first, gone], lease_seconds=LEASE, now=world.clock())
    same("expiry", renewed.lease_expires_at, world.clock() + LEASE)
    same("otherwise the same", replace(renewed, lease_expires_at=first.lease_expires_at), first)
    _every_way_to_settle(world, first, "dispatch.claim_lost")
    world.clock.advance(LEASE - 1)
    same("still ours", world.claims("w2"), [])
    world.outbox.complete(renewed, RESPONSE, now=world.clock())


@_case
def released_was_never_tried(world: World) -> None:
    """A released event is due as before, in its old place, and its attempt has not been counted."""
    world.put(1, 2)
    first = world.claim()
    (line,) = world.outbox.release([first], now=world.clock())
    same("line", (line.won, line.outcome is not None), (True, True))
    same("state", shown(world.status(1)), ("pending", 0, None, None))
    same("place", world.numbers(world.claims()), [1, 2])


@_case
def released_after_a_try(world: World) -> None:
    """A released event that had been tried before waits for a retry that is due now."""
    world.put(1)
    world.outbox.retry(world.claim(), "busy", now=world.clock())
    world.clock.advance(BASE_DELAY)
    world.outbox.release([world.claim()], now=world.clock())
    same("state", shown(world.status(1)), ("retry_wait", 1, "lease_released", None))
    same("attempt", world.claim().attempt, 2)


# -- the host's transactions ------------------------------------------------------------------------------------------


@_case
def joins_the_hosts_transaction(world: World) -> None:
    """An event enqueued in a host's transaction is there when that commits, and never was when it rolls back."""
    with world.engine.connect() as connection:
        for number, end in ((1, "rollback"), (2, "commit")):
            transaction = connection.begin()
            world.outbox.enqueue(world.event(number), connection=connection, now=world.clock())
            same("visible to others", world.is_due(), False)
            same("still open", transaction.is_active, True)
            getattr(transaction, end)()
    same("claimed", world.numbers(world.claims()), [2])


@_case
def joins_the_hosts_session(world: World) -> None:
    """The same with an ORM session."""
    with Session(world.engine) as session:
        world.outbox.enqueue(world.event(1), connection=session, now=world.clock())
        session.rollback()
        world.outbox.enqueue(world.event(2), connection=session, now=world.clock())
        same("visible to others", world.is_due(), False)
        session.commit()
    same("claimed", world.numbers(world.claims()), [2])


@_case
def no_transaction_to_join(world: World) -> None:
    """A connection in autocommit mode is refused, and nothing is written."""
    with world.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with refused("dispatch.transaction_required"):
            world.outbox.enqueue(world.event(1), connection=connection, now=world.clock())
        with refused("dispatch.connection_invalid"):
            world.outbox.enqueue(world.event(1), connection=object(), now=world.clock())  # type: ignore[arg-type]
    same("due", world.is_due(), False)


@_case
def refused_event_leaves_the_transaction_usable(world: World) -> None:
    """After a bad event and after a collision the host's transaction goes on, and commits what else is in it."""
    world.put(1)
    with world.engine.begin() as connection:

        def join(event: Any) -> None:
            world.outbox.enqueue(event, connection=connection, now=world.clock())

        join(world.event(2))
        with refused("dispatch.change_invalid"):
            join({"id": world.id(3)})
        with refused("dispatch.idempotency_collision"):
            world.outbox.enqueue_many(
                [world.event(5), world.event(1, "other")], connection=connection, now=world.clock()
            )
        join(world.event(4))
    same("claimed", world.numbers(world.claims()), [1, 2, 4])


# -- many at once -----------------------------------------------------------------------------------------------------


@_case
def two_claimers_share_nothing(world: World) -> None:
    """Workers that claim at the same time get different events, and together all of them."""
    world.put(*range(40))

    def drain(worker: str) -> list[int]:
        found: list[int] = []
        while batch := world.claims(worker, limit=3):
            found += world.numbers(batch)
        return found

    shares = at_once(lambda: drain("w1"), lambda: drain("w2"), lambda: drain("w3"))
    same("claimed", sorted(number for share in shares for number in share), list(range(40)))


@_case
def enqueued_at_once_is_one_event(world: World) -> None:
    """Hosts that enqueue the same event at the same time all succeed, with one row."""

    def enqueue() -> EventStatus:
        return world.outbox.enqueue(world.event(1), now=world.clock())

    found = at_once(*[enqueue] * 4)
    same("answers", {status.event_id for status in found}, {world.id(1)})
    same("claimed", world.numbers(world.claims()), [1])


@_case
def settled_at_once_has_one_winner(world: World) -> None:
    """Of several who settle one claim at the same time exactly one wins."""
    world.put(1)
    claim = world.claim()

    def settle() -> bool:
        return world.outbox.settle([Success(claim, RESPONSE)], now=world.clock())[0].won

    same("winners", sum(at_once(*[settle] * 4)), 1)


@_case
def recovered_at_once_has_one_owner(world: World) -> None:
    """Of several who come upon an expired lease at the same time one gets the event."""
    world.put(1)
    world.claim("w1")
    world.clock.advance(LEASE)
    batches = at_once(*[lambda: world.claims("w2")] * 4)
    same("owners", [claim.attempt for batch in batches for claim in batch], [2])


# -- delivering and looking -------------------------------------------------------------------------------------------


@_case
def run_once_settles_what_came_back(world: World) -> None:
    """Claim, deliver, settle: a success, a declared failure of either kind, an undeclared one, and nothing due."""
    world.put(1, 2, 3, 4, 5)
    destination = world.destination()
    destination.script(world.id(2), DeliveryFailed("busy", retryable=True, retry_after=7.0))
    destination.script(world.id(3), DeliveryFailed("refused", retryable=False))
    destination.script(world.id(4), RuntimeError("text that is nobody's business"))
    destination.script(world.id(5), {"ok": "no"})
    expected = [
        ("succeeded", None), ("retry_wait", "busy"), ("failed", "refused"), ("failed", "dispatch.client_failure"),
        ("failed", "dispatch.response_invalid"),
    ]  # fmt: skip
    for number, (status, code) in enumerate(expected, start=1):
        outcome = world.outbox.run_once(destination, "w1", lease_seconds=LEASE, now=world.clock())
        if outcome is None:
            raise AssertionError(f"event {number} is due, and run_once() returned None")
        same("outcome", (outcome.event_id, outcome.status, outcome.error_code), (world.id(number), status, code))
    same("nothing due", world.outbox.run_once(destination, "w1", lease_seconds=LEASE, now=world.clock()), None)
    same("due again", world.status(2).next_attempt_at, world.clock() + 7.0)


@_case
def run_once_says_that_it_lost(world: World) -> None:
    """A claim that is lost while its event is being delivered is said, and the new owner's result stands."""
    world.put(1)
    destination, now = world.destination(), world.clock()

    def overtaken(claim: Claim) -> Mapping[str, Any]:
        del claim
        world.clock.advance(LEASE)
        world.outbox.complete(world.claim("w2"), RESPONSE, now=world.clock())
        return RESPONSE

    destination.script(world.id(1), overtaken)
    try:
        world.outbox.run_once(destination, "w1", lease_seconds=LEASE, now=now)
    except ClaimLostError as error:
        same("code", error.code, "dispatch.claim_lost")
    else:
        raise AssertionError("the claim was lost, and run_once() said nothing")
    same("state", shown(world.status(1)), ("succeeded", 2, None, {"kept": "yes"}))


@_case
def worker_delivers_all(world: World) -> None:
    """A worker delivers everything that is due, retries included, and returns when it is idle."""
    outbox = Outbox(
        world.engine,
        contracts=(Note(world.topic),),
        retry=RetryPolicy(base_delay_seconds=0.01, max_delay_seconds=0.01),
    )
    outbox.enqueue_many([world.event(number) for number in range(20)])
    destination, gate = world.destination(), Gate()
    destination.script(world.id(7), gate)
    destination.script(world.id(3), gate)
    worker = Worker(outbox, {world.topic: destination}, concurrency=4, batch=5, lease_seconds=LEASE)
    thread = threading.Thread(target=worker.run, kwargs={"until_idle": True})
    thread.start()
    try:
        gate.wait_for_arrival()
        destination.wait_for(19)
    finally:
        gate.open()
        thread.join(PATIENCE)
    same("stopped", thread.is_alive(), False)
    same("stats", (worker.stats.succeeded, worker.stats.lost), (20, 0))
    same("states", {world.status(number).status for number in range(20)}, {"succeeded"})


@_case
def health_counts(world: World) -> None:
    """Health counts what is there, and is blocked by expired leases and by failures."""
    before = world.outbox.health(now=world.clock()).counts
    world.put(1, 2, 3, 4)
    world.outbox.complete(world.claim(), RESPONSE, now=world.clock())
    world.outbox.retry(world.claim(), "busy", now=world.clock())
    world.claim()
    after = world.outbox.health(now=world.clock()).counts
    grown = {status: after[status] - before[status] for status in after if after[status] != before[status]}
    same("counts", grown, {"pending": 1, "leased": 1, "retry_wait": 1, "succeeded": 1})
    world.clock.advance(LEASE)
    expired = world.outbox.health(now=world.clock())
    same("blocked by a lease", (expired.status, expired.expired_leases >= 1), ("blocked", True))
    world.outbox.fail(world.claim(), "refused", now=world.clock())
    same("blocked by a failure", world.outbox.health(now=world.clock()).status, "blocked")


@_case
def deep_health_finds_what_breaks_the_rules(world: World) -> None:
    """Deep health passes over rows that keep the rules, and finds one that does not."""
    world.put(1, 2)
    world.outbox.complete(world.claim(), RESPONSE, now=world.clock())
    world.outbox.health(deep=True, now=world.clock())
    world.tamper(1, receipt='{"kept": "not canonical"}')
    with refused("dispatch.state_invalid"):
        world.outbox.health(deep=True, now=world.clock())


@_case
def few_statements_for_many_events(world: World) -> None:
    """Enqueueing many takes no more statements than enqueueing one or two."""
    executed: list[str] = []

    def note(*arguments: Any) -> None:
        executed.append(arguments[2])

    with world.engine.begin() as connection:
        world.outbox.enqueue(world.event(0), connection=connection, now=world.clock())
        event.listen(world.engine, "before_cursor_execute", note)
        try:
            for numbers in (range(1, 3), range(3, 203)):
                before = len(executed)
                events = [world.event(number) for number in numbers]
                world.outbox.enqueue_many(events, connection=connection, now=world.clock())
                same("statements at most", len(executed) - before <= 4, True)
        finally:
            event.remove(world.engine, "before_cursor_execute", note)


#: Every case, in the order in which a new dialect had best be made to pass them.
conformance_cases: Final[tuple[Case, ...]] = tuple(_cases)
