"""No verb may cost more as settled events pile up: the plans of its statements, whatever the statistics say.

The statements are those the engine sends while a verb runs, caught on their way to the driver, so that the guard
follows the code. Each is then explained, with its own parameters, on the very tables it ran on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text

from outbox import Claim, Failure, Outbox, Success
from outbox.records import STATUSES
from tests.support import TOPIC, WORKER, Notes, T, note, response

FEW, MANY = 10, 100_000
TABLE: Final = "outbox_event"
#: What the statistics know: the table as it is, nothing at all, or how it once was, with ten rows of one status in it.
STATISTICS: Final = ("fresh", "none", "pending", "leased", "succeeded")

KEY = "outbox_event_pkey"
NAME = "uq_outbox_event_topic_event_id"
DUE = "ix_outbox_event_due"
LEASE = "ix_outbox_event_lease"
WAITING = "ix_outbox_event_waiting"
HEAD = "uq_outbox_event_ordering_head"
FAILED_HEAD = "ix_outbox_event_failed_head"
#: By which the keys that are left waiting are found, and the first of a key.
SWEEP = {WAITING, HEAD, FAILED_HEAD}
SUCCEEDED = "ix_outbox_event_succeeded"
FAILED = "ix_outbox_event_failed"
COUNTED = {DUE, SUCCEEDED, FAILED, WAITING, "ix_outbox_event_retry_wait"}

# Of 100 rows 90 are settled, 2 wait for their ordering keys' turn, half of them for the same key's, 4 are in back-off, 2 are due and 2 leased, half of these expired. Ids and times advance
# together, as they do in life, and the unsettled are the newest.
_FILL = """
INSERT INTO outbox_event (topic, event_id, payload, payload_sha256, ordering_key, status, attempts, max_attempts, redrives,
    next_attempt_at, lease_owner, lease_token, lease_expires_at, last_error_code, receipt, response_sha256,
    created_at, updated_at)
SELECT :topic, 'bulk-' || n, '{}', :hash,
    CASE WHEN status = 'waiting' THEN CASE n % 2 WHEN 0 THEN 'hot' ELSE 'key-' || n END END,
    status, CASE WHEN status = 'pending' OR status = 'waiting' THEN 0 ELSE 1 END, 5, 0,
    CASE status WHEN 'retry_wait' THEN :now + n ELSE :now - :rows + n * 0.5 END,
    CASE status WHEN 'leased' THEN 'w' END, CASE status WHEN 'leased' THEN 't' || n END,
    CASE status WHEN 'leased' THEN :now + (n % 2) * 1000 END,
    CASE WHEN status = 'retry_wait' OR status = 'failed' THEN 'network' END,
    CASE status WHEN 'succeeded' THEN '{}' END, CASE status WHEN 'succeeded' THEN :hash END,
    :now - :rows, :now - :rows + n * 0.5
FROM (
    SELECT n, CASE WHEN n > :rows * 0.98 THEN 'pending' WHEN n > :rows * 0.96 THEN 'leased'
        WHEN n > :rows * 0.92 THEN 'retry_wait' WHEN n > :rows * 0.90 THEN 'waiting' WHEN n % 50 = 0 THEN 'failed' ELSE 'succeeded' END AS status
    FROM (NUMBERS) AS numbers
) AS made
"""
_NUMBERS: Final = {
    "sqlite": "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < :rows) SELECT n FROM c",
    "postgresql": "SELECT n FROM generate_series(1, CAST(:rows AS integer)) AS n",
}


@dataclass
class Statement:
    sql: str
    parameters: Any

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.sql)[:160]


@dataclass
class Plan:
    """How one statement reaches the rows of ``outbox_event``."""

    statement: Statement
    indexes: set[str] = field(default_factory=set)
    #: Whole-table scans and sorts of the table's rows.
    sins: list[str] = field(default_factory=list)


class Database:
    """What the two databases call the same things."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def execute(self, statement: str, **values: Any) -> None:
        self.connection.execute(text(statement), values)
        self.connection.commit()

    def fill(self, rows: int, statement: str = _FILL) -> None:
        statement = statement.replace("NUMBERS", _NUMBERS[self.connection.dialect.name])
        self.execute(statement, topic=TOPIC, hash="a" * 64, now=T, rows=rows)

    def fill_once(self, status: str) -> None:
        """Ten rows, all of one status, which are analysed and go again."""
        self.fill(FEW, re.sub("CASE WHEN n > .*? END AS status", f"'{status}' AS status", _FILL, flags=re.DOTALL))

    def prepare(self, rows: int, statistics: str) -> None:
        raise NotImplementedError

    def explain(self, statement: Statement) -> list[Plan]:
        """The statement's plans, in the transaction that the statements before it have made."""
        plans = list(self.plans(statement))
        if "set_config" in statement.sql:
            self.connection.exec_driver_sql(statement.sql, statement.parameters)
        return plans

    def plans(self, statement: Statement) -> Iterator[Plan]:
        raise NotImplementedError


