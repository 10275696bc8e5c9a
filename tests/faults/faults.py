"""The faults. Each is let loose on a lab and waits for what it can observe; the lab gives the verdict."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import make_url, select, text

from outbox import DatabaseError
from outbox.schema import outbox_event
from outbox.testing import Manner
from outbox.testing.ledger import ACCEPT, BREAK_OFF, DROP, DROP_UNREAD, FLOOD, HANG, RESET, TRICKLE, Arrival, late
from tests.cms_events import event
from tests.faults.host_main import HostSettings, metadata
from tests.faults.host_main import article as article_table
from tests.faults.host_main import main as host_main
from tests.faults.laboratory import Lab, PostgresPlace, WorkerProcess, manner_of, until
from tests.faults.proxy import Direction, Passage, Proxy, Rule, Verdict
from tests.misbehaving import refused_port

SQLITE, POSTGRESQL = ("sqlite",), ("postgresql",)
BOTH = SQLITE + POSTGRESQL


@dataclass(frozen=True)
class Fault:
    """One way in which things break.

    Attributes:
        events: how many events it takes in the short form; more are taken when more are asked for.
        most: how many it takes at most, whatever is asked for; most that hold things up are slow.
        scale: how many times what is asked for it takes.
        short: the databases of the short form. What happens between worker and receiver is the same on both.
    """

    name: str
    about: str
    databases: tuple[str, ...]
    short: tuple[str, ...]
    events: int
    most: int
    scale: int
    let_loose: Callable[[Lab], None]


FAULTS: dict[str, Fault] = {}


def fault(
    *databases: str, events: int = 60, most: int = 1_000_000, scale: int = 1, short: tuple[str, ...] | None = None
) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    def register(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        about = (function.__doc__ or "").partition("\n")[0]
        FAULTS[function.__name__] = Fault(
            function.__name__, about, databases, short or databases, events, most, scale, function
        )
        return function

    return register


def spread(lab: Lab, disturb: Callable[[], None], times: int) -> None:
    """Disturb so many times while a host enqueues, each after a random number of requests."""
    with lab.enqueuing(lab.events):
        for _ in range(times):
            lab.check_time()
            lab.wait_for_requests(lab.choose.randint(1, max(1, lab.events // (times + 1))))
            time.sleep(lab.choose.random() * 0.03)  # so that it strikes claims and settles as well
            disturb()
            lab.disturbed()


# -- processes that end or stand still --------------------------------------------------------------------------------


@fault(*BOTH, events=200, scale=10)
def sigkill(lab: Lab) -> None:
    """Workers killed with SIGKILL at random moments, others started in their place."""
    alive = [lab.start() for _ in range(3)]

    def kill() -> None:
        victim = alive.pop(lab.choose.randrange(len(alive)))
        victim.kill()
        alive.append(lab.start())

    spread(lab, kill, max(6, lab.events // 40))


@fault(*BOTH, events=40, most=400)
def sigstop(lab: Lab) -> None:
    """A worker paused with SIGSTOP beyond its lease and resumed: its late results must lose, and be reported."""
    lab.server.behave(manner_of(lambda _: late(0.3)))
    paused = lab.start(lease=1.0, timeout=0.8)
    lab.enqueue(lab.events)
    for _ in range(max(1, lab.events // 200)):
        _pause(lab, paused)
        lab.disturbed()
    lab.server.behave(manner_of())


def _pause(lab: Lab, paused: WorkerProcess) -> None:
    """Stop a worker that has requests in flight, and let it go on when others have its events."""
    reported = _late_results(paused)
    until(lambda: bool(lab.server.ledger.held), "a request in flight")
    paused.send(signal.SIGSTOP)
    holding = _held_by(lab, paused.settings.name)
    other = lab.start()
    until(lambda: not _held_by(lab, paused.settings.name) & holding, "others have taken over")
    paused.send(signal.SIGCONT)
    until(lambda: _late_results(paused) > reported, "the late results are reported")
    problem = other.stop()  # so that the next request in flight is the other one's again
    if problem is not None:
        lab.problems.append(problem)


def _late_results(worker: WorkerProcess) -> int:
    return sum(not line.get("won", True) for line in worker.lines())


def _held_by(lab: Lab, worker: str) -> set[str]:
    with lab.engine.connect() as connection:
        query = select(outbox_event.c.lease_token).where(outbox_event.c.lease_owner == worker)
        return set(connection.scalars(query))


@fault(*BOTH, events=20, most=200)
def host_killed(lab: Lab) -> None:
    """Host processes killed in the middle of their transactions; what was not committed is never sent."""
    metadata.create_all(lab.engine)
    lab.start()
    reports: list[Path] = []
    made = 0
    while made < lab.events:
        lab.check_time()
        reports.append(_killed_host(lab, f"host-{len(reports) + 1}"))
        made += reports[-1].read_text().count("committed")
        lab.disturbed()
    _believe(lab, reports)


def _killed_host(lab: Lab, name: str) -> Path:
    """The report of a host that was killed after some transactions, in whatever it was doing."""
    report = lab.directory / name
    host = lab.process(host_main, HostSettings(lab.url, name, str(report), 1000, lab.choose.randrange(2**32)))
    lines = lab.choose.randint(3, 12)
    until(lambda: report.exists() and report.read_bytes().count(b"\n") >= lines, "transactions of the host")
    time.sleep(lab.choose.random() * 0.01)
    host.kill()
    host.join()
    return report


def _believe(lab: Lab, reports: list[Path]) -> None:
    """Take over what the hosts said. What one was killed over was committed exactly if its own rows were."""
    with lab.engine.connect() as connection:
        articles = set(connection.scalars(select(article_table.c.event_id)))
    said: dict[str, set[str]] = {"begin": set(), "doomed": set(), "committed": set(), "rolled-back": set()}
    for report in reports:
        for line in report.read_text().splitlines():
            word, *ids = line.split()
            said[word].update(ids)
    unknown = said["begin"] - said["committed"]
    lab.committed.update(dict.fromkeys(said["committed"] | (unknown & articles), "succeeded"))
    lab.rolled_back.update(said["doomed"] | (unknown - articles))


# -- the database ---------------------------------------------------------------------------------------------------


@fault(*POSTGRESQL, events=120)
def database_crash(lab: Lab) -> None:
    """PostgreSQL stopped in immediate mode, as in a crash, and started again, in mid-run."""
    server = cast(PostgresPlace, lab.place).server
    for _ in range(2):
        lab.start()
    spread(lab, lambda: server.restart("immediate"), max(2, lab.events // 60))


@fault(*POSTGRESQL, events=40, most=200)
def stopped_without_database(lab: Lab) -> None:
    """Workers told to stop while PostgreSQL is down: they end in order, and others deliver what they left."""
    server = cast(PostgresPlace, lab.place).server
    lab.server.behave(manner_of(lambda _: late(0.1)))
    stopped = [lab.start(grace=2.0) for _ in range(2)]
    lab.enqueue(lab.events)
    lab.wait_for_requests(5)
    server.stop("immediate")
    try:
        lab.problems.extend(filter(None, [worker.stop() for worker in stopped]))
    finally:
        server.start()
    lab.disturbed()
    lab.server.behave(manner_of())
    lab.start()


@fault(*POSTGRESQL, events=60)
def silent_connection(lab: Lab) -> None:
    """Database connections that go silent without closing: a proxy stops forwarding, and acknowledges for ever."""
    proxy = _database_proxy(lab)
    lab.start(url=f"{_through(lab, proxy)}?connect_timeout=2", answer_seconds=1.5)
    spread(lab, lambda: _silence(proxy), max(1, lab.events // 100))


def _silence(proxy: Proxy) -> None:
    until(lambda: proxy.silence() > 0, "connections to silence")


@fault(*POSTGRESQL, events=80)
def settle_terminated(lab: Lab) -> None:
    """Backends terminated while they settle; after that nothing stays leased for longer than its lease."""
    for _ in range(2):
        lab.start()
    terminate = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE application_name = 'outbox' AND datname = current_database() AND pid <> pg_backend_pid()"
    )

    def strike() -> None:
        def struck() -> bool:
            with lab.engine.connect() as connection:
                return bool(connection.scalar(terminate))

        until(struck, "backends to terminate")

    spread(lab, strike, max(4, lab.events // 100))
    _nothing_leased_for_longer(lab)


@fault(*POSTGRESQL, events=80)
def cut_in_commit(lab: Lab) -> None:
    """Database connections cut in COMMIT, before it arrives or before its answer does."""
    proxy = _database_proxy(lab)
    choose = random.Random(lab.choose.random())

    def rule(passage: Passage, direction: Direction, data: bytes) -> Verdict:
        if direction == "down":
            return "pass"
        if b'"lease_token"' in data:  # the parameter of a settle
            passage.note = "settling"
        if b"COMMIT" in data:
            settling, passage.note = passage.note, ""
            if choose.random() < (0.4 if settling else 0.05):
                return choose.choice(("cut", "pass_and_cut"))
        return "pass"

    lab.start(url=_through(lab, proxy))
    proxy.behave(rule)
    with lab.enqueuing(lab.events):
        until(lambda: proxy.cuts >= max(4, lab.events // 100) or lab.finished(), "commits to be cut")
    proxy.behave(None)
    lab.disturbed(proxy.cuts)
    _nothing_leased_for_longer(lab)


def _nothing_leased_for_longer(lab: Lab) -> None:
    """While a worker lives, a lease that has ended is recovered at once: within its next look, at the latest."""
    until(lambda: lab.outbox.health().expired_leases == 0, "expired leases recovered", 5)


def _database_proxy(lab: Lab) -> Proxy:
    port = make_url(lab.url).port
    assert port is not None
    return cast(Proxy, lab.enter(Proxy(port)))


def _through(lab: Lab, proxy: Proxy) -> str:
    return make_url(lab.url).set(port=proxy.port).render_as_string(hide_password=False)


@fault(*SQLITE, events=60)
def write_lock(lab: Lab) -> None:
    """Another process holds SQLite's write lock for longer than anybody waits for it."""
    lab.start(url=f"{lab.url}?timeout=0.2")
    lab.enqueue(lab.events)
    lab.wait_for_requests(5)
    for _ in range(max(1, lab.events // 500)):
        with lab.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            until(lambda: _logged(lab, "dispatch.database_busy"), "the worker has given up waiting once", 20)
            connection.exec_driver_sql("ROLLBACK")
        lab.disturbed()


def _logged(lab: Lab, words: str) -> bool:
    return any(words in Path(worker.settings.log).read_text() for worker in lab.workers)


@fault(*SQLITE, events=60)
def full_disk(lab: Lab) -> None:
    """No room on SQLite's disk for a while: neither hosts nor workers can write, and nothing is half written."""
    lab.server.behave(manner_of(lambda _: late(0.02)))
    lab.enqueue(lab.events)
    worker = lab.start()
    lab.wait_for_requests(5)
    if lab.disk.is_mount():
        with _filled(lab):
            until(lambda: _logged(lab, "dispatch.database_unavailable"), "the worker has met the full disk", 20)
            _fail_to_enqueue(lab)
    else:  # it takes root to mount a small one; a limit on the worker's files comes near
        with _limited(worker):
            until(lambda: _logged(lab, "dispatch.database_unavailable"), "the worker has met its limit", 20)
    lab.disturbed()


def _fail_to_enqueue(lab: Lab) -> None:
    try:
        lab.outbox.enqueue(event(event_id="never"))
    except DatabaseError:
        lab.rolled_back.add("never")
    else:
        lab.problems.append("a host could enqueue on a full disk")


@contextmanager
def _limited(worker: WorkerProcess) -> Iterator[None]:
    """Let a worker's files grow no further than its log may."""
    before = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def _filled(lab: Lab) -> Iterator[None]:
    """Fill the file system that the lab's database is on, up to the last byte."""
    ballast = lab.disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = 1_048_576
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def small_disk(directory: Path, megabytes: int = 16) -> Iterator[None]:
    """A file system of its own on ``directory``, where this process may mount one (it takes root)."""
    directory.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"none", os.fsencode(directory), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0
    try:
        yield
    finally:
        if mounted:
            libc.umount2(os.fsencode(directory), 2)  # detached: gone when its last file is closed


@fault(*BOTH, events=60)
def clock_step(lab: Lab) -> None:
    """A worker's clock stepped by an hour: on PostgreSQL, whose own clock rules, nothing happens at all."""
    backwards = lab.place.name == "postgresql"
    ahead = lab.start(clock_offset=3600.0)
    behind = lab.start(clock_offset=-3600.0) if backwards else None
    lab.enqueue(lab.events // 2)
    lab.wait_for_requests(5)
    for worker in filter(None, (ahead, behind)):
        worker.send(signal.SIGUSR1)
        lab.disturbed()
    lab.enqueue(lab.events // 2)
    lab.wait_until_settled()
    if backwards and lab.server.ledger.replays:
        lab.problems.append("a host's clock made events be sent twice")


@fault(*BOTH, events=24, most=80)
def long_tail(lab: Lab) -> None:
    """A batch whose tail would outlive its lease: it is renewed or given back, and nothing is sent twice."""
    lab.server.behave(manner_of(lambda _: late(0.25)))
    lab.enqueue(lab.events)
    lab.start(lease=4.0, timeout=3.0, concurrency=2, batch=200)
    lab.wait_until_settled()
    lab.disturbed()
    if lab.server.ledger.replays:
        lab.problems.append("events were sent twice without need")


# -- the network and the receiver -------------------------------------------------------------------------------------


def _cut_http(lab: Lab, verdict_up: Verdict, verdict_down: Verdict) -> None:
    proxy = cast(Proxy, lab.enter(Proxy(lab.server.port)))
    choose = random.Random(lab.choose.random())

    def rule(passage: Passage, direction: Direction, data: bytes) -> Verdict:
        if direction == "up" and data.startswith(b"POST "):
            passage.note = "doomed" if choose.random() < 0.25 else ""
            return verdict_up if passage.note else "pass"
        return verdict_down if direction == "down" and passage.note else "pass"

    proxy.behave(cast(Rule, rule))
    lab.start(origin=f"http://127.0.0.1:{proxy.port}")
    with lab.enqueuing(lab.events):
        until(lambda: proxy.cuts >= lab.events // 10, "connections to be cut")
    lab.wait_until_settled()
    lab.disturbed(proxy.cuts)


@fault(*BOTH, short=SQLITE)
def cut_before_request(lab: Lab) -> None:
    """HTTP connections cut before the request arrives."""
    _cut_http(lab, "cut", "pass")


@fault(*BOTH)
def cut_after_request(lab: Lab) -> None:
    """HTTP connections cut after the request has arrived and before its answer has."""
    _cut_http(lab, "pass", "cut")


@fault(*BOTH, short=SQLITE)
def cut_in_response(lab: Lab) -> None:
    """HTTP connections cut in the middle of the response."""
    _cut_http(lab, "pass", "halve")


@fault(*BOTH, short=SQLITE)
def receiver_down(lab: Lab) -> None:
    """The receiver is not there for a while: connections are refused."""
    with refused_port() as port:
        lab.start(origin=f"http://127.0.0.1:{port}")
        lab.enqueue(lab.events)
        until(lambda: lab.counts()["retry_wait"] > 0, "attempts that failed")
    lab.enter(Proxy(lab.server.port, port))
    lab.disturbed()


def _misbehaving(lab: Lab, manner: Manner, **settings: Any) -> None:
    def treat(arrival: Arrival) -> Manner:
        return manner if arrival.number % 10 == 3 and arrival.request == 1 else ACCEPT

    lab.server.behave(manner_of(treat))
    lab.start(**settings)
    lab.enqueue(lab.events)
    lab.wait_until_settled()
    lab.disturbed(lab.server.ledger.manners.get(manner.name, 0))


@fault(*BOTH, most=400, short=SQLITE)
def receiver_hangs(lab: Lab) -> None:
    """The receiver takes events up and never answers."""
    _misbehaving(lab, HANG)


@fault(*BOTH, most=400, short=SQLITE)
def receiver_trickles(lab: Lab) -> None:
    """The receiver answers a byte at a time."""
    _misbehaving(lab, TRICKLE)


@fault(*BOTH, short=SQLITE)
def receiver_floods(lab: Lab) -> None:
    """The receiver's answer never ends."""
    _misbehaving(lab, FLOOD)


@fault(*BOTH, short=SQLITE)
def receiver_resets(lab: Lab) -> None:
    """The receiver resets, closes or breaks off in mid-answer."""
    manners = (RESET, DROP, DROP_UNREAD, BREAK_OFF)

    def treat(arrival: Arrival) -> Manner:
        return manners[arrival.number % 4] if arrival.number % 3 == 0 and arrival.request == 1 else ACCEPT

    lab.server.behave(manner_of(treat))
    lab.start()
    lab.enqueue(lab.events)
    lab.wait_until_settled()
    lab.disturbed(sum(lab.server.ledger.manners.get(manner.name, 0) for manner in manners))


@fault(*BOTH, events=20, most=60)
def receiver_late(lab: Lab) -> None:
    """The answer comes after the lease has expired, to a destination that overruns the timeout it declares."""

    def treat(arrival: Arrival) -> Manner:
        return late(6.0) if arrival.number % 10 == 3 and arrival.request == 1 else ACCEPT

    lab.server.behave(manner_of(treat))
    late_one = lab.start(timeout=20.0, declared_timeout=0.3, lease=0.6)
    lab.enqueue(lab.events)
    until(lambda: bool(lab.server.ledger.held), "a request that is held")
    lab.start()
    until(lambda: _late_results(late_one) > 0, "the late result is reported")
    lab.disturbed(lab.server.ledger.manners["late"])
