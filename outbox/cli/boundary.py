"""Where errors end: one line on standard error, a stable code, an exit status, and never a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from outbox.errors import OutboxError

#: Exit statuses. 1 is no error: `health` found something, or the demo's two sides disagree.
FAILED: Final = 2
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

#: Codes of the command line's own, beside :data:`outbox.errors.CODES`.
CODES: Final[dict[str, str]] = {
    "cli.usage": "the command was given wrongly",
    "cli.file_invalid": "a file could not be read",
    "cli.lines_refused": "some lines were refused; the others were enqueued",
    "cli.app_invalid": "--app does not lead to a function that returns a Worker",
    "cli.output": "standard output could not be written",
    "cli.interrupted": "interrupted",
    "cli.internal": "an unexpected error; please report it",
}


class CommandLineError(OutboxError):
    """The command line refused something."""

    def __init__(self, code: str, message: str | None = None, **about: str | None) -> None:
        super().__init__(code, message or CODES[code], **about)


class Program(click.Group):
    """A click group that ends every error in one line and exits itself, with or without click's standalone mode."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name or "outbox", **extra)
            sys.stdout.flush()
        except BaseException as error:  # noqa: BLE001 - the outermost place there is
            status = end(error)
        sys.exit(status)

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)  # in the order a newcomer meets them

    def invoke(self, ctx: click.Context) -> Any:
        # Here and not in main(), where click would first print an empty line, or end a closed pipe in its own way.
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError):
            raise CommandLineError("cli.interrupted") from None
        except BrokenPipeError:
            raise _PipeClosedError from None


class _PipeClosedError(Exception):
    """Whoever read our output has gone, which is theirs to decide."""


def end(error: BaseException) -> int:
    """Say what happened, if anybody has to know, and return the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0
    if isinstance(error, _PipeClosedError | BrokenPipeError):
        _give_up_output()
        return PIPE_CLOSED
    say_error(as_ours(error))
    if isinstance(error, CommandLineError) and error.code == "cli.interrupted":
        return INTERRUPTED
    return FAILED


def as_ours(error: BaseException) -> OutboxError:
    """Any exception as one of ours, without text that could quote something."""
    if isinstance(error, OutboxError):
        return error
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return CommandLineError("cli.interrupted")
    if isinstance(error, click.ClickException):
        return CommandLineError("cli.usage", _usage(error))
    if isinstance(error, OSError) and not error.filename:
        _give_up_output()
        return CommandLineError("cli.output", found=error.strerror)
    return CommandLineError("cli.internal", found=f"{type(error).__name__} at {place(error)}")


def say_error(error: OutboxError, *, where: str | None = None, after: str = "") -> None:
    """The line an error ends in.

    Args:
        where: what of the input is meant, such as ``line 7``.
        after: what has become of the rest.
    """
    text = str(error)
    if where is not None:
        text = text.replace(f"{error.code}: ", f"{error.code}: {where}: ", 1)
    click.echo(f"outbox: error: {one_line(text)}{after}", err=True)


def one_line(text: str) -> str:
    return " ".join(text.split())


def place(error: BaseException) -> str:
    """Where an exception was raised: a file's name and a line, nothing of what was in the variables."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


def _usage(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}; see `{context.command_path} --help`"


def _give_up_output() -> None:
    """Let the interpreter flush into nothing at exit, where it would complain about the closed pipe."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as under a test runner
        return
