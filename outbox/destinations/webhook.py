"""An HTTPS URL as a destination, signed as the Standard Webhooks specification says.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from outbox.contracts.base import DeliveryFailed
from outbox.destinations.headers import Header, HostHeaders, authentication, check_headers
from outbox.errors import InputError
from outbox.http import (
    AddressForbidden,
    Deadline,
    Network,
    Origin,
    Reply,
    Sender,
    SystemResolver,
    TransportFailed,
    default_ssl_context,
    is_public,
    parse_origin,
    permitting,
    retry_after,
)
from outbox.records import Arrival, Claim
from outbox.trace import request_headers
from outbox.values import MAX_LEASE_SECONDS, check_seconds

MAX_URL_LENGTH: Final = 2048
#: An answer's body is read only so that its connection can be used again, and means nothing.
MAX_RESPONSE_BYTES: Final = 65_536
MIN_SECRET_BYTES: Final = 24
MAX_SECRET_BYTES: Final = 64

_URL = re.compile(r"(https?://[^/?#]+)([/?][!-\"$-~]*)?", re.IGNORECASE)
_SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - no secret
_RESERVED: Final = "webhook-"
_FIXED_HEADERS: Final = (
    (b"Content-Type", b"application/json"),
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"outbox"),
)
_ACCEPTED: Final = range(200, 300)
_REDIRECTS: Final = range(300, 400)
_SERVER_ERRORS: Final = range(500, 600)
_GONE: Final = 410
_TOO_MANY: Final = 429


class WebhookDestination:
    """Posts events to a URL, each with ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature``.

    Accepted is any 2xx. 410 means that the receiver wants nothing more: the event fails and its topic is paused. All
    else is tried again; 429 and 5xx, with their Retry-After, count as the receiver's being down, a redirect (never
    followed) or another 4xx as its refusing this event for now.

    Args:
        url: ``https://host[:port][/path][?query]``, in ASCII, at most 2048 characters.
        secrets: ``whsec_`` and 24 to 64 bytes in base64; several while one replaces another, the newest first.
        headers: called for every attempt and returns further headers, as a mapping of text to text; not ``webhook-...``
            and none that frame the message.
        timeout: the most seconds that one delivery takes, everything included.
        allow_private: whether the URL may lead to addresses that are not public. Only for URLs that the operator chose:
            a customer's could lead to your own network.
        allow_loopback_http: whether the URL may be plain HTTP to this machine. For trials.

    Raises:
        InputError: ``destination.url_invalid``, ``destination.address_forbidden``, ``destination.secret_invalid``,
            ``destination.headers_invalid``, ``destination.timeout_invalid``. None shows the URL or a secret.
    """

    def __init__(
        self,
        url: str,
        secrets: str | Sequence[str],
        *,
        headers: HostHeaders | None = None,
        timeout: float = 30.0,
        allow_private: bool = False,
        allow_loopback_http: bool = False,
    ) -> None:
        self._origin, self._target = _parse_url(url, allow_loopback_http=allow_loopback_http)
        self._keyed = _keyed(secrets)
        self._headers = check_headers(headers)
        self.timeout = check_seconds(timeout, code="destination.timeout_invalid", longest=MAX_LEASE_SECONDS)
        network = _network(self._origin, allow_private=allow_private, allow_loopback=allow_loopback_http)
        self._sender = Sender(self._origin, network)

    def deliver(self, claim: Claim) -> dict[str, Any]:
        """Post the claim's payload, byte for byte, and return ``{"status": ...}``.

        Raises:
            DeliveryFailed: ``gone``, ``redirect``, ``http_status``, ``network``, ``network.unsent``,
                ``destination.address_forbidden`` or ``authentication``.
        """
        deadline = Deadline(self.timeout)
        body = claim.payload.encode("utf-8")
        headers = (
            *_FIXED_HEADERS,
            *self._sign(claim.event_id, body),
            *request_headers(claim.headers),
            *authentication(self._headers, _RESERVED),
        )
        try:
            reply = self._sender.post(self._target, headers, body, deadline=deadline, max_bytes=MAX_RESPONSE_BYTES)
        except TransportFailed as error:
            forbidden = error.kind == AddressForbidden.__name__
            code = "destination.address_forbidden" if forbidden else error.code
            arrival: Arrival = "unsent" if error.unsent else "unknown"
            raise DeliveryFailed(code, retryable=True, arrival=arrival, outage=True) from None
        if reply.status not in _ACCEPTED:
            _refuse(reply)
        return {"status": reply.status}

    def close(self) -> None:
        """Close all connections. They are opened again if more is delivered."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WebhookDestination({str(self._origin)!r}, timeout={self.timeout:g})"  # a path may hold a token

    def _sign(self, event_id: str, body: bytes) -> list[Header]:
        """As of now, for each attempt: receivers refuse timestamps that are minutes old."""
        identity, moment = event_id.encode("ascii"), b"%d" % time.time()
        signatures = []
        for keyed in self._keyed:
            signed = keyed.copy()
            signed.update(b"%b.%b.%b" % (identity, moment, body))
            signatures.append(b"v1," + base64.b64encode(signed.digest()))
        return [
            (b"webhook-id", identity),
            (b"webhook-timestamp", moment),
            (b"webhook-signature", b" ".join(signatures)),
        ]


