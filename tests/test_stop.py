"""``Worker.stop`` from a signal handler, which may run between any two lines of the thread that it interrupts."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from sqlalchemy import Engine

from outbox import Outbox, Worker
from outbox import worker as worker_module
from tests.plain import Plain, Scripted, fill


def test_stopping_from_a_signal_handler_never_waits_for_what_it_interrupted(sqlite_engine: Engine) -> None:
    """A lock that the interrupted code holds would be waited for by the handler, and so for ever."""
    outbox = Outbox(sqlite_engine, [Plain()])
    fill(outbox, 3)
    worker = Worker(outbox, {"test.plain": Scripted()}, concurrency=1, wake_ups=False)
    interrupted: set[tuple[str, int]] = set()
    handling = False

    def at_every_line(frame: FrameType, kind: str, argument: Any) -> Any:
        nonlocal handling
        if frame.f_code.co_filename not in (worker_module.__file__, threading.__file__):
            return None
        if kind == "line" and not handling:
            handling = True
            interrupted.add((frame.f_code.co_name, frame.f_lineno))
            worker.stop()
            handling = False
        return at_every_line

    original = worker._wind_down

    def wind_down() -> None:
        sys.settrace(at_every_line)
        try:
            original()
        finally:
            sys.settrace(None)

    worker._wind_down = wind_down  # type: ignore[method-assign]
    assert worker.run(until_idle=True).succeeded == 3
    assert "_wind_down" in {name for name, _ in interrupted}
    assert len(interrupted) > 5