class Sqlite(Database):
    def prepare(self, rows: int, statistics: str) -> None:
        if statistics in STATUSES:
            self.fill_once(statistics)
            self.execute("ANALYZE")
            self.execute(f"DELETE FROM {TABLE}")
        self.fill(rows)
        if statistics == "fresh":
            self.execute("ANALYZE")

    def plans(self, statement: Statement) -> Iterator[Plan]:
        plan = Plan(statement)
        steps = self.connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement.sql}", statement.parameters)
        for *_, step in steps:
            index = re.search(rf"{TABLE} USING (?:COVERING )?INDEX (\w+)", step)
            if f"{TABLE} USING INTEGER PRIMARY KEY" in step:
                plan.indexes.add(KEY)
            elif index:
                plan.indexes.add({"sqlite_autoindex_outbox_event_1": NAME}.get(index[1], index[1]))
            elif re.fullmatch(rf"SCAN {TABLE}", step) or "TEMP B-TREE" in step or "AUTOMATIC" in step:
                plan.sins.append(step)
        yield plan


class Postgresql(Database):
    def prepare(self, rows: int, statistics: str) -> None:
        self.execute(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = off)")
        if statistics in STATUSES:
            self.fill_once(statistics)
            self.execute(f"ANALYZE {TABLE}")
            self.execute(f"DELETE FROM {TABLE}")
        self.fill(rows)
        if statistics == "fresh":
            self.execute(f"ANALYZE {TABLE}")
        if rows == FEW:
            # All rows are on one page, and reading it whole is right. What can be asked is whether the index would do.
            self.execute("SET enable_seqscan = off")
            self.execute("SET enable_sort = off")

    def plans(self, statement: Statement) -> Iterator[Plan]:
        """The plan for these parameters, and the one that serves all once psycopg has prepared the statement."""
        raw: Any = self.connection.connection.dbapi_connection
        with psycopg.ClientCursor(raw) as cursor:
            yield self._read(statement, cursor.execute(f"EXPLAIN (FORMAT JSON) {statement.sql}", statement.parameters))
            sql, values = _numbered(statement)
            cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            cursor.execute(f"PREPARE guarded AS {sql}")
            execute = f"EXECUTE guarded ({', '.join(['%s'] * len(values))})" if values else "EXECUTE guarded"
            yield self._read(statement, cursor.execute(f"EXPLAIN (FORMAT JSON) {execute}", values or None))
            cursor.execute("DEALLOCATE guarded")
            cursor.execute("SET LOCAL plan_cache_mode = auto")

    @staticmethod
    def _read(statement: Statement, cursor: Any) -> Plan:
        plan = Plan(statement)
        ((found,),) = cursor.fetchall()
        _walk(found[0]["Plan"], plan)
        return plan


def _walk(node: Mapping[str, Any], plan: Plan) -> bool:
    """Note indexes and sins below ``node``; whether rows of the table come out of it."""
    below = [_walk(child, plan) for child in node.get("Plans", [])]
    reads = node.get("Relation Name") == TABLE and node["Node Type"] != "ModifyTable"
    if TABLE in node.get("Index Name", ""):
        plan.indexes.add(node["Index Name"])
    if reads and node["Node Type"] == "Seq Scan":
        plan.sins.append(f"Seq Scan with {node.get('Filter')}")
    from_table = reads or any(below)
    if node["Node Type"] in ("Sort", "Incremental Sort") and from_table:
        plan.sins.append(f"Sort by {node.get('Sort Key')}")
    return from_table


