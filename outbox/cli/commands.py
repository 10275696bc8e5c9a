"""The commands: what each takes, what it does, how it ends."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from outbox.cli import compose, lines, options, output, serve
from outbox.cli.boundary import CommandLineError, Program, say_error
from outbox.dialects.engines import program_engine, program_url
from outbox.errors import OutboxError
from outbox.store import MAX_BATCH
from outbox.worker import Worker

#: Exit status of `health` when something needs a person.
BLOCKED = 1


def _version() -> str:
    try:
        return version("outbox")
    except PackageNotFoundError:  # run from a folder, not installed
        return "unknown"


@click.group(
    name="outbox",
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(_version(), prog_name="outbox", message="%(prog)s %(version)s")
@click.pass_context
def program(context: click.Context) -> None:
    """Tell a remote HTTPS API about every change of your database, surely and exactly as it was.

    Your program enqueues an event in the transaction that makes the change. `outbox worker` delivers it: at least once,
    again after every crash and outage, until the API has accepted it or an operator has to look.

    \b
    New here?      outbox demo
    To set up:     export OUTBOX_DATABASE_URL=sqlite:///site.db
                   outbox migrate
                   outbox worker
    To look:       outbox health
                   outbox status EVENT_ID
    To act:        outbox redrive EVENT_ID
                   outbox pause TOPIC --reason TEXT

    Options can also be given as environment variables, named beside them. Every error is one line on standard error
    with a stable code, and exit status 2.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@program.command(short_help="Watch it work: half a minute, nothing to set up.")
@click.option("--database-url", metavar="URL",
              help="Where to run it: a PostgreSQL database, or an SQLite file that is not there yet. Never taken from "
              "the environment.  [default: a temporary SQLite file]")  # fmt: skip
@click.option("--events", type=click.IntRange(20, 1000), default=40, show_default=True, metavar="N",
              help="Changes that the host makes.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the database, logs and ledger, and say where they are.")
def demo(database_url: str | None, events: int, keep: bool) -> int:
    """Watch it work, in half a minute, with nothing but this package.

    A host changes articles and enqueues events in the same transactions, some of which are rolled back. Two workers
    deliver them to a server on this machine that fails on purpose: errors, dropped connections, slow answers. One
    worker is killed in mid-delivery. In the end the server's ledger is compared with the database. Exit status 0 if
    they agree, 1 if not.

    On PostgreSQL it works in a schema of its own, and drops it.

    \b
    Example:  outbox demo
              outbox demo --database-url postgresql://postgres@localhost/test
    """
    from outbox.demo import run  # noqa: PLC0415 - brings a server along

    return run(database_url, events=events, keep=keep)


@program.command()
@options.database()
@click.option("--revision", default="head", show_default=True, metavar="REVISION", help="Where to go.")
@click.option("--sql", is_flag=True, help="Print the SQL instead of running it. Nothing is connected to.")
def migrate(database_url: str, revision: str, sql: bool) -> None:
    """Make the outbox table, or bring it up to date.

    Run it at every deploy, before the programs that use the table. Any number of hosts may run it at once: one
    migrates, the others wait, all succeed. `alembic upgrade head` in a checkout is the same.

    \b
    Example:  outbox migrate --database-url postgresql://site@db.internal/site
              outbox migrate --sql > upgrade.sql
    """
    from outbox.migrate import current, render_sql, upgrade  # noqa: PLC0415 - only this command needs Alembic

    if sql:
        click.echo(render_sql(program_url(database_url), revision), nl=False)
        return
    engine = program_engine(database_url, create=True, answer_seconds=None)  # an index may take hours
    try:
        with compose.explained(engine):
            before = current(engine)
            upgrade(engine, revision)
            after = current(engine)
    finally:
        engine.dispose()
    output.say_lines({"before": before, "revision": after})


@program.command(short_help="Enqueue events from a file of JSON lines.")
@click.argument("file")
@options.outbox
@options.topic("The contract that the events follow.  [default: the only one]")
@options.setting("--max-attempts", type=int, default=5, show_default=True, metavar="N",
                 help="Deliveries to try before an event fails, 1 to 20.")  # fmt: skip
