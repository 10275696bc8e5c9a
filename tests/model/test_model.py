"""The engine against the model: whatever is called, in whatever order, both do the same to every column of every row.

Run it for longer with ``OUTBOX_HYPOTHESIS_PROFILE=thorough`` (and ``OUTBOX_HYPOTHESIS_EXAMPLES=5000``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, RootTransaction, text
from sqlalchemy.orm import Session

from outbox import Claim, DeliveryFailed, Failure, Outbox, OutboxError, Outcome, RetryPolicy, Success
from outbox.schema import outbox_event
from tests.model.illegal import ILLEGAL, Attempt
from tests.model.model import (
    BASE_DELAY,
    MAX_DELAY,
    MAX_RETRY_AFTER,
    TOPICS,
    Echo,
    Key,
    Model,
    Refused,
    Row,
    Transaction,
    sha256,
    text_of,
)
from tests.profiles import PROFILE, examples, settings

T = TypeVar("T")

START: Final = 1_000_000.0
IDS: Final = tuple(f"e{number}" for number in range(5))
SETTLED: Final = ("succeeded", "failed")
ROWS: Final = outbox_event.select().order_by(outbox_event.c.id)

#: Weighted by repetition. Hypothesis prefers nothing, and what is rare on a wire leads nowhere when it is common here.
topics = st.sampled_from([TOPICS[0], TOPICS[0], TOPICS[1]])
ids = st.sampled_from(IDS)
# Few numbers, so that the same event is met again, mostly as it was and sometimes as another under its id.
events = st.builds(lambda event_id, n: {"id": event_id, "n": n}, ids, st.sampled_from([0] * 11 + [1]))
most_attempts = st.sampled_from([2] * 6 + [1, 3, 20])
owners = st.sampled_from(["w1", "w2"])
leases = st.sampled_from([30, 30.0, 60, 60, 86_400, 5, 1e-9, 1e-300])
limits = st.sampled_from([1, 2, 3, 1000])
codes = st.sampled_from(["network", "http_status", "a"])
details = st.sampled_from([None, "d" * 64])
hints = st.sampled_from([None, None, 0, 15, 15.5, 1e9])
steps = st.sampled_from([0, 0.25, 1, 5, 10, 30, 60, 100])
#: Which of the claims ever handed out, the newest first: a live one below LIVE_PICKS, a late one below LATE_PICKS, else
#: any. Those that are late would seldom be met: the next claim recovers them.
LIVE_PICKS, LATE_PICKS = 5, 8
TOLD_BY_TIME: Final = ("dispatch.lease_expired", "dispatch.clock_regressed")
picks = st.integers(0, 9)
#: Claims that nobody was given.
FORGERIES: Final[tuple[dict[str, Any], ...]] = (
    {"lease_owner": "w3"}, {"lease_token": "f" * 32}, {"attempt": 2, "max_attempts": 3}, {"id": 10**9},
    {"max_attempts": 19}, {"lease_expires_at": START + 1e6}, {"payload": "{}", "payload_sha256": sha256("{}")},
)  # fmt: skip
notes = st.sampled_from([{}, {"note": "größe"}])
kinds = st.sampled_from(["success", "success", "retry", "fail", "bad response"])


@dataclass
class Host:
    """A host in the middle of a transaction, and what the model thinks it has enqueued in it."""

    connection: Connection
    begun: RootTransaction
    handed: Connection | Session
    uncommitted: Transaction = field(default_factory=Transaction)
    savepoints: list[Any] = field(default_factory=list)
    notes: int = 0
    #: Refused and undone, but until the transaction ends PostgreSQL makes others wait for the same ids.
    touched: set[Key] = field(default_factory=set)


class Destination:
    """Does what the step says with the one claim it is given."""

    timeout = 4.0

    def __init__(self, act: Callable[[Claim], Any]) -> None:
        self.claim: Claim | None = None
        self._act = act

    def deliver(self, claim: Claim) -> Any:
        self.claim = claim
        return self._act(claim)


class Bench:
    """One database for all examples of a test."""

    def __init__(self, engine: Engine, watcher: Connection) -> None:
        self.engine = engine
        policy = RetryPolicy(BASE_DELAY, MAX_DELAY, MAX_RETRY_AFTER)
        self.outbox = Outbox(engine, [Echo(topic) for topic in TOPICS], policy)
        #: SQLite has one writer, so while a host's transaction is open only that host acts.
        self.interleaves = engine.dialect.name != "sqlite"
        #: Examples in CI; a step on PostgreSQL takes several times as long.
        self.budget = 40 if self.interleaves else 60
        self._watcher = watcher
        self.execute("CREATE TABLE host_note (note TEXT)")

    def execute(self, statement: str, **values: Any) -> None:
        self._watcher.execute(text(statement), values)

    def rows(self, connection: Connection | None = None) -> list[dict[str, Any]]:
        """All rows in the order of their ids: the committed ones, or what a host sees."""
        return [dict(row) for row in (connection or self._watcher).execute(ROWS).mappings()]

    def host_notes(self) -> int:
        return int(self._watcher.execute(text("SELECT count(*) FROM host_note")).scalar_one())

    def reset(self) -> None:
        self.execute("DELETE FROM outbox_event")
        self.execute("DELETE FROM host_note")


class Machine(RuleBasedStateMachine):
    """Steps are the verbs; whoever acts, the clock is the model's."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        bench.reset()
        self.bench, self.outbox = bench, bench.outbox
        self.model = Model(START)
        self.hosts: list[Host] = []
        self.claims: list[Claim] = []
        self.committed_notes = 0
        self.host_ended = False
        self.beside = 0
        self.before: dict[Key, dict[str, Any]] = {}
        self.looked_at = 0.0
        self.settled_may_change = False

    def teardown(self) -> None:
        for host in self.hosts:
            with suppress(Exception):  # after a failed step it may be in any state
                host.begun.rollback()
            host.connection.close()

    # -- helpers ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.model.now

    def free(self) -> bool:
        """Whether anybody but an open host may write."""
        return self.bench.interleaves or not self.hosts

    def agree(self, expected: Callable[[], T], actual: Callable[[], T]) -> T | None:
        """Both return the same or refuse with the same code; what they returned."""
        right, refused = _attempt(expected)
        found, raised = _attempt(actual)
        assert raised == refused, f"raised {raised}, should be {refused or right}"
        assert found == right
        return found

    def pick(self, index: int) -> Claim:
        """A live claim (made on the spot if there is none), one that was live until time told, or any that ever was."""
        if index >= LATE_PICKS and self.claims:
            return self.claims[-1 - index % len(self.claims)]
        late = [claim for claim in self.claims if self.model.verdict(claim) in TOLD_BY_TIME]
        if index >= LIVE_PICKS and late:
            return late[-1 - index % len(late)]
        if not self.live():
            self.claim_batch(TOPICS[0], "w1", 2, 60, None)
        if not self.live():
            self.enqueue_here(TOPICS[0], [{"id": f"fresh-{len(self.claims)}", "n": 0}], 2)
            self.compare()
            self.claim_batch(TOPICS[0], "w1", 1, 60, None)
        live = self.live()
        return live[-1 - index % len(live)]

    def live(self) -> list[Claim]:
        return [claim for claim in self.claims if self.model.verdict(claim) is None]

    def hand_out(self, rows: list[Row], claims: list[Claim]) -> None:
        """The claims are of the rows, in their order, each with a token never seen before."""
        assert [claim.event_id for claim in claims] == [row.event_id for row in rows]
        seen = {claim.lease_token for claim in self.claims}
        for row, claim in zip(rows, claims, strict=True):
            assert claim.lease_token not in seen
            row.lease_token = claim.lease_token
            assert claim == _claim(row)
            seen.add(claim.lease_token)
            self.claims.append(claim)

    def went(self, status: str | None) -> Callable[[Row], bool]:
        """Whether a row has been purged (None) or come to ``status``, asked of the database."""
        found = {(row["topic"], row["event_id"]): row["status"] for row in self.bench.rows()}
        return lambda row: found.get(row.key) == status

    def not_taken(self, topic: str, wanted: list[dict[str, Any]], host: Host | None) -> list[dict[str, Any]]:
        """Without events that another open host has enqueued: PostgreSQL would rightly wait for that host."""
        others = [other.touched | other.uncommitted.rows.keys() for other in self.hosts if other is not host]
        return [event for event in wanted if not any((topic, event["id"]) in keys for keys in others)]

    # -- the clock --------------------------------------------------------------------------------------------------

    @rule(seconds=steps, back=st.sampled_from([False] * 6 + [True]))
    def clock_steps(self, seconds: float, back: bool) -> None:
        self.model.now += -seconds if back else seconds

    @precondition(lambda self: self.model.rows)
    @rule(
        index=st.integers(0, 9),
        column=st.sampled_from(["lease_expires_at", "lease_expires_at", "next_attempt_at", "updated_at"]),
        nudge=st.sampled_from([-math.inf, 0, 0, math.inf]),
    )
    def clock_reaches(self, index: int, column: str, nudge: float) -> None:
        """Go to the very moment at which something changes, or to the one just before or after it."""
        moments = sorted({at for row in self.model.rows.values() if (at := getattr(row, column)) is not None})
        if moments:
            moment = moments[index % len(moments)]
            self.model.now = math.nextafter(moment, nudge) if nudge else moment

    # -- hosts ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.hosts) < (3 if self.bench.interleaves else 1))
    @rule(session=st.booleans())
    def host_begins(self, session: bool) -> None:
        connection = self.bench.engine.connect()
        begun = connection.begin()
        # The change of its own that the events are about.
        connection.execute(text("INSERT INTO host_note VALUES ('changed')"))
        self.hosts.append(Host(connection, begun, Session(connection) if session else connection, notes=1))

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 2), topic=topics, wanted=st.lists(events, min_size=1, max_size=3), most=most_attempts)
    def host_enqueues(self, index: int, topic: str, wanted: list[dict[str, Any]], most: int) -> None:
        host = self.hosts[index % len(self.hosts)]
        if wanted := self.not_taken(topic, wanted, host):
            self.enqueue_here(topic, wanted, most, host)

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 2), how=st.sampled_from(["savepoint", "savepoint", "release", "rollback"]))
    def host_nests(self, index: int, how: str) -> None:
        host = self.hosts[index % len(self.hosts)]
        if how == "savepoint":
            host.savepoints.append(host.connection.begin_nested())
            host.uncommitted.savepoint()
        elif host.savepoints and how == "release":
            host.savepoints.pop().commit()
            host.uncommitted.release_savepoint()
        elif host.savepoints:
            host.savepoints.pop().rollback()
            host.uncommitted.rollback_to_savepoint()

    @precondition(lambda self: self.hosts)
    @rule(index=st.integers(0, 2), commit=st.sampled_from([True, True, False]))
    def host_ends(self, index: int, commit: bool) -> None:
        host = self.hosts.pop(index % len(self.hosts))
        self.host_ended = True
        if commit:
            host.begun.commit()
            self.model.commit(host.uncommitted)
            self.committed_notes += host.notes
        else:
            host.begun.rollback()
        host.connection.close()

    # -- enqueue ----------------------------------------------------------------------------------------------------

    @precondition(free)
    @rule(topic=topics, wanted=st.lists(events, max_size=4), most=most_attempts)
    def enqueue(self, topic: str, wanted: list[dict[str, Any]], most: int) -> None:
        self.enqueue_here(topic, self.not_taken(topic, wanted, None), most)

    def enqueue_here(self, topic: str, wanted: list[dict[str, Any]], most: int, host: Host | None = None) -> None:
        options: dict[str, Any] = {"topic": topic, "max_attempts": most, "now": self.now}
        if host is not None:
            options["connection"] = host.handed

        def enqueue() -> Any:
            if len(wanted) == 1:
                return [self.outbox.enqueue(wanted[0], **options)]
            return self.outbox.enqueue_many(wanted, **options)

        uncommitted = None if host is None else host.uncommitted
        found = self.agree(lambda: self.model.enqueue(wanted, topic, most, uncommitted), enqueue)
        if found is None and host is not None:
            host.touched.update((topic, event["id"]) for event in wanted)

    @precondition(lambda self: (self.hosts or self.free()) and self.model.rows)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["payload", "attempts", "nothing"]))
    def enqueue_beside_a_namesake(self, index: int, how: str) -> None:
        """A new event together with one whose id is taken, mostly by a different one: then neither is enqueued."""
        rows = sorted(self.model.rows.values(), key=lambda row: row.order)
        row = rows[index % len(rows)]
        host = self.hosts[index % len(self.hosts)] if self.hosts else None
        namesake = {"id": row.event_id, "n": 0 if how != "payload" else 2}
        wanted = [{"id": f"beside-{self.beside}", "n": 0}, namesake]
        self.beside += 1
        most = row.max_attempts if how != "attempts" else row.max_attempts % 20 + 1
        self.enqueue_here(row.topic, wanted, most, host)

    # -- claim ------------------------------------------------------------------------------------------------------

    @precondition(free)
    @rule(topic=topics, owner=owners, seconds=leases)
    def claim(self, topic: str, owner: str, seconds: float) -> None:
        row, refused = _attempt(lambda: self.model.claim(topic, owner, seconds))
        claim, raised = _attempt(lambda: self.outbox.claim(owner, topic=topic, lease_seconds=seconds, now=self.now))
        assert raised == refused
        self.hand_out([row] if row else [], [claim] if claim else [])

    @precondition(free)
    @rule(topic=topics, owner=owners, limit=limits, seconds=leases, skip=st.sampled_from([None, None, None, 5, 0]))
    def claim_batch(self, topic: str, owner: str, limit: int, seconds: float, skip: float | None) -> None:
        due_from = 0 if skip is None else self.now - skip
        rows = self.model.claim_batch(topic, owner, limit, seconds, due_from)
        claims = self.outbox.claim_batch(
            owner, topic=topic, limit=limit, lease_seconds=seconds, due_from=due_from, now=self.now
        )
        self.hand_out(rows, claims)

    @initialize(topic=topics, count=st.integers(0, 5), seconds=leases, limit=limits, settled=st.integers(0, 3))
    def a_past_to_begin_with(self, topic: str, count: int, seconds: float, limit: int, settled: int) -> None:
        """Some events are there, of these some are leased, and of these some are settled one after another."""
        self.enqueue_here(topic, [{"id": event_id, "n": 0} for event_id in IDS[:count]], 2)
        self.compare()
        self.claim_batch(topic, "w1", limit, seconds, None)
        for index in range(min(settled, len(self.claims))):
            if index % 2:
                self.retry_or_fail(0, "network", None, None, final=True)
            else:
                self.complete(0, {})
            self.clock_steps(1, back=False)

    # -- settle -----------------------------------------------------------------------------------------------------

    @precondition(free)
    @rule(index=picks, note=notes)
    def complete(self, index: int, note: dict[str, Any]) -> None:
        claim = self.pick(index)
        response = {"echo": claim.event_id, **note}
        self.agree(
            lambda: self.model.complete(claim, response),
            lambda: self.outbox.complete(claim, response, now=self.now),
        )

    @precondition(free)
    @rule(index=picks, code=codes, hint=hints, detail=details, final=st.sampled_from([False, False, True]))
    def retry_or_fail(self, index: int, code: str, hint: float | None, detail: str | None, final: bool) -> None:
        claim = self.pick(index)
        if final:
            self.agree(
                lambda: self.model.fail(claim, code, detail),
                lambda: self.outbox.fail(claim, code, detail_hash=detail, now=self.now),
            )
        else:
            self.agree(
                lambda: self.model.retry(claim, code, hint, detail),
                lambda: self.outbox.retry(claim, code, retry_after=hint, detail_hash=detail, now=self.now),
            )

    @precondition(free)
    @rule(index=st.integers(0, 4), end=st.booleans(), nudge=st.sampled_from([-math.inf, 0, 0, math.inf]))
    def settle_at_the_edge(self, index: int, end: bool, nudge: float) -> None:
        """The result comes just before, just when or just after the lease ends, or, by the clock, when it began."""
        claim = self.pick(index)
        moment = claim.lease_expires_at if end else self.model.rows[claim.topic, claim.event_id].updated_at
        self.model.now = math.nextafter(moment, nudge) if nudge else moment
        self.agree(
            lambda: self.model.retry(claim, "late", None, None),
            lambda: self.outbox.retry(claim, "late", now=self.now),
        )

    @precondition(free)
    @rule(
        index=st.integers(0, 4), verb=st.sampled_from(["settle", "release", "renew"]), order=st.permutations([0, 1, 1])
    )
    def act_beside_ones_past(self, index: int, verb: str, order: list[int]) -> None:
        """A claim, the same before it was renewed, and itself once more: all have one token and only one of them wins."""
        old = self.pick(index)
        self.renew([index], 30)
        new = self.claims[-1]
        claims = [(old, new)[which] for which in order]
        if verb == "settle":
            results = [_result(claim, "success", None) for claim in claims]
            self.agree(lambda: self.model.settle(results), lambda: self.outbox.settle(results, now=self.now))
        elif verb == "release":
            self.agree(lambda: self.model.release(claims), lambda: self.outbox.release(claims, now=self.now))
        else:
            renewed = self.agree(
                lambda: self.model.renew(claims, 60),
                lambda: self.outbox.renew(claims, lease_seconds=60, now=self.now),
            )
            self.claims += renewed or []

    @precondition(free)
    @rule(lines=st.lists(st.tuples(picks, kinds, hints), max_size=6))
    def settle(self, lines: list[tuple[int, str, float | None]]) -> None:
        """Live and stale claims together, and the same one twice."""
        results = [_result(self.pick(index), kind, hint) for index, kind, hint in lines]
        self.agree(
            lambda: self.model.settle(results),
            lambda: self.outbox.settle(iter(results), now=self.now),
        )

    @precondition(free)
    @rule(indexes=st.lists(picks, min_size=1, max_size=4), seconds=leases)
    def renew(self, indexes: list[int], seconds: float) -> None:
        claims = [self.pick(index) for index in indexes]
        renewed = self.agree(
            lambda: self.model.renew(claims, seconds),
            lambda: self.outbox.renew(iter(claims), lease_seconds=seconds, now=self.now),
        )
        self.claims += renewed or []

    @precondition(free)
    @rule(indexes=st.lists(picks, min_size=1, max_size=4))
    def release(self, indexes: list[int]) -> None:
        claims = [self.pick(index) for index in indexes]
        self.agree(
            lambda: self.model.release(claims),
            lambda: self.outbox.release(iter(claims), now=self.now),
        )

    @precondition(free)
    @rule(index=picks)
    def forge(self, index: int) -> None:
        """Well formed, but not what was handed out: every part of the fence counts."""
        claim = self.pick(index)
        results = [Failure(replace(claim, **forgery), "forged") for forgery in FORGERIES]
        self.agree(lambda: self.model.settle(results), lambda: self.outbox.settle(results, now=self.now))

    # -- deliver ----------------------------------------------------------------------------------------------------

    @precondition(free)
    @rule(topic=topics, owner=owners, kind=kinds, hint=hints, raises=st.booleans())
    def run_once(self, topic: str, owner: str, kind: str, hint: float | None, raises: bool) -> None:
        def act(claim: Claim) -> Any:
            if raises and kind == "success":
                raise ValueError(claim.payload)
            result = _result(claim, kind, hint)
            if isinstance(result, Success):
                return result.response
            raise DeliveryFailed(result.error_code, retryable=result.retryable, retry_after=result.retry_after)

        def expected() -> Outcome | None:
            row = self.model.claim(topic, owner, 5)
            assert (row is None) == (destination.claim is None)
            if row is None:
                return None
            assert destination.claim is not None
            self.hand_out([row], [destination.claim])
            if raises and kind == "success":
                found = repr(ValueError(row.payload))
                return self.model.fail(destination.claim, "dispatch.client_failure", sha256(found))
            (line,) = self.model.settle([_result(destination.claim, kind, hint)])
            return line.outcome

        destination = Destination(act)
        found, raised = _attempt(
            lambda: self.outbox.run_once(destination, owner, topic=topic, lease_seconds=5, now=self.now)
        )
        right, refused = _attempt(expected)
        assert raised == refused
        assert found == right

    # -- operate ----------------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 9), missing=st.sampled_from([False, False, False, True]))
    def ask(self, index: int, missing: bool) -> None:
        rows = sorted(self.model.rows)
        topic, event_id = rows[index % len(rows)] if rows and not missing else (TOPICS[0], "nobody")
        self.agree(
            lambda: self.model.status(topic, event_id),
            lambda: self.outbox.status(event_id, topic=topic, now=self.now),
        )
        self.agree(lambda: self.model.ready(topic), lambda: self.outbox.ready(topic=topic, now=self.now))
        self.agree(lambda: self.model.health(deep=True), lambda: self.outbox.health(deep=True, now=self.now))

    @precondition(free)
    @rule(topic=topics, event_id=ids, failed=st.sampled_from([None, 0, 1, 2]))
    def redrive(self, topic: str, event_id: str, failed: int | None) -> None:
        self.settled_may_change = True
        candidates = sorted(row.key for row in self.model.rows.values() if row.status == "failed")
        if candidates and failed is not None:
            topic, event_id = candidates[failed % len(candidates)]
        self.agree(
            lambda: self.model.redrive(topic, event_id),
            lambda: self.outbox.redrive(event_id, topic=topic, now=self.now),
        )

    @precondition(lambda self: self.free() and any(row.status == "failed" for row in self.model.rows.values()))
    @rule(topic=topics, code=st.sampled_from([None, None, "network", "lease_expired"]), limit=limits)
    def redrive_all(self, topic: str, code: str | None, limit: int) -> None:
        self.settled_may_change = True
        count = self.outbox.redrive_all(topic=topic, error_code=code, limit=limit, now=self.now)
        assert count == self.model.redrive_all(topic, code, limit, self.went("pending"))

    @precondition(lambda self: self.free() and any(row.status in SETTLED for row in self.model.rows.values()))
    @rule(age=st.sampled_from([0, 1, 10.5, 100]), topic=st.none() | topics, failed=st.booleans(), limit=limits)
    def purge(self, age: float, topic: str | None, failed: bool, limit: int) -> None:
        self.settled_may_change = True
        count = self.outbox.purge(older_than_seconds=age, topic=topic, include_failed=failed, limit=limit, now=self.now)
        assert count == self.model.purge(age, topic, limit, self.went(None), include_failed=failed)

    # -- what should not happen -------------------------------------------------------------------------------------

    @precondition(lambda self: self.free() and self.model.rows)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["payload", "hash", "another event", "spelling", "lease"]))
    def tamper(self, index: int, how: str) -> None:
        """Somebody with a database shell and no idea."""
        rows = sorted(self.model.rows.values(), key=lambda row: row.order)
        row = rows[index % len(rows)]
        self.settled_may_change = True
        if how == "payload":
            row.payload = text_of({"id": row.event_id, "n": 666})
        elif how == "hash":
            row.payload_sha256 = "0" * 64
        elif how == "another event":
            row.payload = text_of({"id": "e99", "n": 0})
            row.payload_sha256 = sha256(row.payload)
        elif how == "spelling":
            row.payload = row.payload.replace(":", ": ")
            row.payload_sha256 = sha256(row.payload)
        elif row.status == "leased":
            row.lease_owner, row.lease_token = "somebody", "t" * 32
        names = ("payload", "payload_sha256", "lease_owner", "lease_token")
        assignments = ", ".join(f"{name} = :{name}" for name in names)
        self.bench.execute(
            f"UPDATE outbox_event SET {assignments} WHERE id = :id",
            id=row.id, **{name: getattr(row, name) for name in names},
        )  # fmt: skip

    @rule(case=st.sampled_from(ILLEGAL), index=picks)
    def illegal(self, case: Attempt, index: int) -> None:
        """Every verb refuses what it should, before it asks what the database has to say."""
        if case.needs_claim and not (self.claims or self.free()):
            return
        claim = None
        if case.needs_claim:
            claim = self.pick(index) if self.free() else self.claims[-1 - index % len(self.claims)]
        with self.bench.engine.connect() as connection:
            _, raised = _attempt(lambda: case.call(self.outbox, claim, connection, self.now))
        assert raised == case.code, case

    # -- after every step -------------------------------------------------------------------------------------------

    @invariant()
    def all_agrees(self) -> None:
        found = self.compare()
        if self.host_ended:  # with its events or without them, never one without the other
            assert self.bench.host_notes() == self.committed_notes
        for host in self.hosts:
            mine = host.uncommitted.rows
            seen = [row for row in self.bench.rows(host.connection) if (row["topic"], row["event_id"]) in mine]
            _same(seen, mine.values())
        self._is_safe(found)
        now = {(row["topic"], row["event_id"]): row for row in found}
        if (now, self.now) != (self.before, self.looked_at):
            assert self.outbox.health(now=self.now) == self.model.health(deep=False)
        self.before, self.looked_at = now, self.now
        self.settled_may_change = self.host_ended = False

    def compare(self) -> list[dict[str, Any]]:
        """Every column of every committed row."""
        found = self.bench.rows()
        _same(found, self.model.rows.values())
        return found

    def _is_safe(self, found: list[dict[str, Any]]) -> None:
        """What must hold whatever the model says."""
        for row in found:
            fences = {
                (claim.lease_token, claim.lease_expires_at) for claim in self.claims
                if claim.lease_token == row["lease_token"] and claim.lease_expires_at == row["lease_expires_at"]
            }  # fmt: skip
            assert len(fences) <= 1, "two live leases of one event"
            assert 0 <= row["attempts"] <= row["max_attempts"]
        if not self.settled_may_change:
            now = {(row["topic"], row["event_id"]): row for row in found}
            for key, row in self.before.items():
                assert row["status"] not in SETTLED or now.get(key) == row, "a settled event changed"


