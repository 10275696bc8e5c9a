"""The outbox: every verb, on whatever database the engine leads to.

The store decides and a dialect writes. It holds no state but caches, so one :class:`Outbox` serves all threads.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from sqlalchemy import Column, Connection, Engine, select, tuple_
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import Pool

from outbox import schema
from outbox.breaker import TopicState, spares
from outbox.contracts.base import Contract, DeliveryFailed, Destination
from outbox.dialects import dialect_for
from outbox.dialects.base import DISCARDED, Change, Count, NewEvent, Watch, event, fence, hidden, lease_end, of_topic
from outbox.errors import (
    ClaimLostError,
    CollisionError,
    DatabaseError,
    InputError,
    IntegrityError,
    NotFoundError,
    SchemaError,
)
from outbox.policy import BreakerPolicy, RetryPolicy
from outbox.records import (
    STATUSES,
    Claim,
    EventStatus,
    FailedAttempt,
    Failure,
    Health,
    Outcome,
    Receipt,
    Result,
    Settled,
    Status,
    Success,
    TopicStatus,
    check_attempt,
    check_claim,
)
from outbox.rules import check_payload, check_row
from outbox.schema_check import check_schema
from outbox.trace import current_headers
from outbox.values import (
    MAX_ATTEMPTS,
    MAX_LEASE_SECONDS,
    check_error,
    check_int,
    check_label,
    check_now,
    check_seconds,
    check_token,
    describe,
    is_number,
    parse_canonical,
    sha256_hex,
)

logger = logging.getLogger("outbox")

MAX_BATCH: Final = 1000
#: Leases ended per claim; a bound, so that a mass expiry costs many short transactions and not one long one.
RECOVERY_LIMIT: Final = 1000
#: Rows that one statement looks up, and that deep health holds at once.
CHUNK_ROWS: Final = 500
DEEP_ROWS: Final = 50
#: Failed attempts that ``status`` shows.
SHOWN_ATTEMPTS: Final = 50
#: Ordering keys that one claim looks at for events left waiting behind nobody, and how often at least, in seconds.
SWEPT_KEYS: Final = 500
SWEEP_SECONDS: Final = 1.0

T = TypeVar("T")

HostConnection = Connection | Session | scoped_session[Any]

_STATUS_COLUMNS = [column for column in event.c if column.name not in ("payload", "headers")]


class _Transaction(NamedTuple):
    connection: Connection
    now: float
    expired: bool
    topics: Mapping[str, TopicState]


class _Line(NamedTuple):
    """One claim to be settled: its result, where there is one, and the change once the time is known and, for an
    attempt that is spared, when to make the next at the earliest."""

    claim: Claim
    result: Result | None
    change: Callable[[float, float | None], Change]


class Outbox:
    """A leased outbox in the database that ``engine`` leads to.

    Args:
        engine: the host's engine. Its pool is shared; its settings and its open transactions are left alone.
        contracts: one contract per topic.
        retry: when failed attempts are made again: one policy for all topics, or a mapping from topics to theirs.
        breaker: when a topic whose destination is down is left alone.

    ``now``, wherever it can be given, is UTC epoch seconds. Without it the time is the database's on PostgreSQL, so
    that all hosts share one clock, and the machine's on SQLite.

    Every verb may raise :class:`SchemaError` (``dispatch.schema_altered``) before it does anything,
    :class:`DatabaseError` (``dispatch.database_busy``, ``dispatch.database_unavailable``), and :class:`IntegrityError`
    (``dispatch.database_integrity``) when it meets damage to the database.

    Raises:
        InputError: ``dispatch.connection_invalid``, ``dispatch.contract_invalid``, ``dispatch.policy_invalid``.
        DatabaseError: ``dispatch.database_unsupported``.
    """

    def __init__(
        self,
        engine: Engine,
        contracts: Iterable[Contract],
        retry: RetryPolicy | Mapping[str, RetryPolicy] | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise InputError("dispatch.connection_invalid", expected="a SQLAlchemy Engine", found=describe(engine))
        if breaker is not None and not isinstance(breaker, BreakerPolicy):
            raise InputError("dispatch.policy_invalid", expected="a BreakerPolicy", found=describe(breaker))
        self.engine = engine
        self.breaker_policy = breaker or BreakerPolicy()
        self._contracts = _by_topic(contracts)
        self._retry = _policies(retry, self._contracts)
        self._topics: Mapping[str, TopicState] = {}
        self._seen_at = 0.0
        self._keys = _Keys()
        self._dialect = dialect_for(engine.dialect.name)
        self._own = _OwnEngine(engine)
        self._generation: tuple[Any, ...] | None = None
        self._joined = WeakSet[Pool]()

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics there are contracts for."""
        return tuple(self._contracts)

    def __repr__(self) -> str:
        return f"<Outbox on {self._dialect.name} for {', '.join(self._contracts)}>"

    # -- enqueue ----------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        event: Any,
        *,
        connection: HostConnection | None = None,
        topic: str | None = None,
        max_attempts: int = 5,
        ordering_key: str | None = None,
        now: float | None = None,
    ) -> EventStatus:
        """Enqueue one event, in the host's open transaction when its ``connection`` is given.

        Joining never commits, rolls back or closes what it joins. Idempotent: the same id, payload, ``max_attempts``
        and ordering key again returns the event as it stands, whatever its state.

        Args:
            ordering_key: events of one key in one topic are delivered one after another, in the order enqueued. 1 to
                256 printable characters; None for the contract's own key, which by default is none. Producers of the
                same key wait for each other's transactions on PostgreSQL, as all writers do on SQLite.

        Raises:
            InputError: ``dispatch.change_invalid``, ``dispatch.max_attempts_invalid``, ``dispatch.time_invalid``,
                ``dispatch.topic_unknown``, ``dispatch.connection_invalid``, ``dispatch.transaction_required``,
                ``dispatch.ordering_key_invalid``.
            CollisionError: ``dispatch.idempotency_collision``.
        """
        return self.enqueue_many(
            [event], connection=connection, topic=topic, max_attempts=max_attempts, ordering_key=ordering_key, now=now
        )[0]

    def enqueue_many(
        self,
        events: Iterable[Any],
        *,
        connection: HostConnection | None = None,
        topic: str | None = None,
        max_attempts: int = 5,
        ordering_key: str | None = None,
        now: float | None = None,
    ) -> list[EventStatus]:
        """Enqueue events in the order given, all or none, by the rules of :meth:`enqueue`.

        Returns:
            One status for each of ``events``, in their order; an event that is given twice is stored once.
        """
        contract = self._contract(topic)
        now = check_now(now)
        check_int(max_attempts, code="dispatch.max_attempts_invalid", lowest=1, highest=MAX_ATTEMPTS)
        rows = [_new_event(contract, each, max_attempts, ordering_key) for each in events]
        distinct = _distinct(rows)
        if not rows:
            return []
        if connection is None:
            with self._transaction(now, write=True) as transaction:
                found = self._insert(transaction.connection, distinct, now)
        else:
            found = self._insert_joined(connection, distinct, now)
        return [found[row.event_id] for row in rows]

    def _insert_joined(
        self, connection: HostConnection, rows: Mapping[str, NewEvent], now: float | None
    ) -> dict[str, EventStatus]:
        try:
            with self._dialect.mapped_errors():
                return self._insert(self._joinable(connection), rows, now)
        except InvalidRequestError as error:  # SQLAlchemy itself refuses to execute anything on it
            expected = "a connection that can be used"
            raise InputError("dispatch.connection_invalid", expected=expected, found=type(error).__name__) from None
        except SchemaError:
            self._explain_schema()
            raise

    def _insert(
        self, connection: Connection, rows: Mapping[str, NewEvent], now: float | None
    ) -> dict[str, EventStatus]:
        """Insert what is new, look up the rest, and undo it all on a collision.

        Undone by deleting, not by a savepoint: under pysqlite a savepoint without a transaction around it commits when
        it is released, and everywhere it would cost two more statements per enqueue.
        """
        pending, found, inserted = dict(rows), dict[str, EventStatus](), list[int]()
        moment, keyed = now, [row for row in rows.values() if row.ordering_key is not None]
        if keyed:
            self._dialect.hold_keys(connection, keyed[0].topic, list({str(row.ordering_key): None for row in keyed}))
        while pending:  # more than once only if a purge deletes a row between the two statements
            for new in self._dialect.insert(connection, list(pending.values()), now):
                inserted.append(new.id)
                found[new.event_id] = _fresh_status(pending.pop(new.event_id), new.created_at)
            for row in self._existing(connection, pending.values()):
                wanted = pending.pop(row.event_id)
                if _differs(row, wanted):
                    self._undo(connection, inserted)
                    raise CollisionError("dispatch.idempotency_collision", event_id=wanted.event_id)
                if moment is None and row.status == "leased":  # whether the lease has ended is the clock's to say
                    moment = self._dialect.clock(connection)
                found[row.event_id] = _event_status(row, moment)
        if keyed:
            self._queue_up(connection, keyed, found)
        return found

    def _queue_up(self, connection: Connection, keyed: Sequence[NewEvent], found: dict[str, EventStatus]) -> None:
        """Make those events that are the first of their ordering keys due."""
        topic, waiting = keyed[0].topic, [row for row in keyed if found[row.event_id].status == "waiting"]
        if waiting:
            keys = list({str(row.ordering_key): None for row in waiting})
            now, passes = found[waiting[0].event_id].created_at, not self._contracts[topic].hold_on_failure
            if not self._dialect.promote(connection, topic, keys, now, passes=passes):
                return  # and nothing is read, for which a serializable transaction would answer
            found.update((row.event_id, _event_status(row, now)) for row in self._existing(connection, waiting))

    @staticmethod
    def _existing(connection: Connection, rows: Iterable[NewEvent | Claim]) -> Iterator[Any]:
        for chunk in _chunks([(row.topic, row.event_id) for row in rows], CHUNK_ROWS):
            keys = tuple_(event.c.topic, event.c.event_id).in_(chunk)
            yield from connection.execute(select(*_STATUS_COLUMNS).where(keys)).all()

    @staticmethod
    def _undo(connection: Connection, ids: Sequence[int]) -> None:
        for chunk in _chunks(ids, CHUNK_ROWS):
            connection.execute(event.delete().where(event.c.id.in_(chunk)))

    # -- claim ------------------------------------------------------------------------------------------------------

    def claim(
        self, worker_id: str, *, topic: str | None = None, lease_seconds: float = 600, now: float | None = None
    ) -> Claim | None:
        """Lease the longest-due event, or return None when nothing is due.

        Expired leases are recovered first.

        Raises:
            InputError: ``dispatch.worker_invalid``, ``dispatch.lease_invalid``, ``dispatch.time_invalid``,
                ``dispatch.topic_unknown``.
            IntegrityError: ``dispatch.payload_integrity``: the event's payload no longer proves itself; it has been
                quarantined, and the next call finds the next event.
        """
        good, bad = self._claim(worker_id, topic, 1, lease_seconds, now)
        if bad:
            raise IntegrityError("dispatch.payload_integrity", event_id=bad[0].event_id)
        return good[0] if good else None

    def claim_batch(
        self,
        worker_id: str,
        *,
        topic: str | None = None,
        limit: int = 100,
        lease_seconds: float = 600,
        due_from: float = 0.0,
        now: float | None = None,
    ) -> list[Claim]:
        """Lease up to ``limit`` (1 to 1000) events in due order. Empty means that nothing was due.

        Events whose payload no longer proves itself are quarantined and logged, and do not stop the others.

        Args:
            due_from: pass over what was due before this time. While an old snapshot is held, PostgreSQL cannot forget
                the index entries of delivered events, and a claim that begins at the oldest walks over all of them. A
                caller that passes over must also ask without, now and then: an event may be committed late.

        Raises:
            InputError: as :meth:`claim`, and ``dispatch.limit_invalid``.
        """
        check_int(limit, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)
        floor = check_now(due_from) or 0.0
        while True:
            good, bad = self._claim(worker_id, topic, limit, lease_seconds, now, floor)
            for claim in bad:
                logger.error("quarantined event %s of %s: dispatch.payload_integrity", claim.event_id, claim.topic)
            if good or not bad:  # a batch of nothing but poison is not an empty outbox
                return good

    def ready(self, *, topic: str | None = None, now: float | None = None) -> bool:
        """Whether a claim would find something to lease or to recover. Reads only, so it can be asked often.

        Raises:
            InputError: ``dispatch.topic_unknown``, ``dispatch.time_invalid``.
        """
        contract = self._contract(topic)
        with self._transaction(check_now(now), write=False) as (connection, moment, expired, topics):
            state = topics.get(contract.topic)
            if expired:
                return True
            if state is not None and not state.allowance(moment, 1, self.breaker_policy):
                return False
            if self._dialect.ready(connection, contract.topic, moment):
                return True
            self._look_for_stranded(connection, contract, idle=False)
            return self._keys.any(contract.topic)

    def watch(self) -> Watch:
        """What wakes a worker when there may be new work; its owner starts and closes it."""
        return self._dialect.watch(self._own())

    def announce(self, worker_id: str, *, topic: str | None = None, seconds: float = 30.0) -> None:
        """Let enqueuing hosts know for ``seconds`` that a worker waits for events of ``topic``.

        Raises:
            InputError: ``dispatch.worker_invalid``, ``dispatch.topic_unknown``.
        """
        contract = self._contract(topic)
        check_token(worker_id, code="dispatch.worker_invalid", longest=128)
        with self._transaction(None, write=True) as (connection, now, _, _):
            self._dialect.announce(connection, worker_id, contract.topic, now + seconds, now)

    def withdraw(self, worker_id: str) -> None:
        """Take back whatever a worker has announced.

        Raises:
            InputError: ``dispatch.worker_invalid``.
        """
        check_token(worker_id, code="dispatch.worker_invalid", longest=128)
        with self._transaction(None, write=True) as (connection, _, _, _):
            self._dialect.withdraw(connection, worker_id)

    def _claim(
        self, worker_id: str, topic: str | None, limit: int, lease_seconds: float, now: float | None, floor: float = 0.0
    ) -> tuple[list[Claim], list[Claim]]:
        """Lease, then verify. Between the two a crash leaves an ordinary lease, so that needs no transaction around it
        and SQLite's write lock is not held over the hashing."""
        contract = self._contract(topic)
        check_token(worker_id, code="dispatch.worker_invalid", longest=128)
        seconds = check_seconds(lease_seconds, code="dispatch.lease_invalid", longest=MAX_LEASE_SECONDS)
        now = check_now(now)
        with self._transaction(now, write=True) as transaction:
            if transaction.expired:
                self._recover(transaction)
            claims = self._lease(transaction, contract, worker_id, seconds, limit, floor)
        moment = transaction.now
        good, bad = list[Claim](), list[Claim]()
        for claim in claims:
            (good if _proves_itself(contract, claim) else bad).append(claim)
        if bad:  # as of when they were leased: verifying may take longer than a short lease
            code = "dispatch.payload_integrity"
            self._apply([Change(claim, "failed", claim.attempt, error_code=code) for claim in bad], moment)
        return good, bad

    def _lease(
        self,
        transaction: _Transaction,
        contract: Contract,
        worker_id: str,
        seconds: float,
        limit: int,
        floor: float,
    ) -> list[Claim]:
        """As many due events as the topic's breaker admits."""
        connection, now, _, _ = transaction
        state, limit = self._admit(transaction, contract.topic, limit)
        expires_at = lease_end(now, seconds)

        def lease(room: int) -> list[Claim]:
            if room <= 0:
                return []
            return self._dialect.lease(connection, contract.topic, worker_id, expires_at, now, room, floor)

        claims = lease(limit)
        self._look_for_stranded(connection, contract, idle=not claims)
        if self._promote(connection, contract, self._keys.take(contract.topic), now):
            claims += lease(limit - len(claims))
        if state is not None and (after := state.claimed(claims, now, self.breaker_policy)) != state:
            self._dialect.write_topic(connection, after)
        return claims

    def _admit(self, transaction: _Transaction, topic: str, limit: int) -> tuple[TopicState | None, int]:
        """How many events the topic's breaker lets be claimed, and its state where that has to be counted."""
        connection, now, _, topics = transaction
        state = topics.get(topic)
        if state is None or state.gate(now, self.breaker_policy) == "closed":
            return None, limit
        if not state.allowance(now, limit, self.breaker_policy):
            return None, 0
        state = self._dialect.lock_topic(connection, topic)  # one probe at a time, whoever else asks
        return state, state.allowance(now, limit, self.breaker_policy)

    def _recover(self, transaction: _Transaction) -> None:
        connection, now, _, _ = transaction
        rows = self._dialect.recover(connection, now, RECOVERY_LIMIT)
        for row in rows:
            logger.warning("lease expired on event %s of %s: now %s", row.event_id, row.topic, row.status)
            contract = self._contracts.get(row.topic)
            if row.status == "failed" and row.ordering_key is not None and contract and not contract.hold_on_failure:
                self._keys.remember(row.topic, [row.ordering_key])
        lost = [
            (row.id, FailedAttempt(row.attempts, now, None, "lease_expired", "unknown", None, None)) for row in rows
        ]
        if lost:
            self._dialect.record(connection, lost)

    # -- ordering keys ----------------------------------------------------------------------------------------------

    def _look_for_stranded(self, connection: Connection, contract: Contract, *, idle: bool) -> None:
        """Remember keys whose events wait behind nobody: a portion of all keys each time.

        Whoever ends a head promotes the next. That fails where a producer holds the key at that moment: its event may
        not be visible yet, and waiting for it is not for a worker. So the key is remembered, and tried again with the
        next claim. And where whoever should have done so is gone, this walk over all keys finds it.
        """
        topic = contract.topic
        if not self._keys.due(topic, idle=idle):
            return
        rows = self._dialect.waiting_keys(connection, topic, self._keys.next_after(topic), SWEPT_KEYS)
        self._keys.walked(topic, rows[-1][0] if len(rows) == SWEPT_KEYS else "")
        passes = not contract.hold_on_failure
        self._keys.remember(topic, [key for key, head, failed in rows if not head and (passes or not failed)])

    def _promote(self, connection: Connection, contract: Contract, keys: Sequence[str], now: float) -> int:
        if not keys:
            return 0
        free = self._dialect.free_keys(connection, contract.topic, keys)
        self._keys.remember(contract.topic, set(keys) - set(free))
        passes = not contract.hold_on_failure
        return self._dialect.promote(connection, contract.topic, free, now, passes=passes) if free else 0

    # -- settle -----------------------------------------------------------------------------------------------------

    def complete(self, claim: Claim, response: Mapping[str, Any], *, now: float | None = None) -> Outcome:
        """Record the destination's response: the event has been accepted.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.response_invalid``, ``dispatch.time_invalid``.
            ClaimLostError: ``dispatch.claim_missing``, ``dispatch.claim_lost``, ``dispatch.lease_expired``,
                ``dispatch.clock_regressed``.
        """
        contract = self._contract(check_claim(claim).topic)
        receipt = contract.receipt(claim.event_id, response)
        return self._settle_one(_success_line(Success(claim, response), receipt), now)

    def retry(
        self,
        claim: Claim,
        error_code: str,
        *,
        retry_after: float | None = None,
        detail_hash: str | None = None,
        now: float | None = None,
    ) -> Outcome:
        """Record a failure that another attempt may mend; the last attempt ends the event.

        Args:
            retry_after: seconds to wait at least, or None.
            detail_hash: SHA-256 hex of detail kept elsewhere.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.error_invalid``, ``dispatch.time_invalid``.
            ClaimLostError: as :meth:`complete`.
        """
        failure = Failure(check_claim(claim), error_code, True, retry_after, detail_hash)
        return self._settle_one(self._line(failure), now)

    def fail(
        self, claim: Claim, error_code: str, *, detail_hash: str | None = None, now: float | None = None
    ) -> Outcome:
        """Record a failure that no other attempt can mend. Raises as :meth:`retry`."""
        failure = Failure(check_claim(claim), error_code, retryable=False, detail_hash=detail_hash)
        return self._settle_one(self._line(failure), now)

    def settle(self, results: Iterable[Result], *, jitter: bool = False, now: float | None = None) -> list[Settled]:
        """Record many results in one transaction, each fenced on its own.

        A response that its contract refuses fails that event with ``dispatch.response_invalid``. A lost claim is
        reported in its line and spoils no other. Failures that speak of the destination (``outage``) count towards the
        topic's breaker; while that is open they cost their events no attempt.

        Args:
            jitter: spread retries as the topic's policy says, instead of doubling exactly.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.error_invalid``, ``dispatch.time_invalid``; nothing
                was changed.
        """
        lines = [self._line(result, jitter=jitter) for result in results]
        return self._apply_all(lines, check_now(now))

    def renew(self, claims: Iterable[Claim], *, lease_seconds: float = 600, now: float | None = None) -> list[Claim]:
        """Make the leases of live claims end ``lease_seconds`` from now.

        Returns:
            The renewed claims, which replace those given; a claim that was lost has none.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.lease_invalid``, ``dispatch.time_invalid``.
        """
        wanted = [check_claim(claim) for claim in claims]
        seconds = check_seconds(lease_seconds, code="dispatch.lease_invalid", longest=MAX_LEASE_SECONDS)
        now = check_now(now)
        if not wanted:
            return []
        with self._transaction(now, write=True) as (connection, moment, _, topics):
            expires_at = lease_end(moment, seconds)
            live = _in_turn(
                wanted,
                lambda turn: self._dialect.renew(connection, [wanted[index] for index in turn], expires_at, moment),
            )
            tokens = {wanted[index].lease_token for index in live}
            for topic, state in sorted(topics.items()):
                if state.probe_token in tokens:
                    locked = self._dialect.lock_topic(connection, topic)
                    self._dialect.write_topic(connection, locked.renewed(tokens, expires_at))
        return [_renewed(wanted[index], expires_at) for index in sorted(live)]

    def release(self, claims: Iterable[Claim], *, now: float | None = None) -> list[Settled]:
        """Give back events that were not sent: due again at once, the attempt not counted.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.time_invalid``.
        """
        changes = [_released(check_claim(claim)) for claim in claims]
        return self._apply(changes, check_now(now))

    def _line(self, result: Result, *, jitter: bool = False) -> _Line:
        """The line a result leads to. Everything that can be refused is refused here."""
        if isinstance(result, Success):
            claim = check_claim(result.claim)
            try:
                receipt = self._contract(claim.topic).receipt(claim.event_id, result.response)
            except InputError as error:
                if error.code != "dispatch.response_invalid":
                    raise
                return self._line(Failure(claim, error.code, retryable=False))
            return _success_line(result, receipt)
        if not isinstance(result, Failure):
            raise InputError("dispatch.claim_invalid", expected="a Success or a Failure", found=describe(result))
        check_claim(result.claim)
        _check_failure(result)
        policy = self._retry[self._contract(result.claim.topic).topic]
        luck = random.random() if jitter else None  # noqa: S311 - no secret
        return _Line(result.claim, result, lambda now, spared: _failed(result, policy, now, luck, spared))

    def _settle_one(self, line: _Line, now: float | None) -> Outcome:
        (settled,) = self._apply_all([line], check_now(now))
        if settled.outcome is None:
            assert settled.error_code is not None
            raise ClaimLostError(settled.error_code, event_id=line.claim.event_id)
        return settled.outcome

    def _apply(self, changes: Sequence[Change], now: float | None) -> list[Settled]:
        return self._apply_all([_constant(change) for change in changes], now)

    def _apply_all(self, lines: Sequence[_Line], now: float | None) -> list[Settled]:
        if not lines:
            return []
        with self._transaction(now, write=True) as transaction:
            connection, moment, _, _ = transaction
            changes = self._decide(lines, transaction)
            claims = [change.claim for change in changes]
            won = _in_turn(
                claims, lambda turn: self._dialect.settle(connection, [changes[index] for index in turn], moment)
            )
            lost = [claim for index, claim in enumerate(claims) if index not in won]
            reasons = self._reasons(connection, lost, moment) if lost else {}
            settled = [(lines[index], changes[index]) for index in sorted(won)]
            self._record_attempts(connection, settled, moment)
            self._note_topics(transaction, [line for line, _ in settled])
            self._let_next_pass(connection, [change for _, change in settled], moment)
        return [
            Settled(change.claim, True, _outcome_of(change), None)
            if index in won
            else Settled(change.claim, False, None, reasons[fence(change.claim)])
            for index, change in enumerate(changes)
        ]

    def _decide(self, lines: Sequence[_Line], transaction: _Transaction) -> list[Change]:
        """What each line writes. A failure that opens its topic, or finds it open, is spared."""
        states, changes = dict(transaction.topics), list[Change]()
        for claim, result, change in lines:
            spared = None
            if result is not None:
                before = states.get(claim.topic) or TopicState(claim.topic)
                states[claim.topic] = after = before.after(result, transaction.now, self.breaker_policy)
                if spares(after, result, self.breaker_policy):
                    # A probe lets what has come meanwhile go before it.
                    probed = before.probe_token == claim.lease_token
                    spared = after.next_probe() if probed else transaction.now
            changes.append(change(transaction.now, spared))
        return changes

    def _record_attempts(self, connection: Connection, settled: Iterable[tuple[_Line, Change]], now: float) -> None:
        failed = [
            (claim.id, FailedAttempt(
                claim.attempt, now, result.seconds, result.error_code, result.arrival, result.http_status,
                result.detail_hash,
            ))
            for (claim, result, _), change in settled
            if isinstance(result, Failure) and change.attempts == claim.attempt
        ]  # fmt: skip
        if failed:
            self._dialect.record(connection, failed)

    def _note_topics(self, transaction: _Transaction, lines: Sequence[_Line]) -> None:
        """Carry the results over to their topics' rows, where they change anything."""
        connection, now, _, topics = transaction
        for topic in sorted({line.claim.topic for line in lines}):
            ours = [line for line in lines if line.claim.topic == topic]
            before = topics.get(topic) or TopicState(topic)
            if self._topic_after(before, ours, now) != before:
                locked = self._dialect.lock_topic(connection, topic)  # as it is now, and not when the pulse was taken
                after = self._topic_after(locked, ours, now)
                self._dialect.write_topic(connection, after)
                self._topics = {**self._topics, topic: after}
                _tell(locked, after)

    def _topic_after(self, state: TopicState, lines: Iterable[_Line], now: float) -> TopicState:
        unsent = set[str]()
        for claim, result, _ in lines:
            if result is None:
                unsent.add(claim.lease_token)
            else:
                state = state.after(result, now, self.breaker_policy)
        return state.released(unsent, now)

    def _let_next_pass(self, connection: Connection, changes: Iterable[Change], now: float) -> None:
        """Make the events due that stood behind those that have ended, or before those that were given back untried."""
        ended, untried = dict[str, dict[str, None]](), dict[str, dict[str, None]]()
        for change in changes:
            claim, contract = change.claim, self._contracts.get(change.claim.topic)
            if claim.ordering_key is None or contract is None:
                continue
            if change.status == "pending":
                untried.setdefault(claim.topic, {})[claim.ordering_key] = None
            elif change.status == "succeeded" or (change.status == "failed" and not contract.hold_on_failure):
                ended.setdefault(claim.topic, {})[claim.ordering_key] = None
        for topic, keys in sorted(untried.items()):
            self._back_in_line(connection, self._contracts[topic], list(keys), now)
        for topic, keys in sorted(ended.items()):
            self._promote(connection, self._contracts[topic], list(keys), now)

    @classmethod
    def _reasons(cls, connection: Connection, claims: Sequence[Claim], now: float) -> dict[tuple[Any, ...], str]:
        """Why each claim lost, by its fence. Looked up by name: SQLite gives a purged row's id to the next event."""
        rows = {(row.topic, row.event_id): row for row in cls._existing(connection, claims)}
        return {fence(claim): _why_lost(rows.get((claim.topic, claim.event_id)), claim, now) for claim in claims}

    # -- deliver ----------------------------------------------------------------------------------------------------

    def run_once(
        self,
        destination: Destination,
        worker_id: str,
        *,
        topic: str | None = None,
        lease_seconds: float = 600,
        now: float | None = None,
    ) -> Outcome | None:
        """Claim one event, deliver it and settle it; None when nothing was due.

        A given ``now`` serves for all of it; otherwise the settle reads the clock afresh.

        Raises:
            InputError: ``dispatch.client_invalid``, ``dispatch.lease_too_short``, and as :meth:`claim`.
            IntegrityError: as :meth:`claim`.
            ClaimLostError: the claim was lost while delivering; what the destination answered is not recorded.
        """
        check_destination(destination, lease_seconds)
        claim = self.claim(worker_id, topic=topic, lease_seconds=lease_seconds, now=now)
        if claim is None:
            return None
        return self._settle_one(self._line(deliver(destination, claim)), now)

    # -- operate ----------------------------------------------------------------------------------------------------

    def status(self, event_id: str, *, topic: str | None = None, now: float | None = None) -> EventStatus:
        """The event as it stands.

        Raises:
            InputError: ``dispatch.event_invalid``, ``dispatch.topic_unknown``, ``dispatch.time_invalid``.
            NotFoundError: ``dispatch.event_missing``.
            IntegrityError: ``dispatch.state_invalid``: the row breaks a row rule.
        """
        contract = self._contract(topic)
        check_token(event_id, code="dispatch.event_invalid")
        with self._transaction(check_now(now), write=False) as (connection, moment, _, _):
            row = self._find(connection, contract, event_id, event.c)
            failures = self._dialect.attempts(connection, row.id, SHOWN_ATTEMPTS)
        check_row(row)
        check_payload(row, contract)
        return _event_status(row, moment, failures)

    @staticmethod
    def _find(
        connection: Connection, contract: Contract, event_id: str, columns: Iterable[Column[Any]] = _STATUS_COLUMNS
    ) -> Any:
        key = (event.c.topic == contract.topic) & (event.c.event_id == event_id)
        row = connection.execute(select(*columns).where(key)).one_or_none()
        if row is None:
            raise NotFoundError("dispatch.event_missing", event_id=event_id)
        return row

    def health(self, *, deep: bool = False, now: float | None = None) -> Health:
        """The outbox at a glance, at a cost that does not grow with what has been settled.

        With ``deep`` every row is first held against the row rules and its contract, in constant memory, and the
        database is asked about its own integrity. Rows of topics without a contract here are held to the rest.

        Raises:
            InputError: ``dispatch.time_invalid``.
            IntegrityError: ``dispatch.state_invalid``, ``dispatch.database_integrity`` (deep only).
        """
        with self._transaction(check_now(now), write=False) as transaction:
            if deep:
                self._check_everything(transaction.connection)
            return self._glance(transaction)

    def _check_everything(self, connection: Connection) -> None:
        # Rows first, since SQLite counts a row that breaks a CHECK as damage, and the rules can say which it is.
        self._check_rows(connection)
        damage = self._dialect.damage(connection)
        if damage is not None:
            raise IntegrityError("dispatch.database_integrity", found=damage)

    def _check_rows(self, connection: Connection) -> None:
        last = None
        while True:  # by key, not by cursor: a driver's cursor may hold the whole result
            page = select(event).order_by(event.c.id).limit(DEEP_ROWS)
            rows = connection.execute(page if last is None else page.where(event.c.id > last)).all()
            for row in rows:
                check_row(row)
                check_payload(row, self._contracts.get(row.topic))
            if len(rows) < DEEP_ROWS:
                return
            last = rows[-1].id

    def _glance(self, transaction: _Transaction) -> Health:
        connection, now, _, topics = transaction
        counted = {name: self._dialect.count(connection, where) for name, where in schema.COUNTED.items()}
        due = self._dialect.count(connection, schema.DUE, now)
        waiting_for_retry, unsettled = counted["retry_wait"], counted.pop("due")
        counted["pending"] = Count(
            max(0, unsettled.rows - waiting_for_retry.rows), unsettled.exact and waiting_for_retry.exact
        )
        expired = self._dialect.expired_leases(connection, now)
        oldest = self._dialect.oldest_due(connection, self._contracts, now)
        counts: dict[Status, int] = {status: counted[status].rows for status in STATUSES}
        failed = counts["failed"]
        return Health(
            status="blocked" if expired or failed else "ok",
            counts=counts,
            due=due.rows,
            expired_leases=expired,
            failed=failed,
            oldest_due_age=None if oldest is None else now - oldest,
            approximate=tuple(status for status in STATUSES if not counted[status].exact),
            topics={
                topic: (topics.get(topic) or TopicState(topic)).status(now, self.breaker_policy)
                for topic in sorted({*topics, *self._contracts})
            },
        )

    def redrive(self, event_id: str, *, topic: str | None = None, now: float | None = None) -> EventStatus:
        """Make a failed event due again with all its attempts, once its cause has been mended.

        One with an ordering key takes its old place: before all later ones of its key that have not been tried yet. It
        waits for one that has been, until that ends.

        Raises:
            InputError: ``dispatch.event_invalid``, ``dispatch.topic_unknown``, ``dispatch.time_invalid``,
                ``dispatch.redrive_invalid``: the event has not failed.
            NotFoundError: ``dispatch.event_missing``.
        """
        contract = self._contract(topic)
        check_token(event_id, code="dispatch.event_invalid")
        with self._transaction(check_now(now), write=True) as (connection, moment, _, _):
            condition = (event.c.topic == contract.topic) & (event.c.event_id == event_id)
            redriven = self._dialect.redrive(connection, condition, moment)
            self._back_in_line(connection, contract, redriven, moment)
            row = self._find(connection, contract, event_id)
            if not redriven:
                failed = "a failed one that was created after now or is being changed"
                found = failed if row.status == "failed" else row.status
                raise InputError("dispatch.redrive_invalid", event_id=event_id, found=found)
        return _event_status(row, moment)

    def redrive_all(
        self,
        *,
        topic: str | None = None,
        error_code: str | None = None,
        limit: int = MAX_BATCH,
        now: float | None = None,
    ) -> int:
        """Redrive up to ``limit`` failed events of a topic, longest failed first; return how many.

        Args:
            error_code: only those that failed with this code. Without one, all but those that were discarded.

        Raises:
            InputError: ``dispatch.topic_unknown``, ``dispatch.error_invalid``, ``dispatch.limit_invalid``,
                ``dispatch.time_invalid``.
        """
        contract = self._contract(topic)
        condition = of_topic(contract.topic)
        check_int(limit, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)
        if error_code is not None:
            check_error(error_code, None)
            condition &= event.c.last_error_code == error_code
        else:
            condition &= hidden(event.c.last_error_code != DISCARDED)
        with self._transaction(check_now(now), write=True) as (connection, moment, _, _):
            redriven = self._dialect.redrive(connection, condition, moment, limit)
            self._back_in_line(connection, contract, redriven, moment)
        return len(redriven)

    def _back_in_line(
        self, connection: Connection, contract: Contract, redriven: Sequence[str | None], now: float
    ) -> None:
        """Put redriven events, given by their ordering keys, in their places."""
        keys = list({key: None for key in redriven if key is not None})
        if keys:
            self._dialect.demote(connection, contract.topic, keys, now)
            self._promote(connection, contract, keys, now)

    def discard(self, event_id: str, *, topic: str | None = None, now: float | None = None) -> EventStatus:
        """Give a failed event up: it stays failed, as ``discarded``, and no longer holds its ordering key.

        Raises:
            InputError: ``dispatch.event_invalid``, ``dispatch.topic_unknown``, ``dispatch.time_invalid``,
                ``dispatch.discard_invalid``: the event has not failed.
            NotFoundError: ``dispatch.event_missing``.
        """
        contract = self._contract(topic)
        check_token(event_id, code="dispatch.event_invalid")
        with self._transaction(check_now(now), write=True) as (connection, moment, _, _):
            row = self._find(connection, contract, event_id)
            if not self._dialect.discard(connection, row.id, moment):
                found = "one that was changed after now" if row.status == "failed" else row.status
                raise InputError("dispatch.discard_invalid", event_id=event_id, found=found)
            self._promote(connection, contract, [] if row.ordering_key is None else [row.ordering_key], moment)
            row = self._find(connection, contract, event_id)
        return _event_status(row, moment)

    def pause(self, topic: str | None = None, *, reason: str, now: float | None = None) -> TopicStatus:
        """Let nothing of a topic be claimed until it is resumed. What is in flight ends as it may.

        Args:
            reason: why, for people; 1 to 256 printable characters.

        Raises:
            InputError: ``dispatch.topic_unknown``, ``dispatch.reason_invalid``, ``dispatch.time_invalid``.
        """
        check_label(reason, code="dispatch.reason_invalid")
        return self._change_topic(topic, now, lambda state, moment: state.paused(reason, moment))

    def resume(self, topic: str | None = None, *, now: float | None = None) -> TopicStatus:
        """End a pause. If the topic's breaker is open, let a probe be sent at once.

        Raises:
            InputError: ``dispatch.topic_unknown``, ``dispatch.time_invalid``.
        """
        return self._change_topic(topic, now, lambda state, moment: state.resumed(moment))

    def _change_topic(
        self, topic: str | None, now: float | None, change: Callable[[TopicState, float], TopicState]
    ) -> TopicStatus:
        name = self._contract(topic).topic
        with self._transaction(check_now(now), write=True) as (connection, moment, _, _):
            before = self._dialect.lock_topic(connection, name)
            after = change(before, moment)
            self._dialect.write_topic(connection, after)
            self._topics = {**self._topics, name: after}
        _tell(before, after)
        return after.status(moment, self.breaker_policy)

    def gate(self, topic: str) -> TopicStatus:
        """How a topic's destination fared when this outbox last had a look; costs nothing.

        Raises:
            InputError: ``dispatch.topic_unknown``.
        """
        name = self._contract(topic).topic
        state, seen_at = self._topics.get(name), self._seen_at
        return (state or TopicState(name)).status(seen_at, self.breaker_policy)

    def purge(
        self,
        *,
        older_than_seconds: float,
        topic: str | None = None,
        include_failed: bool = False,
        limit: int = MAX_BATCH,
        now: float | None = None,
    ) -> int:
        """Delete up to ``limit`` events that were settled longer ago than that, oldest first; return how many.

        Only ``succeeded`` events go, and ``failed`` ones if asked; what is still to be sent never does. With a row goes
        its proof of idempotency: the same event enqueued again later is a new one.

        Raises:
            InputError: ``dispatch.retention_invalid``, ``dispatch.topic_unknown``, ``dispatch.limit_invalid``,
                ``dispatch.time_invalid``.
        """
        age = check_seconds(older_than_seconds, code="dispatch.retention_invalid", zero=True)
        contract = None if topic is None else self._contract(topic)
        check_int(limit, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)
        deleted = 0
        with self._transaction(check_now(now), write=True) as (connection, moment, _, _):
            for settled in (schema.SUCCEEDED, schema.FAILED)[: 1 + bool(include_failed)]:
                conditions: list[Any] = [schema.predicate(settled), event.c.updated_at <= moment - age]
                if contract is not None:
                    conditions.append(of_topic(contract.topic))
                if deleted < limit:
                    deleted += self._dialect.purge(connection, conditions, limit - deleted)
        return deleted

    def check(self) -> str | None:
        """Prove that the database can be reached and is at the migration head; return advice on its settings.

        Returns:
            One sentence about a setting that should be otherwise, or None.
        """
        with self._transaction(None, write=False) as (connection, _, _, _):
            return self._dialect.advice(connection)

    # -- connections ------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, now: float | None, *, write: bool) -> Iterator[_Transaction]:
        """A transaction of our own, in a database that has proven to be at the migration head."""
        try:
            with self._dialect.begin(self._own(), write=write) as connection:
                pulse = self._dialect.pulse(connection, now)
                if pulse.generation != self._generation:
                    check_schema(connection)
                    self._generation = pulse.generation
                self._topics, self._seen_at = pulse.topics, pulse.now
                yield _Transaction(connection, pulse.now, pulse.expired, pulse.topics)
        except SchemaError:
            self._explain_schema()
            raise

    def _explain_schema(self) -> None:
        """Say what is wrong with the schema, where a statement could only say that something is missing."""
        self._generation = None
        self._joined.clear()
        with suppress(DatabaseError), self._dialect.begin(self._own(), write=False) as connection:
            check_schema(connection)

    def _joinable(self, connection: HostConnection) -> Connection:
        """The Connection under what the host handed in, once it has proven fit to join."""
        joined = _connection_of(connection)
        if joined.dialect.name != self._dialect.name:
            raise InputError("dispatch.connection_invalid", expected=self._dialect.name, found=joined.dialect.name)
        if not self._dialect.in_transaction(joined):
            raise InputError("dispatch.transaction_required", expected="a connection with a transaction to join")
        pool = joined.engine.pool
        if pool not in self._joined:
            if pool is not self.engine.pool:
                self._check_database(joined)
            check_schema(joined)
            self._joined.add(pool)
        return joined

    def _check_database(self, joined: Connection) -> None:
        with self._dialect.begin(self._own(), write=False) as ours:
            same = self._dialect.identity(ours) == self._dialect.identity(joined)
        if not same:
            raise InputError("dispatch.connection_invalid", expected="a connection to the outbox's database")

    def _contract(self, topic: str | None) -> Contract:
        if topic is None and len(self._contracts) == 1:
            return next(iter(self._contracts.values()))
        contract = self._contracts.get(topic) if isinstance(topic, str) else None
        if contract is None:
            raise InputError("dispatch.topic_unknown", expected=f"one of: {', '.join(self._contracts)}")
        return contract


