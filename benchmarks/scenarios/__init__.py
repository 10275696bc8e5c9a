"""What is measured, in the order it is reported."""

from __future__ import annotations

from benchmarks.harness import Scenario
from benchmarks.scenarios import backlog, drain, enqueue, hosts, http, idle, memory, operate, processes, snapshot, verbs

SCENARIOS: tuple[Scenario, ...] = (
    enqueue.ENQUEUE,
    enqueue.ENQUEUE_MANY,
    verbs.CLAIM_SETTLE,
    drain.DRAIN,
    http.HTTP,
    backlog.BACKLOG,
    operate.HEALTH,
    snapshot.SNAPSHOT,
    idle.IDLE,
    memory.MEMORY,
    hosts.HOSTS,
    processes.PROCESSES,
)
