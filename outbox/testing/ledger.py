"""A receiver that speaks the CMS localization contract on loopback, keeps a ledger, and misbehaves when asked to.

It deduplicates by event id, as every receiver has to, and checks each signature over the exact bytes. What is in its
ledger it knows from requests alone, so it is a witness that no sender can influence.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Literal, Self

from outbox.contracts.cms import EVENT_SCHEMA, RESPONSE_SCHEMA
from outbox.testing.doubles import PATIENCE
from outbox.values import sha256_hex

TARGET: Final = "/v2/localization/changes"
KEY_ID: Final = "ledger-key"
KEY: Final = b"a key that everybody may know"
_MAX_BODY: Final = 4_000_000
_ALL_LOCALES: Final = 24
_SIGNATURE_HEADERS: Final = (
    "X-Localization-Signature-Algorithm", "X-Localization-Key-Id", "X-Localization-Signature",
)  # fmt: skip
#: A trickling or flooding answer sends something so often, in seconds.
_PAUSE: Final = 0.02
_FLOOD: Final = b" " * 65_536

Answer = Literal["whole", "part", "none", "reset", "trickle", "flood", "silence"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How one request is treated.

    Attributes:
        name: what the ledger counts it under.
        accepts: whether the event is taken up before anything is answered.
        error: the code of a refusal, with its status; None answers as to an event that was taken up.
        final: whether the event is refused for good; a later request for it is refused alike.
        retry_after: the header's value, or None.
        wait: seconds to wait before the answer. When the client leaves meanwhile, that is counted as ``cut_off``.
        quiet: whether the ledger's ``held`` leaves out a request that waits.
        answer: whether the answer comes whole, breaks off in the middle (``part``), is a closed connection (``none``)
            or a TCP reset, comes byte by byte, never ends, or never comes.
    """

    name: str = "accept"
    accepts: bool = True
    error: str | None = None
    status: int = 202
    final: bool = False
    retry_after: str | None = None
    wait: float = 0.0
    quiet: bool = False
    answer: Answer = "whole"


ACCEPT: Final = Manner()
UNAVAILABLE: Final = Manner("unavailable", accepts=False, error="service_unavailable", status=503)
REFUSE: Final = Manner("refuse", accepts=False, error="content_not_translatable", status=422, final=True)
DROP: Final = Manner("drop", answer="none")
DROP_UNREAD: Final = Manner("drop_unread", accepts=False, answer="none")
BREAK_OFF: Final = Manner("break_off", answer="part")
RESET: Final = Manner("reset", answer="reset")
TRICKLE: Final = Manner("trickle", answer="trickle")
FLOOD: Final = Manner("flood", answer="flood")
HANG: Final = Manner("hang", answer="silence")


def late(seconds: float) -> Manner:
    """Takes the event up and says so after ``seconds``."""
    return Manner("late", wait=seconds)


@dataclass
class Entry:
    """What the receiver knows of one event.

    Attributes:
        number: the how many-eth it was, from 0.
        requests: how often it came in.
        accepted: how often it was taken up; more than once would be a failure of the receiver's own.
        replays: requests for it after it had been taken up, answered alike and changing nothing.
        refused: whether it was refused for good.
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
    """All that the receiver knows, and what it did to its clients.

    Attributes:
        held: events whose requests are being held back now.
        manners: how often each manner was used, by its name.
        cut_off: requests whose client left while they were held.
        bad_signatures: requests that were not signed with the key over their very bytes.
        malformed: requests that are none of this contract's.
        altered: requests for a known event with another content.
    """

    events: dict[str, Entry] = field(default_factory=dict)
    requests: int = 0
    held: list[str] = field(default_factory=list)
    manners: dict[str, int] = field(default_factory=dict)
    cut_off: int = 0
    bad_signatures: int = 0
    malformed: int = 0
    altered: int = 0

    @property
    def accepted(self) -> frozenset[str]:
        """Events that were taken up."""
        return frozenset(name for name, entry in self.events.items() if entry.accepted)

    @property
    def refused(self) -> frozenset[str]:
        """Events that were refused for good."""
        return frozenset(name for name, entry in self.events.items() if entry.refused)

    @property
    def replays(self) -> int:
        """Requests for events that had been taken up before."""
        return sum(entry.replays for entry in self.events.values())


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a script is asked about: one request for one event.

    Attributes:
        number: the how many-eth event this is, from 0.
        request: the how many-eth request for it, from 1.
        total: the how many-eth request of all, from 1.
    """

    event_id: str
    number: int
    request: int
    total: int


