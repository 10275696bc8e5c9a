"""What no verb may accept: each case with the one code it is refused with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection

from outbox import Claim, Failure, Outbox, Success

Call = Callable[..., Any]


class Attempt:
    """An illegal call: ``call(outbox, claim, connection without a transaction, now)`` is refused with ``code``."""

    def __init__(self, code: str, words: str, call: Call, needs_claim: bool = False) -> None:
        self.code, self.words, self.call, self.needs_claim = code, words, call, needs_claim

    def __repr__(self) -> str:
        return f"<{self.words}>"


class _Poor:
    """A destination with something missing."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


Poor: Any = _Poor


EVENT: Final = {"id": "new", "n": 0}
BAD_TIMES: Final[tuple[Any, ...]] = (True, -1, -0.5, math.nan, math.inf, -math.inf, "1", [], 10**400)
BAD_TOPICS: Final = (None, "gamma", "", 3, ["alpha"])
BAD_LEASES: Final = (0, -1, True, math.nan, math.inf, 86_400.5, "60", None)
BAD_LIMITS: Final = (0, -1, 1001, True, 1.0, "1", None)
BAD_EVENTS: Final[tuple[Any, ...]] = (
    None, 3, "new", [], {}, {"id": "new"}, {"id": "a b", "n": 0}, {"id": "", "n": 0}, {"id": 3, "n": 0},
    {"id": "x" * 257, "n": 0}, {"id": "new", "n": 0.5}, {"id": "new", "n": math.nan}, {"id": "\ud800", "n": 0},
    {"id": "new", "n": 10**5000}, {"id": "new", "n": {}}, {"id": "new", 3: 0},
)  # fmt: skip
BAD_IDS: Final = (None, 3, "", "a b", "é", "x" * 257, "e1\n", b"e1")
BAD_WORKERS: Final = (None, 3, "", "a b", "x" * 129, "w\n", b"w")
BAD_CODES: Final = (None, 3, "", "Network", "a b", "x" * 129, "a\n", "1a")
BAD_HASHES: Final = (3, "", "d" * 63, "D" * 64, "g" * 64, "d" * 64 + "\n", b"d" * 64)
BAD_HINTS: Final = (-1, True, math.nan, math.inf, "1")
BAD_AGES: Final = (None, -1, True, math.nan, math.inf, "1")
FORGERIES: Final = (
    {"attempt": 0}, {"attempt": True}, {"attempt": 1.0}, {"attempt": 21, "max_attempts": 21}, {"max_attempts": 0},
    {"id": "1"}, {"topic": ""}, {"event_id": "a b"}, {"lease_owner": None}, {"lease_token": ""},
    {"lease_expires_at": math.nan}, {"lease_expires_at": None}, {"payload": None}, {"payload": "{}"},
    {"payload": "\ud800"}, {"payload_sha256": "0" * 64}, {"payload_sha256": None},
)  # fmt: skip


def _times() -> Iterator[Attempt]:
    verbs: dict[str, Callable[[Outbox, Claim, Any], Any]] = {
        "enqueue": lambda o, c, now: o.enqueue(EVENT, topic="alpha", now=now),
        "enqueue_many": lambda o, c, now: o.enqueue_many([EVENT], topic="alpha", now=now),
        "claim": lambda o, c, now: o.claim("w", topic="alpha", now=now),
        "claim_batch": lambda o, c, now: o.claim_batch("w", topic="alpha", now=now),
        "complete": lambda o, c, now: o.complete(c, {"echo": c.event_id}, now=now),
        "retry": lambda o, c, now: o.retry(c, "a", now=now),
        "fail": lambda o, c, now: o.fail(c, "a", now=now),
        "settle": lambda o, c, now: o.settle([Failure(c, "a")], now=now),
        "renew": lambda o, c, now: o.renew([c], now=now),
        "release": lambda o, c, now: o.release([c], now=now),
        "run_once": lambda o, c, now: o.run_once(Poor(timeout=1, deliver=print), "w", topic="alpha", now=now),
        "status": lambda o, c, now: o.status("e1", topic="alpha", now=now),
        "ready": lambda o, c, now: o.ready(topic="alpha", now=now),
        "health": lambda o, c, now: o.health(now=now),
        "redrive": lambda o, c, now: o.redrive("e1", topic="alpha", now=now),
        "redrive_all": lambda o, c, now: o.redrive_all(topic="alpha", now=now),
        "purge": lambda o, c, now: o.purge(older_than_seconds=1, now=now),
    }
    with_claim = ("complete", "retry", "fail", "settle", "renew", "release")
    for verb, call in verbs.items():
        for bad in BAD_TIMES:
            yield Attempt(
                "dispatch.time_invalid", f"{verb} at {_word(bad)}",
                partial(_at, call, bad), verb in with_claim,
            )  # fmt: skip


