"""Redriving what has failed and purging what is settled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.pool import QueuePool

from outbox import Failure, Outbox, Success
from outbox.schema import outbox_event
from tests.support import (
    STATES,
    WORKER,
    T,
    claimed,
    dump,
    ids,
    leased,
    make_outbox,
    note,
    notes,
    put,
    raw_row,
    refused,
    response,
    row_count,
    statements,
    together,
    unchanged,
)
from tests.test_enqueue import forbidden


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return make_outbox(engine)


@pytest.fixture
def apart() -> Outbox:
    """An outbox whose database must not be asked."""
    return make_outbox(create_engine("sqlite://", creator=forbidden, poolclass=QueuePool))


def fail(outbox: Outbox, number: int, code: str = "refused", at: float = T, **more: Any) -> None:
    outbox.enqueue(note(number), now=at, **more)
    outbox.fail(claimed(outbox, now=at, **({"topic": more["topic"]} if more else {})), code, now=at)


def complete(outbox: Outbox, number: int, at: float = T) -> None:
    outbox.enqueue(note(number), now=at)
    outbox.complete(claimed(outbox, now=at), response(f"note-{number}"), now=at)


def by_status(engine: Engine, status: str) -> list[str]:
    return [row["event_id"] for row in dump(engine) if row["status"] == status]


# -- redrive --------------------------------------------------------------------------------------------------------


def test_redrive_makes_due_again_with_all_attempts(outbox: Outbox, engine: Engine) -> None:
    outbox.fail(leased(outbox), "refused", detail_hash="a" * 64, now=T)
    before = raw_row(engine)

    status = outbox.redrive("note-1", now=T + 50)

    assert raw_row(engine) == before | {
        "status": "pending", "attempts": 0, "redrives": 1, "last_error_code": None, "last_error_detail_hash": None,
        "next_attempt_at": T + 50, "updated_at": T + 50,
    }  # fmt: skip
    assert status == outbox.status("note-1", now=T + 50)
    assert outbox.health(deep=True, now=T + 50).status == "ok"
    assert claimed(outbox, now=T + 50).attempt == 1


def test_redriving_again_and_again(outbox: Outbox) -> None:
    outbox.fail(leased(outbox, max_attempts=1), "refused", now=T)
    for times in range(1, 4):
        assert outbox.redrive("note-1", now=T + times).redrives == times
        outbox.retry(claimed(outbox, now=T + times), "busy", now=T + times)
        assert outbox.status("note-1").status == "failed"


@pytest.mark.parametrize("state", [state for state in STATES if state != "failed"])
def test_only_what_has_failed_is_redriven(outbox: Outbox, engine: Engine, state: str) -> None:
    put(outbox, state)
    with unchanged(engine), refused("dispatch.redrive_invalid", event_id="note-1", says=f"found {state}"):
        outbox.redrive("note-1", now=T)
    with unchanged(engine):
        assert outbox.redrive_all(now=T) == 0


def test_redriving_what_is_not_there(outbox: Outbox) -> None:
    with refused("dispatch.event_missing", event_id="note-1"):
        outbox.redrive("note-1")


def test_a_clock_before_the_events_creation_redrives_nothing(outbox: Outbox, engine: Engine) -> None:
    put(outbox, "failed")
    with unchanged(engine):
        with refused("dispatch.redrive_invalid", says="created after now"):
            outbox.redrive("note-1", now=T - 1)
        assert outbox.redrive_all(now=T - 1) == 0
    assert outbox.redrive("note-1", now=T).status == "pending"


def test_an_old_claim_does_not_survive_a_redrive(outbox: Outbox) -> None:
    claim = leased(outbox)
    outbox.fail(claim, "refused", now=T)
    outbox.redrive("note-1", now=T)
    new = claimed(outbox)
    assert new.lease_token != claim.lease_token
    with refused("dispatch.claim_lost"):
        outbox.complete(claim, response(), now=T)


def test_redrive_all_by_code(outbox: Outbox, engine: Engine) -> None:
    for number, code in enumerate(["refused", "busy", "refused", "dispatch.payload_integrity"], 1):
        fail(outbox, number, code)
    assert outbox.redrive_all(error_code="refused", now=T) == 2
    assert by_status(engine, "pending") == ["note-1", "note-3"]
    assert outbox.redrive_all(error_code="never.seen", now=T) == 0
    assert outbox.redrive_all(now=T) == 2
    assert by_status(engine, "failed") == []


def test_redrive_all_in_portions_the_longest_failed_first(outbox: Outbox, engine: Engine) -> None:
    for number, at in enumerate([T + 2, T, T + 1], 1):
        fail(outbox, number, at=at)
    assert outbox.redrive_all(limit=2, now=T + 9) == 2
    assert by_status(engine, "failed") == ["note-1"]
    assert outbox.redrive_all(limit=2, now=T + 9) == 1
    assert outbox.redrive_all(limit=2, now=T + 9) == 0


def test_redrive_all_is_by_topic(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    for topic in ("one", "two"):
        fail(outbox, 1, topic=topic)
    assert outbox.redrive_all(topic="one", now=T) == 1
    assert [(row["topic"], row["status"]) for row in dump(engine)] == [("one", "pending"), ("two", "failed")]
    with refused("dispatch.event_missing"):
        outbox.redrive("note-9", topic="two")
    with refused("dispatch.redrive_invalid"):
        outbox.redrive("note-1", topic="one")


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *(("dispatch.limit_invalid", {"limit": value}) for value in (0, 1001, True, 1.0, "1", None)),
        *(("dispatch.error_invalid", {"error_code": value}) for value in ("", "No Code", 7, "a" * 129)),
        ("dispatch.topic_unknown", {"topic": "other"}),
        ("dispatch.time_invalid", {"now": -1}),
    ],
)
def test_bad_redrives(apart: Outbox, code: str, arguments: dict[str, Any]) -> None:
    with refused(code):
        apart.redrive_all(**arguments)


def test_each_is_redriven_once(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(40), now=T)
    outbox.settle([Failure(c, "refused", False) for c in outbox.claim_batch(WORKER, now=T)], now=T)
    counts = together(*[lambda: outbox.redrive_all(limit=10, now=T)] * 6)
    assert sum(counts) + outbox.redrive_all(now=T) == 40
    assert {row["redrives"] for row in dump(engine)} == {1}


def test_what_is_being_changed_is_passed_over(pg_engine: Engine) -> None:
    outbox = make_outbox(pg_engine)
    for number in (1, 2):
        fail(outbox, number)
    with pg_engine.connect() as connection:
        connection.execute(update(outbox_event).where(outbox_event.c.event_id == "note-1").values(redrives=0))
        with refused("dispatch.redrive_invalid", says="being changed"):
            outbox.redrive("note-1", now=T)
        assert outbox.purge(older_than_seconds=0, include_failed=True, limit=1, now=T) == 1
        assert outbox.redrive_all(now=T) == 0
    assert by_status(pg_engine, "failed") == ["note-1"]


# -- purge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_failed", [False, True])
def test_only_what_is_settled_is_purged(outbox: Outbox, engine: Engine, include_failed: bool) -> None:
    for number, state in enumerate(STATES[::-1], 1):
        put(outbox, state, number)
    gone = {"succeeded", "failed"} if include_failed else {"succeeded"}
    before = dump(engine)
    assert outbox.purge(older_than_seconds=0, include_failed=include_failed, now=T + 1e6) == len(gone)
    assert dump(engine) == [row for row in before if row["status"] not in gone]


@pytest.mark.parametrize(("now", "gone"), [(T + 60 - 1e-6, 0), (T + 60, 1), (T + 1e6, 1)])
def test_age_counts_from_the_last_change(outbox: Outbox, now: float, gone: int) -> None:
    outbox.enqueue(note(), now=T - 1000)
    outbox.complete(claimed(outbox), response(), now=T)
    assert outbox.purge(older_than_seconds=60, now=now) == gone


def test_purge_in_portions_the_oldest_first(outbox: Outbox, engine: Engine) -> None:
    for number, at in enumerate([T + 2, T, T + 1], 1):
        complete(outbox, number, at)
    fail(outbox, 4, at=T - 5)
    assert outbox.purge(older_than_seconds=0, limit=2, now=T + 9) == 2
    assert by_status(engine, "succeeded") == ["note-1"]
    assert outbox.purge(older_than_seconds=0, limit=2, include_failed=True, now=T + 9) == 2
    assert row_count(engine) == 0


def test_purge_by_topic_or_of_all(engine: Engine) -> None:
    outbox = make_outbox(engine, "one", "two")
    for number, topic in enumerate(["one", "one", "two"], 1):
        fail(outbox, number, topic=topic)
    arguments = {"older_than_seconds": 0, "include_failed": True, "now": T}
    assert outbox.purge(topic="one", **arguments) == 2  # type: ignore[arg-type]
    assert outbox.purge(**arguments) == 1  # type: ignore[arg-type]


def test_with_a_row_goes_its_proof_of_idempotency(outbox: Outbox) -> None:
    complete(outbox, 1)
    assert outbox.purge(older_than_seconds=0, now=T) == 1
    with refused("dispatch.event_missing"):
        outbox.status("note-1")
    assert outbox.enqueue(note(1, "another"), now=T).status == "pending"


def test_a_purge_of_any_size_takes_as_many_statements(outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue_many(notes(301), now=T)
    claims = outbox.claim_batch(WORKER, limit=1000, now=T)
    outbox.settle([Success(c, response(c.event_id)) for c in claims], now=T)

    def counted(limit: int) -> int:
        with statements(engine) as seen:
            assert outbox.purge(older_than_seconds=0, limit=limit, now=T) == limit
        return len(seen)

    assert counted(1) == counted(300)


def test_each_is_purged_once(outbox: Outbox, engine: Engine) -> None:
    for number in range(1, 21):
        complete(outbox, number)
    counts = together(*[lambda: outbox.purge(older_than_seconds=0, limit=5, now=T)] * 5)
    assert sum(counts) + outbox.purge(older_than_seconds=0, now=T) == 20
    assert row_count(engine) == 0


def test_an_enqueue_that_meets_a_purge(outbox: Outbox, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is there when it is inserted and gone when it is looked up; then it is inserted after all."""
    complete(outbox, 1)
    look_up, purged = Outbox._existing, []

    def meanwhile(connection: Any, rows: Any) -> Any:
        wanted = list(rows)
        if wanted and not purged:
            purged.append(connection.execute(outbox_event.delete()).rowcount)
        return look_up(connection, wanted)

    monkeypatch.setattr(Outbox, "_existing", staticmethod(meanwhile))
    found = outbox.enqueue_many([note(2), note(1)], now=T + 1)
    assert [(status.event_id, status.status) for status in found] == [("note-2", "pending"), ("note-1", "pending")]
    assert purged == [2]
    assert by_status(engine, "pending") == ["note-1"]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *(("dispatch.retention_invalid", {"older_than_seconds": value})
          for value in (-1, math.nan, math.inf, True, "0", None)),
        *(("dispatch.limit_invalid", {"limit": value}) for value in (0, 1001, True, 1.0, None)),
        ("dispatch.topic_unknown", {"topic": "other"}),
        ("dispatch.time_invalid", {"now": math.nan}),
    ],
)  # fmt: skip
def test_bad_purges(apart: Outbox, code: str, arguments: dict[str, Any]) -> None:
    with refused(code):
        apart.purge(**{"older_than_seconds": 0, **arguments})


@pytest.mark.parametrize(
    "verb", [lambda o: o.redrive_all(limit=1000), lambda o: o.purge(older_than_seconds=0, limit=1000)]
)
def test_by_the_clock(outbox: Outbox, verb: Callable[[Outbox], int]) -> None:
    outbox.enqueue_many(notes(2))
    first, second = outbox.claim_batch(WORKER)
    outbox.complete(first, response())
    outbox.fail(second, "refused")
    assert verb(outbox) == 1
    assert len(ids(2)) == 2
