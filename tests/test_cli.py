"""The command line: what commands do, what they print, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Worker
from outbox.cli import boundary, compose, output, program
from outbox.cli import lines as lines_module
from outbox.contracts.cms import CMS_CHANGE
from outbox.dialects.engines import program_engine, program_url, shown
from outbox.errors import DatabaseError, InputError
from outbox.records import STATUSES
from outbox.schema import HEAD_REVISION
from tests.cli_tools import KEY, TIMEOUT, call, cms, error_line, events, fields, lines, run, start
from tests.cms_events import event
from tests.misbehaving import Exchange, Server, blocked, echo, refused_port, reply, silence
from tests.plain import Plain

ANSI = "\x1b["
COMMANDS = [
    "demo",
    "migrate",
    "enqueue",
    "worker",
    "status",
    "health",
    "redrive",
    "discard",
    "pause",
    "resume",
    "purge",
]


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, contracts=[CMS_CHANGE])


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*values: object) -> Path:
        path = tmp_path / "events.jsonl"
        path.write_bytes(lines(*values))
        return path

    return write


def ids(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT event_id FROM outbox_event ORDER BY id")))


def failed(outbox: Outbox, *events: dict[str, Any], code: str = "broken") -> None:
    outbox.enqueue_many(events)
    for claim in outbox.claim_batch("w", limit=100):
        outbox.fail(claim, code)


# -- help ------------------------------------------------------------------------------------------------------------


def test_all_commands_are_there_in_the_order_a_newcomer_meets_them() -> None:
    assert list(program.commands) == COMMANDS


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_explains_and_fits_a_terminal(arguments: list[str]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "Example:" in result.stdout or not arguments
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_without_a_command_help_is_shown() -> None:
    assert run().stdout == run("--help").stdout
    assert run().exit_code == 0


def test_every_setting_names_its_variable() -> None:
    text = " ".join(run("worker", "--help").stdout.split())
    for name in re.findall(r"--([a-z-]+)", text):
        if name not in {"help", "quiet", "verbose", "timeout."}:
            assert f"OUTBOX_{name.upper().replace('-', '_')}" in text.replace("env var", "").replace(" ", ""), name


def test_version_is_the_packages() -> None:
    assert re.fullmatch(r"outbox (\d+\.\d+\.\d+|unknown)\n", run("--version").stdout)


def test_python_m_outbox_is_the_same_program() -> None:
    result = call("--help")
    assert result.stdout.startswith("Usage: outbox [OPTIONS]")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'; see `outbox --help`"),
        (["health", "--nonsense"], "No such option"),
        (["enqueue"], "Missing argument 'FILE'"),
        (["purge"], "Missing option '--older-than'"),
        (["purge", "--older-than", "10"], "'10' is not a number and a unit"),
        (["purge", "--older-than", "1y"], "such as 90s, 15m, 12h, 30d or 4w"),
        (["redrive"], "give either one EVENT_ID, or --all"),
        (["redrive", "event-1", "--all"], "give either one EVENT_ID, or --all"),
        (["redrive", "event-1", "--error-code", "x"], "give either one EVENT_ID, or --all"),
        (["worker", "--concurrency", "0"], "'--concurrency'"),
        (["demo", "--events", "3"], "'--events'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], says: str) -> None:
    line = error_line(run(*arguments, url="sqlite:///nowhere.sqlite3"))
    assert line.startswith("cli.usage: ")
    assert says in line


def test_a_missing_database_url_names_the_variable() -> None:
    line = error_line(run("health"))
    assert "--database-url" in line
    assert "OUTBOX_DATABASE_URL" in line


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nonsense", "dispatch.connection_invalid"),
        ("postgresql://user:hunter2@[::1/x", "dispatch.connection_invalid"),
        ("postgresql://user:hunter2@127.0.0.1:port/x", "dispatch.connection_invalid"),
        ("mysql://user:hunter2@127.0.0.1/x", "dispatch.database_unsupported"),
        ("postgresql+nonsense://user:hunter2@127.0.0.1/x", "dispatch.database_unsupported"),
        ("postgresql://user:hunter2@127.0.0.1:{port}/x?connect_timeout=2", "dispatch.database_unavailable"),
        ("postgresql://user@127.0.0.1:{port}/x?password=hunter2", "dispatch.database_unavailable"),
        ("sqlite:////no/such/folder/file.sqlite3", "dispatch.database_unavailable"),
    ],
)
@pytest.mark.parametrize("command", [["health"], ["status", "event-1"], ["migrate"], ["purge", "--older-than", "1d"]])
def test_a_url_that_leads_nowhere_is_one_line_and_keeps_its_secrets(url: str, code: str, command: list[str]) -> None:
    with refused_port() as port:
        line = error_line(run(*command, url=url.format(port=port)))
    assert line.startswith(f"{code}: ")
    assert "hunter2" not in line


def test_an_option_that_the_driver_does_not_take_is_not_repeated(sqlite_url: str, pg_url: str) -> None:
    line = error_line(run("health", url=f"{pg_url}?hunter2=1"))
    assert "an option that the driver does not take" in line
    assert "hunter2" not in line
    result = run("health", url=f"{sqlite_url}?hunter2=1")
    if result.exit_code:  # SQLAlchemy 2.0 passes over it without a word
        assert error_line(result).startswith("dispatch.connection_invalid: ")
    assert "hunter2" not in result.output


def test_an_unreachable_server_is_named_with_the_reason() -> None:
    with refused_port() as port:
        line = error_line(run("health", url=f"postgres://me:hunter2@127.0.0.1:{port}/shop"))
    assert f"(postgresql+psycopg://me:***@127.0.0.1:{port}/shop); found nobody listens there" in line


def test_other_reasons_are_said_too(pg_url: str) -> None:
    url = program_url(pg_url)
    no_database = url.set(database="nonsense").render_as_string(hide_password=False)
    assert "no such database" in error_line(run("health", url=no_database))
    no_user = url.set(username="nonsense").render_as_string(hide_password=False)
    assert re.search("no such database or role|refused", error_line(run("health", url=no_user)))


def test_no_command_but_migrate_makes_a_database_file(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite3"
    assert "no such database file" in error_line(run("health", url=f"sqlite:///{path}"))
    assert not path.exists()
    assert run("migrate", url=f"sqlite:///{path}").exit_code == 0
    assert path.exists()


@pytest.mark.parametrize(
    "command", [["health"], ["status", "event-1"], ["redrive", "--all"], ["purge", "--older-than", "1d"]]
)
def test_a_database_that_is_not_migrated_says_what_to_run(empty_url: str, command: list[str]) -> None:
    line = error_line(run(*command, url=empty_url))
    assert line.startswith("dispatch.schema_altered: ")
    assert "outbox migrate" in line


def test_a_database_that_is_not_migrated_refuses_events_and_workers(empty_url: str, tmp_path: Path) -> None:
    assert error_line(run("enqueue", "-", url=empty_url)).startswith("dispatch.schema_altered: ")
    settings = cms(tmp_path, "http://127.0.0.1:1")
    assert error_line(run("worker", url=empty_url, **settings)).startswith("dispatch.schema_altered: ")


def test_an_unexpected_error_says_where_and_quotes_nothing(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the payload was hunter2")

    monkeypatch.setattr(Outbox, "health", broken)
    line = error_line(run("health", url=sqlite_url))
    assert re.fullmatch(r"cli\.internal: .*; found RuntimeError at test_cli\.py:\d+", line)


def test_codes_of_the_command_line_are_all_declared() -> None:
    sources = Path(boundary.__file__).parent.glob("*.py")
    used = {code for path in sources for code in re.findall(r'"(cli\.[a-z_]+)"', path.read_text())}
    assert used == set(boundary.CODES)


# -- migrate ---------------------------------------------------------------------------------------------------------


def test_migrate_goes_to_head_and_can_be_repeated(empty_url: str) -> None:
    assert fields(run("migrate", url=empty_url)) == {"before": "-", "revision": HEAD_REVISION}
    assert fields(run("migrate", url=empty_url)) == {"before": HEAD_REVISION, "revision": HEAD_REVISION}
    assert run("health", url=empty_url).exit_code == 0


def test_migrate_prints_sql_and_connects_to_nothing(backend: str) -> None:
    result = run("migrate", "--sql", "--database-url", f"{backend}://")
    assert result.exit_code == 0
    assert "CREATE TABLE outbox_event" in result.stdout
    assert "INSERT INTO outbox_alembic_version" in result.stdout


def test_the_sql_migrates(empty_url: str, empty_engine: Engine) -> None:
    sql = run("migrate", "--sql", url=empty_url).stdout
    with empty_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in sql.split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    assert run("health", url=empty_url).exit_code == 0


def test_migrate_refuses_a_revision_that_is_none(empty_url: str) -> None:
    assert error_line(run("migrate", "--revision", "nonsense", url=empty_url)).startswith("dispatch.migration_failed: ")


# -- enqueue ---------------------------------------------------------------------------------------------------------


def test_enqueue_takes_a_file(database_url: str, engine: Engine, file: Callable[..., Path]) -> None:
    result = run("enqueue", file(*events(3)), url=database_url)
    assert fields(result) == {"events": "3", "pending": "3"}
    assert ids(engine) == ["event-1", "event-2", "event-3"]


def test_enqueue_takes_standard_input_and_more_than_one_chunk(database_url: str, engine: Engine) -> None:
    result = run("enqueue", "-", url=database_url, stdin=lines(*events(1200)))
    assert fields(result)["events"] == "1200"
    assert ids(engine) == [f"event-{number}" for number in range(1, 1201)]


def test_enqueue_again_changes_nothing_and_says_how_things_stand(database_url: str, outbox: Outbox) -> None:
    failed(outbox, event(event_id="event-2"))
    assert fields(run("enqueue", "-", url=database_url, stdin=lines(*events(3)))) == {
        "events": "3",
        "pending": "2",
        "failed": "1",
    }


def test_enqueue_passes_max_attempts_and_topic_on(database_url: str, outbox: Outbox) -> None:
    arguments = ["--topic", "cms.change", "--max-attempts", "7"]
    assert run("enqueue", "-", *arguments, url=database_url, stdin=lines(*events(1))).exit_code == 0
    assert outbox.status("event-1").max_attempts == 7


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--topic", "x"], "dispatch.topic_unknown"), (["--max-attempts", "21"], "dispatch.max_attempts_invalid")],
)
def test_what_is_wrong_for_every_line_is_said_once(database_url: str, arguments: list[str], code: str) -> None:
    line = error_line(run("enqueue", "-", "--keep-going", *arguments, url=database_url, stdin=lines(*events(3))))
    assert line.startswith(f"{code}: ")
    assert "line" not in line


BAD_LINES = {
    "not JSON": b"{\n",
    "not an object": b"[1, 2]\n",
    "not UTF-8": b'{"event_id": "\xff"}\n',
    "a key twice": b'{"event_id": "a", "event_id": "b"}\n',
    "NaN": b'{"event_id": NaN}\n',
    "an endless integer": b'{"event_id": ' + b"9" * 5000 + b"}\n",
    "deep nesting": b"[" * 100_000 + b"\n",
    "against the contract": lines(event(source_text="hunter2 ", event_id="event-3", content_type="hunter2")),
    "a lone surrogate": b'{"event_id": "\\ud800"}\n',
    "another event under that id": lines(event(event_id="event-1", source_text="hunter2")),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_and_nothing_is_enqueued(sqlite_url: str, sqlite_engine: Engine, bad: bytes) -> None:
    first, second, last = events(3)
    stdin = lines(first, b"\n", second, bad, {**last, "event_id": "event-9"})
    line = error_line(run("enqueue", "-", url=sqlite_url, stdin=stdin))
    assert re.match(r"dispatch\.(change_invalid|idempotency_collision): line 4: ", line), line
    assert "nothing was enqueued" in line
    assert "hunter2" not in line
    assert ids(sqlite_engine) == []


def test_keep_going_enqueues_the_good_lines_and_reports_each_bad_one(database_url: str, engine: Engine) -> None:
    good = events(len(BAD_LINES))
    stdin = lines(*(part for pair in zip(good, BAD_LINES.values(), strict=True) for part in pair))
    result = run("enqueue", "-", "--keep-going", url=database_url, stdin=stdin)
    assert result.exit_code == 2
    *reports, last = result.stderr.splitlines()
    bad = [str(number) for number in range(2, 2 * len(BAD_LINES) + 1, 2)]
    assert [re.findall(r"outbox: error: dispatch\.[a-z_]+: line (\d+): ", report) for report in reports] == [
        [number] for number in bad
    ]
    assert last.startswith("outbox: error: cli.lines_refused: ")
    assert last.endswith(f"found {len(BAD_LINES)} bad lines")
    assert "hunter2" not in result.stderr
    assert fields(result)["events"] == str(len(good))
    assert sorted(ids(engine)) == sorted(each["event_id"] for each in good)


def test_without_keep_going_the_first_bad_line_is_the_one_named(database_url: str, engine: Engine) -> None:
    stdin = lines(*events(1), event(event_id="event-2", site_id=""), b"nonsense\n")
    line = error_line(run("enqueue", "-", url=database_url, stdin=stdin))
    assert line.startswith("dispatch.change_invalid: line 2: ")
    assert ids(engine) == []


def test_a_late_bad_line_undoes_the_chunks_before_it(
    database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "CHUNK_LINES", 2)
    stdin = lines(*events(7), b"{}\n")
    assert "line 8: " in error_line(run("enqueue", "-", url=database_url, stdin=stdin))
    assert ids(engine) == []


def test_an_event_that_another_chunk_has_otherwise_is_a_collision(
    database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "CHUNK_LINES", 2)
    stdin = lines(*events(4), event(event_id="event-1", source_text="other"))
    line = error_line(run("enqueue", "-", url=database_url, stdin=stdin))
    assert line.startswith("dispatch.idempotency_collision: line 5: ")
    assert ids(engine) == []


def test_a_line_too_long_is_refused_without_being_held(
    sqlite_url: str, sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 2000)
    stdin = lines(b" " * 1999 + b"\n", b"x" * 9000 + b"\n", *events(1), b"y" * 2000)
    result = run("enqueue", "-", "--keep-going", url=sqlite_url, stdin=stdin)
    assert re.findall(r"line (\d+)", result.stderr) == ["2", "4"]
    assert ids(sqlite_engine) == ["event-1"]


def test_a_byte_order_mark_is_no_reason_to_refuse_a_file(sqlite_url: str, sqlite_engine: Engine) -> None:
    stdin = b"\xef\xbb\xbf" + lines(*events(2)).replace(b"\n", b"\r\n").rstrip()
    assert run("enqueue", "-", url=sqlite_url, stdin=stdin).exit_code == 0
    assert ids(sqlite_engine) == ["event-1", "event-2"]


def test_an_empty_file_is_nothing_to_do(sqlite_url: str, file: Callable[..., Path]) -> None:
    assert fields(run("enqueue", file(), url=sqlite_url)) == {"events": "0"}


@pytest.mark.parametrize(("name", "reason"), [("no such file", "No such file"), (".", "directory")])
def test_a_file_that_cannot_be_read_is_one_line(sqlite_url: str, name: str, reason: str) -> None:
    line = error_line(run("enqueue", name, url=sqlite_url))
    assert line.startswith("cli.file_invalid: ")
    assert reason in line


def test_memory_does_not_grow_with_the_file(sqlite_url: str, tmp_path: Path) -> None:
    """Twenty megabytes, in a process that may use little more than a small file needs."""
    padding = "x" * 10_000
    path = tmp_path / "large.jsonl"
    with path.open("wb") as large:
        for number in range(2000):
            large.write(lines(event(event_id=f"event-{number}", source_text=f"text {padding}")))
    measure = (
        "import resource, sys; from outbox.cli import program\n"
        "try: program.main(['enqueue', sys.argv[1]])\n"
        "except SystemExit as end: print(end.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    small = tmp_path / "small.jsonl"
    small.write_bytes(lines(event(event_id="small")))

    def peak(given: Path) -> int:
        done = subprocess.run(
            [sys.executable, "-c", measure, given], env={**os.environ, "OUTBOX_DATABASE_URL": sqlite_url},
            capture_output=True, text=True, check=True, timeout=TIMEOUT,
        )  # fmt: skip
        status, megabytes = done.stdout.split()[-2:]
        assert status in {"0", "None"}
        return int(megabytes)

    assert peak(path) < peak(small) + 40


# -- status, health, redrive, purge ----------------------------------------------------------------------------------


def test_status_shows_an_event_without_its_content(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue(event(source_text="hunter2"))
    result = run("status", "event-1", url=database_url)
    shown_fields = fields(result)
    assert shown_fields["status"] == "pending"
    assert shown_fields["attempts"] == "0"
    assert datetime.fromisoformat(shown_fields["created_at"]).timestamp() == pytest.approx(
        outbox.status("event-1").created_at, abs=1e-5
    )
    assert shown_fields["created_at"].endswith("Z")
    assert "hunter2" not in result.stdout


def test_status_as_json_has_the_fields_of_the_record(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue(event())
    answer = {"schema": "blun.website-localization-api.v2", "event_id": "event-1", "plan_id": "p", "job_count": 2,
              "inserted_jobs": 1, "status": "enqueued"}  # fmt: skip
    claim = outbox.claim("w")
    assert claim is not None
    outbox.complete(claim, answer)
    found = json.loads(run("status", "event-1", "--json", url=database_url).stdout)
    record = outbox.status("event-1")
    assert set(found) == set(record.__dataclass_fields__)
    assert found["receipt"] == {"plan_id": "p", "job_count": 2, "status": "enqueued"}
    assert found["response_sha256"] == record.response_sha256
    assert fields(run("status", "event-1", url=database_url))["receipt.plan_id"] == "p"


@pytest.mark.parametrize(
    ("event_id", "code"), [("event-2", "dispatch.event_missing"), ("no token", "dispatch.event_invalid")]
)
def test_status_of_nothing_is_one_line(database_url: str, event_id: str, code: str) -> None:
    assert error_line(run("status", event_id, url=database_url)).startswith(f"{code}: ")


def test_health_ends_with_0_when_ok_and_1_when_blocked(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue(event())
    well = run("health", url=database_url)
    assert (well.exit_code, fields(well)["status"], fields(well)["counts.pending"]) == (0, "ok", "1")
    failed(outbox)
    ill = run("health", url=database_url)
    assert (ill.exit_code, fields(ill)["status"], fields(ill)["failed"]) == (1, "blocked", "1")
    assert ill.stderr == ""


def test_health_as_json_is_the_record(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue(event())
    found = json.loads(run("health", "--json", url=database_url).stdout)
    record = outbox.health()
    assert set(found) == set(record.__dataclass_fields__)
    assert set(found["counts"]) == set(STATUSES)
    assert found["due"] == 1
    assert found["oldest_due_age"] >= 0


def test_deep_health_cannot_tell_when_a_row_breaks_the_rules(database_url: str, outbox: Outbox, engine: Engine) -> None:
    outbox.enqueue(event())
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_event SET payload = '{}'"))
    assert run("health", url=database_url).exit_code == 0
    assert error_line(run("health", "--deep", url=database_url)).startswith("dispatch.state_invalid: ")


def test_health_passes_on_advice(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rollback.sqlite3"
    run("migrate", url=url)
    assert "WAL" in fields(run("health", url=url))["advice"]
    assert "advice" not in json.loads(run("health", "--json", url=url).stdout)


def test_redrive_makes_failed_events_due_again(database_url: str, outbox: Outbox) -> None:
    failed(outbox, *events(2), code="one")
    failed(outbox, *events(3, first=3), code="other")
    assert fields(run("redrive", "event-1", url=database_url)) == {"redriven": "1"}
    assert fields(run("redrive", "--all", "--error-code", "other", url=database_url)) == {"redriven": "3"}
    assert outbox.status("event-2").status == "failed"
    assert fields(run("redrive", "--all", url=database_url)) == {"redriven": "1"}
    assert outbox.health().counts["pending"] == 5
    assert error_line(run("redrive", "event-1", url=database_url)).startswith("dispatch.redrive_invalid: ")
    assert error_line(run("redrive", "nothing", url=database_url)).startswith("dispatch.event_missing: ")


def test_redrive_and_purge_go_on_until_nothing_is_left(
    database_url: str, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outbox.cli import commands

    monkeypatch.setattr(commands, "MAX_BATCH", 2)
    failed(outbox, *events(5))
    assert fields(run("redrive", "--all", url=database_url)) == {"redriven": "5"}
    failed(outbox)
    assert fields(run("purge", "--older-than", "0s", "--include-failed", url=database_url)) == {"deleted": "5"}


@pytest.mark.parametrize(("age", "deleted"), [("50m", "1"), ("1h", "0"), ("4w", "0"), ("0.5h", "1"), ("3000s", "1")])
def test_purge_deletes_what_was_settled_longer_ago(
    sqlite_url: str, sqlite_engine: Engine, age: str, deleted: str
) -> None:
    failed(Outbox(sqlite_engine, contracts=[CMS_CHANGE]), *events(1))
    with sqlite_engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outbox_event SET created_at = created_at - 3300, next_attempt_at = next_attempt_at - 3300,"
                " updated_at = updated_at - 3300"
            )
        )
    assert fields(run("purge", "--older-than", age, url=sqlite_url)) == {"deleted": "0"}
    assert fields(run("purge", "--older-than", age, "--include-failed", url=sqlite_url)) == {"deleted": deleted}


# -- worker: put together --------------------------------------------------------------------------------------------


def test_a_worker_says_which_settings_are_missing(database_url: str) -> None:
    line = error_line(run("worker", "--cms-origin", "https://cms.example", url=database_url))
    assert "--cms-key-id (or OUTBOX_CMS_KEY_ID) and --cms-key-file (or OUTBOX_CMS_KEY_FILE)" in line
    assert "--cms-origin" not in line


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"cms_origin": "http://cms.example"}, "destination.origin_invalid"),
        ({"cms_origin": "https://user:hunter2@cms.example"}, "destination.origin_invalid"),
        ({"cms_origin": "https://cms.example/path"}, "destination.origin_invalid"),
        ({"cms_key_id": "no token"}, "destination.key_invalid"),
        ({"cms_key_file": "/no/such/hunter"}, "destination.key_invalid"),
        ({"cms_key_file": "/"}, "destination.key_invalid"),
        ({"cms_key_file": "/dev/null"}, "destination.key_invalid"),
        ({"cms_key_file": "/dev/zero"}, "destination.key_invalid"),
        ({"timeout": "0"}, "destination.timeout_invalid"),
        ({"timeout": "nan"}, "destination.timeout_invalid"),
        ({"lease_seconds": "30", "timeout": "30"}, "dispatch.lease_too_short"),
        ({"lease_seconds": "90000"}, "dispatch.lease_invalid"),
        ({"worker_id": "no token"}, "dispatch.worker_invalid"),
        ({"retry_base_seconds": "-1"}, "dispatch.policy_invalid"),
        ({"retry_base_seconds": "10", "retry_max_seconds": "5"}, "dispatch.policy_invalid"),
        ({"grace_seconds": "-1"}, "dispatch.limit_invalid"),
        ({"concurrency": "many"}, "cli.usage"),
        ({"batch": "1001"}, "cli.usage"),
    ],
)
def test_a_worker_with_a_wrong_setting_does_not_start(
    sqlite_url: str, tmp_path: Path, changes: dict[str, str], code: str
) -> None:
    settings = {**cms(tmp_path, "https://cms.example"), **changes}
    line = error_line(run("worker", "--quiet", "--until-idle", url=sqlite_url, **settings))
    assert line.startswith(f"{code}: ")
    assert "hunter2" not in line


def test_plain_http_has_to_be_allowed(sqlite_url: str, tmp_path: Path) -> None:
    settings = cms(tmp_path, "http://127.0.0.1:1")
    del settings["allow_loopback_http"]
    assert error_line(run("worker", url=sqlite_url, **settings)).startswith("destination.origin_invalid: ")


def test_a_key_file_that_cannot_be_read_is_one_line(sqlite_url: str, tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root may read anything; a loop of links cannot be followed even so
        path = tmp_path / "loop"
        path.symlink_to(path)
    else:
        path = tmp_path / "mine"
        path.touch(mode=0)
    settings = {**cms(tmp_path, "https://cms.example"), "cms_key_file": str(path)}
    assert error_line(run("worker", url=sqlite_url, **settings)).startswith("destination.key_invalid: ")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"secret", b"secret"),
        (b"secret\n", b"secret"),
        (b"secret\r\n", b"secret"),
        (b" secret \n", b" secret "),
        (b"\x00\xff\n", b"\x00\xff\n"),
        (b"k" * 65_536, b"k" * 65_536),
    ],
)
def test_a_key_is_the_file_less_a_newline_at_the_end_of_text(tmp_path: Path, content: bytes, key: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    assert compose.read_key(path) == key


def test_a_key_that_others_can_read_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    compose.read_key(path)
    assert caplog.messages == []
    path.chmod(0o644)
    compose.read_key(path)
    assert [message for message in caplog.messages if "chmod 600" in message]


APP = """
from sqlalchemy import create_engine
from outbox import Outbox, Worker
from outbox.contracts.cms import CMS_CHANGE

