"""``outbox demo``: the whole of it, working, on one machine, with everything going wrong that usually does.

``scenario`` tells the story, ``server`` is the remote side in a process of its own, ``actors`` are the host and the
processes, ``report`` compares what the two sides say in the end, and ``view`` shows it.
"""

from __future__ import annotations


def run(database_url: str | None, *, events: int, keep: bool) -> int:
    """Run the demo and return its exit status: 0 when the server's ledger and the database agree, else 1.

    Args:
        database_url: where to run it; None for a temporary SQLite file.
        events: how many changes the host makes.
        keep: whether to leave the database, the logs and the ledger behind.

    Raises:
        OutboxError: it could not be run at all.
    """
    from outbox.demo.scenario import play  # noqa: PLC0415 - `python -m outbox.demo.server` needs none of it

    return play(database_url, events=events, keep=keep)
