"""The outbox: every verb, on whatever database the engine leads to.

The store decides and a dialect writes. It holds no state but caches, so one :class:`Outbox` serves all threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from sqlalchemy import Column, Connection, Engine, select, tuple_
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import Pool

from outbox import schema
from outbox.contracts.base import Contract, DeliveryFailed, Destination
from outbox.dialects import dialect_for
from outbox.dialects.base import Change, Count, NewEvent, Watch, event, fence, lease_end, of_topic
from outbox.errors import (
    ClaimLostError,
    CollisionError,
    DatabaseError,
    InputError,
    IntegrityError,
    NotFoundError,
    SchemaError,
)
from outbox.policy import RetryPolicy
from outbox.records import (
    STATUSES,
    Claim,
    EventStatus,
    Failure,
    Health,
    Outcome,
    Receipt,
    Result,
    Settled,
    Status,
    Success,
    check_attempt,
    check_claim,
)
from outbox.rules import check_payload, check_row
from outbox.schema_check import check_schema
from outbox.values import (
    MAX_ATTEMPTS,
    MAX_LEASE_SECONDS,
    check_error,
    check_int,
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

T = TypeVar("T")

HostConnection = Connection | Session | scoped_session[Any]

_STATUS_COLUMNS = [column for column in event.c if column.name not in ("payload", "headers")]


class _Transaction(NamedTuple):
    connection: Connection
    now: float
    expired: bool


class Outbox:
    """A leased outbox in the database that ``engine`` leads to.

    Args:
        engine: the host's engine. Its pool is shared; its settings and its open transactions are left alone.
        contracts: one contract per topic.
        retry: when failed attempts are made again.

    ``now``, wherever it can be given, is UTC epoch seconds. Without it the time is the database's on PostgreSQL, so
    that all hosts share one clock, and the machine's on SQLite.

    Every verb may raise :class:`SchemaError` (``dispatch.schema_altered``) before it does anything,
    :class:`DatabaseError` (``dispatch.database_busy``, ``dispatch.database_unavailable``), and :class:`IntegrityError`
    (``dispatch.database_integrity``) when it meets damage to the database.

    Raises:
        InputError: ``dispatch.connection_invalid``, ``dispatch.contract_invalid``, ``dispatch.policy_invalid``.
        DatabaseError: ``dispatch.database_unsupported``.
    """

    def __init__(self, engine: Engine, contracts: Iterable[Contract], retry: RetryPolicy | None = None) -> None:
        if not isinstance(engine, Engine):
            raise InputError("dispatch.connection_invalid", expected="a SQLAlchemy Engine", found=describe(engine))
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise InputError("dispatch.policy_invalid", expected="a RetryPolicy", found=describe(retry))
        self.engine = engine
        self.retry_policy = retry or RetryPolicy()
        self._contracts = _by_topic(contracts)
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
        now: float | None = None,
    ) -> EventStatus:
        """Enqueue one event, in the host's open transaction when its ``connection`` is given.

        Joining never commits, rolls back or closes what it joins. Idempotent: the same id, payload and
        ``max_attempts`` again returns the event as it stands, whatever its state.

        Raises:
            InputError: ``dispatch.change_invalid``, ``dispatch.max_attempts_invalid``, ``dispatch.time_invalid``,
                ``dispatch.topic_unknown``, ``dispatch.connection_invalid``, ``dispatch.transaction_required``.
            CollisionError: ``dispatch.idempotency_collision``.
        """
        return self.enqueue_many([event], connection=connection, topic=topic, max_attempts=max_attempts, now=now)[0]

    def enqueue_many(
        self,
        events: Iterable[Any],
        *,
        connection: HostConnection | None = None,
        topic: str | None = None,
        max_attempts: int = 5,
        now: float | None = None,
    ) -> list[EventStatus]:
        """Enqueue events in the order given, all or none, by the rules of :meth:`enqueue`.

        Returns:
            One status for each of ``events``, in their order; an event that is given twice is stored once.
        """
        contract = self._contract(topic)
        now = check_now(now)
        check_int(max_attempts, code="dispatch.max_attempts_invalid", lowest=1, highest=MAX_ATTEMPTS)
        rows = [_new_event(contract, each, max_attempts) for each in events]
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
        moment = now
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
        return found

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
        with self._transaction(check_now(now), write=False) as (connection, moment, _):
            return self._dialect.ready(connection, contract.topic, moment)

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
        with self._transaction(None, write=True) as (connection, now, _):
            self._dialect.announce(connection, worker_id, contract.topic, now + seconds, now)

    def withdraw(self, worker_id: str) -> None:
        """Take back whatever a worker has announced.

        Raises:
            InputError: ``dispatch.worker_invalid``.
        """
        check_token(worker_id, code="dispatch.worker_invalid", longest=128)
        with self._transaction(None, write=True) as (connection, _, _):
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
        with self._transaction(now, write=True) as (connection, moment, expired):
            if expired:
                self._recover(connection, moment)
            claims = self._dialect.lease(
                connection, contract.topic, worker_id, lease_end(moment, seconds), moment, limit, floor
            )
        good, bad = list[Claim](), list[Claim]()
        for claim in claims:
            (good if _proves_itself(contract, claim) else bad).append(claim)
        if bad:  # as of when they were leased: verifying may take longer than a short lease
            code = "dispatch.payload_integrity"
            self._apply([Change(claim, "failed", claim.attempt, error_code=code) for claim in bad], moment)
        return good, bad

    def _recover(self, connection: Connection, now: float) -> None:
        for row in self._dialect.recover(connection, now, RECOVERY_LIMIT):
            logger.warning("lease expired on event %s of %s: now %s", row.event_id, row.topic, row.status)

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
        return self._settle_one(lambda _: _succeeded(claim, receipt), claim, now)

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
        return self._settle_one(self._changer(failure), claim, now)

    def fail(
        self, claim: Claim, error_code: str, *, detail_hash: str | None = None, now: float | None = None
    ) -> Outcome:
        """Record a failure that no other attempt can mend. Raises as :meth:`retry`."""
        failure = Failure(check_claim(claim), error_code, retryable=False, detail_hash=detail_hash)
        return self._settle_one(self._changer(failure), claim, now)

    def settle(self, results: Iterable[Result], *, now: float | None = None) -> list[Settled]:
        """Record many results in one transaction, each fenced on its own.

        A response that its contract refuses fails that event with ``dispatch.response_invalid``. A lost claim is
        reported in its line and spoils no other.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.error_invalid``, ``dispatch.time_invalid``; nothing
                was changed.
        """
        changers = [self._changer(result) for result in results]
        return self._apply_all(changers, check_now(now))

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
        with self._transaction(now, write=True) as (connection, moment, _):
            expires_at = lease_end(moment, seconds)
            live = _in_turn(
                wanted,
                lambda turn: self._dialect.renew(connection, [wanted[index] for index in turn], expires_at, moment),
            )
        return [_renewed(wanted[index], expires_at) for index in sorted(live)]

    def release(self, claims: Iterable[Claim], *, now: float | None = None) -> list[Settled]:
        """Give back events that were not sent: due again at once, the attempt not counted.

        Raises:
            InputError: ``dispatch.claim_invalid``, ``dispatch.time_invalid``.
        """
        changes = [_released(check_claim(claim)) for claim in claims]
        return self._apply(changes, check_now(now))

    def _changer(self, result: Result) -> Callable[[float], Change]:
        """The change a result leads to, once the time is known. Everything that can be refused is refused here."""
        if isinstance(result, Success):
            claim = check_claim(result.claim)
            try:
                receipt = self._contract(claim.topic).receipt(claim.event_id, result.response)
            except InputError as error:
                if error.code != "dispatch.response_invalid":
                    raise
                return self._changer(Failure(claim, error.code, retryable=False))
            return lambda _: _succeeded(claim, receipt)
        if not isinstance(result, Failure):
            raise InputError("dispatch.claim_invalid", expected="a Success or a Failure", found=describe(result))
        check_claim(result.claim)
        _check_failure(result)
        return lambda now: _failed(result, self.retry_policy, now)

    def _settle_one(self, changer: Callable[[float], Change], claim: Claim, now: float | None) -> Outcome:
        (settled,) = self._apply_all([changer], check_now(now))
        if settled.outcome is None:
            assert settled.error_code is not None
            raise ClaimLostError(settled.error_code, event_id=claim.event_id)
        return settled.outcome

    def _apply(self, changes: Sequence[Change], now: float | None) -> list[Settled]:
        return self._apply_all([_constant(change) for change in changes], now)

    def _apply_all(self, changers: Sequence[Callable[[float], Change]], now: float | None) -> list[Settled]:
        if not changers:
            return []
        with self._transaction(now, write=True) as (connection, moment, _):
            changes = [changer(moment) for changer in changers]
            claims = [change.claim for change in changes]
            won = _in_turn(
                claims, lambda turn: self._dialect.settle(connection, [changes[index] for index in turn], moment)
            )
            lost = [claim for index, claim in enumerate(claims) if index not in won]
            reasons = self._reasons(connection, lost, moment) if lost else {}
        return [
            Settled(change.claim, True, _outcome_of(change), None)
            if index in won
            else Settled(change.claim, False, None, reasons[fence(change.claim)])
            for index, change in enumerate(changes)
        ]

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
        return self._settle_one(self._changer(deliver(destination, claim)), claim, now)

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
        with self._transaction(check_now(now), write=False) as (connection, moment, _):
            row = self._find(connection, contract, event_id, event.c)
        check_row(row)
        check_payload(row, contract)
        return _event_status(row, moment)

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
        connection, now, _ = transaction
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
        )

    def redrive(self, event_id: str, *, topic: str | None = None, now: float | None = None) -> EventStatus:
        """Make a failed event due again with all its attempts, once its cause has been mended.

        Raises:
            InputError: ``dispatch.event_invalid``, ``dispatch.topic_unknown``, ``dispatch.time_invalid``,
                ``dispatch.redrive_invalid``: the event has not failed.
            NotFoundError: ``dispatch.event_missing``.
        """
        contract = self._contract(topic)
        check_token(event_id, code="dispatch.event_invalid")
        with self._transaction(check_now(now), write=True) as (connection, moment, _):
            condition = (event.c.topic == contract.topic) & (event.c.event_id == event_id)
            redriven = self._dialect.redrive(connection, condition, moment)
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
            error_code: only those that failed with this code.

        Raises:
            InputError: ``dispatch.topic_unknown``, ``dispatch.error_invalid``, ``dispatch.limit_invalid``,
                ``dispatch.time_invalid``.
        """
        condition = of_topic(self._contract(topic).topic)
        check_int(limit, code="dispatch.limit_invalid", lowest=1, highest=MAX_BATCH)
        if error_code is not None:
            check_error(error_code, None)
            condition &= event.c.last_error_code == error_code
        with self._transaction(check_now(now), write=True) as (connection, moment, _):
            return self._dialect.redrive(connection, condition, moment, limit)

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
        with self._transaction(check_now(now), write=True) as (connection, moment, _):
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
        with self._transaction(None, write=False) as (connection, _, _):
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
                yield _Transaction(connection, pulse.now, pulse.expired)
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
    try:
        return Success(claim, destination.deliver(claim))
    except Exception as error:  # noqa: BLE001 - a host's code may raise anything, and the event must end somewhere
        return _declared(claim, error) or _undeclared(claim, error)


