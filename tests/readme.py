"""The parts of the README that the program knows better. ``python -m tests.readme`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import click
from click.testing import CliRunner

from outbox import errors
from outbox.cli import boundary, program
from outbox.demo import actors

README = Path(__file__).parent.parent / "README.md"


def parts() -> dict[str, str]:
    """What belongs between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""
    return {"worker options": worker_options(), "help": help_text(), "codes": codes()}


def worker_options() -> str:
    """The worker's settings as a table."""
    rows = ["| option | variable | default | what it is |", "|---|---|---|---|"]
    for parameter in program.commands["worker"].params:
        assert isinstance(parameter, click.Option)
        if parameter.envvar is not None:
            default = parameter.default if parameter.show_default else ""
            words = re.sub(r"  \[.*\]", "", parameter.help or "")
            rows.append(f"| `{parameter.opts[0]}` | `{parameter.envvar}` | {default} | {words} |")
    return "\n".join(rows)


def help_text() -> str:
    """What ``outbox --help`` prints."""
    printed = CliRunner().invoke(program, ["--help"], env={"COLUMNS": "80"}).stdout
    return f"```text\n{printed.rstrip()}\n```"


def codes() -> str:
    """Every error code and its meaning."""
    found = {**errors.CODES, **boundary.CODES, **actors.CODES}
    return "\n".join(["| code | means |", "|---|---|", *(f"| `{code}` | {words} |" for code, words in found.items())])


def written(text: str) -> str:
    """The README with those parts as they should be."""
    for name, content in parts().items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, times = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)  # type: ignore[misc]
        assert times == 1, name
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
