"""The benchmarks run: a package that nobody runs every day rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import Spread, at_least, at_most

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "enqueue", "enqueue-many", "claim-settle", "drain", "http", "backlog", "health", "snapshot", "idle", "memory",
        "hosts", "processes", "peers",
    ]  # fmt: skip


def test_a_scenario_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such scenario: nonesuch"):
        main(["--only", "nonesuch", "--database", "sqlite"])


@pytest.mark.timeout(300)  # seconds on a quiet machine
def test_a_scenario_runs_and_its_result_is_written(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    shown = run("--quick", "--database", "sqlite", "--only", "enqueue", "--json", str(report))
    assert "enqueue / bare Core insert" in shown
    saved = json.loads(report.read_text(encoding="utf-8"))
    assert saved["command"].startswith("python -m benchmarks --quick")
    assert [(line["scenario"], line["database"]) for line in saved["lines"]] == [("enqueue", "sqlite")] * 2
    assert all(line["value"]["low"] <= line["value"]["median"] <= line["value"]["high"] for line in saved["lines"])
    assert "| enqueue | sqlite |" in run("--from-json", str(report))


def test_a_budget_is_met_by_the_median() -> None:
    spread = Spread.of([3.0, 1.0, 1.4])
    assert (spread.median, spread.low, spread.high) == (1.4, 1.0, 3.0)
    assert at_most(1.4).met(spread.median)
    assert not at_least(1.5).met(spread.median)
