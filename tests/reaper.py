"""Cleans up after a test process that could not: ``python tests/reaper.py LOCK MODULE CLASS DIRECTORY``.

A killed pytest stops no server. So whoever starts one also starts this: it waits for a lock which the kernel takes away
from its holder, however that ends, and then deletes whatever is still there.
"""

from __future__ import annotations

import fcntl
import importlib
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parent.parent


def hold(lock: Path) -> IO[str]:
    """Take the lock for as long as this process lives, or until the returned file is closed."""
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def watch(lock: Path, kind: type, directory: Path) -> None:
    """Have ``kind.clean_up(directory)`` called once nobody holds ``lock`` any more."""
    arguments = [sys.executable, __file__, str(lock), kind.__module__, kind.__name__, str(directory)]
    # Through a shell that ends at once: the reaper is nobody's child, and in a session that no Ctrl-C reaches.
    command = ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *arguments]
    subprocess.run(command, cwd=ROOT, start_new_session=True, check=True)


def main(lock: str, module: str, name: str, directory: str) -> None:
    with Path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if Path(directory).exists():  # another reaper of the same lock may have been here, but is not any more
            sys.path.insert(0, str(ROOT))
            getattr(importlib.import_module(module), name).clean_up(Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
