"""The demo: it agrees on both databases, notices when it should not, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, inspect, text

from outbox import Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.demo.actors import sample_events
from outbox.demo.report import DatabaseSide, Row, ServerSide, compare
from outbox.demo.view import Facts, Terminal
from outbox.destinations.cms import HMACSigner
from tests.cli_tools import clean_environment, error_line, run, start
from tests.cms_events import event
from tests.misbehaving import canonical

#: The demo has a limit of its own; on a busy machine everything around it takes long too.
LIMIT = 200
pytestmark = pytest.mark.timeout(LIMIT + 20)


def play(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    """The demo as a process; ``program`` is Python to run instead of the command line."""
    module = ["-c", program] if program else ["-m", "outbox", "demo"]
    return subprocess.run(
        [sys.executable, *module, *arguments], env=clean_environment(), capture_output=True, text=True, timeout=LIMIT,
        check=False,
    )  # fmt: skip


def results(output: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in output.splitlines() if re.match(r"[a-z][a-z0-9, -]+: ", line))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo puts its files, so that it can be seen whether it takes them away."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


# -- whole runs -----------------------------------------------------------------------------------------------------


def test_the_two_sides_agree_on_sqlite(temporary: Path) -> None:
    done = play()
    _check_agreement(done)
    assert list(temporary.iterdir()) == []


def test_the_two_sides_agree_on_postgresql_and_nothing_is_left(pg_url: str, pg_engine: Engine, temporary: Path) -> None:
    """Beside a migrated outbox and a host's own table called article, which it leaves alone."""
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE TABLE article (mine integer)"))
    before = inspect(pg_engine).get_table_names()
    _check_agreement(play("--database-url", pg_url))
    assert inspect(pg_engine).get_schema_names() == ["information_schema", "public"]
    assert inspect(pg_engine).get_table_names() == before
    assert list(temporary.iterdir()) == []