@click.option(
    "--keep-going", is_flag=True, help="Enqueue the good lines, report the bad ones, exit 2 if there are any."
)
def enqueue(file: str, where: options.Where, topic: str | None, max_attempts: int, keep_going: bool) -> None:
    """Enqueue the events in FILE, one JSON object a line (- reads standard input).

    All of them or none: a bad line is named by its number, and nothing of the file is enqueued. An event that is there
    already, with the same content, is left as it stands, so the same file may be given again.

    \b
    Example:  outbox enqueue changes.jsonl
              zcat changes.jsonl.gz | outbox enqueue --keep-going -
    """
    with lines.open_file(file, sys.stdin.buffer) as events, compose.located(where) as outbox:
        outbox.check()
        outbox.enqueue_many([], topic=topic, max_attempts=max_attempts)  # refuses what is wrong for every line
        size = os.fstat(events.fileno()).st_size
        with output.progress("enqueuing", size) as counter, compose.transaction(outbox) as connection:
            loader = lines.Loader(
                outbox, connection, topic=topic, max_attempts=max_attempts,
                on_refused=_report_line if keep_going else None, on_chunk=counter.add,
            )  # fmt: skip
            loader.load(lines.read(events))
    output.say_lines({"events": loader.states.total(), **loader.states})
    if loader.refused:
        raise CommandLineError("cli.lines_refused", found=f"{loader.refused} bad lines")


def _report_line(number: int, error: OutboxError) -> None:
    say_error(error, where=f"line {number}")


@program.command()
@options.database(required=False)
@options.pooler
@options.worker
@click.option("--quiet", "-q", is_flag=True, help="Log only what somebody should look into.")
@click.option("--verbose", "-v", is_flag=True, help="Log every delivery.")
@click.pass_context
def worker(context: click.Context, /, quiet: bool, verbose: bool, **given: Any) -> None:
    """Deliver what is due, until told to stop.

    Run one or more on every host. Workers share the work through leases in the database: when one dies, its events are
    delivered again by another once their leases end. SIGTERM or Ctrl-C finishes what is under way, gives the rest back
    and exits 0; a second one exits at once. A database that goes away is waited for.

    \b
    Example:  export OUTBOX_DATABASE_URL=postgresql://site@db.internal/site
              export OUTBOX_CMS_ORIGIN=https://cms.example.com
              export OUTBOX_CMS_KEY_ID=site-1
              export OUTBOX_CMS_KEY_FILE=/etc/site/cms.key
              outbox worker --concurrency 32
    """
    with ExitStack() as stack:
        screen = stack.enter_context(serve.logged(quiet=quiet, verbose=verbose))
        stopper = serve.Stopper()
        stack.enter_context(serve.stopping(stopper))
        if given["app"] is not None:
            heard = {"app", "until_idle", "quiet", "verbose"}
            options.only_without_app(context, *(name for name in context.params if name not in heard))
            runner = compose.host_worker(given["app"])
        else:
            runner = _cms_worker(context, stack, given, verbose=verbose)
        stopper.attach(runner)
        serve.run(runner, screen, until_idle=given["until_idle"])


def _cms_worker(context: click.Context, stack: ExitStack, given: dict[str, Any], *, verbose: bool) -> Worker:
    cms = options.together(context, "database_url", "cms_origin", "cms_key_id", "cms_key_file")
    url = cms.pop("database_url")
    destination = stack.enter_context(
        compose.cms_destination(
            **cms, timeout=given["timeout"], allow_loopback_http=given["allow_loopback_http"]
        )
    )  # fmt: skip
    policy = compose.retry_policy(given["retry_base_seconds"], given["retry_max_seconds"])
    outbox = stack.enter_context(compose.opened(url, pooled=given["pooler"], retry=policy))
    advice = outbox.check()
    if advice:
        serve.logger.warning("%s", advice)
    return Worker(
        outbox,
        dict.fromkeys(outbox.topics, destination),
        worker_id=given["worker_id"],
        concurrency=given["concurrency"],
        batch=given["batch"],
        lease_seconds=given["lease_seconds"],
        grace_seconds=given["grace_seconds"],
        wake_ups=not given["pooler"],
        observer=serve.say_delivered if verbose else None,
    )


@program.command(short_help="Show one event: state, attempts, last error, receipt.")
@click.argument("event_id")
@options.outbox
@options.topic("The topic the event is in.  [default: the only one]")
@options.as_json
def status(event_id: str, where: options.Where, topic: str | None, as_json: bool) -> None:
    """Show one event: its state, attempts, failures and receipt.

    Never its content. Times are UTC.

    \b
    Example:  outbox status site-4:conf:00003
              outbox status site-4:conf:00003 --json | jq -r .status
    """
    with compose.located(where) as outbox:
        fields = output.status_fields(outbox.status(event_id, topic=topic))
    if as_json:
        output.say_json(fields)
    else:
        output.say_record(f"event {event_id}", fields)


