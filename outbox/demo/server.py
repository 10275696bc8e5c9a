"""The demo's CMS: a real HTTP server in a process of its own, which keeps a ledger and misbehaves on purpose.

It deduplicates by event id, as every receiver has to, and checks each signature over the exact bytes. ``GET /ledger``
tells what it knows; nothing else does, so the ledger is an independent witness.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import sys
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal

from outbox.contracts.cms import EVENT_SCHEMA, RESPONSE_SCHEMA
from outbox.values import sha256_hex

TARGET: Final = "/v2/localization/changes"
REFUSAL: Final = "content_not_translatable"
SLOW_SECONDS: Final = 0.6
#: How long a request is held for somebody to kill its sender.
HOLD_SECONDS: Final = 3.5
_MAX_BODY: Final = 4_000_000
_SIGNATURE_HEADERS: Final = (
    "X-Localization-Signature-Algorithm", "X-Localization-Key-Id", "X-Localization-Signature",
)  # fmt: skip

Manner = Literal["accept", "unavailable", "drop", "slow", "refuse", "hold"]

#: What happens to the first request for the n-th event that comes in, by n modulo the round; the others fare well.
_MANNERS: Final[dict[int, Manner]] = {1: "unavailable", 3: "drop", 5: "slow"}
_ROUND: Final = 7
_REFUSED_EVENT: Final = 9
#: From this one on a request is held, until one has been cut off by the death of its sender.
_HELD_EVENT: Final = 12


@dataclass
class Entry:
    """What the server knows of one event.

    Attributes:
        number: the how many-eth it was, from 0.
        requests: how often it came in.
        accepted: how often it was taken up; more than once would be a failure of the server's own.
        replays: requests for it after it had been accepted, answered alike and changing nothing.
    """

    number: int
    payload_sha256: str
    requests: int = 0
    accepted: int = 0
    replays: int = 0
    refused: bool = False
    receipt: dict[str, Any] | None = None


@dataclass
class Ledger:
    """All that the server knows, and what it did to its clients."""

    events: dict[str, Entry] = field(default_factory=dict)
    #: The event whose request is being held, for as long as it is.
    held: str | None = None
    requests: int = 0
    unavailable: int = 0
    dropped: int = 0
    slow: int = 0
    cut_off: int = 0
    bad_signatures: int = 0
    altered: int = 0


class Service:
    """Decides what to answer. One lock, no I/O."""

    def __init__(self, key_id: str, key: bytes) -> None:
        self._key_id = key_id
        self._key = key
        self._lock = threading.Lock()
        self._ledger = Ledger()

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return asdict(self._ledger)

    def count(self, name: str) -> None:
        with self._lock:
            setattr(self._ledger, name, getattr(self._ledger, name) + 1)

    def let_go(self, *, gone: bool) -> None:
        """The request that was held is not any more; its client may be gone."""
        with self._lock:
            self._ledger.held = None
            self._ledger.cut_off += gone

    def signed(self, algorithm: str, key_id: str, signature: str, body: bytes) -> bool:
        """Whether the client has the key, and the body is the one it signed."""
        expected = hmac.new(self._key, body, hashlib.sha256).hexdigest()
        proven = algorithm == "hmac-sha256" and key_id == self._key_id and hmac.compare_digest(expected, signature)
        if not proven:
            self.count("bad_signatures")
        return proven

    def receive(self, body: bytes) -> tuple[str, Manner]:
        """Take a request in and say how to treat it."""
        text = body.decode("utf-8")
        event = json.loads(text)
        if event["schema"] != EVENT_SCHEMA:
            raise ValueError
        event_id = str(event["event_id"])
        with self._lock:
            ledger = self._ledger
            ledger.requests += 1
            entry = ledger.events.setdefault(event_id, Entry(len(ledger.events), sha256_hex(text)))
            entry.requests += 1
            if entry.payload_sha256 != sha256_hex(text):
                ledger.altered += 1
            manner = self._manner(entry)
            if manner == "refuse" or entry.refused:
                entry.refused = True
                return event_id, "refuse"
            if manner != "unavailable":
                self._accept(entry, event)
            if manner == "hold":
                ledger.held = event_id
            return event_id, manner

    def _manner(self, entry: Entry) -> Manner:
        """Only the first request for an event fares badly, so that in the end all is well."""
        if entry.requests > 1:
            return "accept"
        if entry.number == _REFUSED_EVENT:
            return "refuse"
        manner = _MANNERS.get(entry.number % _ROUND, "accept")
        still_to_be_cut_off = not self._ledger.cut_off and self._ledger.held is None
        return "hold" if manner == "accept" and entry.number >= _HELD_EVENT and still_to_be_cut_off else manner

    def _accept(self, entry: Entry, event: dict[str, Any]) -> None:
        if entry.accepted:
            entry.replays += 1
            return
        entry.accepted = 1
        jobs = len(event["localization"].get("target_locales") or ()) or 24
        entry.receipt = {"plan_id": f"plan-{entry.number + 1:04}", "job_count": jobs, "status": "enqueued"}

    def response(self, event_id: str) -> dict[str, Any]:
        with self._lock:
            entry = self._ledger.events[event_id]
            receipt = entry.receipt or {}
            inserted = 0 if entry.replays else receipt["job_count"]
        return {"schema": RESPONSE_SCHEMA, "event_id": event_id, "inserted_jobs": inserted, **receipt}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/ledger":
            self._answer(200, self.server.service.snapshot())
        else:
            self._block(404, "not_found")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != TARGET or not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True
            self._block(404, "not_found")
            return
        body = self.rfile.read(int(length))
        algorithm, key_id, signature = (self.headers.get(name, "") for name in _SIGNATURE_HEADERS)
        if not self.server.service.signed(algorithm, key_id, signature, body):
            self._block(401, "signature_invalid")
            return
        try:
            event_id, manner = self.server.service.receive(body)
        except (ValueError, KeyError, TypeError):
            self._block(400, "change_invalid")
            return
        self._treat(event_id, manner)

    def _treat(self, event_id: str, manner: Manner) -> None:
        service = self.server.service
        if manner == "refuse":
            self._block(422, REFUSAL)
        elif manner == "unavailable":
            service.count("unavailable")
            self._block(503, "service_unavailable")
        elif manner == "drop":
            service.count("dropped")
            self.close_connection = True
        elif manner == "hold":
            self._hold(event_id)
        else:
            if manner == "slow":
                service.count("slow")
                self.server.stopping.wait(SLOW_SECONDS)
            self._answer(202, service.response(event_id))

    def _hold(self, event_id: str) -> None:
        """The event is in the ledger, and the answer does not come: until the client has gone, or given up on."""
        # A client that waits for its answer sends nothing, so what can be read is the end.
        gone, _, _ = select.select([self.connection], [], [], HOLD_SECONDS)
        self.server.service.let_go(gone=bool(gone))
        if gone:
            self.close_connection = True
        else:
            self._answer(202, self.server.service.response(event_id))

    def _block(self, status: int, code: str) -> None:
        self._answer(status, {"schema": RESPONSE_SCHEMA, "status": "BLOCK", "error": code})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the ledger is the log."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, service: Service) -> None:
        self.service = service
        self.stopping = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has been killed is what this server is for."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve until standard input ends, as it does when whoever started this has gone.

    The key comes in the first line of standard input; the port goes out in the first of standard output.
    """
    key_id, key = sys.stdin.readline().split()
    server = Server(Service(key_id, key.encode("ascii")))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # requests that are being held have nobody to wait for


if __name__ == "__main__":
    main()
