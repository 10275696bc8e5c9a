"""The short form of the laboratory: every fault, on the databases where it says something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS, Fault
from tests.faults.laboratory import Place, PostgresPlace, SqlitePlace
from tests.faults.run import run
from tests.postgres import PrivatePostgres

pytestmark = pytest.mark.timeout(240)  # what is waited for takes long on a busy machine

CASES = [(fault, database) for fault in FAULTS.values() for database in fault.short]


@pytest.fixture(scope="module")
def postgres_place() -> Iterator[Place]:
    """A server of our own, since some faults are about its end."""
    with PrivatePostgres({"max_connections": 60}) as server:
        yield PostgresPlace(server)


@pytest.fixture
def place(database: str, request: pytest.FixtureRequest) -> Place:
    if database == "sqlite":
        return SqlitePlace()
    found: Place = request.getfixturevalue("postgres_place")
    return found


@pytest.mark.parametrize(("fault", "database"), CASES, ids=[f"{fault.name}-{database}" for fault, database in CASES])
def test_fault(fault: Fault, place: Place, tmp_path: Path) -> None:
    result = run(fault, place, directory=tmp_path / "lab", seconds=100)
    assert not result.problems
    assert result.lost == 0
    assert result.events > 0
    assert result.disturbances > 0
