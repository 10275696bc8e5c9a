"""The bounded POST against real sockets: deadlines, caps, what surely did not arrive, and kept connections.

Deadline tests use a short deadline and a bound many times as long: they tell "ends" from "hangs" and measure nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import multiprocessing
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from outbox import InputError, OutboxError, http
from outbox.http import (
    MAX_HEAD_BYTES,
    Address,
    Deadline,
    Network,
    Origin,
    Reply,
    Sender,
    SystemResolver,
    TransportFailed,
    parse_origin,
    permitting,
    retry_after,
)
from tests.misbehaving import (
    Answer,
    Exchange,
    Server,
    chunked,
    connections,
    flood,
    hang_up,
    message,
    raw,
    refused_port,
    reset,
    silence,
    trickle,
    unanswered_port,
)

SHORT = 0.4
#: What "returned because of the deadline" may take on a busy machine.
BOUND = 10.0
PATIENCE = 20.0
CAP = 100_000
OK = raw(message(200, b"{}"))
BODY = b'{"a":"\xe2\x82\xac"}'


def sender_to(port: int, scheme: str = "http", network: Network | None = None) -> Sender:
    return Sender(Origin(scheme, "127.0.0.1", port), network)


def post(sender: Sender, seconds: float = PATIENCE, body: bytes = BODY, cap: int = CAP) -> Reply:
    return sender.post(b"/path", [(b"X-Mine", b"1")], body, deadline=Deadline(seconds), max_bytes=cap)


def failure(sender: Sender, seconds: float = PATIENCE, body: bytes = BODY) -> TransportFailed:
    """How a POST fails, which it must, in time, and without an exception from below in its chain."""
    started = time.monotonic()
    with pytest.raises(TransportFailed) as caught:
        post(sender, seconds, body)
    assert time.monotonic() - started < BOUND
    error = caught.value
    assert isinstance(error, OutboxError)
    assert error.code == ("network.unsent" if error.unsent else "network")
    assert error.__cause__ is None
    assert error.__context__ is None
    return error


@contextlib.contextmanager
def talking(*script: Answer, network: Network | None = None) -> Iterator[tuple[Server, Sender]]:
    with Server(*script) as server:
        sender = sender_to(server.port, network=network)
        try:
            yield server, sender
        finally:
            sender.close()


# -- the plain case ---------------------------------------------------------------------------------------------------


def test_what_is_sent() -> None:
    with talking(OK) as (server, sender):
        post(sender)
        (request,) = server.requests
        assert request.line == b"POST /path HTTP/1.1"
        assert request.body == BODY
        assert request.headers == [
            (b"Host", f"127.0.0.1:{server.port}".encode()),
            (b"X-Mine", b"1"),
            (b"Content-Length", str(len(BODY)).encode()),
        ]


@pytest.mark.parametrize("size", [0, 1, 4_000_000])
def test_bodies_of_any_size_arrive_whole(size: int) -> None:
    body = os.urandom(size)
    with talking(OK) as (server, sender):
        post(sender, body=body)
        post(sender, body=body)
        assert [request.body for request in server.requests] == [body, body]
        assert server.connections == 1


def test_what_comes_back() -> None:
    headers = [
        ("RETRY-AFTER", "7"), ("Content-Encoding", "identity"), ("X-Other", "1"), ("Retry-After", "8"),
    ]  # fmt: skip
    with talking(raw(message(503, b"abc", *headers, content_type="text/plain"))) as (_, sender):
        assert post(sender) == Reply(503, "text/plain", "identity", "3", "7, 8", b"abc")


def test_a_reply_keeps_its_body_out_of_repr() -> None:
    assert "secret" not in repr(Reply(200, None, None, None, None, b"secret"))


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (message(200, b""), b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (chunked(b"ab", b"cd"), b"abcd"),
        (chunked(b"ab", extension=b";name=value"), b"ab"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + message(200, b"x"), b"x"),
    ],
    ids=["empty", "204", "chunked", "chunk extensions", "interim responses"],
)  # fmt: skip
def test_framings_that_keep_the_connection(answer: bytes, body: bytes) -> None:
    with talking(raw(answer)) as (server, sender):
        assert [post(sender).body for _ in range(3)] == [body] * 3
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        message(200, b"abc", ("Connection", "close")),
    ],
    ids=["until the end", "HTTP/1.0", "Connection: close"],
)
def test_framings_that_end_the_connection(answer: bytes) -> None:
    with talking(raw(answer, close=True)) as (server, sender):
        assert [post(sender).body for _ in range(2)] == [b"abc"] * 2
        assert server.connections == 2


def test_nothing_is_decompressed() -> None:
    packed = gzip.compress(b"{}")
    with talking(raw(message(200, packed, ("Content-Encoding", "gzip")))) as (_, sender):
        answer = post(sender)
        assert (answer.content_encoding, answer.body) == ("gzip", packed)


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused_port() as port, talking(OK) as (_, sender):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert post(sender).status == 200


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308, 399])
def test_redirects_are_not_followed_and_their_bodies_not_read(status: int) -> None:
    with Server(OK) as elsewhere:
        head = f"HTTP/1.1 {status} Go\r\nLocation: {elsewhere.origin}/\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        with talking(flood(b"1\r\nx\r\n", at_once=head)) as (_, sender):
            answer = post(sender)
            assert (answer.status, answer.body) == (status, b"")
        assert elsewhere.connections == 0


# -- caps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda body: message(200, body), chunked], ids=["declared", "chunked"])
def test_the_cap_is_exact(make: Callable[[bytes], bytes]) -> None:
    with talking(raw(make(b"x" * CAP)), raw(make(b"x" * (CAP + 1)))) as (server, sender):
        assert post(sender).body == b"x" * CAP
        assert post(sender).body is None
        assert post(sender).body is None
        assert server.connections == 2, "a connection with an answer left unread is not used again"


def test_a_declared_excess_is_not_waited_for() -> None:
    with talking(raw(message(200, b"", length=CAP + 1))) as (_, sender):
        assert post(sender).body is None


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"e" * 9999 + b"\r\nx\r\n"),
    ],
    ids=["until the end", "chunked", "chunk extensions"],
)
def test_endless_bodies_are_cut(head: bytes, part: bytes) -> None:
    with talking(flood(part, at_once=head)) as (_, sender):
        assert post(sender, cap=4_000_000).body is None


@pytest.mark.parametrize(
    "answer",
    [
        flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        flood(b"X-Filler: x\r\n" * 100, at_once=b"HTTP/1.1 200 OK\r\n"),
        flood(b"x" * 1000, at_once=b"HTTP/1.1 200 OK\r\nX: "),
        flood(b"e" * 1000, at_once=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"),
        flood(b"X-Filler: x\r\n" * 100, at_once=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"),
        flood(b"x" * 1000),
    ],
    ids=["1xx", "headers", "one header", "one chunk header", "trailers", "no HTTP at all"],
)
def test_endless_heads_are_cut_long_before_the_deadline(answer: Answer) -> None:
    with talking(answer) as (_, sender):
        assert not failure(sender, seconds=10 * BOUND).unsent


def test_a_long_head_within_the_limit_passes() -> None:
    filler = ("X-Filler", "x" * (MAX_HEAD_BYTES - 1000))
    with talking(raw(message(200, b"x", filler))) as (_, sender):
        assert post(sender).body == b"x"


# -- the deadline -----------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        silence,
        trickle(HEAD * 100),
        trickle(b"x" * 1000, at_once=HEAD),
        flood(b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.02),
        flood(b"1\r\nx\r\n", at_once=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", pause=0.02),
        flood(b"e", at_once=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", pause=0.02),
        flood(b"X: x\r\n", at_once=b"HTTP/1.1 200 OK\r\n", pause=0.02),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx"),
        raw(b"HTTP/1.1 200 OK\r\n"),
    ],
    ids=[
        "silence", "trickled head", "trickled body", "trickled 1xx", "trickled chunks", "trickled chunk extension",
        "trickled headers", "body cut short", "head cut short",
    ],
)  # fmt: skip
def test_the_deadline_is_total(answer: Answer) -> None:
    with talking(answer) as (server, sender):
        error = failure(sender, SHORT)
        assert (error.unsent, error.kind) == (False, "TimeoutError")
        assert len(server.requests) == 1


def test_the_deadline_holds_while_writing() -> None:
    def never_read(_: socket.socket, closing: threading.Event) -> None:
        closing.wait()

    with connections(never_read) as port:
        error = failure(sender_to(port), SHORT, body=b"x" * 50_000_000)
        assert (error.unsent, error.kind) == (False, "TimeoutError")


def test_the_deadline_holds_while_connecting() -> None:
    with unanswered_port() as port:
        error = failure(sender_to(port), SHORT)
        assert (error.unsent, error.kind) == (True, "TimeoutError")


def test_a_deadline_already_over_sends_nothing() -> None:
    with talking(OK) as (server, sender):
        post(sender)
        assert failure(sender, seconds=-1.0).unsent
        assert len(server.requests) == 1


def test_an_answer_just_before_the_deadline_counts() -> None:
    def late(exchange: Exchange) -> None:
        exchange.pause(0.2)
        exchange.send(message(200, b"x"))

    with talking(late) as (_, sender):
        assert post(sender).body == b"x"


# -- name resolution --------------------------------------------------------------------------------------------------


def lookups(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[str]:
    """Let ``act`` decide every lookup of a name; return the list that each is noted in."""
    seen: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host == "127.0.0.1":
            return real(host, port, *args, **options)
        seen.append(host)
        return act()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return seen


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    seen = lookups(monkeypatch, fail)
    error = failure(Sender(Origin("http", "name.test", 80)))
    assert (error.unsent, error.kind, seen) == (True, "gaierror", ["name.test"])


def test_a_name_the_codec_refuses() -> None:
    error = failure(Sender(Origin("http", "x" * 64 + ".test", 80)))
    assert (error.unsent, error.kind) == (True, "UnicodeError")


def test_a_name_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups(monkeypatch, list)
    assert failure(Sender(Origin("http", "name.test", 80))).unsent


def test_a_dead_name_server_costs_the_deadline_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    seen = lookups(monkeypatch, lambda: gate.wait(PATIENCE) and [])
    sender = Sender(Origin("http", "name.test", 80))
    try:
        for _ in range(3):
            error = failure(sender, SHORT)
            assert (error.unsent, error.kind) == (True, "TimeoutError")
        assert seen == ["name.test"]
    finally:
        gate.set()
    for thread in threading.enumerate():
        if thread.name == "outbox-resolver":
            thread.join(PATIENCE)
    failure(sender)
    assert len(seen) == 2, "an answered lookup is not kept"


def test_a_resolver_thread_that_does_not_start_fails_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolve = SystemResolver()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            resolve("name.test", 80, 1.0)
    lookups(monkeypatch, list)
    assert resolve("name.test", 80, PATIENCE) == []


def test_addresses_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread for an address"))
    assert [address.sockaddr[:2] for address in SystemResolver()("127.0.0.1", 80, 1.0)] == [("127.0.0.1", 80)]
    assert [address.sockaddr[:2] for address in SystemResolver()("::1", 80, 1.0)] == [("::1", 80)]


def addresses(*ports: int) -> list[Address]:
    return [Address(socket.AF_INET, ("127.0.0.1", port)) for port in ports]


def resolving_to(*ports: int) -> Network:
    return Network(lambda host, port, seconds: addresses(*ports))


def test_addresses_are_tried_in_turn() -> None:
    with refused_port() as dead, Server(OK) as server, contextlib.closing(
        Sender(Origin("http", "name.test", 80), resolving_to(dead, server.port))
    ) as sender:  # fmt: skip
        assert post(sender).status == 200
        assert server.requests[0].values("Host") == ["name.test"]


def test_a_silent_address_does_not_use_up_the_others_time() -> None:
    with unanswered_port() as dead, Server(OK) as server, contextlib.closing(
        Sender(Origin("http", "name.test", 80), resolving_to(dead, server.port))
    ) as sender:  # fmt: skip
        assert post(sender, seconds=1.0).status == 200


def test_only_permitted_addresses_are_connected_to() -> None:
    found = [
        *addresses(1),
        Address(socket.AF_INET6, ("fe80::1%eth0", 2, 0, 3)),
        Address(socket.AF_INET, ("10.0.0.1", 3)),
    ]

    def resolve(host: str, port: int, seconds: float) -> Sequence[Address]:
        return found

    assert permitting(lambda address: address.is_loopback, resolve)("name.test", 80, 1.0) == found[:1]
    assert permitting(lambda address: address.is_link_local, resolve)("name.test", 80, 1.0) == found[1:2]
    vetted = permitting(lambda address: False, resolve)
    error = failure(Sender(Origin("http", "name.test", 80), Network(vetted)))
    assert (error.unsent, error.kind) == (True, "AddressForbidden")


# -- what surely did not arrive, and what may have --------------------------------------------------------------------


def test_a_refused_connection_sent_nothing() -> None:
    with refused_port() as port:
        error = failure(sender_to(port))
        assert (error.unsent, error.kind) == (True, "ConnectionRefusedError")


@pytest.mark.parametrize(
    "answer",
    [
        hang_up,
        reset,
        raw(b"HTTP/1.1 200 OK\r\n", close=True),
        raw(message(200, b"abc", length=4), close=True),
        raw(chunked(b"abc")[:-5], close=True),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxx\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
        raw(b"HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nX: \0\r\n\r\n"),
        raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"),
        raw(b"HTTP/2 200\r\n\r\n"),
        raw(b"HTTP/1.1 2000 OK\r\n\r\n"),
        raw(b"HTTP/1.1 000 OK\r\n\r\n"),
        raw(b"\x15\x03\x01\x00\x02\x02\x46", close=True),
        raw(b"SSH-2.0-OpenSSH\r\n\r\n"),
        raw(b"\r\n\r\n"),
    ],
)
def test_what_may_have_arrived(answer: Answer) -> None:
    with talking(answer) as (server, sender):
        assert not failure(sender).unsent
        assert len(server.requests) == 1, "a request that may have arrived is never repeated here"


class Impatient:
    """A socket whose peer answers and stops reading after ``takes`` bytes."""

    def __init__(self, takes: int, answer: bytes) -> None:
        self._takes = takes
        self._answer = answer

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def send(self, data: memoryview) -> int:
        if self._takes == 0:
            raise BrokenPipeError
        taken, self._takes = min(len(data), self._takes), 0
        return taken

    def recv(self, size: int) -> bytes:
        answer, self._answer = self._answer, b""
        return answer

    def close(self) -> None:
        pass


class Only(Network):
    """A network with this one connection."""

    def __init__(self, sock: Any) -> None:
        super().__init__()
        self._sock = sock

    def connect(self, origin: Origin, deadline: Deadline) -> socket.socket:
        return self._sock  # type: ignore[no-any-return]


def test_an_early_answer_counts_though_the_server_stopped_reading() -> None:
    sender = sender_to(1, network=Only(Impatient(1, message(413, b"too much"))))
    answer = post(sender)
    assert (answer.status, answer.body) == (413, b"too much")
    assert list(sender._shelf._lines) == [], "what the rest of the request would be taken for nobody knows"


def test_a_request_taken_in_part_may_have_arrived() -> None:
    assert not failure(sender_to(1, network=Only(Impatient(1, b"")))).unsent


def test_a_request_of_which_no_byte_was_taken_did_not_arrive() -> None:
    error = failure(sender_to(1, network=Only(Impatient(0, message(200, b"")))))
    assert (error.unsent, error.kind) == (True, "BrokenPipeError")


@pytest.mark.parametrize(
    "talk",
    [
        lambda sock, _: sock.sendall(b"HTTP/1.1 400 Plain HTTP\r\n\r\n"),
        lambda sock, _: None,
        lambda sock, _: sock.sendall(b"\x15\x03\x01\x00\x02\x02\x46"),
    ],
    ids=["no TLS", "hang-up", "alert"],
)
def test_a_failed_handshake_sent_nothing(talk: Callable[[socket.socket, threading.Event], None]) -> None:
    with connections(talk) as port:
        assert failure(sender_to(port, "https")).unsent


@pytest.mark.parametrize("pause", [None, 0.02], ids=["silent", "trickled"])
def test_a_slow_handshake_ends_with_the_deadline(pause: float | None) -> None:
    def talk(sock: socket.socket, closing: threading.Event) -> None:
        sock.sendall(b"\x16\x03\x03\x40\x00")  # the header of a record of 16 KiB
        while not closing.wait(pause):
            sock.sendall(b"\x02")

    with connections(talk) as port:
        error = failure(sender_to(port, "https"), SHORT)
        assert (error.unsent, error.kind) == (True, "TimeoutError")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1, its key, and the authority that nobody else knows, in one file."""
    path = tmp_path / "certificate.pem"
    authority = trustme.CA()
    for pem in (authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem, authority.cert_pem):
        pem.write_to_path(path, append=True)
    return path