def _same(found: list[dict[str, Any]], rows: Iterable[Row]) -> None:
    wanted = sorted(rows, key=lambda row: row.order)
    for row, there in zip(wanted, found, strict=False):
        if row.id is None and row.key == (there["topic"], there["event_id"]):
            row.id = there["id"]
    assert found == [row.columns() for row in wanted]


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it returned and the code it refused with; one of the two."""
    try:
        return action(), None
    except (Refused, OutboxError) as error:
        return None, error.code


def _claim(row: Row) -> Claim:
    columns: Mapping[str, Any] = row.columns() | {"attempt": row.attempts, "due_at": row.next_attempt_at}
    return Claim(**{name: columns[name] for name in Claim.__dataclass_fields__})


def _result(claim: Claim, kind: str, hint: float | None) -> Success | Failure:
    if kind == "success":
        return Success(claim, {"echo": claim.event_id})
    if kind == "bad response":
        return Success(claim, {"echo": "somebody else"})
    return Failure(claim, "scripted", retryable=kind == "retry", retry_after=hint)


@pytest.fixture
def bench(database_url: str, engines: Callable[..., Engine]) -> Iterator[Bench]:
    # Nothing here may wait for a lock; if something does, it is to fail and not to hang.
    arguments = {"connect_args": {"options": "-c lock_timeout=5000"}} if "postgresql" in database_url else {}
    engine = engines(database_url, **arguments)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        yield Bench(engine, watcher)


@pytest.mark.timeout(0 if PROFILE == "thorough" else 600)  # a failure takes minutes to be made small
def test_engine_and_model_agree(bench: Bench) -> None:
    def machine() -> Machine:
        return Machine(bench)

    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]
        settings=settings(max_examples=examples(bench.budget, 2000), stateful_step_count=40),
    )