class Destination:
    timeout = 5.0
    def deliver(self, claim):
        return {"schema": "blun.website-localization-api.v2", "event_id": claim.event_id, "plan_id": "p",
                "job_count": 1, "inserted_jobs": 1, "status": "enqueued"}

def make():
    outbox = Outbox(create_engine(URL), contracts=[CMS_CHANGE])
    return Worker(outbox, {"cms.change": Destination()})

def own():
    from tests.plain import Plain
    outbox = Outbox(create_engine(URL), contracts=[Plain("site.note")])
    return Worker(outbox, {"site.note": Destination()})

def broken():
    raise RuntimeError("hunter2")

def nothing():
    return None

def refused():
    return Worker(Outbox(create_engine(URL), contracts=[CMS_CHANGE]), {})
"""


@pytest.fixture
def app(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host's directory, to be in."""
    (tmp_path / "hostapp.py").write_text(APP.replace("URL", repr(sqlite_url)))
    (tmp_path / "badapp.py").write_text("this is no Python, hunter2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("hostapp", None)


def test_a_hosts_own_worker_runs(app: Path, sqlite_engine: Engine) -> None:
    outbox = Outbox(sqlite_engine, contracts=[CMS_CHANGE])
    outbox.enqueue_many(events(3))
    result = call("worker", "--app", "hostapp:make", "--until-idle", cwd=app)
    assert result.returncode == 0, result.stderr
    assert outbox.health().counts["succeeded"] == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hostapp", "expected package.module:function"),
        ("nonsense:make", "no module named nonsense"),
        ("hostapp:nonsense", "no nonsense in hostapp"),
        ("hostapp:broken", r"RuntimeError at hostapp.py:\d+"),
        ("hostapp:nothing", "expected an outbox.Worker; found NoneType"),
        ("badapp:make", "SyntaxError"),
    ],
)
def test_an_app_that_leads_nowhere_is_one_line(app: Path, name: str, says: str) -> None:
    line = error_line(run("worker", app=name))
    assert line.startswith("cli.app_invalid: ")
    assert re.search(says, line)
    assert "hunter2" not in line


