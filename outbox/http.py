"""The bounded POST: one request, one answer, one total deadline, and a cap on everything that is read.

It drives h11, the parser inside httpx and httpcore, on sockets of its own. The layers above h11 count time per read, so
a server that trickles bytes holds them for ever, and they keep a connection whose answer was followed by bytes nobody
asked for, which the next request would take for its own answer. Here both are decided where the bytes are. It is also
what makes this several times as fast as ``httpx.Client.post``.

No proxies, no environment, no redirects, no decompression. Only this module knows an HTTP library.
"""

from __future__ import annotations

import collections
import concurrent.futures
import email.utils
import functools
import ipaddress
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any, Final, NamedTuple

import h11
import httpx

from outbox.errors import InputError, OutboxError

#: Under the five seconds after which many servers close an idle connection, perhaps just as we write to it.
KEEP_ALIVE_SECONDS: Final = 4.0
#: One response head, or one chunk header, must fit in this.
MAX_HEAD_BYTES: Final = 65_536
#: All heads of one answer, the endless ``100 Continue`` of a broken server included.
MAX_HEADS_BYTES: Final = 4 * MAX_HEAD_BYTES
MAX_RETRY_AFTER_SECONDS: Final = 1e9

_READ_BYTES: Final = 65_536
_MAX_PORT: Final = 65_535
_MAX_HOST_LENGTH: Final = 253
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = range(300, 400)
_KEPT_HEADERS: Final = frozenset({b"content-type", b"content-encoding", b"content-length", b"retry-after"})

_ORIGIN = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_DIGITS = re.compile(r"[0-9]+")