@contextlib.contextmanager
def tls_server(certificate: Path) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers every request alike over TLS, and the requests it got."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    got: list[bytes] = []

    def talk(sock: socket.socket, closing: threading.Event) -> None:
        sock.settimeout(PATIENCE)
        with context.wrap_socket(sock, server_side=True) as secure:
            while data := secure.recv(65536):
                got.append(data)
                secure.sendall(message(200, b"{}"))

    with connections(talk) as port:
        yield port, got


def test_a_certificate_signed_by_nobody(certificate: Path) -> None:
    with tls_server(certificate) as (port, got):
        error = failure(sender_to(port, "https"))
        assert (error.unsent, error.kind) == (True, "SSLCertVerificationError")
        assert got == []


def test_a_trusted_certificate_and_a_kept_connection(certificate: Path) -> None:
    with tls_server(certificate) as (port, got):
        network = Network(ssl_context=ssl.create_default_context(cafile=str(certificate)))
        with contextlib.closing(sender_to(port, "https", network)) as sender:
            assert [post(sender).body for _ in range(3)] == [b"{}"] * 3
        assert len(got) == 3


def test_a_certificate_for_another_name(certificate: Path) -> None:
    with tls_server(certificate) as (port, got):
        context = ssl.create_default_context(cafile=str(certificate))
        network = Network(lambda host, _, seconds: addresses(port), context)
        assert failure(Sender(Origin("https", "name.test", 443), network)).unsent
        assert got == []


