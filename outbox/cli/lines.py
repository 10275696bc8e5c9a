"""JSON lines into the outbox: in bounded memory, in one transaction, each bad line known by its number."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn

from sqlalchemy import Connection

from outbox.cli.boundary import CommandLineError
from outbox.errors import CollisionError, InputError, OutboxError
from outbox.store import Outbox

#: Of one line. A payload of the longest that is allowed may be written six times as long, in escapes.
MAX_LINE_BYTES: Final = 32_000_000
CHUNK_LINES: Final = 500
CHUNK_BYTES: Final = 8_000_000

#: What a line can be at fault for; anything else that is raised is about the whole run.
_OF_THE_LINE: Final = frozenset({"dispatch.change_invalid", "dispatch.idempotency_collision"})


class Line(NamedTuple):
    """A line of the file: its number, and what stands there or why that is no event."""

    number: int
    size: int
    event: Any = None
    error: OutboxError | None = None


class BadLineError(OutboxError):
    """A line was refused, and with it the file."""

    def __init__(self, number: int, error: OutboxError) -> None:
        super().__init__(
            error.code, f"line {number}: {error.message}; nothing was enqueued",
            event_id=error.event_id, expected=error.expected, found=error.found,
        )  # fmt: skip
        self.number = number


def open_file(name: str, standard_input: IO[bytes]) -> IO[bytes]:
    """The file called ``name``, or for ``-`` all of standard input.

    Input that comes slowly is first gathered on disk: a transaction waiting for it would keep others waiting too.

    Raises:
        CommandLineError: ``cli.file_invalid``.
    """
    if name != "-":
        with _readable(name):
            return Path(name).open("rb")
    with _readable("standard input"):
        spooled = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        shutil.copyfileobj(standard_input, spooled)
        spooled.seek(0)
        return spooled


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or type(error).__name__
        raise CommandLineError("cli.file_invalid", f"cannot read {name}", found=found) from None


def read(file: IO[bytes]) -> Iterator[Line]:
    """The lines of a file. Blank ones are passed over, but counted."""
    number = 0
    while raw := _next(file):
        number += 1
        size = len(raw)
        if size == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            size += _skip_line(file)
            yield Line(number, size, error=_no_event(f"at most {MAX_LINE_BYTES} bytes in a line"))
        elif raw.strip():
            yield _parsed(number, raw)


def _next(file: IO[bytes]) -> bytes:
    with _readable("the file to its end"):
        return file.readline(MAX_LINE_BYTES)


def _skip_line(file: IO[bytes]) -> int:
    size = 0
    while rest := _next(file):
        size += len(rest)
        if rest.endswith(b"\n"):
            break
    return size


def _parsed(number: int, raw: bytes) -> Line:
    try:
        # A byte order mark is what some editors put first in a file.
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        event = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except UnicodeDecodeError:
        return Line(number, len(raw), error=_no_event("UTF-8"))
    except InputError as error:
        return Line(number, len(raw), error=error)
    except (ValueError, RecursionError):
        return Line(number, len(raw), error=_no_event("one JSON object"))
    return Line(number, len(raw), event)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _no_event("no key twice in an object")
    return found


def _refuse(_: str) -> NoReturn:
    raise _no_event("finite numbers")


def _no_event(expected: str) -> InputError:
    return InputError("dispatch.change_invalid", expected=expected)


class Loader:
    """Enqueues lines on one connection, whose transaction is the caller's.

    Args:
        on_refused: called with the number of a bad line and why; None to stop there with :class:`BadLineError`.
        on_chunk: called with the lines and the bytes that have just been done.

    Attributes:
        states: how many of the events are in which state now.
        refused: how many lines were refused.
    """

    def __init__(
        self,
        outbox: Outbox,
        connection: Connection,
        *,
        topic: str | None,
        max_attempts: int,
        on_refused: Callable[[int, OutboxError], None] | None,
        on_chunk: Callable[[int, int], None],
    ) -> None:
        self._enqueue_many = partial(outbox.enqueue_many, connection=connection, topic=topic, max_attempts=max_attempts)
        self._on_refused = on_refused
        self._on_chunk = on_chunk
        self.states: Counter[str] = Counter()
        self.refused = 0

    def load(self, lines: Iterator[Line]) -> None:
        """Enqueue all of ``lines``."""
        for chunk in _chunks(lines):
            bad = [(line.number, line.error) for line in chunk if line.error is not None]
            bad += self._enqueue([line for line in chunk if line.error is None])
            for number, error in sorted(bad, key=lambda pair: pair[0]):
                self._refuse(number, error)
            self._on_chunk(len(chunk), sum(line.size for line in chunk))

    def _enqueue(self, lines: Sequence[Line]) -> list[tuple[int, OutboxError]]:
        """In few statements; where one of the lines is refused, one by one to see which. Returns those."""
        try:
            statuses = self._enqueue_many([line.event for line in lines])
        except (InputError, CollisionError) as error:
            if error.code not in _OF_THE_LINE:
                raise
            if len(lines) == 1:
                return [(lines[0].number, error)]
        else:
            self.states.update(status.status for status in statuses)
            return []
        return [refused for line in lines for refused in self._enqueue([line])]

    def _refuse(self, number: int, error: OutboxError) -> None:
        if self._on_refused is None:
            raise BadLineError(number, error)
        self.refused += 1
        self._on_refused(number, error)


def _chunks(lines: Iterator[Line]) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += line.size
        if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