#: Decides how a request is treated. Called under the service's lock, so it must not wait.
Script = Callable[[Arrival], Manner]


class Service:
    """Decides what to answer. One lock, no I/O."""

    def __init__(self, script: Script | None = None, *, key_id: str = KEY_ID, key: bytes = KEY) -> None:
        self._script = script or (lambda _: ACCEPT)
        self._key_id = key_id
        self._key = key
        self._lock = threading.Lock()
        self._ledger = Ledger()

    def behave(self, script: Script | Manner) -> None:
        """Treat requests by this from now on."""
        with self._lock:
            self._script = (lambda _: script) if isinstance(script, Manner) else script

    def snapshot(self) -> Ledger:
        """A copy of the ledger as it stands."""
        with self._lock:
            entries = {name: replace(entry) for name, entry in self._ledger.events.items()}
            ledger = self._ledger
            return replace(ledger, events=entries, held=list(ledger.held), manners=dict(ledger.manners))

    def signed(self, algorithm: str, key_id: str, signature: str, body: bytes) -> bool:
        """Whether the client has the key, and the body is the one it signed."""
        expected = hmac.new(self._key, body, hashlib.sha256).hexdigest()
        proven = algorithm == "hmac-sha256" and key_id == self._key_id and hmac.compare_digest(expected, signature)
        if not proven:
            with self._lock:
                self._ledger.bad_signatures += 1
        return proven

    def receive(self, body: bytes) -> tuple[str, Manner] | None:
        """Take a request in and say how to treat it; None for what is no event of this contract."""
        known = _known(body)
        with self._lock:
            if known is None:
                self._ledger.malformed += 1
                return None
            event_id, locales = known
            return event_id, self._enter(event_id, sha256_hex(body.decode("utf-8")), locales)

    def _enter(self, event_id: str, sha256: str, locales: int) -> Manner:
        ledger = self._ledger
        ledger.requests += 1
        entry = ledger.events.setdefault(event_id, Entry(len(ledger.events), sha256))
        entry.requests += 1
        ledger.altered += entry.payload_sha256 != sha256
        manner = REFUSE
        if not entry.refused:
            manner = self.manner(Arrival(event_id, entry.number, entry.requests, ledger.requests), ledger)
        ledger.manners[manner.name] = ledger.manners.get(manner.name, 0) + 1
        entry.refused = entry.refused or manner.final
        if manner.accepts and manner.error is None:
            _take_up(entry, locales or _ALL_LOCALES)
        return manner

    def manner(self, arrival: Arrival, ledger: Ledger) -> Manner:
        """How to treat a request; called under the lock, with the ledger itself."""
        del ledger
        return self._script(arrival)

    def response(self, event_id: str) -> dict[str, Any]:
        """What is answered to an event that was taken up."""
        with self._lock:
            entry = self._ledger.events[event_id]
            receipt = entry.receipt or {"plan_id": "none", "job_count": 1, "status": "cancelled"}
            inserted = 0 if entry.replays or not entry.accepted else receipt["job_count"]
        return {"schema": RESPONSE_SCHEMA, "event_id": event_id, "inserted_jobs": inserted, **receipt}

    @contextmanager
    def holding(self, event_id: str) -> Iterator[None]:
        """Show in the ledger that a request is being held."""
        with self._lock:
            self._ledger.held.append(event_id)
        try:
            yield
        finally:
            with self._lock:
                self._ledger.held.remove(event_id)

    def client_left(self) -> None:
        """Count a client that left while its request was held."""
        with self._lock:
            self._ledger.cut_off += 1