@program.command(short_help="Say whether events flow (exit status 0, 1 or 2).")
@options.outbox
@options.as_json
@click.option("--deep", is_flag=True, help="Check every row and the database's own integrity. Reads everything.")
def health(where: options.Where, as_json: bool, deep: bool) -> int:
    """Say whether events flow: exit status 0 ok, 1 blocked, 2 cannot tell.

    Blocked means that events have failed, or that leases have ended and no worker has taken the events up again. Also
    shows each topic: closed (all is well), open (its destination is down), held (it asked for a pause), ramp (it is
    back) or paused. Cheap however many events there are, so a monitor may ask every few seconds.

    \b
    Example:  outbox health
              outbox health --json | jq .oldest_due_age
    """
    with compose.located(where) as outbox:
        found = outbox.health(deep=deep)
        advice = outbox.check()
    if as_json:
        output.say_json(output.health_fields(found))
    else:
        output.say_health(found, advice)
    return BLOCKED if found.status == "blocked" else 0


@program.command()
@click.argument("event_id", required=False)
@options.outbox
@options.topic("The topic the events are in.  [default: the only one]")
@click.option("--all", "every", is_flag=True, help="Every failed event.")
@click.option("--error-code", metavar="CODE", help="With --all: only those that failed with this code.")
def redrive(event_id: str | None, where: options.Where, topic: str | None, every: bool, error_code: str | None) -> None:
    """Make failed events due again, with all their attempts.

    Do this once the cause is mended; `outbox status` says what it was.

    \b
    Example:  outbox redrive site-4:conf:00003
              outbox redrive --all --error-code http_status
    """
    if every == (event_id is not None) or (error_code is not None and not every):
        raise CommandLineError("cli.usage", "give either one EVENT_ID, or --all with or without --error-code")
    with compose.located(where) as outbox:
        if event_id is not None:
            outbox.redrive(event_id, topic=topic)
            redriven = 1
        else:
            redriven = _in_batches(
                "redriving", lambda: outbox.redrive_all(topic=topic, error_code=error_code, limit=MAX_BATCH)
            )
    output.say_lines({"redriven": redriven})


@program.command(short_help="Give up a failed event that holds back later ones.")
@click.argument("event_id")
@options.outbox
@options.topic("The topic the event is in.  [default: the only one]")
def discard(event_id: str, where: options.Where, topic: str | None) -> None:
    """Give up a failed event, so that later ones of its ordering key are delivered.

    It stays failed, with the code `discarded`, until it is purged. To have it delivered instead, redrive it.

    \b
    Example:  outbox discard site-4:conf:00003
    """
    with compose.located(where) as outbox:
        found = outbox.discard(event_id, topic=topic)
    output.say_lines({"event_id": found.event_id, "status": found.status, "last_error_code": found.last_error_code})


@program.command(short_help="Let nothing of a topic be delivered for now.")
@click.argument("topic")
@options.outbox
@click.option("--reason", required=True, metavar="TEXT", help="Why, for whoever finds it paused.")
def pause(topic: str, where: options.Where, reason: str) -> None:
    """Let nothing of TOPIC be delivered until it is resumed.

    All workers heed it at once, also after a restart. What is under way ends as it may; events are still enqueued, and
    wait at no attempt's cost. `outbox health` shows it.

    \b
    Example:  outbox pause cms.change --reason "their migration, until Monday"
    """
    with compose.located(where) as outbox:
        output.say_lines(output.topic_fields(outbox.pause(topic, reason=reason)))


@program.command(short_help="Deliver a topic's events again.")
@click.argument("topic")
@options.outbox
def resume(topic: str, where: options.Where) -> None:
    """End a pause. A topic that is open, because its destination was down, is probed at once.

    \b
    Example:  outbox resume cms.change
    """
    with compose.located(where) as outbox:
        output.say_lines(output.topic_fields(outbox.resume(topic)))


@program.command()
@options.outbox
@options.topic("Only events of this topic.  [default: all topics]")
@click.option("--older-than", callback=options.duration, required=True, metavar="DURATION",
              help="How long ago an event must have been settled, such as 90s, 12h, 30d or 4w.")  # fmt: skip
@click.option("--include-failed", is_flag=True, help="Delete failed events too, not only succeeded ones.")
def purge(where: options.Where, topic: str | None, older_than: float, include_failed: bool) -> None:
    """Delete events that were settled long ago.

    With an event goes its receipt, and the proof that it was enqueued before: the same event enqueued later is a new
    one. What has still to be delivered is never deleted. Works in small transactions beside running workers.

    \b
    Example:  outbox purge --older-than 30d
    """
    with compose.located(where) as outbox:
        deleted = _in_batches(
            "deleting",
            lambda: outbox.purge(older_than_seconds=older_than, topic=topic, include_failed=include_failed),
        )
    output.say_lines({"deleted": deleted})


def _in_batches(words: str, batch: Any) -> int:
    """Repeat until a batch is not full."""
    with output.progress(words) as counter:
        while True:
            moved = batch()
            counter.add(moved)
            if moved < MAX_BATCH:
                return counter.events
