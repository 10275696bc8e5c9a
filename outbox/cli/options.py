"""What commands take. A setting may also come from the environment; what a command does, never."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from outbox.cli.boundary import CommandLineError
from outbox.store import MAX_BATCH

Decorator = Callable[[Any], Any]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")


def duration(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """A number and a unit, ``90s``, ``15m``, ``12h``, ``30d`` or ``4w``, as seconds: the callback of an option."""
    found = _DURATION.fullmatch(value)
    if found is None:
        words = f"{value!r} is not a number and a unit, such as 90s, 15m, 12h, 30d or 4w"
        raise click.BadParameter(words, ctx=context, param=parameter)
    return float(found[1]) * _UNITS[found[2]]


def setting(name: str, **arguments: Any) -> Decorator:
    """An option that is also read from ``OUTBOX_`` and its name."""
    variable = "OUTBOX_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=variable, show_envvar=True, **arguments)


def database(*, required: bool = True) -> Decorator:
    return setting(
        "--database-url", metavar="URL", required=required,
        help="The database, such as sqlite:///site.db or postgresql://user@host/name.",
    )  # fmt: skip


def pooler(command: Any) -> Any:
    return setting(
        "--pooler", is_flag=True,
        help="The URL leads to a pooler in transaction mode, such as PgBouncer.",
    )(command)  # fmt: skip


class Where(NamedTuple):
    """Which outbox a command speaks of: that of a host's own worker, or one at a URL."""

    database_url: str | None
    pooler: bool
    app: str | None


def outbox(command: Any) -> Any:
    """The outbox a command speaks of, as its argument ``where``."""

    @functools.wraps(command)
    def located(*arguments: Any, database_url: str | None, pooler: bool, app: str | None, **given: Any) -> Any:
        return command(*arguments, where=_where(Where(database_url, pooler, app)), **given)

    app = setting(
        "--app", metavar="MODULE:FACTORY",
        help="Speak of the outbox of the Worker that this function returns: for topics other than the CMS's.",
    )  # fmt: skip
    return database(required=False)(pooler(app(located)))


def _where(where: Where) -> Where:
    """Refuse two databases, and none.

    Raises:
        CommandLineError: ``cli.usage``.
    """
    context = click.get_current_context()
    if where.app is None:
        together(context, "database_url")
    else:
        only_without_app(context, "database_url", "pooler")
    return where


def topic(words: str) -> Decorator:
    return setting("--topic", metavar="TOPIC", help=words)


def as_json(command: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def worker(command: Any) -> Any:
    """Everything a worker can be told."""
    for option in reversed(_WORKER_OPTIONS):
        command = option(command)
    return command


_batch = click.IntRange(1, MAX_BATCH)
_WORKER_OPTIONS: Final[tuple[Decorator, ...]] = (
    setting("--cms-origin", metavar="ORIGIN", help="Where to deliver: https://host or https://host:port."),
    setting("--cms-key-id", metavar="ID", help="The name under which the service knows the signing key."),
    setting(
        "--cms-key-file", metavar="PATH", type=click.Path(path_type=Path),
        help="A file holding the signing key (HMAC-SHA256). Of a text file a newline at the end is left off.",
    ),
    setting(
        "--allow-loopback-http", is_flag=True,
        help="Allow a plain http:// origin on this machine. For trials.",
    ),
    setting(
        "--timeout", type=float, default=30, show_default=True, metavar="SECONDS",
        help="The most time that one delivery takes, all told.",
    ),
    setting(
        "--concurrency", type=_batch, default=16, show_default=True, metavar="N",
        help="Deliveries under way at once.",
    ),
    setting(
        "--batch", type=_batch, default=100, show_default=True, metavar="N",
        help="Events that one claim or one settle moves at most.",
    ),
    setting(
        "--lease-seconds", type=float, default=600, show_default=True, metavar="SECONDS",
        help="How long a claimed event is this worker's. After a crash it waits this long for another worker. "
        "Must be longer than --timeout.",
    ),
    setting(
        "--retry-base-seconds", type=float, default=5, show_default=True, metavar="SECONDS",
        help="The wait after a first failure; doubled after each further one.",
    ),
    setting(
        "--retry-max-seconds", type=float, default=300, show_default=True, metavar="SECONDS",
        help="The longest such wait.",
    ),
    setting(
        "--grace-seconds", type=float, default=20, show_default=True, metavar="SECONDS",
        help="How long a worker that was told to stop waits for deliveries under way.",
    ),
    setting(
        "--worker-id", metavar="ID",
        help="A name for this worker, unique among those that run.  [default: host, process and a random part]",
    ),
    setting(
        "--app", metavar="MODULE:FACTORY",
        help="Run the Worker that this function returns, instead of one for the CMS. Modules are also looked for in "
        "the current directory.",
    ),
    setting("--until-idle", is_flag=True, help="Stop once nothing is due any more."),
)  # fmt: skip


def only_without_app(context: click.Context, *names: str) -> None:
    """Refuse options of those, given by hand, of which a host's own worker would not hear.

    Raises:
        CommandLineError: ``cli.usage``.
    """
    by_hand = click.core.ParameterSource.COMMANDLINE
    given = [name for name in names if context.get_parameter_source(name) == by_hand]
    if given:
        said = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandLineError("cli.usage", f"{said}: not together with --app, whose factory decides")


def together(context: click.Context, *names: str) -> dict[str, Any]:
    """Options that are all needed, by name.

    Raises:
        CommandLineError: ``cli.usage``, naming those that are missing.
    """
    missing = [name for name in names if context.params[name] is None]
    if missing:
        words = " and ".join(f"--{name.replace('_', '-')} (or OUTBOX_{name.upper()})" for name in missing)
        raise CommandLineError("cli.usage", f"missing {words}; see `{context.command_path} --help`")
    return {name: context.params[name] for name in names}
