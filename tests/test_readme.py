"""The README is true: its Python runs, its commands exist, and its tables are the program's own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from outbox.cli import program
from outbox.contracts import cms
from outbox.destinations import cms as destination
from outbox.destinations import headers, webhook
from outbox.records import STATUSES
from tests.cli_tools import clean_environment, fields, run
from tests.readme import README, written

TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def table(name: str) -> list[str]:
    """The first column of a table, its code quotes off."""
    part = TEXT.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
    return re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)


def test_generated_parts_are_as_the_program_has_them() -> None:
    assert written(TEXT) == TEXT, "write them anew: python -m tests.readme"


def test_its_python_runs_and_leaves_an_event(tmp_path: Path) -> None:
    source = "\n".join(blocks("python")) + "\nassert worker().worker_id\n"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", source], cwd=tmp_path, env=clean_environment(), check=True, timeout=60
    )
    url = f"sqlite:///{tmp_path}/site.db"
    assert fields(run("status", "site-1:article:1:1", url=url))["status"] == "pending"
    assert fields(run("health", url=url))["counts.pending"] == "1"


def test_states_are_the_engines() -> None:
    assert tuple(table("states")) == STATUSES


@pytest.mark.parametrize("line", re.findall(r"(?:^|`)(outbox [^`\n]+)", TEXT, re.MULTILINE))
def test_every_command_it_names_exists_with_its_options(line: str) -> None:
    _, name, *arguments = shlex.split(line.partition("|")[0])
    if name.startswith("-") or name not in program.commands:
        assert name in {"--help", "is"} or not name.isalpha() or line.startswith("outbox worker"), line
        return
    known = {option for parameter in program.commands[name].params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known, line


def test_every_variable_it_names_is_read_by_the_program_or_the_tests() -> None:
    read = {
        parameter.envvar for command in program.commands.values() for parameter in command.params if parameter.envvar
    }
    named = set(re.findall(r"OUTBOX_[A-Z_]+", TEXT))
    assert named - read == {"OUTBOX_TEST_POSTGRES_URL"}


def test_every_delivery_code_it_names_is_used() -> None:
    part = TEXT.partition("`last_error_code` is one of these")[2].partition("## Develop")[0]
    named = re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)
    assert len(named) == 11
    sources = "".join(
        Path(str(module.__file__)).read_text(encoding="utf-8")
        for module in (cms, destination, headers, webhook, sys.modules["outbox.http"])
    )
    assert [code for code in named if f'"{code}"' not in sources] == []


def test_links_and_paths_lead_somewhere() -> None:
    for path in re.findall(r"`((?:outbox|tests|\.ci)/[\w./]+)`", TEXT):
        assert (README.parent / path).exists(), path


def test_the_two_commands_stand_alone() -> None:
    assert "uv run outbox demo\nuv run pytest\n" in blocks("sh")


def test_settings_are_options() -> None:
    assert all(isinstance(parameter, click.Option) for parameter in program.commands["worker"].params)
    assert len(table("worker options")) >= 15