class _OwnEngine:
    """An engine of our own on the host's pool.

    It shares connections with the host, and so every setting that is made when one connects, but none of the listeners
    on the host's engine: one that begins transactions by hand would collide with ours. Neither statements' values nor
    rows reach its log. In a forked process the parent's pool is left alone, since its sockets are the parent's.
    """

    def __init__(self, host: Engine) -> None:
        self._host = host
        self._pool = host.pool
        self._pid = os.getpid()
        self._engine = self._on(host.pool)

    def __call__(self) -> Engine:
        if self._pid != os.getpid():
            inherited = self._host.pool is self._pool
            self._engine = self._on(self._host.pool.recreate() if inherited else self._host.pool)
            self._pool, self._pid = self._host.pool, os.getpid()
        elif self._pool is not self._host.pool:  # the host disposed of its engine
            self._engine = self._on(self._host.pool)
            self._pool = self._host.pool
        return self._engine

    def _on(self, pool: Pool) -> Engine:
        engine = Engine(pool, self._host.dialect, self._host.url, logging_name="outbox", hide_parameters=True)
        logging.getLogger(f"sqlalchemy.engine.Engine.{engine.logging_name}").addFilter(_without_rows)
        return engine


def _without_rows(record: logging.LogRecord) -> bool:
    """At DEBUG SQLAlchemy logs the rows it reads, payloads and all."""
    return record.levelno > logging.DEBUG