def test_the_default_context_verifies_and_is_shared() -> None:
    context = http.default_ssl_context()
    assert context is http.default_ssl_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


# -- kept connections -------------------------------------------------------------------------------------------------


def test_threads_share_no_connection_while_sending() -> None:
    together = threading.Barrier(4)

    def meet(exchange: Exchange) -> None:
        together.wait(PATIENCE)  # all four requests are open at once, or none is ever answered
        exchange.send(message(200, exchange.request.body))

    with talking(meet) as (server, sender):
        answers: dict[int, bytes | None] = {}

        def work(number: int) -> None:
            for _ in range(5):
                answers[number] = post(sender, body=b"%d" % number).body

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == {number: b"%d" % number for number in range(4)}
        assert server.connections == 4
        assert len(server.requests) == 20


def test_a_connection_the_server_closed_is_replaced_unnoticed() -> None:
    with talking(OK) as (server, sender):
        post(sender)
        server.hang_up()
        assert post(sender).status == 200
        assert (server.connections, len(server.requests)) == (2, 2)


def test_a_kept_connection_that_takes_no_byte_is_replaced_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As when the server's reset comes between the look at the connection and the first byte.
    with talking(OK) as (server, sender):
        post(sender)
        (line,) = sender._shelf._lines
        line._sock.shutdown(socket.SHUT_RDWR)
        monkeypatch.setattr(http, "_is_readable", lambda sock: False)
        assert post(sender).status == 200
        assert (server.connections, len(server.requests)) == (2, 2)


