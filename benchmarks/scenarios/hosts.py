"""Eight hosts that commit events all at once, with wake-ups on and off."""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection

from benchmarks.children import child, host, stand_by
from benchmarks.databases import Databases
from benchmarks.harness import Bench, Scenario

_HOSTS = 8


def _together(url: str, seconds: float, first: int, *, wake_ups: bool) -> float:
    """Commits a second of all hosts, beside a worker that delivers what they enqueue."""
    with ExitStack() as stack:
        arrivals, process = stack.enter_context(child(stand_by, url, wake_ups))
        stack.callback(process.terminate)
        assert arrivals.recv() == "ready"
        threading.Thread(target=_ignore, args=(arrivals,), daemon=True).start()
        pipes = [
            stack.enter_context(child(host, url, first + number * 1_000_000, seconds))[0] for number in range(_HOSTS)
        ]
        for each in pipes:
            assert each.recv() == "ready"
        for each in pipes:
            each.send("go")
        return float(sum(each.recv() for each in pipes))


def _ignore(arrivals: Connection) -> None:
    """Read what the worker reports: a full pipe would stop it."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            arrivals.recv()


def _hosts(bench: Bench, databases: Databases) -> None:
    seconds, base = bench.size(4, 1), 0

    def measure(*, wake_ups: bool) -> float:
        nonlocal base
        base += _HOSTS * 1_000_000
        with databases.fresh() as url:
            return _together(url, seconds, base, wake_ups=wake_ups)

    found = bench.alternate(
        {"on": lambda: measure(wake_ups=True), "off": lambda: measure(wake_ups=False)}, bench.size(3, 2)
    )
    what = f"{_HOSTS} hosts enqueuing beside a worker: wake-ups on / off"
    bench.ratio(what, found["on"], found["off"], unit="commits/s", names=("on", "off"))


HOSTS = Scenario("hosts", "eight hosts enqueuing at once, with wake-ups on and off", _hosts)