def _topics() -> Iterator[Attempt]:
    yield from _each("dispatch.topic_unknown", BAD_TOPICS, {
        "enqueue": lambda o, c, _, now, bad: o.enqueue(EVENT, topic=bad, now=now),
        "enqueue_many": lambda o, c, _, now, bad: o.enqueue_many([], topic=bad, now=now),
        "claim": lambda o, c, _, now, bad: o.claim("w", topic=bad, now=now),
        "claim_batch": lambda o, c, _, now, bad: o.claim_batch("w", topic=bad, now=now),
        "run_once": lambda o, c, _, now, bad: o.run_once(Poor(timeout=1, deliver=print), "w", topic=bad, now=now),
        "status": lambda o, c, _, now, bad: o.status("e1", topic=bad, now=now),
        "ready": lambda o, c, _, now, bad: o.ready(topic=bad, now=now),
        "redrive": lambda o, c, _, now, bad: o.redrive("e1", topic=bad, now=now),
        "redrive_all": lambda o, c, _, now, bad: o.redrive_all(topic=bad, now=now),
    })  # fmt: skip
    yield from _each("dispatch.topic_unknown", [bad for bad in BAD_TOPICS if bad is not None], {
        "purge": lambda o, c, _, now, bad: o.purge(older_than_seconds=1, topic=bad, now=now),
    })  # fmt: skip


def _enqueues() -> Iterator[Attempt]:
    yield from _each("dispatch.change_invalid", BAD_EVENTS, {
        "enqueue": lambda o, c, _, now, bad: o.enqueue(bad, topic="alpha", now=now),
        "enqueue_many": lambda o, c, _, now, bad: o.enqueue_many([EVENT, bad], topic="alpha", now=now),
    })  # fmt: skip
    yield from _each("dispatch.max_attempts_invalid", (None, 0, -1, 21, True, 1.0, "5"), {
        "enqueue": lambda o, c, _, now, bad: o.enqueue(EVENT, topic="alpha", max_attempts=bad, now=now),
        "enqueue_many": lambda o, c, _, now, bad: o.enqueue_many([], topic="alpha", max_attempts=bad, now=now),
    })  # fmt: skip
    yield from _each("dispatch.connection_invalid", (3, "connection", []), {
        "enqueue": lambda o, c, _, now, bad: o.enqueue(EVENT, topic="alpha", connection=bad, now=now),
    })  # fmt: skip
    yield Attempt(
        "dispatch.connection_invalid", "enqueue on the engine",
        lambda o, c, _, now: o.enqueue(EVENT, topic="alpha", connection=o.engine, now=now),
    )  # fmt: skip
    yield Attempt("dispatch.connection_invalid", "enqueue on a closed connection", _on_closed)
    yield Attempt("dispatch.transaction_required", "enqueue in autocommit", _in_autocommit)


def _on_closed(outbox: Outbox, claim: Any, connection: Connection, now: float) -> Any:
    connection.close()
    return outbox.enqueue(EVENT, topic="alpha", connection=connection, now=now)


def _in_autocommit(outbox: Outbox, claim: Any, connection: Connection, now: float) -> Any:
    connection = connection.execution_options(isolation_level="AUTOCOMMIT")
    return outbox.enqueue(EVENT, topic="alpha", connection=connection, now=now)