def check_destination(destination: Any, lease_seconds: Any) -> None:
    """Refuse a destination that cannot be delivered to within a lease.

    Raises:
        InputError: ``dispatch.client_invalid``, ``dispatch.lease_invalid``, ``dispatch.lease_too_short``.
    """
    timeout = getattr(destination, "timeout", None)
    if not callable(getattr(destination, "deliver", None)):
        raise InputError("dispatch.client_invalid", expected="a callable deliver", found=describe(destination))
    if timeout is None or not is_number(timeout) or timeout <= 0:
        raise InputError("dispatch.client_invalid", expected="a timeout in seconds", found=describe(timeout))
    seconds = check_seconds(lease_seconds, code="dispatch.lease_invalid", longest=MAX_LEASE_SECONDS)
    if seconds <= timeout:
        raise InputError("dispatch.lease_too_short", expected=f"more than {timeout:g} s", found=f"{seconds:g} s")


def deliver(destination: Destination, claim: Claim) -> Result:
    """Submit a claimed event once. Whatever the destination does comes back as a result.

    Of an exception it does not declare only the hash of its text is kept: the text may quote anything.
    """
    began = time.monotonic()
    try:
        return Success(claim, destination.deliver(claim))
    except Exception as error:  # noqa: BLE001 - a host's code may raise anything, and the event must end somewhere
        seconds = time.monotonic() - began
        return _declared(claim, error, seconds) or _undeclared(claim, error, seconds)