def test_an_app_that_is_refused_keeps_its_code(app: Path) -> None:
    assert error_line(run("worker", "--app", "hostapp:refused")).startswith("dispatch.topic_unknown: ")


def test_options_that_an_app_would_not_hear_of_are_refused() -> None:
    line = error_line(run("worker", "--app", "a:b", "--batch", "3", "--worker-id", "w"))
    assert line.startswith("cli.usage: --batch, --worker-id: ")


@pytest.mark.parametrize("command", [["status", "event-1"], ["redrive", "event-1"], ["health"], ["enqueue", "-"]])
def test_commands_need_a_database_or_an_app_and_not_both(command: list[str]) -> None:
    assert "--database-url (or OUTBOX_DATABASE_URL)" in error_line(run(*command))
    line = error_line(run(*command, "--app", "a:b", "--database-url", "sqlite://"))
    assert line.startswith("cli.usage: --database-url: not together with --app")


def test_commands_speak_of_an_apps_own_topics(app: Path, sqlite_engine: Engine) -> None:
    outbox = Outbox(sqlite_engine, contracts=[Plain("site.note")])
    own = {"app": "hostapp:own"}
    (app / "notes.jsonl").write_text('{"id": "note-1"}\n{"id": "note-2"}\n')
    assert fields(run("enqueue", "notes.jsonl", **own))["events"] == "2"
    outbox.fail(outbox.claim("w"), "broken")  # type: ignore[arg-type]
    assert fields(run("status", "note-1", **own))["failures.1.error_code"] == "broken"
    assert fields(run("redrive", "note-1", **own)) == {"redriven": "1"}
    assert fields(run("pause", "site.note", "--reason", "why", **own))["state"] == "paused"
    assert fields(run("health", **own))["topics.site.note.reason"] == "why"
    assert error_line(run("resume", "cms.change", **own)).startswith("dispatch.topic_unknown: ")