Headers = Sequence[tuple[bytes, bytes]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class TransportFailed(OutboxError):  # noqa: N818 - named like DeliveryFailed, which it becomes
    """No usable answer came back.

    Attributes:
        unsent: True when surely no byte of the request left this machine; False when it may have arrived.
        kind: the class name of what went wrong below. The exception itself stays here: its text can quote the answer.
    """

    def __init__(self, *, unsent: bool, kind: str) -> None:
        super().__init__("network.unsent" if unsent else "network", "no answer from the server", found=kind)
        self.unsent = unsent
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered. Headers are None where absent; repeated ones are joined with commas.

    Attributes:
        body: the bytes as sent, never decompressed; None when there were more than the caller allowed. Of a redirect no
            body is read at all.
    """

    status: int
    content_type: str | None
    content_encoding: str | None
    content_length: str | None
    retry_after: str | None
    body: bytes | None = field(repr=False)


class Deadline:
    """A moment on the monotonic clock by which everything has to be done."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, always more than 0.

        Raises:
            TimeoutError: there are none.
        """
        seconds = self._at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait from ``now`` (UTC epoch seconds) as a Retry-After header says, or None where it says nothing.

    Absurdly long waits are cut to 1e9 seconds; how long is too long is the retry policy's business.
    """
    if value is None:
        return None
    value = value.strip(" \t")
    if _DIGITS.fullmatch(value):
        return min(float(value), MAX_RETRY_AFTER_SECONDS)
    try:
        moment = email.utils.parsedate_to_datetime(value)
        if moment.tzinfo is None:  # "-0000": UTC, of unknown origin
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


# -- where to ---------------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Scheme and authority, normalised. ``str()`` gives it back as text."""

    scheme: str
    host: str
    port: int

    @property
    def address(self) -> IPAddress | None:
        """The address that the host is, where it is no name."""
        return _literal(self.host)

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" if self.address is None else self.address.is_loopback

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_origin(value: object, *, allow_loopback_http: bool = False) -> Origin:
    """An origin from text: ``https://host`` or ``https://host:port`` and nothing more.

    Plain HTTP is for 127.0.0.0/8, ::1 and localhost, and only where allowed. A name that is not ASCII is given as it is
    on the wire (``xn--...``).

    Raises:
        InputError: ``destination.origin_invalid``. It does not show the value: a mistaken one may hold a password.
    """
    match = _ORIGIN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _origin_error("https:// and a host, perhaps with a port; no user, path, query or fragment")
    scheme, host = match[1].lower(), match[2].lower()
    port = int(match[3]) if match[3] else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= _MAX_PORT:
        raise _origin_error(f"a port from 1 to {_MAX_PORT}")
    if host.startswith("["):
        host = host[1:-1]
        if not isinstance(_literal(host), ipaddress.IPv6Address):
            raise _origin_error("an IPv6 address in the brackets")
    elif not _is_host(host):
        raise _origin_error("a host name or an IPv4 address")
    origin = Origin(scheme, host, port)
    if scheme == "http" and not allow_loopback_http:
        raise _origin_error("https")
    if scheme == "http" and not origin.loopback:
        raise _origin_error("https, or plain http to the loopback interface")
    return origin


def _origin_error(expected: str) -> InputError:
    return InputError("destination.origin_invalid", expected=expected)


def _is_host(host: str) -> bool:
    labels = host.split(".")
    if len(host) > _MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        return False
    # "127.1" and "0x7f000001" are addresses to the C library; only the plain spelling is one here.
    return _NUMERIC_LABEL.fullmatch(labels[-1]) is None or _literal(host) is not None


def _literal(host: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# -- names to addresses -----------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """One place to connect to: a socket family and what its ``connect`` takes."""

    family: int
    sockaddr: tuple[Any, ...]


#: From (host, port, seconds left) to the addresses to try, in order. Raises OSError, of which TimeoutError is one.
Resolve = Callable[[str, int, float], Sequence[Address]]


class SystemResolver:
    """The system's own resolver, bounded in time.

    ``getaddrinfo`` cannot be interrupted, so it runs in a daemon thread that is left behind when time is up. Everybody
    who asks for the same name meanwhile waits for that same thread: a dead name server costs one thread for a name, not
    one for each attempt.
    """

    def __init__(self) -> None:
        # Keyed by process too: a child made by fork has none of its parent's threads to finish a lookup. No lock, which
        # the fork could have caught held: setdefault and pop are each atomic.
        self._running: dict[tuple[int, str, int], concurrent.futures.Future[list[Address]]] = {}

    def __call__(self, host: str, port: int, seconds: float) -> Sequence[Address]:
        if _literal(host) is not None:
            return _addresses(host, port, socket.AI_NUMERICHOST)
        key = (os.getpid(), host, port)
        mine: concurrent.futures.Future[list[Address]] = concurrent.futures.Future()
        lookup = self._running.setdefault(key, mine)
        if lookup is mine:
            try:
                threading.Thread(target=self._look_up, args=(key, lookup), name="outbox-resolver", daemon=True).start()
            except BaseException as error:
                self._finish(key, lookup, [], error)
                raise
        return lookup.result(seconds)

    def _look_up(self, key: tuple[int, str, int], lookup: concurrent.futures.Future[list[Address]]) -> None:
        try:
            self._finish(key, lookup, _addresses(key[1], key[2]), None)
        except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
            self._finish(key, lookup, [], error)

    def _finish(
        self,
        key: tuple[int, str, int],
        lookup: concurrent.futures.Future[list[Address]],
        addresses: list[Address],
        error: BaseException | None,
    ) -> None:
        self._running.pop(key, None)
        if error is None:
            lookup.set_result(addresses)
        else:
            lookup.set_exception(error)


class AddressForbidden(PermissionError):  # noqa: N818 - it is what happened to the address
    """None of a host's addresses is one that may be connected to."""


def permitting(permitted: Callable[[IPAddress], bool], resolve: Resolve) -> Resolve:
    """``resolve`` without the addresses that are not ``permitted``: what is vetted is what is connected to."""

    def vetted(host: str, port: int, seconds: float) -> Sequence[Address]:
        found = resolve(host, port, seconds)
        kept = [address for address in found if permitted(ipaddress.ip_address(address.sockaddr[0].partition("%")[0]))]
        if found and not kept:
            raise AddressForbidden
        return kept

    return vetted


def is_public(address: IPAddress) -> bool:
    """Whether an address is one host's on the public internet.

    By the special-purpose registries of IANA (RFC 6890 and its successors), spelled out here since what ``ipaddress``
    knows of them differs from one Python to another. An IPv4 address inside an IPv6 one is judged as what it leads to.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    inner = _embedded(address)
    if inner is not None:
        return is_public(inner)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a packet to an IPv6 address may end at."""
    number = int(address)
    if address in _MAPPED or address in _NAT64:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    if address in _6TO4:
        return ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)
    if number >> 32 & 0xFDFFFFFF == _ISATAP:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


_NOT_PUBLIC_V4: Final = tuple(map(ipaddress.IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
)))  # fmt: skip
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
#: Of global unicast: protocol assignments with Teredo in them, and documentation.
_NOT_PUBLIC_V6: Final = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_6TO4: Final = ipaddress.IPv6Network("2002::/16")
_ISATAP: Final = 0x00005EFE  # the third quarter of an interface identifier, but for its universal bit (RFC 5214, 6.1)


def _addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]


# -- connecting -------------------------------------------------------------------------------------------------------