def test_a_kept_connection_closed_after_the_request_is_not_tried_again() -> None:
    with talking(OK, hang_up, OK) as (server, sender):
        post(sender)
        assert not failure(sender).unsent
        assert len(server.requests) == 2


def test_idle_connections_are_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.KEEP_ALIVE_SECONDS < 5
    with talking(OK) as (server, sender):
        post(sender)
        monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.0)
        post(sender)
        assert server.connections == 2
        assert list(sender._shelf._lines) == []


SURPLUS = b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad"


@pytest.mark.parametrize(
    "answer",
    [
        message(200, b"good") + SURPLUS,
        message(200, b"good, and more", length=4),
        chunked(b"good") + SURPLUS,
        chunked(b"good") + b"H",
    ],
    ids=["a second answer", "a body longer than it says", "after chunks", "a single byte"],
)
def test_bytes_after_an_answer_never_become_the_next_one(answer: bytes) -> None:
    with talking(raw(answer), OK) as (server, sender):
        assert post(sender).body == b"good"
        assert post(sender).body == b"{}"
        assert server.connections == 2


def test_an_answer_nobody_asked_for_is_not_taken() -> None:
    sent = threading.Event()

    def twice(exchange: Exchange) -> None:
        exchange.send(message(200, b"good"))
        exchange.pause(0.1)
        exchange.send(SURPLUS)
        sent.set()

    with talking(twice, OK) as (server, sender):
        assert post(sender).body == b"good"
        assert sent.wait(PATIENCE)
        assert post(sender).body == b"{}"
        assert server.connections == 2


