"""The two pictures: what a claim costs against the backlog, and throughput against the size of the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"sqlite": "#0f766e", "postgresql": "#1d4ed8"}
_NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}

Points = dict[str, list[tuple[float, float, float, float]]]


def draw(lines: Sequence[Line], directory: Path) -> None:
    """Write what the lines have points for.

    Raises:
        SystemExit: matplotlib, of the dependency group ``bench``, is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only who wants plots needs it
    except ImportError:
        raise SystemExit("plots need matplotlib: install the dependency group `bench`") from None
    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    _claim_cost(_claims(lines), directory / "claim-cost.png")
    _throughput(lines, directory / "throughput.png")


def _claims(lines: Sequence[Line]) -> Points:
    points: Points = defaultdict(list)
    for line in lines:
        due = line.data.get("due")
        if line.scenario != "backlog" or due is None:
            continue
        scale = line.data["theirs"] if line.unit == "x" else 1.0
        value = line.value
        points[line.database].append((due, value.median * scale, value.low * scale, value.high * scale))
    return points


def _claim_cost(points: Points, path: Path) -> None:
    if not points:
        return
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for database, found in points.items():
        due, medians, _, _ = zip(*sorted(found), strict=True)
        axes.plot(due, medians, marker="o", color=_COLOURS[database], label=_NAMES[database])
    axes.set(xscale="log", xlabel="events due", ylabel="milliseconds", title="A claim of 100 events")
    axes.set_ylim(bottom=0)
    _finish(axes)
    figure.savefig(path, dpi=144)
    plt.close(figure)


def _throughput(lines: Sequence[Line], path: Path) -> None:
    found = [line for line in lines if line.scenario == "claim-settle"]
    if not found:
        return
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for database in dict.fromkeys(line.database for line in found):
        mine = sorted((line.data for line in found if line.database == database), key=lambda data: data["batch"])
        sizes = [data["batch"] for data in mine]
        for key, style, who in (("ours", "-", "outbox"), ("theirs", ":", "bare SQL")):
            axes.plot(
                sizes, [data[key] for data in mine], style, marker="o", color=_COLOURS[database],
                label=f"{_NAMES[database]}, {who}",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="events in a batch", ylabel="events a second", title="Claim and settle")
    axes.set_xticks([1, 10, 100, 500], ["1", "10", "100", "500"])
    _finish(axes)
    figure.savefig(path, dpi=144)
    plt.close(figure)


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
