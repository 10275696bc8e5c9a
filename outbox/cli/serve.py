"""Runs a worker in the foreground: what it logs, and what signals do to it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from outbox.cli.output import console
from outbox.records import Settled
from outbox.worker import Worker, WorkerStats

logger = logging.getLogger("outbox.worker")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_COLOURS: Final = {logging.ERROR: "red", logging.WARNING: "yellow", logging.DEBUG: "bright_black"}


class Stopper:
    """Stops a worker, which need not be there yet when the word comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False
        self._worker: Worker | None = None

    def __call__(self) -> None:
        with self._lock:
            self._told = True
            if self._worker is not None:
                self._worker.stop()

    def attach(self, worker: Worker) -> None:
        with self._lock:
            self._worker = worker
            if self._told:
                worker.stop()


def run(worker: Worker, screen: Console, *, until_idle: bool) -> WorkerStats:
    """Run until told to stop, or until nothing is due any more; on a terminal, with its numbers on ``screen``."""
    logger.info("worker %s runs", worker.worker_id)
    with _live(worker, screen):
        stats = worker.run(until_idle=until_idle)
    logger.info("worker %s has stopped: %s", worker.worker_id, _numbers(stats))
    return stats


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT, and exit at once at the second.

    A thread of its own hears of signals through a pipe that the C handler writes to. So neither waits for what the main
    thread is doing, and ``stop`` may take locks, which a Python signal handler had better not.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    wakeup_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(heard, stop), name="outbox-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)  # which ends the thread
        thread.join(1)


def _listen(heard: int, stop: Callable[[], None]) -> None:
    told = False
    while numbers := os.read(heard, 64):
        for number in numbers:
            if number not in _SIGNALS:
                continue
            if told:
                os._exit(128 + number)
            told = True
            logger.info("%s: finishing what is under way; once more to exit at once", signal.Signals(number).name)
            stop()
    os.close(heard)


# -- logging --------------------------------------------------------------------------------------------------------


class _Lines(logging.Formatter):
    """One line each, whatever is in it: a time in UTC, the level and the message."""

    converter = staticmethod(time.gmtime)

    def __init__(self, *, coloured: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        record.exc_info = record.exc_text = record.stack_info = None  # a traceback could quote a payload
        line = " ".join(super().format(record).split("\n"))
        return click.style(line, fg=_COLOURS.get(record.levelno)) if self._coloured else line


class _Printer(logging.Handler):
    """Prints above whatever is live on the terminal."""

    def __init__(self, screen: Console) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._screen.print(Text.from_ansi(self.format(record)), soft_wrap=True)
        except (OSError, ValueError):  # a terminal that has gone is no reason to stop delivering
            return


@contextmanager
def logged(*, quiet: bool, verbose: bool) -> Iterator[Console]:
    """Log to standard error for a while, by way of the console that is returned."""
    screen = console(sys.stderr)
    coloured = screen.is_terminal and not screen.no_color
    handler: logging.Handler = _Printer(screen) if screen.is_terminal else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(coloured=coloured))
    root, before, raising = logging.getLogger("outbox"), logging.getLogger("outbox").level, logging.raiseExceptions
    root.addHandler(handler)
    root.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    logging.raiseExceptions = False  # a log nobody can read is not worth a traceback
    try:
        yield screen
    finally:
        logging.raiseExceptions = raising
        root.setLevel(before)
        root.removeHandler(handler)


def say_delivered(line: Settled) -> None:
    """An observer for ``--verbose``: the worker itself logs only what did not go well."""
    outcome = line.outcome
    if outcome is not None and outcome.status == "succeeded":
        logger.debug("event %s of %s: attempt %d: succeeded", outcome.event_id, line.claim.topic, outcome.attempt)


@contextmanager
def _live(worker: Worker, screen: Console) -> Iterator[None]:
    """On a terminal, one line that moves."""
    if not screen.is_terminal:
        yield
        return
    spinner = Spinner("dots")

    def line() -> RenderableType:
        spinner.update(text=Text(_numbers(worker.stats), overflow="ellipsis", no_wrap=True))
        return spinner

    live: Any = Live(get_renderable=line, console=screen, transient=True, refresh_per_second=4)
    with live:
        yield


def _numbers(stats: WorkerStats) -> str:
    names = WorkerStats.__dataclass_fields__
    return ", ".join(f"{getattr(stats, name):,} {name}" for name in names)