def _refuse(reply: Reply) -> NoReturn:
    status = reply.status
    if status == _GONE:
        raise DeliveryFailed("gone", retryable=False, arrival="refused", http_status=status, gone=True)
    raise DeliveryFailed(
        "redirect" if status in _REDIRECTS else "http_status",
        retryable=True,
        retry_after=retry_after(reply.retry_after, time.time()),
        arrival="refused",
        http_status=status,
        outage=status in _SERVER_ERRORS or status == _TOO_MANY,
    )


def _parse_url(url: object, *, allow_loopback_http: bool) -> tuple[Origin, bytes]:
    match = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= MAX_URL_LENGTH else None
    if match is None:
        expected = f"https://host[:port][/path][?query], at most {MAX_URL_LENGTH} characters of ASCII"
        raise InputError("destination.url_invalid", expected=expected)
    try:
        origin = parse_origin(match[1], allow_loopback_http=allow_loopback_http)
    except InputError as error:
        raise InputError("destination.url_invalid", expected=error.expected) from None
    target = match[2] or "/"
    return origin, (target if target.startswith("/") else f"/{target}").encode("ascii")


def _keyed(secrets: object) -> list[hmac.HMAC]:
    given = [secrets] if isinstance(secrets, str) else secrets
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray) or not given:
        raise InputError("destination.secret_invalid", expected="a secret, or several")
    return [hmac.new(_secret(each), digestmod="sha256") for each in given]


def _secret(secret: object) -> bytes:
    key = b""
    if isinstance(secret, str) and secret.startswith(_SECRET_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX).encode("ascii"), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            key = b""
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        expected = f"{_SECRET_PREFIX} and {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes in base64"
        raise InputError("destination.secret_invalid", expected=expected)
    return key


def _network(origin: Origin, *, allow_private: bool, allow_loopback: bool) -> Network:
    """Connections to what has been vetted: the addresses that are looked at are the ones connected to."""
    loopback = allow_loopback and origin.loopback  # another name must not lead there, whatever its DNS says

    def permitted(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return is_public(address) or (loopback and address.is_loopback)

    if origin.address is not None and not (allow_private or permitted(origin.address)):
        raise InputError("destination.address_forbidden", expected="a public address")
    context = default_ssl_context() if origin.scheme == "https" else None
    if origin.scheme == "http":
        return Network(permitting(lambda address: address.is_loopback, SystemResolver()))
    return Network(SystemResolver() if allow_private else permitting(permitted, SystemResolver()), context)