# -- pause, resume, discard ------------------------------------------------------------------------------------------


def test_a_pause_is_seen_everywhere_until_it_is_resumed(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue(event())
    paused = fields(run("pause", "cms.change", "--reason", "their migration", url=database_url))
    assert (paused["topic"], paused["state"], paused["reason"]) == ("cms.change", "paused", "their migration")
    assert paused["since"].endswith("Z")
    assert outbox.claim("w") is None
    shown = json.loads(run("health", "--json", url=database_url).stdout)["topics"]["cms.change"]
    assert (shown["state"], shown["reason"]) == ("paused", "their migration")
    assert fields(run("resume", "cms.change", url=database_url))["state"] == "closed"
    assert outbox.claim("w") is not None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["pause", "cms.change"], "cli.usage"),
        (["pause", "--reason", "why"], "cli.usage"),
        (["pause", "cms.change", "--reason", ""], "dispatch.reason_invalid"),
        (["pause", "cms.change", "--reason", "two\nlines"], "dispatch.reason_invalid"),
        (["pause", "other", "--reason", "why"], "dispatch.topic_unknown"),
        (["resume", "other"], "dispatch.topic_unknown"),
        (["resume"], "cli.usage"),
        (["discard", "nothing"], "dispatch.event_missing"),
        (["discard", "event-1"], "dispatch.discard_invalid"),
    ],
)
def test_what_cannot_be_paused_resumed_or_discarded(
    database_url: str, outbox: Outbox, arguments: list[str], code: str
) -> None:
    outbox.enqueue(event())
    assert error_line(run(*arguments, url=database_url)).startswith(f"{code}: ")
    assert outbox.health().topics["cms.change"].state == "closed"


