"""An idle worker: how soon it notices an event, and what it costs until then."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

import psutil

from benchmarks.children import child, stand_by
from benchmarks.databases import Databases, engine
from benchmarks.events import event
from benchmarks.harness import Bench, Scenario, at_most
from outbox import Outbox
from outbox.contracts.cms import CMS_CHANGE


def _latencies(box: Outbox, arrivals: Connection, count: int) -> list[float]:
    """Milliseconds from the end of a commit to the request's arrival at the destination."""
    found = []
    for number in range(1, count + 1):
        time.sleep(0.1 + random.random() / 10)  # long enough to be idle again, and not in step with any poll
        with box.engine.connect() as connection:
            box.enqueue(event(number), connection=connection)
            connection.commit()
            committed = time.monotonic()
        _, arrived = arrivals.recv()
        found.append(max(0.0, arrived - committed) * 1e3)
    return found


def _idle(bench: Bench, databases: Databases) -> None:
    for wake_ups in (True, False):
        with databases.fresh() as url, child(stand_by, url, wake_ups) as (arrivals, process):
            assert arrivals.recv() == "ready"
            assert process.pid is not None
            watched = psutil.Process(process.pid)
            time.sleep(3)  # its polling has backed off by then
            cpu = [_share(watched, bench.size(5, 2)) for _ in range(bench.size(3, 2))]
            own = engine(url)
            waits = _latencies(Outbox(own, contracts=(CMS_CHANGE,)), arrivals, bench.size(60, 12))
            own.dispose()
            process.terminate()
        _report(bench, sorted(waits), cpu, wake_ups=wake_ups)


def _report(bench: Bench, waits: list[float], cpu: list[float], *, wake_ups: bool) -> None:
    how = "wake-ups on" if wake_ups else "polling only"
    slow = waits[min(len(waits) - 1, int(len(waits) * 0.95))]
    budget = at_most(10) if wake_ups else None
    bench.value(f"idle, {how}: commit to arrival", waits, unit="ms", budget=budget, detail=f"p95 {slow:.3g} ms")
    bench.value(f"idle, {how}: CPU", cpu, unit="% of a core", budget=at_most(1))


def _share(process: psutil.Process, seconds: float) -> float:
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return float(used / (time.monotonic() - began) * 100)


IDLE = Scenario("idle", "wake-up latency and CPU of an idle worker", _idle)