def _check_agreement(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    found = results(done.stdout)
    assert found["verdict"] == "the server's ledger and the database agree"
    assert (found["lost"], found["rolled-back events sent"]) == ("0", "0")
    assert (found["changes committed"], found["changes rolled back"]) == ("35", "5")
    assert found["events delivered"] == "34 (server: 34)"
    assert found["events refused for good"] == "1 (server: 1)"
    assert found["receipts equal"] == "34 of 34"
    assert int(found["workers killed"]) >= 1
    # What it is there to survive did happen.
    for misfortune in ("answered 503", "accepted, connection dropped", "accepted, sender killed", "answered slowly"):
        assert int(found[misfortune]) >= 1, misfortune
    assert int(found["replayed and deduplicated"]) >= 6
    assert re.search(r"exit statuses: worker-\d 0, worker-\d 0", done.stdout)


DUAL_WRITE = """
from outbox.demo import actors
from outbox.cli import program

class Careless(actors.Host):
    def _write(self, session, event):
        '''The very mistake that an outbox is for: telling of a change in a transaction of its own.'''
        self._outbox.enqueue(event)
        super()._write(session, event)

from outbox.demo import scenario
scenario.Host = Careless
program.main(["demo", "--events", "20"])
"""

FORGETFUL = """
from outbox.cli import program
from outbox.demo import scenario

def forgetful(server):
    ledger = server.ledger()
    accepted = [name for name, entry in ledger["events"].items() if entry["accepted"]]
    del ledger["events"][accepted[3]]
    return ledger

scenario.read_ledger = forgetful
program.main(["demo", "--events", "20", "--keep"])
"""


def test_events_of_rolled_back_changes_are_noticed(temporary: Path) -> None:
    done = play(program=DUAL_WRITE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert results(done.stdout)["rolled-back events sent"] == "2"
    assert "disagreement: rolled back, but sent: " in done.stdout
    assert "verdict: the two sides DISAGREE" in done.stdout


def test_a_lost_event_is_noticed_and_kept_files_can_be_looked_at(temporary: Path) -> None:
    done = play(program=FORGETFUL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert results(done.stdout)["lost"] == "1"
    assert "disagreement: committed, but not in the ledger: " in done.stdout
    (folder,) = temporary.iterdir()
    assert str(folder) in done.stdout
    ledger = json.loads((folder / "ledger.json").read_text())
    assert len(ledger["events"]) == 17  # and one forgotten
    health = run("health", url=f"sqlite:///{folder}/demo.sqlite3")
    assert health.exit_code == 1  # one event was refused for good
    log = "".join(path.read_text() for path in folder.glob("worker-*.log"))
    assert "Traceback" not in log
    assert "content_not_translatable, now failed" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_its_processes_along(number: signal.Signals, temporary: Path) -> None:
    process = start("demo")
    assert process.stdout is not None
    while "worker-2 starts" not in process.stdout.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert err == "outbox: error: cli.interrupted: interrupted\n"
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert list(temporary.iterdir()) == []


# -- where it will not run ------------------------------------------------------------------------------------------


def test_a_database_with_events_is_left_alone(database_url: str, engine: Engine) -> None:
    Outbox(engine, contracts=[CMS_CHANGE]).enqueue(event())
    before = inspect(engine).get_table_names()
    line = error_line(run("demo", "--database-url", database_url))
    assert line.startswith("demo.database_in_use: ")
    assert inspect(engine).get_table_names() == before


def test_an_sqlite_file_with_anything_in_it_is_left_alone(sqlite_url: str) -> None:
    assert "not there yet, or empty" in error_line(run("demo", "--database-url", sqlite_url))


def test_a_database_in_memory_is_refused() -> None:
    assert "several processes" in error_line(run("demo", "--database-url", "sqlite://"))


def test_the_environments_database_is_never_touched(temporary: Path) -> None:
    """Which may be the production's. Here it could not be reached."""
    help_text = run("demo", "--help").stdout
    assert "OUTBOX_DATABASE_URL" not in help_text
    assert all(parameter.envvar is None for parameter in _demo_parameters())


def _demo_parameters() -> list[Any]:
    from outbox.cli import program

    return list(program.commands["demo"].params)


# -- its parts ------------------------------------------------------------------------------------------------------


def test_sample_events_are_valid_and_distinct() -> None:
    events = list(sample_events(130))
    assert len({CMS_CHANGE.check(each) for each in events}) == 130


def agreeing() -> tuple[DatabaseSide, ServerSide]:
    """Both sides after a run in which all went well: events a and b delivered, c refused, d rolled back."""
    receipt = {"plan_id": "plan-1", "job_count": 1, "status": "enqueued"}
    database = DatabaseSide(
        committed=frozenset("abc"),
        rolled_back=frozenset("d"),
        events={
            "a": Row("succeeded", "hash-a", receipt, None),
            "b": Row("succeeded", "hash-b", receipt, None),
            "c": Row("failed", "hash-c", None, "refused"),
        },
        articles=frozenset("abc"),
    )
    entry = {"accepted": 1, "refused": False, "replays": 1, "requests": 2, "receipt": receipt}
    server = ServerSide(
        events={
            "a": {**entry, "payload_sha256": "hash-a"},
            "b": {**entry, "payload_sha256": "hash-b"},
            "c": {**entry, "payload_sha256": "hash-c", "accepted": 0, "refused": True, "receipt": None},
        },
        counts={
            "requests": 6, "unavailable": 1, "dropped": 1, "slow": 1, "cut_off": 1, "bad_signatures": 0, "altered": 0,
        },
    )  # fmt: skip
    return database, server


def test_two_sides_that_agree_do() -> None:
    report = compare(*agreeing(), killed=1)
    assert report.agrees
    assert report.numbers["lost"] == "0"


Change = Callable[[DatabaseSide, ServerSide], tuple[DatabaseSide, ServerSide]]


def _database(**changes: Any) -> Change:
    return lambda database, server: (dataclasses.replace(database, **changes), server)


def _row(name: str, **changes: Any) -> Change:
    return lambda database, server: (
        dataclasses.replace(database, events={**database.events, name: database.events[name]._replace(**changes)}),
        server,
    )


def _entry(name: str, **changes: Any) -> Change:
    return lambda database, server: (
        database,
        dataclasses.replace(server, events={**server.events, name: {**server.events.get(name, {}), **changes}}),
    )


def _without(side: str, name: str) -> Change:
    def change(database: DatabaseSide, server: ServerSide) -> tuple[DatabaseSide, ServerSide]:
        def less(events: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in events.items() if key != name}

        if side == "database":
            return dataclasses.replace(database, events=less(database.events)), server
        return database, dataclasses.replace(server, events=less(server.events))

    return change


def _count(**changes: int) -> Change:
    return lambda database, server: (database, dataclasses.replace(server, counts={**server.counts, **changes}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("server", "a"), "committed, but not in the ledger: a"),
        (_without("database", "a"), "committed, but not in the outbox: a"),
        (_entry("d", accepted=1, refused=False, replays=0, receipt=None), "rolled back, but sent: d"),
        (_database(articles=frozenset("abcd")), "an article without its event: d"),
        (_database(articles=frozenset("ab")), "an event without its article: c"),
        (_database(committed=frozenset("ab")), "in the outbox, but not committed: c"),
        (_row("a", status="retry_wait"), "not settled in the end: a"),
        (_row("a", status="failed"), "refused, says the database only: a"),
        (_row("c", status="succeeded"), "delivered, says the database only: c"),
        (_entry("a", accepted=0, refused=True), "refused, says the ledger only: a"),
        (_entry("a", accepted=2), "taken up twice by the server: a"),
        (_entry("a", payload_sha256="other"), "received with another content: a"),
        (_row("a", receipt={"plan_id": "plan-2"}), "receipts differ: a"),
        (_count(bad_signatures=1), "requests with bad signatures: 1"),
        (_count(altered=2), "requests with altered: 2"),
        (_count(cut_off=0), "no worker was killed in mid-delivery"),
    ],
)
def test_every_kind_of_disagreement_is_noticed(change: Change, says: str) -> None:
    report = compare(*change(*agreeing()), killed=1)
    assert not report.agrees
    assert says in report.disagreements


def test_a_demo_in_which_nobody_was_killed_has_not_shown_anything() -> None:
    assert not compare(*agreeing(), killed=0).agrees


def test_a_terminal_sees_what_happens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    view = Terminal()
    with view.running():
        view.progress(Facts(40, 12, {"pending": 2, "leased": 1, "succeeded": 7}, {"requests": 9}))
        view.remark("something happens")
    view.report(compare(*agreeing(), killed=1))
    view.report(compare(*agreeing(), killed=0))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "12/40 changes" in shown
    assert "7/10 settled" in shown
    assert "9 requests" in shown
    assert re.search(r"\d\.\ds  something happens", shown)
    assert re.search(r"lost +0", shown)
    assert "the server's ledger and the database agree" in shown
    assert "disagreement: no worker was killed in mid-delivery" in shown
    assert max(map(len, shown.splitlines())) <= 80


# -- the remote server ----------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox.demo.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environment(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("key-1 secret\n")
    process.stdin.flush()
    yield int(process.stdout.readline())
    process.stdin.close()  # which ends it
    assert process.wait(10) == 0
    process.stdout.close()


def _post(port: int, body: bytes, **changes: str) -> tuple[int, dict[str, Any]]:
    algorithm, key_id, signature = HMACSigner("key-1", b"secret").sign(body)
    headers = {
        "X-Localization-Signature-Algorithm": changes.get("algorithm", algorithm),
        "X-Localization-Key-Id": changes.get("key_id", key_id),
        "X-Localization-Signature": changes.get("signature", signature),
    }
    return _ask(port, "POST", changes.get("path", "/v2/localization/changes"), body, headers)


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_server_takes_an_event_up_once_and_answers_every_time_alike(port: int) -> None:
    body = canonical(event())
    first = _post(port, body)
    second = _post(port, body)
    assert first[0] == second[0] == 202
    assert first[1] == {**second[1], "inserted_jobs": first[1]["job_count"]}
    assert second[1]["inserted_jobs"] == 0
    _, ledger = _ask(port, "GET", "/ledger")
    entry = ledger["events"]["event-1"]
    assert (entry["requests"], entry["accepted"], entry["replays"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"signature": "0" * 64}, 401),
        ({"key_id": "other"}, 401),
        ({"algorithm": "none"}, 401),
        ({"path": "/elsewhere"}, 404),
    ],
)
def test_the_server_checks_who_sends_and_where_to(port: int, changes: dict[str, str], status: int) -> None:
    assert _post(port, canonical(event()), **changes)[0] == status
    _, ledger = _ask(port, "GET", "/ledger")
    assert ledger["events"] == {}
    assert ledger["bad_signatures"] == (status == 401)


def test_the_server_refuses_what_is_no_event(port: int) -> None:
    assert _post(port, b"{}")[0] == 400
    assert _post(port, b"\xff")[0] == 400


def test_the_server_notices_another_content_under_the_same_id(port: int) -> None:
    _post(port, canonical(event()))
    _post(port, canonical(event(source_text="other")))
    assert _ask(port, "GET", "/ledger")[1]["altered"] == 1