def _declared(claim: Claim, error: Exception, seconds: float) -> Failure | None:
    """The failure that an exception declares; None too if a host's subclass has left it malformed."""
    if not isinstance(error, DeliveryFailed):
        return None
    try:
        failure = Failure(
            claim, error.code, bool(error.retryable), error.retry_after, error.detail_hash,
            error.arrival, error.http_status, bool(error.outage), bool(error.gone), seconds,
        )  # fmt: skip
        _check_failure(failure)
    except (AttributeError, InputError):
        return None
    return failure


def _undeclared(claim: Claim, error: Exception, seconds: float) -> Failure:
    logger.error("destination raised %s on event %s", type(error).__name__, claim.event_id)
    try:
        said = repr(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # noqa: BLE001 - neither must an exception that cannot even be shown stop us
        said = type(error).__name__
    return Failure(claim, "dispatch.client_failure", retryable=False, detail_hash=sha256_hex(said), seconds=seconds)


# -- decisions, without I/O --------------------------------------------------------------------------------------------


def _by_topic(contracts: Iterable[Contract]) -> dict[str, Contract]:
    found: dict[str, Contract] = {}
    if not isinstance(contracts, Iterable):
        raise InputError("dispatch.contract_invalid", expected="several contracts", found=describe(contracts))
    for contract in contracts:
        if not isinstance(contract, Contract):
            raise InputError("dispatch.contract_invalid", expected="Contract objects", found=describe(contract))
        topic = check_token(getattr(contract, "topic", None), code="dispatch.contract_invalid")
        if topic in found:
            raise InputError("dispatch.contract_invalid", expected="one contract per topic", found=f"two for {topic}")
        found[topic] = contract
    if not found:
        raise InputError("dispatch.contract_invalid", expected="at least one contract")
    return found


def _policies(retry: Any, contracts: Iterable[str]) -> dict[str, RetryPolicy]:
    given = retry if isinstance(retry, Mapping) else dict.fromkeys(contracts, RetryPolicy() if retry is None else retry)
    unknown = set(given) - set(contracts)
    if unknown:
        raise InputError("dispatch.topic_unknown", expected=f"policies for any of: {', '.join(contracts)}")
    for policy in given.values():
        if not isinstance(policy, RetryPolicy):
            raise InputError("dispatch.policy_invalid", expected="a RetryPolicy", found=describe(policy))
    return {topic: given.get(topic) or RetryPolicy() for topic in contracts}


def _connection_of(host: Any) -> Connection:
    if isinstance(host, Session | scoped_session):
        host = host.connection()
    if not isinstance(host, Connection):
        raise InputError("dispatch.connection_invalid", expected="a Connection or Session", found=describe(host))
    if host.closed or host.invalidated:
        raise InputError("dispatch.connection_invalid", expected="an open Connection")
    return host


def _new_event(contract: Contract, value: Any, max_attempts: int, ordering_key: str | None) -> NewEvent:
    encoded = contract.encode(value)
    key = encoded.ordering_key if ordering_key is None else ordering_key
    if key is not None:
        key = check_label(key, code="dispatch.ordering_key_invalid")
    return NewEvent(
        contract.topic, encoded.event_id, encoded.payload, encoded.payload_sha256, key, current_headers(), max_attempts
    )


def _distinct(rows: Iterable[NewEvent]) -> dict[str, NewEvent]:
    """The rows by event id, in order.

    Raises:
        CollisionError: one id with two payloads.
    """
    found: dict[str, NewEvent] = {}
    for row in rows:
        if found.setdefault(row.event_id, row).payload_sha256 != row.payload_sha256:
            raise CollisionError("dispatch.idempotency_collision", event_id=row.event_id)
    return found


def _differs(row: Any, wanted: NewEvent) -> bool:
    found = (row.payload_sha256, row.max_attempts, row.ordering_key)
    return bool(found != (wanted.payload_sha256, wanted.max_attempts, wanted.ordering_key))


def _fresh_status(row: NewEvent, created_at: float) -> EventStatus:
    return EventStatus(
        topic=row.topic,
        event_id=row.event_id,
        payload_sha256=row.payload_sha256,
        status=row.status,
        attempts=0,
        max_attempts=row.max_attempts,
        next_attempt_at=created_at,
        lease_expires_at=None,
        lease_expired=False,
        last_error_code=None,
        last_error_detail_hash=None,
        receipt=None,
        response_sha256=None,
        ordering_key=row.ordering_key,
        redrives=0,
        created_at=created_at,
        updated_at=created_at,
    )


def _event_status(row: Any, now: float | None, failures: tuple[FailedAttempt, ...] = ()) -> EventStatus:
    names = set(EventStatus.__dataclass_fields__) - {"receipt", "lease_expired", "failures"}
    receipt = None if row.receipt is None else parse_canonical(row.receipt, code="dispatch.state_invalid")
    expired = row.status == "leased" and now is not None and row.lease_expires_at <= now
    known = {name: getattr(row, name) for name in names}
    return EventStatus(**known, receipt=receipt, lease_expired=expired, failures=failures)


def _proves_itself(contract: Contract, claim: Claim) -> bool:
    try:
        contract.verify(claim.event_id, claim.payload, claim.payload_sha256)
    except IntegrityError:
        return False
    return True


def _in_turn(claims: Sequence[Claim], act: Callable[[list[int]], set[str]]) -> set[int]:
    """The indexes of the claims that ``act``, given indexes, finds live by their tokens.

    Claims may share a token: one given twice, or before and after it was renewed. At most one of them is live, and only
    the database can tell which, so those go one after another.
    """
    live, waiting = set[int](), list(range(len(claims)))
    while waiting:
        turn: dict[str, int] = {}
        later = [index for index in waiting if turn.setdefault(claims[index].lease_token, index) != index]
        tokens = act(list(turn.values()))
        live.update(index for token, index in turn.items() if token in tokens)
        waiting = [index for index in later if claims[index].lease_token not in tokens]
    return live


def _check_failure(failure: Failure) -> None:
    check_error(failure.error_code, failure.detail_hash)
    if failure.retry_after is not None:
        check_seconds(failure.retry_after, code="dispatch.error_invalid", zero=True)
    check_attempt(failure.arrival, failure.http_status, failure.seconds)


def _constant(change: Change) -> _Line:
    return _Line(change.claim, None, lambda _now, _spared: change)


def _success_line(result: Success, receipt: Receipt) -> _Line:
    claim = result.claim
    change = Change(claim, "succeeded", claim.attempt, receipt=receipt.text, response_sha256=receipt.response_sha256)
    return _Line(claim, result, lambda _now, _spared: change)


def _failed(failure: Failure, policy: RetryPolicy, now: float, luck: float | None, spared: float | None) -> Change:
    claim = failure.claim
    if spared is not None:
        again_at = max(spared, now + policy.delay(claim.attempt, failure.retry_after, luck=luck))
        return Change(claim, "retry_wait", claim.attempt - 1, again_at, failure.error_code, failure.detail_hash)
    decision = policy.decide(
        attempt=claim.attempt, max_attempts=claim.max_attempts, now=now,
        retryable=failure.retryable, retry_after=failure.retry_after, luck=luck,
    )  # fmt: skip
    due = decision.next_attempt_at if decision.status == "retry_wait" else None
    return Change(claim, decision.status, claim.attempt, due, failure.error_code, failure.detail_hash)


def _released(claim: Claim) -> Change:
    """Due as before, and so in its old place; what had been tried before still shows that it was."""
    if claim.attempt == 1:
        return Change(claim, "pending", 0)
    return Change(claim, "retry_wait", claim.attempt - 1, error_code="lease_released")


def _renewed(claim: Claim, expires_at: float) -> Claim:
    return Claim(
        **{name: getattr(claim, name) for name in Claim.__dataclass_fields__} | {"lease_expires_at": expires_at}
    )


def _outcome_of(change: Change) -> Outcome:
    claim = change.claim
    return Outcome(
        event_id=claim.event_id,
        status=change.status,  # type: ignore[arg-type]
        attempt=change.attempts,
        max_attempts=claim.max_attempts,
        next_attempt_at=None if change.status in ("succeeded", "failed") else change.next_attempt_at or claim.due_at,
        error_code=change.error_code,
    )


def _why_lost(row: Any, claim: Claim, now: float) -> str:
    if row is None:
        return "dispatch.claim_missing"
    found = (row.id, row.lease_token, row.lease_owner, row.attempts, row.max_attempts, row.payload_sha256)
    if (*found, row.lease_expires_at) != fence(claim):
        return "dispatch.claim_lost"
    if now >= row.lease_expires_at:
        return "dispatch.lease_expired"
    return "dispatch.clock_regressed" if now < row.updated_at else "dispatch.claim_lost"


def _tell(before: TopicState, after: TopicState) -> None:
    """One line in the log when a topic opens, closes, is paused or resumed."""
    if before.opened_at is None and after.opened_at is not None:
        logger.error("topic %s is open: %s; its events wait, at no attempt's cost", after.topic, after.error_code)
    elif before.opened_at is not None and after.opened_at is None:
        logger.warning("topic %s is closed again", after.topic)
    if before.paused_at is None and after.paused_at is not None:
        logger.warning("topic %s is paused", after.topic)
    elif before.paused_at is not None and after.paused_at is None:
        logger.warning("topic %s is resumed", after.topic)


class _Keys:
    """Ordering keys to be looked at: those that could not be advanced, and where the walk over all of them stands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, set[str]] = {}
        self._after: dict[str, str] = {}
        self._looked_at: dict[str, float] = {}

    def due(self, topic: str, *, idle: bool) -> bool:
        """Whether to look now: when there is nothing else to claim, and every so often even so."""
        now = time.monotonic()
        with self._lock:
            if idle or now - self._looked_at.get(topic, -SWEEP_SECONDS) >= SWEEP_SECONDS:
                self._looked_at[topic] = now
                return True
        return False

    def next_after(self, topic: str) -> str:
        return self._after.get(topic, "")

    def walked(self, topic: str, last: str) -> None:
        self._after[topic] = last

    def remember(self, topic: str, keys: Iterable[str]) -> None:
        with self._lock:
            self._held.setdefault(topic, set()).update(keys)

    def any(self, topic: str) -> bool:
        return bool(self._held.get(topic))

    def take(self, topic: str) -> Sequence[str]:
        with self._lock:
            return list(self._held.pop(topic, ()))


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