class Network:
    """Makes connections: resolves, connects, and speaks TLS, all before a deadline.

    Args:
        resolve: names to addresses; the place to vet them, since the addresses it returns are the ones used.
        ssl_context: whom to trust; without one, the certificate authorities that httpx trusts.
    """

    def __init__(self, resolve: Resolve | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        self._resolve = SystemResolver() if resolve is None else resolve
        self._ssl_context = ssl_context

    def connect(self, origin: Origin, deadline: Deadline) -> socket.socket:
        """A connected socket.

        Raises:
            Exception: whatever the layers below raise; nothing has been sent then.
        """
        sock = self._connect_any(self._resolve(origin.host, origin.port, deadline.left()), deadline)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._secure(sock, origin.host, deadline) if origin.scheme == "https" else sock
        except BaseException:
            sock.close()
            raise

    def _connect_any(self, addresses: Sequence[Address], deadline: Deadline) -> socket.socket:
        failure: Exception = OSError("the host has no address")
        for index, address in enumerate(addresses):
            # An equal share of the time for each, so that one dead address does not use up that of the others.
            share = deadline.left() / (len(addresses) - index)
            try:
                return _connect_one(address, share)
            except OSError as error:
                failure = error
        raise failure

    def _secure(self, sock: socket.socket, host: str, deadline: Deadline) -> socket.socket:
        context = self._ssl_context or default_ssl_context()
        sock.settimeout(deadline.left())  # one bound on the whole handshake, not on each of its reads
        return context.wrap_socket(sock, server_hostname=host)


def _connect_one(address: Address, seconds: float) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(address.sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock


@functools.cache
def default_ssl_context() -> ssl.SSLContext:
    """The one context of the process, made when first asked for: it takes tens of milliseconds to load."""
    context = httpx.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


# -- one connection ---------------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    max_bytes: int


class _Line:
    """One connection, used by one thread at a time.

    Attributes:
        sent: bytes of the current request that were handed to the operating system. While it is 0 the request surely
            did not arrive: of a TLS record that never went out whole nothing can be read.
        reusable: whether the connection is in a state to carry another request.
    """

    __slots__ = ("_http", "_idle_since", "_sock", "reusable", "sent")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._idle_since = time.monotonic()
        self.sent = 0
        self.reusable = False

    def exchange(self, request: _Request, deadline: Deadline) -> Reply:
        self.sent, self.reusable = 0, False
        all_sent = self._send(self._encode(request), deadline)
        head = self._read_head(deadline)
        body: bytes | None = b""
        if head.status_code not in _REDIRECTS:
            body = self._read_body(head, request.max_bytes, deadline)
        if all_sent and self._complete():
            self._http.start_next_cycle()
            self._idle_since = time.monotonic()
            self.reusable = True
        return _reply(head, body)

    def expired(self) -> bool:
        return time.monotonic() - self._idle_since >= KEEP_ALIVE_SECONDS

    def usable(self) -> bool:
        # What can be read from an idle connection is the server's good-bye, or an answer to nothing.
        return not self.expired() and not _is_readable(self._sock)

    def close(self) -> None:
        self._sock.close()

    def _encode(self, request: _Request) -> bytes:
        # One buffer, so that head and body leave in one system call and, when small, one packet.
        http = self._http
        head = http.send(h11.Request(method=b"POST", target=request.target, headers=request.headers))
        body = http.send(h11.Data(data=request.body)) if request.body else b""
        return b"".join(part for part in (head, body, http.send(h11.EndOfMessage())) if part)

    def _send(self, data: bytes, deadline: Deadline) -> bool:
        """Write it all; False when the server stopped reading half-way, since it may have answered before it did."""
        with memoryview(data) as view:
            try:
                while self.sent < len(data):
                    self._sock.settimeout(deadline.left())
                    self.sent += self._sock.send(view[self.sent :])
            except TimeoutError:
                raise
            except OSError:
                if self.sent == 0:
                    raise
                return False
        return True

    def _receive(self, deadline: Deadline) -> int:
        self._sock.settimeout(deadline.left())
        data = self._sock.recv(_READ_BYTES)
        self._http.receive_data(data)
        return len(data)

    def _read_head(self, deadline: Deadline) -> h11.Response:
        received = 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                received += self._receive(deadline)
                if received > MAX_HEADS_BYTES:  # each passes as an interim response, and they never end
                    raise ConnectionError("no response among the interim ones")
            elif isinstance(event, h11.Response):
                return event
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("the connection ended without a response")

    def _read_body(self, head: h11.Response, max_bytes: int, deadline: Deadline) -> bytes | None:
        if any(name == b"content-length" and int(value) > max_bytes for name, value in head.headers):
            return None
        body = bytearray()
        received = 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                received += self._receive(deadline)
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            else:
                raise ConnectionError("the connection ended within the response")
            # The second bound is on chunk headers, which can be far longer than what they hold.
            if len(body) > max_bytes or received > 2 * max_bytes + MAX_HEADS_BYTES:
                return None

    def _complete(self) -> bool:
        http = self._http
        ended = http.our_state is h11.DONE and http.their_state is h11.DONE
        return ended and http.trailing_data == (b"", False)  # a surplus would be read as the next request's answer


def _is_readable(sock: socket.socket) -> bool:
    if not hasattr(select, "poll"):  # Windows, where select itself has no limit on descriptors
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _reply(head: h11.Response, body: bytes | None) -> Reply:
    kept: dict[bytes, str] = {}
    for name, value in head.headers:
        if name in _KEPT_HEADERS:
            text = value.decode("latin-1")
            kept[name] = f"{kept[name]}, {text}" if name in kept else text
    return Reply(
        head.status_code,
        kept.get(b"content-type"),
        kept.get(b"content-encoding"),
        kept.get(b"content-length"),
        kept.get(b"retry-after"),
        body,
    )


# -- many of them -----------------------------------------------------------------------------------------------------


class _Shelf:
    """The connections nobody is using, warmest on top. A connection taken off it belongs to the taker alone."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._lines: collections.deque[_Line] = collections.deque()
        self._open = True

    def take(self) -> _Line | None:
        with self._lock:
            while self._lines:
                line = self._lines.pop()
                if line.usable():
                    return line
                line.close()
        return None

    def give(self, line: _Line) -> None:
        with self._lock:
            if not (self._open and line.reusable):
                line.close()
                return
            self._lines.append(line)
            # The coldest lie at the bottom, where nobody would find them as long as fewer threads send than once did.
            while self._lines and self._lines[0].expired():
                self._lines.popleft().close()

    def close(self) -> None:
        with self._lock:
            self._open = False
            self._drop()

    def abandon(self) -> None:
        """Close a parent's connections in its child; the parent's own stay open.

        Without the lock, which a thread may hold that the fork left behind.
        """
        self._open = False
        self._drop()

    def _drop(self) -> None:
        while self._lines:
            self._lines.pop().close()


class Sender:
    """Bounded POSTs to one origin, from any number of threads, each on a connection of its own while it sends.

    Safe across fork: a child makes its own connections.
    """

    def __init__(self, origin: Origin, network: Network | None = None) -> None:
        self._origin = origin
        self._host = origin.authority.encode("ascii")
        self._network = Network() if network is None else network
        self._shelf = _Shelf()

    def post(self, target: bytes, headers: Headers, body: bytes, *, deadline: Deadline, max_bytes: int) -> Reply:
        """Send ``body`` and return the answer, whatever its status.

        Host and Content-Length are added here. All of it, name resolution and TLS included, ends by ``deadline``.

        Raises:
            TransportFailed: there is no answer. Nothing from the libraries below gets out.
        """
        request = _Request(
            target, [(b"Host", self._host), *headers, (b"Content-Length", b"%d" % len(body))], body, max_bytes
        )
        shelf = self._current_shelf()
        outcome: Reply | TransportFailed = TransportFailed(unsent=True, kind="")
        if (line := shelf.take()) is not None:
            outcome = _attempt(line, shelf, request, deadline)
        # The server may have closed the kept connection just now. As long as it took no byte, another can be tried.
        if isinstance(outcome, TransportFailed) and outcome.unsent:
            fresh = self._dial(deadline)
            outcome = fresh if isinstance(fresh, TransportFailed) else _attempt(fresh, shelf, request, deadline)
        if isinstance(outcome, TransportFailed):
            raise outcome  # out of reach of any except, so that no foreign exception is chained to it
        return outcome

    def close(self) -> None:
        """Close every connection; one in use is closed when its answer is in. The sender can still be used."""
        shelf, self._shelf = self._shelf, _Shelf()
        shelf.close()

    def _dial(self, deadline: Deadline) -> _Line | TransportFailed:
        try:
            return _Line(self._network.connect(self._origin, deadline))
        except Exception as error:  # noqa: BLE001 - see _attempt
            return TransportFailed(unsent=True, kind=type(error).__name__)

    def _current_shelf(self) -> _Shelf:
        shelf = self._shelf
        if shelf.pid != os.getpid():  # two processes on one connection would read each other's answers
            shelf.abandon()
            shelf = self._shelf = _Shelf()
        return shelf


def _attempt(line: _Line, shelf: _Shelf, request: _Request, deadline: Deadline) -> Reply | TransportFailed:
    try:
        return line.exchange(request, deadline)
    except Exception as error:  # noqa: BLE001
        # Sockets, TLS, the parser and the IDNA codec each have families of their own. To the caller they are one thing,
        # and one that slipped through would end an event that only has to be sent again.
        return TransportFailed(unsent=line.sent == 0, kind=type(error).__name__)
    finally:
        shelf.give(line)  # which closes it, unless the exchange ended cleanly