def _declared(claim: Claim, error: Exception) -> Failure | None:
    """The failure that an exception declares; None too if a host's subclass has left it malformed."""
    if not isinstance(error, DeliveryFailed):
        return None
    try:
        failure = Failure(
            claim, error.code, bool(error.retryable), error.retry_after, error.detail_hash,
            error.arrival, error.http_status, bool(error.outage), bool(error.gone),
        )  # fmt: skip
        _check_failure(failure)
    except (AttributeError, InputError):
        return None
    return failure


def _undeclared(claim: Claim, error: Exception) -> Failure:
    logger.error("destination raised %s on event %s", type(error).__name__, claim.event_id)
    try:
        said = repr(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # noqa: BLE001 - neither must an exception that cannot even be shown stop us
        said = type(error).__name__
    return Failure(claim, "dispatch.client_failure", retryable=False, detail_hash=sha256_hex(said))


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


def _connection_of(host: Any) -> Connection:
    if isinstance(host, Session | scoped_session):
        host = host.connection()
    if not isinstance(host, Connection):
        raise InputError("dispatch.connection_invalid", expected="a Connection or Session", found=describe(host))
    if host.closed or host.invalidated:
        raise InputError("dispatch.connection_invalid", expected="an open Connection")
    return host


def _new_event(contract: Contract, value: Any, max_attempts: int) -> NewEvent:
    encoded = contract.encode(value)
    return NewEvent(contract.topic, encoded.event_id, encoded.payload, encoded.payload_sha256, None, None, max_attempts)


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
    return bool(row.payload_sha256 != wanted.payload_sha256 or row.max_attempts != wanted.max_attempts)


def _fresh_status(row: NewEvent, created_at: float) -> EventStatus:
    return EventStatus(
        topic=row.topic,
        event_id=row.event_id,
        payload_sha256=row.payload_sha256,
        status="pending",
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


def _event_status(row: Any, now: float | None) -> EventStatus:
    names = set(EventStatus.__dataclass_fields__) - {"receipt", "lease_expired"}
    receipt = None if row.receipt is None else parse_canonical(row.receipt, code="dispatch.state_invalid")
    expired = row.status == "leased" and now is not None and row.lease_expires_at <= now
    return EventStatus(**{name: getattr(row, name) for name in names}, receipt=receipt, lease_expired=expired)


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


def _constant(change: Change) -> Callable[[float], Change]:
    return lambda _: change


def _succeeded(claim: Claim, receipt: Receipt) -> Change:
    return Change(claim, "succeeded", claim.attempt, receipt=receipt.text, response_sha256=receipt.response_sha256)


def _failed(failure: Failure, policy: RetryPolicy, now: float) -> Change:
    claim = failure.claim
    decision = policy.decide(
        attempt=claim.attempt, max_attempts=claim.max_attempts, now=now,
        retryable=failure.retryable, retry_after=failure.retry_after,
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


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
