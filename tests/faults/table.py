"""Results as a table, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.laboratory import Result

_HEAD = (
    "fault", "database", "events", "kills or cuts", "duplicates sent", "lost", "stale settles refused", "recovery, s",
)  # fmt: skip
_WIDTHS = (24, 10, 7, 13, 15, 4, 21, 11)


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.fault, result.database, str(result.events), str(result.disturbances), str(result.duplicates),
        str(result.lost), str(result.stale), f"{result.recovery:.1f}",
    )  # fmt: skip


def plain(results: Sequence[Result], *, head: bool = True) -> str:
    """One line for each, and one more for each broken promise."""
    lines = [_line(_HEAD), _line(["-" * width for width in _WIDTHS])] if head else []
    for result in results:
        lines.append(_line(_cells(result)))
        lines.extend(f"  BROKEN: {problem}" for problem in result.problems)
    return "\n".join(lines)


def markdown(results: Sequence[Result]) -> str:
    lines = [f"| {' | '.join(_HEAD)} |", f"|{'|'.join([' --- '] * 2 + [' ---: '] * (len(_HEAD) - 2))}|"]
    lines.extend(f"| {' | '.join(_cells(result))} |" for result in results)
    broken = [f"- {result.fault}, {result.database}: {each}" for result in results for each in result.problems]
    return "\n".join([*lines, "", *broken, ""]) if broken else "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "  ".join(
        cell.ljust(width) if index < 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ).rstrip()