def test_a_failed_event_is_given_up(database_url: str, outbox: Outbox) -> None:
    outbox.enqueue_many(events(2), ordering_key="page-1")
    outbox.fail(outbox.claim("w"), "broken")  # type: ignore[arg-type]
    assert outbox.claim("w") is None
    given_up = fields(run("discard", "event-1", url=database_url))
    assert given_up == {"event_id": "event-1", "status": "failed", "last_error_code": "discarded"}
    assert outbox.claim("w").event_id == "event-2"  # type: ignore[union-attr]


# -- worker: at work -------------------------------------------------------------------------------------------------


def test_a_worker_delivers_what_is_due(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue_many(events(30))
    with Server(echo) as server:
        result = run("worker", "--until-idle", url=database_url, **cms(tmp_path, server.origin))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert len(server.requests) == 30
    assert server.requests[0].values("X-Localization-Key-Id") == ["key-1"]
    assert outbox.health().counts["succeeded"] == 30
    assert outbox.status("event-7").receipt == {"plan_id": "plan-1", "job_count": 3, "status": "enqueued"}


def test_a_workers_log_is_plain_lines_without_content(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue(event(source_text="hunter2"))
    with Server(reply(422, blocked("nonsense"))) as server:
        result = run("worker", "--until-idle", "-v", url=database_url, **cms(tmp_path, server.origin))
    log = result.stderr.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (DEBUG|INFO|WARNING|ERROR) +\S", line) for line in log)
    assert any("event event-1 of cms.change: attempt 1 of 5: nonsense, now failed" in line for line in log)
    assert "hunter2" not in result.stderr
    assert ANSI not in result.stderr


def test_quiet_and_verbose(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue_many(events(2))
    with Server(echo) as server:
        settings = cms(tmp_path, server.origin)
        loud = run("worker", "--until-idle", "--verbose", url=database_url, **settings)
        quiet = run("worker", "--until-idle", "--quiet", url=database_url, **settings)
    assert loud.stderr.count("succeeded\n") == 2
    assert quiet.stderr == ""


class Gate:
    """An answer that comes when it is let."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.open = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        self.asked.set()
        self.open.wait(TIMEOUT)
        echo(exchange)


@contextlib.contextmanager
def working(url: str, tmp_path: Path, origin: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = start("worker", *arguments, url=url, **cms(tmp_path, origin))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_stop_finishes_what_is_in_flight_and_gives_back_the_rest(
    database_url: str, outbox: Outbox, tmp_path: Path, number: signal.Signals
) -> None:
    outbox.enqueue_many(events(5))
    gate = Gate()
    with Server(gate) as server, working(database_url, tmp_path, server.origin, "--concurrency", 1) as process:
        assert gate.asked.wait(TIMEOUT)
        process.send_signal(number)
        _until(lambda: outbox.health().counts["pending"] == 4)  # given back while the one in flight goes on
        gate.open.set()
        _, log = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, log
    assert outbox.health().counts["succeeded"] == 1
    assert outbox.health().counts["leased"] == 0
    assert len(server.requests) == 1
    assert f"{number.name}: finishing" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_worker_told_twice_exits_at_once(
    database_url: str, outbox: Outbox, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    outbox.enqueue(event())
    with Server(silence) as server, working(database_url, tmp_path, server.origin) as process:
        assert server.begun.wait(TIMEOUT)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "finishing" not in process.stderr.readline():
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT)
    assert process.returncode == status
    assert time.monotonic() - began < 10  # the grace period is twice that


def test_a_worker_waits_no_longer_than_its_grace_period(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue(event())
    grace = ("--grace-seconds", "0.2")
    with Server(silence) as server, working(database_url, tmp_path, server.origin, *grace) as process:
        assert server.begun.wait(TIMEOUT)
        process.terminate()
        _, log = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "left to its lease" in log
    assert outbox.status("event-1").status == "leased"


def test_two_workers_share_the_work(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue_many(events(100))
    arguments = ("--until-idle", "--batch", "5")
    with (
        Server(echo) as server,
        working(database_url, tmp_path, server.origin, *arguments) as one,
        working(database_url, tmp_path, server.origin, *arguments) as two,
    ):
        for process in (one, two):
            process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0
    assert outbox.health().counts["succeeded"] == 100
    assert len(server.requests) == 100


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- pipes, terminals, interruptions ---------------------------------------------------------------------------------


def test_what_is_piped_is_never_coloured(sqlite_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "health"], capture_output=True, text=True, timeout=TIMEOUT, check=True,
        env={**os.environ, "OUTBOX_DATABASE_URL": sqlite_url, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
    )  # fmt: skip
    assert ANSI not in done.stdout + done.stderr
    assert done.stdout.startswith("status: ok\n")


def _on_terminal(*arguments: str, url: str, **environment: str) -> tuple[int, str]:
    """The exit status, and what a terminal of 80 columns is sent."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "TERM": "xterm", "COLUMNS": "80", **environment},
    )  # fmt: skip
    os.close(theirs)
    sent = b""
    while select.select([ours], [], [], TIMEOUT)[0]:
        part = b""
        with contextlib.suppress(OSError):  # which is how Linux says that the other end is closed
            part = os.read(ours, 65_536)
        if not part:
            break
        sent += part
    os.close(ours)
    return process.wait(TIMEOUT), sent.decode()


def test_a_pause_on_a_terminal(database_url: str, outbox: Outbox) -> None:
    outbox.pause(reason="their migration")
    _, sent = _on_terminal("health", url=database_url, NO_COLOR="1")
    assert re.search(r"topic cms\.change: paused, since \S+Z \(their migration\)", sent)
    outbox.resume()
    assert "topic" not in _on_terminal("health", url=database_url)[1]


def test_a_terminal_gets_tables_in_colour(database_url: str, outbox: Outbox) -> None:
    failed(outbox, *events(1))
    status, sent = _on_terminal("health", url=database_url)
    assert status == 1
    assert ANSI in sent
    assert re.search(r"pending +waiting +leased +retry_wait +succeeded +failed", re.sub(r"\x1b\[[0-9;]*m", "", sent))
    status, sent = _on_terminal("status", "event-1", url=database_url)
    assert status == 0
    assert "last_error_code" in sent


def test_no_color_is_obeyed(database_url: str, outbox: Outbox) -> None:
    failed(outbox, *events(1))
    _, sent = _on_terminal("health", url=database_url, NO_COLOR="1")
    colours = re.findall(r"\x1b\[([0-9;]*)m", sent)
    assert not [code for code in colours for part in code.split(";") if part and 30 <= int(part) <= 107]


def test_a_worker_on_a_terminal_shows_its_numbers(database_url: str, outbox: Outbox, tmp_path: Path) -> None:
    outbox.enqueue_many(events(3))
    with Server(echo) as server:
        variables = {f"OUTBOX_{name.upper()}": value for name, value in cms(tmp_path, server.origin).items()}
        status, sent = _on_terminal("worker", "--until-idle", url=database_url, **variables)
    assert status == 0
    assert "3 succeeded" in sent
    assert "Traceback" not in sent


@pytest.mark.parametrize("command", [["health"], ["migrate", "--sql"], ["--help"]])
def test_a_reader_that_has_gone_is_no_error(sqlite_url: str, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*command, url=sqlite_url, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=TIMEOUT)
    assert err == ""
    assert process.returncode in {141, 1} if command == ["--help"] else process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full disk for such occasions")
def test_output_that_cannot_be_written_is_one_line(sqlite_url: str) -> None:
    with Path("/dev/full").open("w") as full:
        assert error_line(call("health", url=sqlite_url, stdout=full)).startswith("cli.output: ")


def test_ctrl_c_is_one_line_and_leaves_nothing(database_url: str, engine: Engine) -> None:
    process = start("enqueue", "-", url=database_url, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(lines(*events(3)).decode())
    process.stdin.flush()
    _wait_until_reading(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (130, "")
    assert err == "outbox: error: cli.interrupted: interrupted\n"
    assert ids(engine) == []


def _wait_until_reading(process: subprocess.Popen[str]) -> None:
    """Until it has taken what was written: a pipe is empty then."""
    import fcntl
    import struct
    import termios

    assert process.stdin is not None

    def unread() -> int:
        raw = fcntl.ioctl(process.stdin, termios.FIONREAD, b"\0" * 4)  # type: ignore[arg-type]
        return int(struct.unpack("i", raw)[0])

    _until(lambda: unread() == 0)


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("postgres://h/d", "postgresql+psycopg"),
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg"),
        (" sqlite:///x ", "sqlite"),
    ],
)
def test_urls_without_a_driver_get_ours(given: str, driver: str) -> None:
    assert program_url(given).drivername == driver


def test_shown_urls_hold_no_secret() -> None:
    url = program_url("postgresql://me:hunter2@h/d?password=hunter2&sslkey=hunter2")
    assert shown(url) == "postgresql+psycopg://me:***@h/d"


def test_no_wait_of_a_postgresql_engine_is_endless(pg_url: str) -> None:
    engine = program_engine(pg_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SHOW lock_timeout")) == "10s"
        assert connection.scalar(text("SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()"))
        parameters = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
    engine.dispose()
    assert {"connect_timeout", "keepalives_idle", "tcp_user_timeout"} <= parameters.keys()


def test_a_urls_own_options_are_left_to_it(pg_url: str) -> None:
    url = program_url(pg_url).update_query_dict({"options": "-clock_timeout=3s", "application_name": "shop"})
    engine = program_engine(url)
    with engine.connect() as connection:
        assert connection.scalar(text("SHOW lock_timeout")) == "3s"
        assert connection.scalar(text("SHOW application_name")) == "shop"
    engine.dispose()


def test_behind_a_pooler_nothing_is_left_in_a_session(pg_url: str) -> None:
    engine = program_engine(pg_url, pooled=True)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert driver.prepare_threshold is None
        assert "options" not in driver.info.get_parameters()
    engine.dispose()


def test_every_command_but_migrate_knows_of_poolers(database_url: str, tmp_path: Path) -> None:
    for command in (["health"], ["redrive", "--all"], ["purge", "--older-than", "1d"], ["enqueue", "-"]):
        assert run(*command, "--pooler", url=database_url).exit_code == 0
    settings = cms(tmp_path, "https://cms.example")
    assert run("worker", "--until-idle", url=database_url, pooler="1", **settings).exit_code == 0
    assert "No such option" in error_line(run("migrate", "--pooler", url=database_url))


def test_an_sqlite_engine_waits_for_a_lock(sqlite_url: str) -> None:
    engine = program_engine(sqlite_url)
    with engine.connect() as connection:
        assert connection.scalar(text("PRAGMA busy_timeout")) == 10_000
    engine.dispose()


def test_unsupported_and_missing_databases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"dispatch\.database_unsupported"):
        program_engine("oracle://h/d")
    with pytest.raises(DatabaseError, match="no such database file"):
        program_engine(f"sqlite:///{tmp_path}/nothing")
    with pytest.raises(InputError, match=r"dispatch\.connection_invalid"):
        program_engine("nonsense")


# -- signals, in process ---------------------------------------------------------------------------------------------


def test_handlers_are_put_back() -> None:
    from outbox.cli.serve import stopping

    before = signal.getsignal(signal.SIGTERM)
    with stopping(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_stop_runs_on_a_thread_of_its_own() -> None:
    """Where it may take locks that the interrupted thread holds."""
    from outbox.cli.serve import stopping

    where: list[str] = []
    stopped = threading.Event()

    def stop() -> None:
        where.append(threading.current_thread().name)
        stopped.set()

    with stopping(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(TIMEOUT)
    assert where == ["outbox-signals"]


def test_times_are_iso_8601_in_utc() -> None:
    assert output.iso(0) == "1970-01-01T00:00:00.000000Z"
    assert output.iso(1e300) == "1e+300"


def test_a_factory_may_be_an_attribute_of_something(app: Path) -> None:
    with (app / "hostapp.py").open("a") as source:
        source.write("\nclass Site:\n    worker = staticmethod(make)\n")
    assert isinstance(compose.host_worker("hostapp:Site.worker"), Worker)
