"""Runs faults one after another, each in a lab of its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.faults.faults import FAULTS, Fault, small_disk
from tests.faults.laboratory import DISK, Lab, Place, PostgresPlace, Result, SqlitePlace, StuckError
from tests.postgres import PrivatePostgres

#: Left to a fault, whatever else it was given, so that a lab that is stuck says so.
LONGEST = 600.0


@contextmanager
def places(names: Iterable[str]) -> Iterator[dict[str, Place]]:
    """Where the databases come from: a private PostgreSQL server is started when one is asked for."""
    with ExitStack() as stack:
        found: dict[str, Place] = {}
        for name in names:
            if name == "postgresql":
                found[name] = PostgresPlace(stack.enter_context(PrivatePostgres({"max_connections": 60})))
            else:
                found[name] = SqlitePlace()
        yield found


def run(
    fault: Fault, place: Place, *, events: int | None = None, seed: int = 1, directory: Path | None = None,
    seconds: float = LONGEST,
) -> Result:  # fmt: skip
    """Let one fault loose on one database and return what came of it. Never raises for what the fault did."""
    began = time.monotonic()
    with ExitStack() as stack:
        home = directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-lab-")))
        if fault.name == "full_disk":
            stack.enter_context(small_disk(home / DISK))
        wanted = min(max(fault.events, fault.scale * (events or 0)), fault.most)
        lab = stack.enter_context(Lab(fault.name, place, home, events=wanted, seed=seed, deadline=began + seconds))
        try:
            fault.let_loose(lab)
            return lab.conclude()
        except (StuckError, AssertionError) as error:
            return _stuck(lab, f"{type(error).__name__}: {error}")


def _stuck(lab: Lab, problem: str) -> Result:
    return Result(lab.fault, lab.place.name, len(lab.committed), lab.disturbances, 0, 0, 0, 0.0, 0.0, (problem,))


def select(names: Iterable[str]) -> list[Fault]:
    """The faults of these names, all of them for none.

    Raises:
        KeyError: there is no such fault.
    """
    wanted = list(names)
    return [FAULTS[name] for name in wanted] if wanted else list(FAULTS.values())
