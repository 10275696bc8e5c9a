"""How results look: a table on a terminal, ``key: value`` lines or JSON anywhere else."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from outbox.records import EventStatus, Health, TopicStatus

_TIMES: Final = frozenset({
    "next_attempt_at", "lease_expires_at", "created_at", "updated_at", "ended_at", "since", "until",
})  # fmt: skip
#: Colours of words that decide something.
_STYLES: Final = {
    "ok": "green", "blocked": "bold red", "succeeded": "green", "failed": "red", "retry_wait": "yellow",
    "leased": "cyan", "open": "bold red", "held": "yellow", "ramp": "yellow", "paused": "yellow",
}  # fmt: skip

Fields = Mapping[str, Any]


def console(stream: TextIO | None = None) -> Console:
    """A console that colours a terminal and nothing else, whatever FORCE_COLOR says. NO_COLOR is obeyed."""
    stream = stream or sys.stdout
    return Console(file=stream, force_terminal=stream.isatty(), highlight=False)


def iso(moment: float) -> str:
    """Epoch seconds as ISO 8601 in UTC, to the microsecond."""
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # a time that no calendar has
        return f"{moment:g}"


def status_fields(status: EventStatus) -> dict[str, Any]:
    """An event's status with its times for people."""
    return _fields(status)


def health_fields(health: Health) -> dict[str, Any]:
    """The fields of Health, as JSON can carry them."""
    return _fields(health)


def topic_fields(topic: TopicStatus) -> dict[str, Any]:
    """How a topic fares, with its times for people."""
    return _fields(topic)


def _fields(record: Any) -> dict[str, Any]:
    named = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {
        name: iso(value) if name in _TIMES and value is not None else _plain(value) for name, value in named.items()
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def say_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def say_lines(fields: Fields) -> None:
    """``key: value``, a line each."""
    for name, value in _flattened(fields):
        click.echo(f"{name}: {value}")


def say_record(title: str, fields: Fields) -> None:
    """One thing with many fields: lines, or on a terminal a table."""
    if not sys.stdout.isatty():
        say_lines(fields)
        return
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold", box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flattened(fields):
        table.add_row(name, Text(value, style=_STYLES.get(value, "")))
    console().print(table)


def say_health(health: Health, advice: str | None) -> None:
    if not sys.stdout.isatty():
        say_lines({**health_fields(health), **({"advice": advice} if advice else {})})
        return
    screen = console()
    screen.print(Text.assemble("outbox ", (health.status, _STYLES[health.status])))
    screen.print(_counts(health))
    screen.print(_sentence(health), soft_wrap=True)
    for topic in health.topics.values():
        if topic.state != "closed":
            screen.print(_topic_sentence(topic), soft_wrap=True)
    if advice:
        screen.print(Text(f"advice: {advice}", style="yellow"))


def _counts(health: Health) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for status in health.counts:
        table.add_column(status, justify="right", no_wrap=True)
    cells = [
        Text(f"{'~' if status in health.approximate else ''}{count:,}", style=_STYLES.get(status, "") if count else "")
        for status, count in health.counts.items()
    ]
    table.add_row(*cells)
    return table


def _sentence(health: Health) -> Text:
    age = "" if health.oldest_due_age is None else f" (the oldest for {health.oldest_due_age:,.1f} s)"
    parts = [f"{health.due:,} due{age}", f"{health.expired_leases:,} expired leases", f"{health.failed:,} failed"]
    return Text(", ".join(parts))


def _topic_sentence(topic: TopicStatus) -> Text:
    words = {
        "open": ", its destination is down; next probe", "held": ", its destination asked for a pause until",
        "ramp": ", its destination is back, and taken up little by little", "paused": "",
    }  # fmt: skip
    said = Text.assemble("topic ", topic.topic, ": ", (topic.state, _STYLES[topic.state]), words[topic.state])
    if topic.until is not None:
        said.append(f" {iso(topic.until)}")
    if topic.since is not None:
        said.append(f", since {iso(topic.since)}")
    return said.append("" if topic.reason is None else f" ({topic.reason})")


def _flattened(fields: Fields, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            yield from _flattened({str(number): each for number, each in enumerate(value, 1)}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _word(value)


def _word(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@contextmanager
def progress(words: str, total: int = 0) -> Iterator[Counter]:
    """A bar on standard error while something long goes on; nothing where that is no terminal."""
    screen = console(sys.stderr)
    columns: list[Any] = [SpinnerColumn(), TextColumn(words)]
    columns += [BarColumn(), TaskProgressColumn()] if total else []
    columns.append(TextColumn("{task.fields[counted]:,} events"))
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        yield Counter(bar, total)


class Counter:
    """How far something long has got."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total or None, counted=0)
        self.events = 0

    def add(self, events: int, size: int = 0) -> None:
        """So many more events, and so much more of ``total``."""
        self.events += events
        self._bar.update(self._task, advance=size, counted=self.events)
