"""What the two sides say in the end, and whether it is the same. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_NAMED: Final = 3


class Row(NamedTuple):
    """An event as the database has it."""

    status: str
    payload_sha256: str
    receipt: Mapping[str, Any] | None
    error_code: str | None


@dataclass(frozen=True)
class DatabaseSide:
    """What the host meant to say, and what its database holds."""

    committed: frozenset[str]
    rolled_back: frozenset[str]
    events: Mapping[str, Row]
    articles: frozenset[str]


@dataclass(frozen=True)
class ServerSide:
    """The server's ledger."""

    events: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, ledger: Mapping[str, Any]) -> ServerSide:
        counts = {name: value for name, value in ledger.items() if isinstance(value, int)}
        return cls(ledger["events"], counts)

    @property
    def accepted(self) -> frozenset[str]:
        return frozenset(name for name, entry in self.events.items() if entry["accepted"])

    @property
    def refused(self) -> frozenset[str]:
        return frozenset(name for name, entry in self.events.items() if entry["refused"])


@dataclass(frozen=True)
class Report:
    """The comparison.

    Attributes:
        numbers: what was counted, by name, in the order to be shown.
        disagreements: one sentence each; none when the two sides agree.
    """

    numbers: Mapping[str, str]
    disagreements: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.disagreements


def compare(database: DatabaseSide, server: ServerSide, *, killed: int) -> Report:
    """Hold the ledger against the database, event by event."""
    return Report(_numbers(database, server, killed), tuple(_disagreements(database, server, killed)))


def _numbers(database: DatabaseSide, server: ServerSide, killed: int) -> dict[str, str]:
    delivered = _with_status(database, "succeeded")
    equal = sum(_receipt_equal(database, server, name) for name in delivered)
    counts = server.counts
    return {
        "changes committed": str(len(database.committed)),
        "changes rolled back": str(len(database.rolled_back)),
        "events delivered": f"{len(delivered)} (server: {len(server.accepted)})",
        "events refused for good": f"{len(_with_status(database, 'failed'))} (server: {len(server.refused)})",
        "requests received": str(counts["requests"]),
        "answered 503": str(counts["unavailable"]),
        "accepted, connection dropped": str(counts["dropped"]),
        "accepted, sender killed": str(counts["cut_off"]),
        "answered slowly": str(counts["slow"]),
        "replayed and deduplicated": str(sum(entry["replays"] for entry in server.events.values())),
        "workers killed": str(killed),
        "receipts equal": f"{equal} of {len(delivered)}",
        "lost": str(len(lost(database, server))),
        "rolled-back events sent": str(len(rolled_back_sent(database, server))),
    }


def lost(database: DatabaseSide, server: ServerSide) -> frozenset[str]:
    """What was committed and has not reached the server's ledger."""
    return database.committed - server.accepted - server.refused


def rolled_back_sent(database: DatabaseSide, server: ServerSide) -> frozenset[str]:
    """What never happened and was told all the same."""
    return frozenset(server.events) & database.rolled_back


def _disagreements(database: DatabaseSide, server: ServerSide, killed: int) -> Iterator[str]:
    delivered, failed = _with_status(database, "succeeded"), _with_status(database, "failed")
    counts = server.counts
    faults: dict[str, Iterable[str]] = {
        "committed, but not in the ledger": lost(database, server),
        "rolled back, but sent": rolled_back_sent(database, server),
        "committed, but not in the outbox": database.committed - database.events.keys(),
        "in the outbox, but not committed": database.events.keys() - database.committed,
        "an article without its event": database.articles - database.events.keys(),
        "an event without its article": database.events.keys() - database.articles,
        "not settled in the end": database.events.keys() - delivered - failed,
        "delivered, says the database only": delivered - server.accepted,
        "delivered, says the ledger only": server.accepted - delivered,
        "refused, says the database only": failed - server.refused,
        "refused, says the ledger only": server.refused - failed,
        "taken up twice by the server": [name for name, entry in server.events.items() if entry["accepted"] > 1],
        "received with another content": [
            name for name in database.events.keys() & server.events.keys() if not _content_equal(database, server, name)
        ],
        "receipts differ": [name for name in delivered if not _receipt_equal(database, server, name)],
    }
    yield from (f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
    for fault in ("bad_signatures", "altered"):
        if counts[fault]:
            yield f"requests with {fault.replace('_', ' ')}: {counts[fault]}"
    if not (killed and counts["cut_off"]):
        yield "no worker was killed in mid-delivery"


def _with_status(database: DatabaseSide, status: str) -> frozenset[str]:
    return frozenset(name for name, row in database.events.items() if row.status == status)


def _content_equal(database: DatabaseSide, server: ServerSide, name: str) -> bool:
    return bool(database.events[name].payload_sha256 == server.events[name]["payload_sha256"])


def _receipt_equal(database: DatabaseSide, server: ServerSide, name: str) -> bool:
    entry = server.events.get(name)
    return entry is not None and database.events[name].receipt == entry["receipt"]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more" if more > 0 else "")
