"""Running the command line in tests: inside this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import outbox
from outbox.cli import program
from tests.cms_events import event

TIMEOUT = 60
KEY_ID = "key-1"
KEY = b"secret"


def run(*arguments: object, url: str | None = None, stdin: bytes | str = b"", **environment: str) -> Result:
    """The command line in this process; ``environment`` in lower case, without its prefix."""
    return CliRunner().invoke(
        program, [str(argument) for argument in arguments], input=stdin, env=_variables(url, environment)
    )


def start(*arguments: object, url: str | None = None, **more: Any) -> subprocess.Popen[str]:
    """The command line as a process, talking text."""
    environment = {key: more.pop(key) for key in list(more) if key.isidentifier() and key in _SETTINGS}
    return subprocess.Popen(
        [sys.executable, "-m", "outbox", *map(str, arguments)],
        env={**clean_environment(), **_set(_variables(url, environment))},
        text=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )


def call(*arguments: object, url: str | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command line as a process, waited for."""
    with start(*arguments, url=url, **more) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def clean_environment() -> dict[str, str]:
    """This process's, without what would set options or paint."""
    painting = {"FORCE_COLOR", "NO_COLOR", "COLUMNS"}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_") and name not in painting
    }
    # The package under test, wherever the process is started.
    paths = [str(Path(outbox.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


_SETTINGS = {"cms_origin", "cms_key_id", "cms_key_file", "allow_loopback_http", "app", "concurrency", "worker_id"}


def _variables(url: str | None, environment: Mapping[str, str]) -> dict[str, str | None]:
    """For CliRunner: None unsets a variable."""
    unset = {name: None for name in os.environ if name.startswith("OUTBOX_")}
    given = {f"OUTBOX_{name.upper()}": value for name, value in environment.items()}
    return {**unset, **given, **({"OUTBOX_DATABASE_URL": url} if url is not None else {})}


def _set(variables: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if value is not None}


def error_line(result: Result | subprocess.CompletedProcess[str], status: int = 2) -> str:
    """What an error looks like: one line, nothing else, and this exit status."""
    code = result.exit_code if isinstance(result, Result) else result.returncode
    assert code == status, (code, result.stdout, result.stderr)
    lines: Sequence[str] = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("outbox: error: "), lines
    assert "Traceback" not in f"{result.stderr}{result.stdout}"
    return str(lines[0].removeprefix("outbox: error: "))


def fields(result: Result | subprocess.CompletedProcess[str]) -> dict[str, str]:
    """``key: value`` lines as a mapping."""
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def events(count: int, first: int = 1) -> list[dict[str, Any]]:
    return [event(event_id=f"event-{number}") for number in range(first, first + count)]


def lines(*values: object) -> bytes:
    """JSON lines; bytes among the values stay as they are."""
    return b"".join(
        value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode() + b"\n"
        for value in values
    )


def cms(tmp_path: Path, origin: str) -> dict[str, str]:
    """Settings of a worker that delivers to ``origin``, plain HTTP on this machine."""
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    return {
        "cms_origin": origin, "cms_key_id": KEY_ID, "cms_key_file": str(key_file), "allow_loopback_http": "1",
    }  # fmt: skip
