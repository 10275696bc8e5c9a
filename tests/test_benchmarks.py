"""The benchmarks run: a package that nobody runs every day rots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_scenarios_are_listed() -> None:
    listed = run("--list")
    for name in ("enqueue", "claim-settle", "drain", "http", "backlog", "snapshot", "idle", "memory", "peers"):
        assert f"\n{name} " in f"\n{listed}"


def test_a_scenario_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nonesuch"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode != 0
    assert "no such scenario: nonesuch" in result.stderr


def test_a_scenario_runs_and_its_result_is_written(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    shown = run("--quick", "--database", "sqlite", "--only", "enqueue-many", "--json", str(report))
    assert "enqueue_many of 100" in shown
    saved = json.loads(report.read_text(encoding="utf-8"))
    assert [line["scenario"] for line in saved["lines"]] == ["enqueue-many", "enqueue-many"]
    assert all(line["value"]["median"] > 0 for line in saved["lines"])
    assert "enqueue-many" in run("--from-json", str(report))
