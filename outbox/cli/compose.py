"""Puts together what commands need, and nothing else: engine, outbox, destination, worker."""

from __future__ import annotations

import importlib
import logging
import operator
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine

from outbox.cli.boundary import CommandLineError, place
from outbox.cli.options import Where
from outbox.contracts.base import Contract
from outbox.contracts.cms import CMS_CHANGE
from outbox.dialects import dialect_for
from outbox.dialects.engines import program_engine, reason, shown
from outbox.errors import DatabaseError, InputError
from outbox.policy import RetryPolicy
from outbox.store import Outbox
from outbox.worker import Worker

if TYPE_CHECKING:
    from outbox.destinations.cms import CMSDestination

logger = logging.getLogger("outbox")

#: What this program knows. A host with contracts of its own runs its own worker, through ``--app``.
CONTRACTS: Final[tuple[Contract, ...]] = (CMS_CHANGE,)
MAX_KEY_BYTES: Final = 65_536


@contextmanager
def opened(url: str, *, pooled: bool, retry: RetryPolicy | None = None) -> Iterator[Outbox]:
    """An outbox on the database at ``url``, closed afterwards.

    Raises:
        DatabaseError, InputError: for a URL that leads nowhere, and whatever the verbs raise, explained.
    """
    engine = program_engine(url, pooled=pooled)
    try:
        with explained(engine):
            yield Outbox(engine, contracts=CONTRACTS, retry=retry)
    finally:
        engine.dispose()


@contextmanager
def located(where: Where) -> Iterator[Outbox]:
    """The outbox that a command speaks of, closed afterwards if it was opened here.

    Raises:
        CommandLineError, DatabaseError, InputError: as :func:`opened` and :func:`host_worker`.
    """
    if where.app is None:
        assert where.database_url is not None
        with opened(where.database_url, pooled=where.pooler) as outbox:
            yield outbox
    else:
        outbox = host_worker(where.app).outbox
        with explained(outbox.engine):
            yield outbox


@contextmanager
def explained(engine: Engine) -> Iterator[None]:
    """Say which database could not be reached, and why, as far as that can be said without quoting the driver."""
    try:
        yield
    except DatabaseError as error:
        why = reason(engine.url, error) or error.found
        message = f"{error.message} ({shown(engine.url)})"
        raise DatabaseError(error.code, message, expected=error.expected, found=why) from None
    except TypeError as error:
        if place(error).startswith("default.py:"):  # SQLAlchemy handing the URL's options to the driver
            raise InputError(
                "dispatch.connection_invalid", "the URL has an option that the driver does not take"
            ) from None
        raise


@contextmanager
def transaction(outbox: Outbox) -> Iterator[Connection]:
    """A transaction as a host would open it."""
    with dialect_for(outbox.engine.dialect.name).mapped_errors(), outbox.engine.begin() as connection:
        yield connection


def retry_policy(base: float, longest: float) -> RetryPolicy:
    return RetryPolicy(base_delay_seconds=base, max_delay_seconds=longest)


def cms_destination(
    cms_origin: str, cms_key_id: str, cms_key_file: Path, *, timeout: float, allow_loopback_http: bool
) -> CMSDestination:
    """The CMS localization service, signed for with the key in a file.

    Raises:
        InputError: ``destination.origin_invalid``, ``destination.key_invalid``, ``destination.timeout_invalid``.
    """
    from outbox.destinations.cms import CMSDestination, HMACSigner  # noqa: PLC0415 - only a worker needs HTTP

    signer = HMACSigner(cms_key_id, read_key(cms_key_file))
    return CMSDestination(cms_origin, signer, timeout=timeout, allow_loopback_http=allow_loopback_http)


def read_key(path: Path) -> bytes:
    """The signing key in a file: its bytes, and of a text file without a newline at the end.

    Raises:
        InputError: ``destination.key_invalid``.
    """
    try:
        with path.open("rb") as file:
            readable_by_others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            key = file.read(MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or type(error).__name__
        raise InputError("destination.key_invalid", f"the key file {path} cannot be read", found=found) from None
    text = key.rstrip(b"\r\n")
    if text.isascii() and text.decode("ascii").isprintable():
        key = text
    if not 0 < len(key) <= MAX_KEY_BYTES:
        expected, found = f"1 to {MAX_KEY_BYTES} bytes", "none" if not key else "more"
        raise InputError("destination.key_invalid", f"the key file {path} holds no key", expected=expected, found=found)
    if readable_by_others:
        logger.warning("the key file %s can be read by other users: chmod 600 it", path)
    return key


def host_worker(app: str) -> Worker:
    """What the function at ``package.module:function`` returns.

    Raises:
        CommandLineError: ``cli.app_invalid``.
    """
    module, separator, name = app.partition(":")
    if not (separator and module and name):
        raise CommandLineError("cli.app_invalid", expected="package.module:function", found=repr(app))
    sys.path.insert(0, str(Path.cwd()))  # as a host's other programs would have it, run from its directory
    found = _guarded(f"importing {module}", lambda: importlib.import_module(module))
    try:
        found = operator.attrgetter(name)(found)
    except AttributeError:
        raise CommandLineError("cli.app_invalid", found=f"no {name} in {module}") from None
    worker = _guarded(f"calling {app}", found)
    if not isinstance(worker, Worker):
        raise CommandLineError("cli.app_invalid", expected="an outbox.Worker", found=type(worker).__name__)
    return worker


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    """A host's code may raise anything. Errors of ours keep their meaning; of others only kind and place are said."""
    try:
        return call()
    except ModuleNotFoundError as error:
        raise CommandLineError("cli.app_invalid", found=f"no module named {error.name}, {what}") from None
    except (CommandLineError, InputError, DatabaseError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        raise CommandLineError("cli.app_invalid", found=f"{type(error).__name__} at {place(error)}, {what}") from None