def _claims() -> Iterator[Attempt]:
    yield from _each("dispatch.worker_invalid", BAD_WORKERS, {
        "claim": lambda o, c, _, now, bad: o.claim(bad, topic="alpha", now=now),
        "claim_batch": lambda o, c, _, now, bad: o.claim_batch(bad, topic="alpha", now=now),
        "run_once": lambda o, c, _, now, bad: o.run_once(Poor(timeout=1, deliver=print), bad, topic="alpha", now=now),
    })  # fmt: skip
    yield from _each("dispatch.lease_invalid", BAD_LEASES, {
        "claim": lambda o, c, _, now, bad: o.claim("w", topic="alpha", lease_seconds=bad, now=now),
        "claim_batch": lambda o, c, _, now, bad: o.claim_batch("w", topic="alpha", lease_seconds=bad, now=now),
        "run_once": lambda o, c, _, now, bad: o.run_once(
            Poor(timeout=1, deliver=print), "w", topic="alpha", lease_seconds=bad, now=now
        ),
    })  # fmt: skip
    yield from _each("dispatch.lease_invalid", BAD_LEASES, {
        "renew": lambda o, c, _, now, bad: o.renew([c], lease_seconds=bad, now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.limit_invalid", BAD_LIMITS, {
        "claim_batch": lambda o, c, _, now, bad: o.claim_batch("w", topic="alpha", limit=bad, now=now),
        "redrive_all": lambda o, c, _, now, bad: o.redrive_all(topic="alpha", limit=bad, now=now),
        "purge": lambda o, c, _, now, bad: o.purge(older_than_seconds=1, limit=bad, now=now),
    })  # fmt: skip


def _settles() -> Iterator[Attempt]:
    verbs: dict[str, Callable[[Outbox, Any, float], Any]] = {
        "complete": lambda o, c, now: o.complete(c, {"echo": "e1"}, now=now),
        "retry": lambda o, c, now: o.retry(c, "a", now=now),
        "fail": lambda o, c, now: o.fail(c, "a", now=now),
        "settle a success": lambda o, c, now: o.settle([Success(c, {})], now=now),
        "settle a failure": lambda o, c, now: o.settle([Failure(c, "a")], now=now),
        "renew": lambda o, c, now: o.renew([c], now=now),
        "release": lambda o, c, now: o.release([c], now=now),
    }
    for verb, call in verbs.items():
        for bad in (None, 3, "claim", {}, object()):
            yield Attempt(
                "dispatch.claim_invalid", f"{verb} {_word(bad)}",
                partial(_of, call, bad),
            )  # fmt: skip
        for forgery in FORGERIES:
            yield Attempt(
                "dispatch.claim_invalid", f"{verb} a claim with {sorted(forgery)}",
                partial(_forged, call, forgery), True,
            )  # fmt: skip
    yield from _each("dispatch.claim_invalid", (None, 3, "result", []), {
        "settle": lambda o, c, _, now, bad: o.settle([bad], now=now),
    })  # fmt: skip
    # One illegal line keeps all others from being recorded.
    yield from _each("dispatch.claim_invalid", (None, 3), {
        "settle after a good one": lambda o, c, _, now, bad: o.settle([Failure(c, "a"), bad], now=now),
        "release after a good one": lambda o, c, _, now, bad: o.release([c, bad], now=now),
        "renew after a good one": lambda o, c, _, now, bad: o.renew([c, bad], now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.response_invalid", (None, 3, [], {}, {"echo": "x"}, {"echo": math.nan}), {
        "complete": lambda o, c, _, now, bad: o.complete(c, bad, now=now),
        "complete with more": lambda o, c, _, now, bad: o.complete(c, {"echo": c.event_id, "more": bad}, now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.response_invalid", (math.nan, "\ud800", {1}, {3: 4}, 10**5000), {
        "complete with a note": lambda o, c, _, now, bad: o.complete(c, {"echo": c.event_id, "note": bad}, now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _errors()


def _errors() -> Iterator[Attempt]:
    yield from _each("dispatch.error_invalid", BAD_CODES, {
        "retry": lambda o, c, _, now, bad: o.retry(c, bad, now=now),
        "fail": lambda o, c, _, now, bad: o.fail(c, bad, now=now),
        "settle": lambda o, c, _, now, bad: o.settle([Success(c, {"echo": c.event_id}), Failure(c, bad)], now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.error_invalid", BAD_HASHES, {
        "retry": lambda o, c, _, now, bad: o.retry(c, "a", detail_hash=bad, now=now),
        "fail": lambda o, c, _, now, bad: o.fail(c, "a", detail_hash=bad, now=now),
        "settle": lambda o, c, _, now, bad: o.settle([Failure(c, "a", detail_hash=bad)], now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.error_invalid", BAD_HINTS, {
        "retry": lambda o, c, _, now, bad: o.retry(c, "a", retry_after=bad, now=now),
        "settle": lambda o, c, _, now, bad: o.settle([Failure(c, "a", retry_after=bad)], now=now),
    }, needs_claim=True)  # fmt: skip
    yield from _each("dispatch.error_invalid", [bad for bad in BAD_CODES if bad is not None], {
        "redrive_all": lambda o, c, _, now, bad: o.redrive_all(topic="alpha", error_code=bad, now=now),
    })  # fmt: skip


def _operations() -> Iterator[Attempt]:
    yield from _each("dispatch.event_invalid", BAD_IDS, {
        "status": lambda o, c, _, now, bad: o.status(bad, topic="alpha", now=now),
        "redrive": lambda o, c, _, now, bad: o.redrive(bad, topic="alpha", now=now),
    })  # fmt: skip
    yield from _each("dispatch.event_missing", ("nobody", "E1", "e1:"), {
        "status": lambda o, c, _, now, bad: o.status(bad, topic="alpha", now=now),
    })  # fmt: skip
    yield from _each("dispatch.retention_invalid", BAD_AGES, {
        "purge": lambda o, c, _, now, bad: o.purge(older_than_seconds=bad, now=now),
    })  # fmt: skip
    poor = (None, object(), Poor(timeout=1), Poor(deliver=print), Poor(timeout=1, deliver=3))
    timeouts = (None, 0, -1, True, math.nan, math.inf, "1")
    yield from _each("dispatch.client_invalid", (*poor, *(Poor(timeout=bad, deliver=print) for bad in timeouts)), {
        "run_once": lambda o, c, _, now, bad: o.run_once(bad, "w", topic="alpha", now=now),
    })  # fmt: skip
    yield from _each("dispatch.lease_too_short", (600, 600.5, 1e9), {
        "run_once": lambda o, c, _, now, bad: o.run_once(Poor(timeout=bad, deliver=print), "w", topic="alpha", now=now),
    })  # fmt: skip


def _each(
    code: str, bads: Iterable[Any], verbs: dict[str, Callable[..., Any]], *, needs_claim: bool = False
) -> Iterator[Attempt]:
    for verb, call in verbs.items():
        for bad in bads:
            yield Attempt(
                code, f"{verb} with {_word(bad)}",
                partial(call, bad=bad), needs_claim,
            )  # fmt: skip


def _at(call: Call, bad: Any, outbox: Outbox, claim: Any, connection: Connection, now: float) -> Any:
    return call(outbox, claim, bad)


def _of(call: Call, bad: Any, outbox: Outbox, claim: Any, connection: Connection, now: float) -> Any:
    return call(outbox, bad, now)


def _forged(
    call: Call, forgery: dict[str, Any], outbox: Outbox, claim: Claim, connection: Connection, now: float
) -> Any:
    return call(outbox, replace(claim, **forgery), now)


def _word(value: object) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # an integer too long to print
        return f"an endless {type(value).__name__}"


ILLEGAL: Final[tuple[Attempt, ...]] = (
    *_times(), *_topics(), *_enqueues(), *_claims(), *_settles(), *_operations(),
)  # fmt: skip
