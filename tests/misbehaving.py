"""A real server on loopback that answers as scripted, mostly badly.

An *answer* is a function of one :class:`Exchange`: a request that came in and the socket to reply on. The server takes
the next answer of its script for each request, and the last one again when the script has run out. Answers that go on
for ever stop when the client hangs up or the server closes, so a test waits for its own deadline and for nothing else.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

EVENT_ID = "event-1"
#: An answer that goes on for ever sends something this often.
PAUSE = 0.02
JSON = "application/json; charset=utf-8"


@dataclass(frozen=True)
class Request:
    """A request as it came over the wire, header names and all."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value.decode() for key, value in self.headers if key.lower() == name.lower().encode()]


@dataclass(frozen=True)
class Exchange:
    request: Request
    socket: socket.socket
    closing: threading.Event
    #: Set once the server has begun to misbehave, for tests that wait to see it.
    begun: threading.Event

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def pause(self, seconds: float = PAUSE) -> bool:
        """Wait; False once the server is to stop."""
        return not self.closing.wait(seconds)


class HangUpError(Exception):
    """Raised by an answer after which the server closes the connection."""


Answer = Callable[[Exchange], None]


class Server:
    """Serves ``script`` until closed.

    Attributes:
        requests: every request that came in whole, in order.
        connections: how many connections were accepted.
    """

    def __init__(self, *script: Answer) -> None:
        assert script
        self._script = script
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.closing = threading.Event()
        self.begun = threading.Event()
        self.requests: list[Request] = []
        self.connections = 0
        self.port: int = self._listener.getsockname()[1]
        self.origin = f"http://127.0.0.1:{self.port}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.closing.set()
        with self._lock:
            for sock in self._sockets:
                _shut(sock)
        _shut(self._listener)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def hang_up(self) -> None:
        """Close every open connection, as a server does whose keep-alive time is over."""
        with self._lock:
            for sock in self._sockets:
                _shut(sock)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.add(sock)
                self.connections += 1
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock.makefile("rb") as stream:
                while (request := _read_request(stream)) is not None:
                    with self._lock:
                        answer = self._script[min(len(self.requests), len(self._script) - 1)]
                        self.requests.append(request)
                    answer(Exchange(request, sock, self.closing, self.begun))
        except (OSError, HangUpError):
            pass
        finally:
            with self._lock:
                self._sockets.discard(sock)
            sock.close()


@contextmanager
def connections(handle: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """The port of a server that hands every raw connection to ``handle``, request unread."""
    closing = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            handle(sock, closing)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(sock,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        closing.set()
        _shut(listener)
        acceptor.join(10)
        listener.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def refused_port() -> Iterator[int]:
    """A port that nobody listens on, held so that nobody can."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def unanswered_port() -> Iterator[int]:
    """A port where connecting goes on for ever: its accept queue is full and never emptied."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting: list[socket.socket] = []
        try:
            for _ in range(16):
                sock = socket.socket()
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            yield listener.getsockname()[1]
        finally:
            for sock in waiting:
                sock.close()


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read_request(stream: Any) -> Request | None:
    line = stream.readline()
    if not line:
        return None
    headers: list[tuple[bytes, bytes]] = []
    while (header := stream.readline().rstrip(b"\r\n")) != b"":
        name, _, value = header.partition(b":")
        headers.append((name, value.strip()))
    length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
    body = stream.read(length)
    return Request(line.rstrip(b"\r\n"), headers, body) if len(body) == length else None


# -- good answers -----------------------------------------------------------------------------------------------------


def accepted(event_id: str = EVENT_ID, **changes: Any) -> dict[str, Any]:
    """The response that the service gives, with ``changes``."""
    return {
        "schema": "blun.website-localization-api.v2",
        "event_id": event_id,
        "plan_id": "plan-1",
        "job_count": 3,
        "inserted_jobs": 2,
        "status": "enqueued",
        **changes,
    }


def blocked(code: str, **changes: Any) -> dict[str, Any]:
    """The service's error object."""
    return {"schema": "blun.website-localization-api.v2", "status": "BLOCK", "error": code, **changes}


def canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def message(
    status: int,
    body: bytes,
    *headers: tuple[str, str],
    content_type: str | None = JSON,
    length: int | None = None,
) -> bytes:
    """A whole response, its Content-Length right unless ``length`` says otherwise."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body) if length is None else length}"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    lines.extend(f"{name}: {value}" for name, value in headers)
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes, extension: bytes = b"") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: {JSON}\r\n\r\n".encode()
    return head + b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in (*chunks, b""))


def raw(data: bytes, *, close: bool = False) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.send(data)
        if close:
            raise HangUpError

    return answer


def reply(status: int = 200, value: Any = None, *headers: tuple[str, str], content_type: str | None = JSON) -> Answer:
    """Answers with canonical JSON: ``value``, or else what the service says when all is well."""

    def answer(exchange: Exchange) -> None:
        exchange.send(
            message(status, canonical(accepted() if value is None else value), *headers, content_type=content_type)
        )

    return answer


def echo(exchange: Exchange) -> None:
    """Accepts whatever event comes, as the service would."""
    exchange.send(message(202, canonical(accepted(json.loads(exchange.request.body)["event_id"]))))


# -- bad ones ---------------------------------------------------------------------------------------------------------


def hang_up(exchange: Exchange) -> None:
    raise HangUpError


def reset(exchange: Exchange) -> None:
    """Closes with a TCP reset."""
    exchange.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise HangUpError


def silence(exchange: Exchange) -> None:
    exchange.begun.set()
    exchange.closing.wait()


def trickle(data: bytes, *, at_once: bytes = b"") -> Answer:
    """Sends ``at_once``, then ``data`` byte by byte, then nothing more."""

    def answer(exchange: Exchange) -> None:
        exchange.send(at_once)
        exchange.begun.set()
        for index in range(len(data)):
            exchange.send(data[index : index + 1])
            if not exchange.pause():
                return
        silence(exchange)

    return answer


def flood(part: bytes, *, at_once: bytes = b"", pause: float = 0.0) -> Answer:
    """Sends ``at_once``, then ``part`` again and again for as long as anybody reads."""

    def answer(exchange: Exchange) -> None:
        exchange.send(at_once)
        exchange.begun.set()
        while exchange.pause(pause):
            exchange.send(part)

    return answer
