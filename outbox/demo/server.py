"""The demo's CMS: the receiver of ``outbox.testing`` in a process of its own, made to misbehave.

``GET /ledger`` tells what it knows; nothing else does, so the ledger is an independent witness.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from outbox.testing.ledger import ACCEPT, REFUSE, UNAVAILABLE, Arrival, HTTPServer, Ledger, Manner, Service

DROPPED: Final = Manner("dropped", answer="none")
SLOW: Final = Manner("slow", wait=0.6, quiet=True)
#: Holds a request for somebody to kill its sender.
HOLD: Final = Manner("hold", wait=3.5)

#: What happens to the first request for the n-th event that comes in, by n modulo the round; the others fare well.
_MANNERS: Final[Mapping[int, Manner]] = {1: UNAVAILABLE, 3: DROPPED, 5: SLOW}
_ROUND: Final = 7
_REFUSED_EVENT: Final = 9
#: From this one on a request is held, until one has been cut off by the death of its sender.
_HELD_EVENT: Final = 12


class Misbehaving(Service):
    """Treats the first request for some events badly, and none twice, so that in the end all is well."""

    def manner(self, arrival: Arrival, ledger: Ledger) -> Manner:
        if arrival.request > 1:
            return ACCEPT
        if arrival.number == _REFUSED_EVENT:
            return REFUSE
        manner = _MANNERS.get(arrival.number % _ROUND, ACCEPT)
        still_to_be_cut_off = not ledger.cut_off and not ledger.held
        return HOLD if manner is ACCEPT and arrival.number >= _HELD_EVENT and still_to_be_cut_off else manner


def read(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """What ``GET /ledger`` said, as the demo tells it: with the event that is held, and a number for each manner."""
    manners = {manner.name: ledger["manners"].get(manner.name, 0) for manner in _MANNERS.values()}
    return {**ledger, **manners, "held": next(iter(ledger["held"]), None)}


def main() -> None:
    """Serve until standard input ends, as it does when whoever started this has gone.

    The key comes in the first line of standard input; the port goes out in the first of standard output.
    """
    key_id, key = sys.stdin.readline().split()
    server = HTTPServer(Misbehaving(key_id=key_id, key=key.encode("ascii")))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # requests that are being held have nobody to wait for


if __name__ == "__main__":
    main()
