"""Sections 3 and 5 of the design once more, as plainly as Python allows: what the engine is held against.

The model keeps its rows in dictionaries and does one thing after another, so it has no leases to race for, no plans and
no locks. It shares with the engine the records that go in and out, and nothing that decides: where both are wrong, they
are wrong in different ways.

Two things only the engine can know, and the model is told: the tokens of new leases, and which of several rows went
first whose times are equal where the design does not say.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

from outbox import Claim, Contract, EventStatus, Failure, Health, InputError, Outcome, Settled, Success
from outbox.records import Status, TopicStatus

TOPICS: Final = ("alpha", "beta")
STATUSES: Final[tuple[Status, ...]] = ("pending", "waiting", "leased", "retry_wait", "succeeded", "failed")
BASE_DELAY, MAX_DELAY, MAX_RETRY_AFTER = 10.0, 60.0, 100.0

Key = tuple[str, str]


class Refused(Exception):  # noqa: N818 - the model's word for an OutboxError
    """The verb raises this code and changes nothing."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Echo(Contract):
    """An event is an id and a number; a response echoes the id and may carry a note."""

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def check(self, event: Any) -> str:
        if not isinstance(event, dict) or event.keys() != {"id", "n"} or type(event["n"]) is not int:
            raise InputError("dispatch.change_invalid")
        return event["id"]  # type: ignore[no-any-return]

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        if not isinstance(response, dict) or response.get("echo") != event_id or response.keys() - {"echo", "note"}:
            raise InputError("dispatch.response_invalid")
        return {"echo": event_id}


def text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class Row:
    """A row of ``outbox_event``, column by column. Ids are the database's to give, in the order of ``order``."""

    order: int
    topic: str
    event_id: str
    payload: str
    payload_sha256: str
    max_attempts: int
    created_at: float
    updated_at: float
    next_attempt_at: float
    status: Any = "pending"
    attempts: int = 0
    redrives: int = 0
    ordering_key: str | None = None
    headers: str | None = None
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at: float | None = None
    last_error_code: str | None = None
    last_error_detail_hash: str | None = None
    receipt: str | None = None
    response_sha256: str | None = None
    id: int | None = None

    @property
    def key(self) -> Key:
        return self.topic, self.event_id

    @property
    def due(self) -> bool:
        return self.status in ("pending", "retry_wait")

    @property
    def genuine(self) -> bool:
        """Whether the payload still proves itself: canonical, of the right hash, under the contract, of this row."""
        try:
            event = json.loads(self.payload)
        except ValueError:
            return False
        well_formed = isinstance(event, dict) and event.keys() == {"id", "n"} and type(event["n"]) is int
        return (
            well_formed
            and event["id"] == self.event_id
            and text_of(event) == self.payload
            and sha256(self.payload) == self.payload_sha256
        )

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}

    def owned_by(self, claim: Claim) -> bool:
        return (
            self.status == "leased"
            and self.id == claim.id
            and self.lease_token == claim.lease_token
            and self.lease_owner == claim.lease_owner
            and self.lease_expires_at == claim.lease_expires_at
            and self.attempts == claim.attempt
            and self.max_attempts == claim.max_attempts
            and self.payload_sha256 == claim.payload_sha256
        )

    def end_lease(self, status: str, now: float, code: str | None = None, detail: str | None = None) -> None:
        self.status, self.updated_at = status, now
        self.lease_owner = self.lease_token = self.lease_expires_at = None
        self.last_error_code, self.last_error_detail_hash = code, detail

    def as_status(self, now: float) -> EventStatus:
        names = set(EventStatus.__dataclass_fields__) & set(self.columns())
        return EventStatus(
            **{name: getattr(self, name) for name in names - {"receipt"}},
            receipt=None if self.receipt is None else json.loads(self.receipt),
            lease_expired=self.lease_expires_at is not None and self.lease_expires_at <= now,
        )


COLUMNS: Final = [column.name for column in fields(Row) if column.name != "order"]


class Transaction:
    """What a host has enqueued and not committed yet, savepoint by savepoint."""

    def __init__(self) -> None:
        self.levels: list[dict[Key, Row]] = [{}]

    @property
    def rows(self) -> dict[Key, Row]:
        return {key: row for level in self.levels for key, row in level.items()}

    def savepoint(self) -> None:
        self.levels.append({})

    def rollback_to_savepoint(self) -> None:
        self.levels.pop()

    def release_savepoint(self) -> None:
        released = self.levels.pop()
        self.levels[-1].update(released)