def _numbered(statement: Statement) -> tuple[str, list[Any]]:
    """``%(name)s`` as ``$1``, which is how the server knows them, and the values in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    sql = re.sub(r"%%|%\((\w+)\)s", number, statement.sql)
    return sql, [statement.parameters[name] for name in names]


@contextmanager
def caught() -> Iterator[list[Statement]]:
    """The statements that any engine sends meanwhile. The outbox has one of its own, so all are listened to."""
    found: list[Statement] = []

    def listener(connection: Any, cursor: Any, sql: str, parameters: Any, context: Any, many: bool) -> None:
        if TABLE in sql and not sql.startswith("EXPLAIN"):
            found.append(Statement(sql, parameters[0] if isinstance(parameters, list) else parameters))

    event.listen(Engine, "before_cursor_execute", listener)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", listener)


class Anything(Notes):
    """The bulk of the rows is made by the database, which cannot hash: all payloads prove themselves here."""

    def verify(self, event_id: str, payload: str, payload_sha256: str) -> None:
        return


@dataclass
class Verb:
    """A verb, run once on the filled table, and the indexes by which its statements may reach rows."""

    name: str
    run: Callable[[Outbox], Any]
    indexes: set[str]


def _join(outbox: Outbox) -> None:
    """Here the planner's settings are the host's."""
    with outbox.engine.connect() as host, host.begin() as transaction:
        outbox.enqueue_many([note("a"), note("joined")], connection=host, now=T)
        outbox.enqueue(note("a"), connection=host, now=T)
        transaction.rollback()


def _claimed(outbox: Outbox, event: Any, key: str) -> Claim:
    outbox.enqueue(event, ordering_key=key, now=T - 2 * MANY)  # before all others
    claim = outbox.claim(WORKER, lease_seconds=86400, now=T - MANY)
    assert claim is not None
    assert claim.event_id == event["id"]
    return claim


def verbs(outbox: Outbox) -> Iterator[Verb]:
    """In an order in which each finds something to do."""
    _join(outbox)  # the first time the schema is checked, with statements that are not ours
    outbox.enqueue_many([note(number) for number in range(8)], now=T - MANY)
    claims = outbox.claim_batch(WORKER, limit=8, now=T - MANY)
    assert len(claims) == 8
    outbox.fail(claims[0], "network", now=T - MANY)
    first, second, third, fourth = claims[1:5]
    keyed = _claimed(outbox, note("hot"), "a key of its own")
    outbox.fail(_claimed(outbox, note("given-up"), "another"), "network", now=T - MANY)

    yield Verb("enqueue", lambda o: o.enqueue(note("new"), now=T), {NAME})
    yield Verb("enqueue again", lambda o: o.enqueue(note("new"), now=T), {NAME})
    yield Verb("enqueue many", lambda o: o.enqueue_many([note("a"), note("b")], now=T), {NAME})
    yield Verb("enqueue many again", lambda o: o.enqueue_many([note("a"), note("c")], now=T), {NAME})
    yield Verb("enqueue in a host's transaction", _join, {NAME})
    yield Verb("enqueue keyed", lambda o: o.enqueue(note("k"), ordering_key="new", now=T), {NAME, KEY, *SWEEP})
    yield Verb("enqueue a hot key", lambda o: o.enqueue(note("h"), ordering_key="hot", now=T), {NAME, KEY, *SWEEP})
    yield Verb("ready", lambda o: o.ready(now=T), {DUE, *SWEEP})
    yield Verb("complete", lambda o: o.complete(first, response(first.event_id), now=T - MANY), {KEY})
    yield Verb("fail", lambda o: o.fail(second, "network", now=T - MANY), {KEY})
    yield Verb("settle", lambda o: o.settle([Failure(third, "network"), Success(fourth, {})], now=T - MANY), {KEY})
    yield Verb("settle what is lost", lambda o: o.settle([Failure(third, "network")], now=T), {KEY, LEASE, NAME})
    yield Verb("renew", lambda o: o.renew(claims[5:7], now=T - MANY), {KEY})
    yield Verb("release", lambda o: o.release(claims[7:], now=T - MANY), {KEY})
    yield Verb("complete keyed", lambda o: o.complete(keyed, response("note-hot"), now=T - MANY), {KEY, *SWEEP})
    yield Verb("claim and recover", lambda o: o.claim(WORKER, now=T), {KEY, DUE, *SWEEP})
    yield Verb("claim many", lambda o: o.claim_batch(WORKER, now=T), {KEY, DUE, *SWEEP})
    yield Verb("claim from", lambda o: o.claim_batch(WORKER, due_from=T - 10, now=T), {KEY, DUE, *SWEEP})
    yield Verb("discard", lambda o: o.discard("note-given-up", now=T), {KEY, NAME, *SWEEP})
    yield Verb("pause", lambda o: o.pause(reason="why", now=T), set())
    yield Verb("resume", lambda o: o.resume(now=T), set())
    yield Verb("status", lambda o: o.status("note-1", now=T), {NAME})
    yield Verb("health", lambda o: o.health(now=T), COUNTED)
    yield Verb("redrive", lambda o: o.redrive("note-0", now=T), {KEY, NAME})
    yield Verb("redrive all", lambda o: o.redrive_all(error_code="network", limit=5, now=T), {KEY, FAILED})
    yield Verb(
        "purge",
        lambda o: o.purge(older_than_seconds=1, include_failed=True, limit=5, now=T),
        {KEY, SUCCEEDED, FAILED, LEASE},
    )
    yield Verb("purge a topic", lambda o: o.purge(older_than_seconds=1, topic=TOPIC, limit=5, now=T), {KEY, SUCCEEDED})


@pytest.mark.parametrize(
    ("rows", "statistics"), [(FEW, "fresh"), (FEW, "none"), *((MANY, statistics) for statistics in STATISTICS)]
)
def test_every_statement_goes_by_its_index(engine: Engine, rows: int, statistics: str) -> None:
    outbox = Outbox(engine, [Anything()])
    kind = {"sqlite": Sqlite, "postgresql": Postgresql}[engine.dialect.name]
    faults = []
    with engine.connect() as connection:
        database = kind(connection)
        database.prepare(rows, statistics)
        for verb in verbs(outbox):
            with caught() as statements:
                verb.run(outbox)
            assert statements, verb.name
            for statement in statements:
                for plan in database.explain(statement):
                    strange = plan.indexes - verb.indexes - {LEASE}  # the first thing asked in every transaction
                    if plan.sins or strange:
                        faults.append(f"{verb.name}: {plan.sins} {sorted(strange)} in {statement.words}")
            connection.rollback()
    assert not faults, "\n".join(faults)
