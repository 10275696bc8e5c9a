"""The command line: the composition root, where engines, contracts and destinations are put together.

``commands`` holds one function per command, ``options`` what they take, ``compose`` builds what they need, ``output``
says how results look, ``boundary`` turns every error into one line, and ``serve`` runs a worker until told to stop.
"""

from __future__ import annotations

from outbox.cli.commands import program

__all__ = ["main", "program"]


def main() -> None:
    """Run the command line on ``sys.argv`` and exit."""
    program.main(prog_name="outbox")