class Model:
    """The verbs. Each either returns what the engine's returns or raises :class:`Refused`, having changed nothing."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.rows: dict[Key, Row] = {}
        self._enqueued = 0

    # -- enqueue ----------------------------------------------------------------------------------------------------

    def enqueue(
        self, events: Sequence[Mapping[str, Any]], topic: str, max_attempts: int, host: Transaction | None = None
    ) -> list[EventStatus]:
        payloads: dict[str, str] = {}
        for event in events:
            if payloads.setdefault(event["id"], text_of(event)) != text_of(event):
                raise Refused("dispatch.idempotency_collision")
        visible = self.rows if host is None else self.rows | host.rows
        for event_id, payload in payloads.items():
            row = visible.get((topic, event_id))
            if row and (row.payload_sha256, row.max_attempts) != (sha256(payload), max_attempts):
                raise Refused("dispatch.idempotency_collision")
        target: MutableMapping[Key, Row] = self.rows if host is None else host.levels[-1]
        for event_id, payload in payloads.items():
            if (topic, event_id) not in visible:
                target[topic, event_id] = self._new(topic, event_id, payload, max_attempts)
        visible = self.rows if host is None else self.rows | host.rows
        return [visible[topic, event["id"]].as_status(self.now) for event in events]

    def _new(self, topic: str, event_id: str, payload: str, max_attempts: int) -> Row:
        self._enqueued += 1
        digest = sha256(payload)
        return Row(self._enqueued, topic, event_id, payload, digest, max_attempts, self.now, self.now, self.now)

    def commit(self, host: Transaction) -> None:
        self.rows.update(host.rows)

    # -- claim ------------------------------------------------------------------------------------------------------

    def claim_batch(self, topic: str, owner: str, limit: int, seconds: float, due_from: float = 0) -> list[Row]:
        """The rows handed out, in order; their leases have no tokens yet."""
        while True:
            good, bad = self._lease(topic, owner, limit, seconds, due_from)
            if good or not bad:
                return good

    def claim(self, topic: str, owner: str, seconds: float) -> Row | None:
        good, bad = self._lease(topic, owner, 1, seconds)
        if bad:
            raise Refused("dispatch.payload_integrity")  # the one refusal that leaves something behind: the quarantine
        return good[0] if good else None

    def _lease(
        self, topic: str, owner: str, limit: int, seconds: float, due_from: float = 0
    ) -> tuple[list[Row], list[Row]]:
        self._recover()
        due = [row for row in self._claimable(topic) if row.next_attempt_at >= due_from]
        taken = sorted(due, key=lambda row: (row.next_attempt_at, row.order))[:limit]
        for row in taken:
            row.status, row.attempts, row.updated_at = "leased", row.attempts + 1, self.now
            row.last_error_code = row.last_error_detail_hash = None
            row.lease_owner, row.lease_expires_at = owner, self.lease_end(seconds)
        bad = [row for row in taken if not row.genuine]
        for row in bad:
            row.end_lease("failed", self.now, "dispatch.payload_integrity")
        return [row for row in taken if row.genuine], bad

    def lease_end(self, seconds: float) -> float:
        return max(self.now + seconds, math.nextafter(self.now, math.inf))  # a lease ends after it began

    def _claimable(self, topic: str) -> list[Row]:
        rows = (row for row in self.rows.values() if row.topic == topic and row.due)
        return [row for row in rows if row.next_attempt_at <= self.now and row.attempts < row.max_attempts]

    def _expired(self) -> list[Row]:
        leased = (row for row in self.rows.values() if row.lease_expires_at is not None)
        return [row for row in leased if row.lease_expires_at <= self.now]  # type: ignore[operator]

    def _recover(self) -> None:
        for row in self._expired():
            spent = row.attempts == row.max_attempts
            row.end_lease("failed" if spent else "retry_wait", self.now, "lease_expired")
            if not spent:
                row.next_attempt_at = self.now

    def ready(self, topic: str) -> bool:
        return bool(self._claimable(topic) or self._expired())

    # -- settle -----------------------------------------------------------------------------------------------------

    def verdict(self, claim: Claim) -> str | None:
        """Why the claim has lost; None while it is live."""
        row = self.rows.get((claim.topic, claim.event_id))
        if row is None:
            return "dispatch.claim_missing"
        if not row.owned_by(claim):
            return "dispatch.claim_lost"
        assert row.lease_expires_at is not None
        if self.now >= row.lease_expires_at:
            return "dispatch.lease_expired"
        return "dispatch.clock_regressed" if self.now < row.updated_at else None

    def complete(self, claim: Claim, response: Mapping[str, Any]) -> Outcome:
        if response.get("echo") != claim.event_id:
            raise Refused("dispatch.response_invalid")
        return self._alone(Success(claim, response))

    def retry(self, claim: Claim, code: str, retry_after: float | None, detail: str | None) -> Outcome:
        return self._alone(Failure(claim, code, True, retry_after, detail))

    def fail(self, claim: Claim, code: str, detail: str | None) -> Outcome:
        return self._alone(Failure(claim, code, retryable=False, detail_hash=detail))

    def _alone(self, result: Success | Failure) -> Outcome:
        (line,) = self.settle([result])
        if line.outcome is None:
            assert line.error_code is not None
            raise Refused(line.error_code)
        return line.outcome

    def settle(self, results: Iterable[Success | Failure]) -> list[Settled]:
        return [self._won(result.claim, partial(self._end, result)) for result in results]

    def release(self, claims: Iterable[Claim]) -> list[Settled]:
        return [self._won(claim, self._give_back) for claim in claims]

    def renew(self, claims: Iterable[Claim], seconds: float) -> list[Claim]:
        # The first verdicts count: a claim that is given twice is renewed once.
        live = {claim.lease_token: claim for claim in claims if self.verdict(claim) is None}
        for claim in live.values():
            row = self.rows[claim.topic, claim.event_id]
            row.lease_expires_at, row.updated_at = self.lease_end(seconds), self.now
        return [replace(claim, lease_expires_at=self.lease_end(seconds)) for claim in live.values()]

    def _won(self, claim: Claim, change: Callable[[Row], Outcome]) -> Settled:
        lost = self.verdict(claim)
        if lost is not None:
            return Settled(claim, False, None, lost)
        return Settled(claim, True, change(self.rows[claim.topic, claim.event_id]), None)

    def _end(self, result: Success | Failure, row: Row) -> Outcome:
        if isinstance(result, Success):
            if result.response.get("echo") == row.event_id:
                row.end_lease("succeeded", self.now)
                row.receipt, row.response_sha256 = text_of({"echo": row.event_id}), sha256(text_of(result.response))
                return self._outcome(row)
            result = Failure(result.claim, "dispatch.response_invalid", retryable=False)
        again = result.retryable and row.attempts < row.max_attempts
        row.end_lease("retry_wait" if again else "failed", self.now, result.error_code, result.detail_hash)
        if again:
            delay = min(MAX_DELAY, BASE_DELAY * 2 ** (row.attempts - 1))
            row.next_attempt_at = self.now + max(delay, min(result.retry_after or 0, MAX_RETRY_AFTER))
        return self._outcome(row)

    def _give_back(self, row: Row) -> Outcome:
        row.attempts -= 1
        again = row.attempts > 0
        row.end_lease("retry_wait" if again else "pending", self.now, "lease_released" if again else None)
        return self._outcome(row)

    @staticmethod
    def _outcome(row: Row) -> Outcome:
        due = row.next_attempt_at if row.due else None
        return Outcome(row.event_id, row.status, row.attempts, row.max_attempts, due, row.last_error_code)

    # -- operate ----------------------------------------------------------------------------------------------------

    def status(self, topic: str, event_id: str) -> EventStatus:
        row = self._row(topic, event_id)
        if self._breaks_rules(row):
            raise Refused("dispatch.state_invalid")
        return row.as_status(self.now)

    def _row(self, topic: str, event_id: str) -> Row:
        if (topic, event_id) not in self.rows:
            raise Refused("dispatch.event_missing")
        return self.rows[topic, event_id]

    @staticmethod
    def _breaks_rules(row: Row) -> bool:
        return not row.genuine and row.last_error_code != "dispatch.payload_integrity"

    def health(self, *, deep: bool) -> Health:
        rows = self.rows.values()
        if deep and any(map(self._breaks_rules, rows)):
            raise Refused("dispatch.state_invalid")
        counted = Counter(row.status for row in rows)
        due = [row.next_attempt_at for row in rows if row.due and row.next_attempt_at <= self.now]
        expired = len(self._expired())
        return Health(
            status="blocked" if expired or counted["failed"] else "ok",
            counts={status: counted[status] for status in STATUSES},
            due=len(due),
            expired_leases=expired,
            failed=counted["failed"],
            oldest_due_age=self.now - min(due) if due else None,
            topics={topic: TopicStatus(topic, "closed") for topic in TOPICS},  # no failure here speaks of a destination
        )

    def redrive(self, topic: str, event_id: str) -> EventStatus:
        row = self._row(topic, event_id)
        if row.status != "failed" or row.created_at > self.now:
            raise Refused("dispatch.redrive_invalid")
        self._redrive(row)
        return row.as_status(self.now)

    def redrive_all(self, topic: str, code: str | None, limit: int, went: Callable[[Row], bool]) -> int:
        failed = [row for row in self.rows.values() if row.topic == topic and row.status == "failed"]
        wanted = [row for row in failed if code in (None, row.last_error_code) and row.created_at <= self.now]
        chosen = _oldest(wanted, limit, went)
        for row in chosen:
            self._redrive(row)
        return len(chosen)

    def _redrive(self, row: Row) -> None:
        row.status, row.attempts, row.redrives = "pending", 0, row.redrives + 1
        row.last_error_code = row.last_error_detail_hash = None
        row.next_attempt_at = row.updated_at = self.now

    def purge(
        self, older_than: float, topic: str | None, limit: int, went: Callable[[Row], bool], *, include_failed: bool
    ) -> int:
        deleted = 0
        for status in ("succeeded", "failed") if include_failed else ("succeeded",):
            settled = [row for row in self.rows.values() if row.status == status and topic in (None, row.topic)]
            old = [row for row in settled if row.updated_at <= self.now - older_than]
            for row in _oldest(old, limit - deleted, went):
                del self.rows[row.key]
                deleted += 1
        return deleted


def _oldest(rows: list[Row], limit: int, went: Callable[[Row], bool]) -> list[Row]:
    """The ``limit`` rows unchanged for longest; among equals, those that ``went``."""
    return sorted(rows, key=lambda row: (row.updated_at, not went(row)))[:limit]
