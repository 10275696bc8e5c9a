"""Drains of other queues and of ours, in alternation, each in a process of its own."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.children import child
from benchmarks.databases import Databases, outbox
from benchmarks.events import payload
from benchmarks.harness import Bench, Budget, Scenario, at_least, installed
from benchmarks.scenarios.drain import by_worker

_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Peer:
    """A queue to compare with.

    Attributes:
        adapter: its module and function in this package; None where there is none, for the reason given.
        jobs: how many jobs a round works off, in full and in a hurry.
    """

    package: str
    database: str
    adapter: str | None
    jobs: tuple[int, int]
    budget: Budget | None = None
    why_not: str = ""
    note: str = ""


_PEERS = (
    Peer("pgqueuer", "postgresql", "pgqueuer.drain", (10_000, 3_000), at_least(1.5)),
    Peer("procrastinate", "postgresql", "procrastinate.drain", (1_000, 300), at_least(20)),
    Peer("faststream-outbox", "postgresql", "faststream_outbox.drain", (5_000, 2_000)),
    Peer("awa-pg", "postgresql", "awa.drain", (10_000, 3_000)),
    Peer("huey", "sqlite", "huey.drain", (5_000, 1_000), at_least(3)),
    Peer("huey", "sqlite", "huey.drain_unsafely", (5_000, 1_000), note=", fsync off"),
    Peer("litequeue", "sqlite", "litequeue.drain", (5_000, 1_000), note=", synchronous NORMAL"),
    Peer(
        "honker", "sqlite", None, (0, 0),
        why_not="no adapter: its wheels need glibc 2.38 and its source crates.io, and neither was at hand",
    ),
)  # fmt: skip


def _work(pipe: Connection, adapter: str, url: str, payloads: Sequence[str]) -> None:
    module, _, function = adapter.partition(".")
    try:
        drain = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        pipe.send(drain(url, payloads))
    except Exception:  # noqa: BLE001 - whatever a peer raises is told, and measuring goes on
        pipe.send(traceback.format_exc(limit=-2))


def _ours(pipe: Connection, url: str, count: int) -> None:
    pipe.send(by_worker(outbox(url), count))


def _answer(pipe: Connection) -> float:
    """What the child measured.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    if not pipe.poll(_SECONDS):
        raise RuntimeError(f"no end within {_SECONDS} s")
    answer = pipe.recv()
    if isinstance(answer, float):
        return answer
    raise RuntimeError(answer)


def _by_peer(databases: Databases, adapter: str, payloads: Sequence[str]) -> float:
    with databases.fresh(migrated=False) as url, child(_work, adapter, url, payloads) as (pipe, _):
        return _answer(pipe)


def _by_us(databases: Databases, count: int) -> float:
    with databases.fresh() as url:
        databases.load(url, count)
        databases.settle_in(url)
        with child(_ours, url, count) as (pipe, _):
            return _answer(pipe)


def _peers(bench: Bench, databases: Databases) -> None:
    for peer in _PEERS:
        if peer.database == databases.name:
            reason = peer.why_not or ("not installed" if installed(peer.package) is None else "")
            if reason or peer.adapter is None:
                bench.not_measured(peer.package, reason)
            else:
                _compare(bench, databases, peer, peer.adapter)


def _compare(bench: Bench, databases: Databases, peer: Peer, adapter: str) -> None:
    payloads = [payload(number) for number in range(1, bench.size(*peer.jobs) + 1)]
    count = bench.size(10_000, 3_000)
    contenders = {
        "ours": lambda: _by_us(databases, count),
        "theirs": lambda: _by_peer(databases, adapter, payloads),
    }
    try:
        found = bench.alternate(contenders, bench.size(3, 2))
    except RuntimeError as error:
        bench.not_measured(peer.package, str(error).strip().splitlines()[-1])
        return
    name = f"{peer.package} {installed(peer.package)}{peer.note}"
    bench.ratio(
        f"worker drain / {name}", found["ours"], found["theirs"], unit="events/s", names=("ours", name),
        budget=peer.budget,
    )  # fmt: skip


PEERS = Scenario("peers", "drains of other queues beside ours (dependency group `bench`)", _peers)
