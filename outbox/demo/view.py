"""How the demo looks: moving on a terminal, a line at a time anywhere else."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outbox.demo.report import Report
from outbox.records import STATUSES

_STYLES: Final = {"succeeded": "green", "failed": "red", "retry_wait": "yellow", "leased": "cyan"}
_REMARKS: Final = 8
#: What decides, and is green or red in the end.
_DECIDING: Final = frozenset({"lost", "rolled-back events sent", "receipts equal"})


@dataclass(frozen=True)
class Facts:
    """How far the demo has got.

    Attributes:
        counts: the database's events by state.
        requests: what the server has counted.
    """

    changes: int
    done: int
    counts: Mapping[str, int]
    requests: Mapping[str, int]

    @property
    def settled(self) -> int:
        return self.counts.get("succeeded", 0) + self.counts.get("failed", 0)


class View(ABC):
    """Shows what happens while it happens."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """Around the time in which something moves."""

    @abstractmethod
    def remark(self, text: str) -> None:
        """Something happened."""

    @abstractmethod
    def progress(self, facts: Facts) -> None:
        """This is how far it has got."""

    @abstractmethod
    def report(self, report: Report) -> None:
        """This is how it ended."""


def view_for_output() -> View:
    return Terminal() if sys.stdout.isatty() else Plain()


class Plain(View):
    """Lines to keep: each begins with the seconds since the start, the results are ``key: value``."""

    def __init__(self) -> None:
        super().__init__()
        self._shown_at = 0.0

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def remark(self, text: str) -> None:
        click.echo(f"{self.elapsed:6.1f}s  {text}")

    def progress(self, facts: Facts) -> None:
        if self.elapsed < self._shown_at + 1:
            return
        self._shown_at = self.elapsed
        states = ", ".join(f"{count} {status}" for status, count in facts.counts.items() if count)
        self.remark(f"{facts.done} of {facts.changes} changes made; events: {states or 'none yet'}")

    def report(self, report: Report) -> None:
        for name, value in report.numbers.items():
            click.echo(f"{name}: {value}")
        for sentence in report.disagreements:
            click.echo(f"disagreement: {sentence}")
        click.echo(f"verdict: {verdict(report)}")


class Terminal(View):
    def __init__(self) -> None:
        super().__init__()
        self._console = Console(file=sys.stdout, force_terminal=True, highlight=False)
        self._live: Live | None = None
        self._remarks: deque[Text] = deque(maxlen=_REMARKS)
        self._facts: Facts | None = None

    def running(self) -> AbstractContextManager[object]:
        self._live = Live(console=self._console, get_renderable=self._screen, refresh_per_second=10, transient=True)
        return self._live

    def remark(self, text: str) -> None:
        line = Text.assemble((f"{self.elapsed:5.1f}s  ", "dim"), text)
        self._console.print(line)

    def progress(self, facts: Facts) -> None:
        self._facts = facts

    def _screen(self) -> RenderableType:
        facts = self._facts
        if facts is None:
            return Text("")
        return Group(Text(""), _bar(facts), _states(facts), _requests(facts))

    def report(self, report: Report) -> None:
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        for name, value in report.numbers.items():
            style = ("bold green" if report.agrees else "bold red") if name in _DECIDING else ""
            table.add_row(Text(name, style=style), Text(value, style=style))
        self._console.print(table)
        for sentence in report.disagreements:
            self._console.print(Text(f"disagreement: {sentence}", style="red"))
        self._console.print(Text(verdict(report), style="bold green" if report.agrees else "bold red"))


def verdict(report: Report) -> str:
    return "the server's ledger and the database agree" if report.agrees else "the two sides DISAGREE"


def _bar(facts: Facts) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    committed = sum(facts.counts.values())
    line.add_row(
        Text(f"{facts.done}/{facts.changes} changes"),
        ProgressBar(total=max(committed, 1), completed=facts.settled, width=30),
        Text(f"{facts.settled}/{committed} settled"),
    )
    return line


def _states(facts: Facts) -> RenderableType:
    line = Text("database  ", style="dim")
    for status in STATUSES:
        count = facts.counts.get(status, 0)
        if status != "waiting":
            line.append(f"{count} {status}  ", style=_STYLES.get(status, "") if count else "dim")
    return line


def _requests(facts: Facts) -> RenderableType:
    return Text.assemble(("server    ", "dim"), "  ".join(f"{count} {name}" for name, count in facts.requests.items()))