def test_close_drops_idle_connections_and_the_sender_still_works() -> None:
    with talking(OK) as (server, sender):
        post(sender)
        (line,) = sender._shelf._lines
        sender.close()
        assert line._sock.fileno() == -1
        assert post(sender).status == 200
        assert server.connections == 2


def test_close_lets_a_request_under_way_finish() -> None:
    asked, closed = threading.Event(), threading.Event()

    def wait(exchange: Exchange) -> None:
        asked.set()
        closed.wait(PATIENCE)
        exchange.send(message(200, b"late"))

    with talking(wait) as (_, sender):
        answers: list[Reply] = []
        thread = threading.Thread(target=lambda: answers.append(post(sender)))
        thread.start()
        assert asked.wait(PATIENCE)
        sender.close()
        closed.set()
        thread.join(PATIENCE)
        assert [answer.body for answer in answers] == [b"late"]
        assert list(sender._shelf._lines) == []


def test_an_interrupted_request_leaves_no_connection_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    with talking(OK) as (server, sender):
        post(sender)
        (line,) = sender._shelf._lines
        with monkeypatch.context() as patched:
            patched.setattr(http._Line, "_receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                post(sender)
        assert line._sock.fileno() == -1
        assert post(sender).status == 200
        assert server.connections == 2


def _post_in_child(sender: Sender, results: Any) -> None:
    results.put(post(sender).status)
    sender.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_its_own_connection() -> None:
    with talking(OK) as (server, sender):
        post(sender)
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        with sender._shelf._lock:  # whatever another thread holds at the moment of the fork stays held in the child
            child = context.Process(target=_post_in_child, args=(sender, results))
            child.start()
        assert results.get(timeout=PATIENCE) == 200
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert server.connections == 2
        assert post(sender).status == 200
        assert server.connections == 2, "the parent's own connection is unharmed"
        results.close()
        results.join_thread()


# -- origins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://cms.example.com", Origin("https", "cms.example.com", 443)),
        ("HTTPS://CMS.Example.com:8443", Origin("https", "cms.example.com", 8443)),
        ("https://cms.example.com:443", Origin("https", "cms.example.com", 443)),
        ("https://cms.example.com:1", Origin("https", "cms.example.com", 1)),
        ("https://cms.example.com:65535", Origin("https", "cms.example.com", 65535)),
        ("https://localhost", Origin("https", "localhost", 443)),
        ("https://my_service", Origin("https", "my_service", 443)),
        ("https://xn--bcher-kva.example", Origin("https", "xn--bcher-kva.example", 443)),
        ("https://192.0.2.1:8443", Origin("https", "192.0.2.1", 8443)),
        ("https://[2001:DB8::1]:8443", Origin("https", "2001:db8::1", 8443)),
        ("https://" + "a" * 63 + ".example", Origin("https", "a" * 63 + ".example", 443)),
    ],
)
def test_origins(text: str, expected: Origin) -> None:
    assert parse_origin(text) == expected
    assert parse_origin(str(expected)) == expected