def _known(body: bytes) -> tuple[str, int] | None:
    """An event's id and how many target locales it names; None for what is no event of this contract."""
    try:
        event = json.loads(body)
        known = event["schema"] == EVENT_SCHEMA
        return (str(event["event_id"]), len(event["localization"].get("target_locales") or ())) if known else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _take_up(entry: Entry, jobs: int) -> None:
    if entry.accepted:
        entry.replays += 1
        return
    entry.accepted = 1
    entry.receipt = {"plan_id": f"plan-{entry.number + 1:04}", "job_count": jobs, "status": "enqueued"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HTTPServer

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def do_GET(self) -> None:
        if self.path == "/ledger":
            self._send(200, asdict(self.server.service.snapshot()))
        else:
            self._refuse(404, "not_found")

    def do_POST(self) -> None:
        service, length = self.server.service, self.headers.get("Content-Length", "")
        if self.path != TARGET or not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True
            self._refuse(404, "not_found")
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):  # the client was cut off, and has said nothing whole
            self.close_connection = True
            return
        algorithm, key_id, signature = (self.headers.get(name, "") for name in _SIGNATURE_HEADERS)
        if not service.signed(algorithm, key_id, signature, body):
            self._refuse(401, "signature_invalid")
            return
        received = service.receive(body)
        if received is None:
            self._refuse(400, "change_invalid")
        else:
            self._treat(*received)

    def _treat(self, event_id: str, manner: Manner) -> None:
        if manner.wait and self._wait(None if manner.quiet else event_id, manner.wait):
            self.server.service.client_left()
            self.close_connection = True
            return
        if manner.error is not None:
            value: dict[str, Any] = _block(manner.error)
        else:
            value = self.server.service.response(event_id)
        self._answer(event_id, manner, _message(manner.status, value, manner.retry_after))

    def _wait(self, event_id: str | None, seconds: float) -> bool:
        """Hold the request for a while, shown in the ledger under this name; whether its client left meanwhile."""
        with nullcontext() if event_id is None else self.server.service.holding(event_id):
            # A client that waits for its answer sends nothing, so what can be read is the end.
            gone, _, _ = select.select([self.connection, self.server.stopped], [], [], seconds)
        return bool(gone)

    def _answer(self, event_id: str, manner: Manner, message: bytes) -> None:
        self.close_connection = manner.answer != "whole"
        if manner.answer == "whole":
            self.wfile.write(message)
        elif manner.answer == "part":
            self.wfile.write(message[: len(message) // 2])
        elif manner.answer == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif manner.answer == "trickle":
            self._go_on((message[index : index + 1] for index in range(len(message))), _PAUSE)
        elif manner.answer == "flood":
            head = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            self.wfile.write(head)
            self._go_on(_endless(b"%x\r\n%s\r\n" % (len(_FLOOD), _FLOOD)), 0.0)
        elif manner.answer == "silence":
            self._wait(event_id, PATIENCE)

    def _go_on(self, parts: Iterator[bytes], pause: float) -> None:
        for part in parts:
            self.wfile.write(part)
            if select.select([self.server.stopped], [], [], pause)[0]:
                return

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, _block(code))

    def _send(self, status: int, value: object) -> None:
        self.wfile.write(_message(status, value))

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the ledger is the log."""


class HTTPServer(ThreadingHTTPServer):
    """Serves a :class:`Service` on a loopback port of its own.

    Attributes:
        stopped: readable once the server is to stop, for handlers that wait.
    """

    daemon_threads = False
    request_queue_size = 256

    def __init__(self, service: Service, port: int = 0) -> None:
        self.service = service
        self.stopped, self._stop = socket.socketpair()
        self._lock = threading.Lock()
        self._connections: set[Any] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close everything, and wait for the threads that serve it."""
        self._stop.close()  # and so `stopped` can be read, by everybody and for ever
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()
        self.stopped.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that have gone: they are what this server is for."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LedgerServer:
    """The CMS localization service on loopback, for as long as the ``with`` block runs.

        with LedgerServer() as server:
            CMSDestination(server.origin, HMACSigner(server.key_id, server.key), allow_loopback_http=True)

    Args:
        script: how each request is treated; all are accepted by default.
        port: 0 for any that is free.
    """

    def __init__(
        self, script: Script | Manner | None = None, *, key_id: str = KEY_ID, key: bytes = KEY, port: int = 0
    ) -> None:
        self.key_id = key_id
        self.key = key
        self._service = Service(key_id=key_id, key=key)
        if script is not None:
            self._service.behave(script)
        self._server = HTTPServer(self._service, port)
        self.port: int = self._server.server_address[1]
        self.origin = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="ledger-server", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ledger(self) -> Ledger:
        """The ledger as it stands now; a copy."""
        return self._service.snapshot()

    def behave(self, script: Script | Manner) -> None:
        """Treat requests by this from now on."""
        self._service.behave(script)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(PATIENCE)
        self._server.server_close()


def _block(code: str) -> dict[str, Any]:
    return {"schema": RESPONSE_SCHEMA, "status": "BLOCK", "error": code}


def _message(status: int, value: object, retry_after: str | None = None) -> bytes:
    body = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    headers: Mapping[str, str | None] = {
        "Content-Type": "application/json; charset=utf-8",
        "Content-Length": str(len(body)),
        "Retry-After": retry_after,
    }
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {text}" for name, text in headers.items() if text is not None)]
    # In one piece: head and body in two would wait for each other's acknowledgement.
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _endless(part: bytes) -> Iterator[bytes]:
    while True:
        yield part
