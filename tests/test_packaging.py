"""What hosts install is the wheel, not the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from outbox.schema import HEAD_REVISION

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import the package from. A pure wheel is installed by unpacking it."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run_installed(installed: Path, program: str, *arguments: str) -> str:
    """Run the program with the installed package, which must not reach for the checkout."""
    program = textwrap.dedent(program) + textwrap.dedent("""
        import sys
        ours = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "outbox" and m.__file__]
        assert ours and all(path.startswith(sys.argv[1]) for path in ours), ours
    """)
    result = subprocess.run(
        [sys.executable, "-c", program, str(installed), *arguments],
        cwd=installed, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_wheel_carries_everything(names: set[str]) -> None:
    migrations = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {f"outbox/_migrations/versions/{name}" for name in migrations} <= names
    assert {"outbox/_migrations/env.py", "outbox/_migrations/script.py.mako", "outbox/py.typed"} <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "outbox").rglob("*.py")}
    assert modules <= names


def test_the_wheel_carries_nothing_else(names: set[str]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"outbox"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".db", ".sqlite3"))]


def test_the_wheels_metadata(wheel: Path, names: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "outbox = outbox.cli:main" in archive.read(scripts).decode()
    assert fields["License-Expression"] == "MIT"
    assert fields["Requires-Python"] == ">=3.11"
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_migrating_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.sqlite3"
    program = """
        import sys
        from sqlalchemy import create_engine
        from outbox import migrate
        from outbox.schema_check import table_differences
        assert str(migrate.migrations_directory()) == sys.argv[1] + "/outbox/_migrations"
        migrate.upgrade(sys.argv[2])
        print(migrate.current(sys.argv[2]))
        with create_engine(sys.argv[2]).connect() as connection:
            assert table_differences(connection) == []
    """
    assert run_installed(installed, program, url) == HEAD_REVISION


def test_importing_the_package_is_light(installed: Path) -> None:
    program = """
        import sys
        import outbox, outbox.contracts.cms
        print([name for name in ("alembic", "httpx", "httpcore", "click", "rich") if name in sys.modules])
    """
    assert run_installed(installed, program) == "[]"


def test_the_checkout_finds_its_migrations() -> None:
    from outbox.migrate import migrations_directory

    assert migrations_directory() == ROOT / "migrations"