@pytest.mark.parametrize(
    ("origin", "authority"),
    [
        (Origin("https", "a.test", 443), "a.test"),
        (Origin("https", "a.test", 80), "a.test:80"),
        (Origin("http", "::1", 80), "[::1]"),
        (Origin("http", "::1", 8080), "[::1]:8080"),
    ],
)
def test_authorities(origin: Origin, authority: str) -> None:
    assert origin.authority == authority


def origin_refused(value: Any, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        parse_origin(value, **options)
    assert caught.value.code == "destination.origin_invalid"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        None, 1, b"https://a.test", "", "a.test", "//a.test", "https:", "https://", "https:///", "https://a.test/",
        "https://a.test/path", "https://a.test?", "https://a.test?q", "https://a.test#", "https://a.test#f",
        "https://user@a.test", "https://user:secret@a.test", "https://@a.test", "https://a.test:", "https://a.test:0",
        "https://a.test:65536", "https://a.test:+1", "https://a.test:-1", "https://a.test:1_0", "https://a.test:\uff11",
        "https://a.test:https", "ftp://a.test", "wss://a.test", "https://a..test", "https://.a.test", "https://a.test.",
        "https://-a.test", "https://a-.test", "https://a b.test", "https://a.test\n", " https://a.test",
        "https://a.test ",
        "https://a\\b.test", "https://bücher.example", "https://%61.test", "https://" + "a" * 64 + ".test",
        "https://" + "a." * 126 + "test", "https://127.1", "https://0x7f000001", "https://2130706433",
        "https://256.0.0.1", "https://1.2.3.4.5", "https://[::1", "https://::1", "https://[127.0.0.1]", "https://[::1%lo]",
        "https://[::1]a", "https://[:::]", "https://[]", "https://*", "https://a,b",
    ],
)  # fmt: skip
def test_what_is_no_origin(value: Any) -> None:
    origin_refused(value)
    origin_refused(value, allow_loopback_http=True)


@pytest.mark.parametrize(
    "authority", ["127.0.0.1", "127.0.0.1:8080", "127.255.255.254", "[::1]", "[::1]:8080", "localhost", "LOCALHOST:1"]
)
def test_plain_http_to_loopback_only_where_allowed(authority: str) -> None:
    origin_refused(f"http://{authority}")
    assert parse_origin(f"http://{authority}", allow_loopback_http=True).scheme == "http"


@pytest.mark.parametrize(
    "authority",
    [
        "cms.example.com", "0.0.0.0", "10.0.0.1", "126.255.255.255", "128.0.0.1", "[::]", "[::2]", "[::ffff:10.0.0.1]",
        "localhost.example", "a.localhost", "127.0.0.1.example",
    ],
)  # fmt: skip
def test_plain_http_to_nowhere_else(authority: str) -> None:
    origin_refused(f"http://{authority}", allow_loopback_http=True)
    assert parse_origin(f"https://{authority}").scheme == "https"


# -- Retry-After ------------------------------------------------------------------------------------------------------

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 120\t", 120.0),
        ("0120", 120.0),
        ("9" * 400, 1e9),
        ("9" * 5000, 1e9),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tuesday, 14-Nov-23 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:13:50 -0000", 30.0),
        ("Tue, 14 Nov 2023 23:13:50 +0100", 30.0),
        ("Tue, 14 Nov 2023 22:13:20 GMT", 0.0),
        ("Tue, 14 Nov 2023 22:13:19 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1e9),
    ],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert retry_after(value, NOW) == seconds


@pytest.mark.parametrize(
    "value",
    [
        None, "", " ", "-1", "+1", "1.5", "1e3", "1 2", "1, 2", "0x10", "\uff11\uff12", "soon", "inf", "nan", "Tue",
        "Tue, 14 Nov", "Tue, 99 Nov 2023 22:13:50 GMT", "Tue, 14 Nov 99999 22:13:50 GMT", "\0", "x" * 10_000,
    ],
)  # fmt: skip
def test_retry_after_that_says_nothing(value: str | None) -> None:
    assert retry_after(value, NOW) is None
