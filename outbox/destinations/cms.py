"""The CMS localization service as a destination: its contract, a signer and the bounded POST put together."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, runtime_checkable

from outbox.contracts.base import DeliveryFailed
from outbox.contracts.cms import CMS_CHANGE, MAX_RESPONSE_BYTES
from outbox.destinations.headers import Header, HostHeaders, authentication, check_headers
from outbox.errors import InputError
from outbox.http import (
    Deadline,
    Network,
    Sender,
    SystemResolver,
    TransportFailed,
    default_ssl_context,
    parse_origin,
    permitting,
    retry_after,
)
from outbox.records import Arrival, Claim
from outbox.trace import request_headers
from outbox.values import MAX_LEASE_SECONDS, check_seconds, check_token, is_token

TARGET: Final = b"/v2/localization/changes"

_FIXED_HEADERS: Final = (
    (b"Content-Type", b"application/json; charset=utf-8"),
    (b"Accept", b"application/json"),
    (b"Accept-Encoding", b"identity"),
)
_SIGNATURE = re.compile(r"[A-Za-z0-9_.:/+=-]{1,4096}")
_RESERVED: Final = "x-localization-"


@runtime_checkable
class Signer(Protocol):
    """Proves to the service who sent a body. Shared by sender threads, so ``sign`` must be thread-safe."""

    def sign(self, body: bytes) -> tuple[str, str, str]:
        """Return (algorithm, key id, signature): two tokens and 1 to 4096 of ``A-Z a-z 0-9 _ . : / + = -``."""
        ...


class HMACSigner:
    """Signs with a secret shared with the service: HMAC-SHA256, in hex, as ``hmac-sha256``.

    Raises:
        InputError: ``destination.key_invalid``.
    """

    __slots__ = ("_key_id", "_keyed")

    def __init__(self, key_id: str, key: bytes) -> None:
        self._key_id = check_token(key_id, code="destination.key_invalid")
        self._keyed = hmac.new(_check_key(key), digestmod="sha256")

    def sign(self, body: bytes) -> tuple[str, str, str]:
        # A copy, not hmac.digest: that keys anew for every body, and lets go of the interpreter to do it.
        signed = self._keyed.copy()
        signed.update(body)
        return "hmac-sha256", self._key_id, signed.hexdigest()

    def __repr__(self) -> str:
        return f"HMACSigner(key_id={self._key_id!r})"


class CMSDestination:
    """Delivers ``cms.change`` events to the localization service at ``origin``.

    Args:
        origin: ``https://host`` or ``https://host:port``.
        signer: signs every body.
        headers: called for every attempt and returns the host's authentication headers, as a mapping of text to text.
            What it raises fails the event for good with ``authentication``, as a bad signer does with ``signing``; one
            that knows better (a token service that is down) raises :class:`DeliveryFailed` itself, retryable.
        timeout: the most seconds that one delivery takes, everything included. Only ``headers`` and ``signer`` can
            overrun it, since they are the host's code; what they use is taken off.
        allow_loopback_http: whether ``origin`` may be plain HTTP to 127.0.0.0/8, ::1 or localhost.

    Raises:
        InputError: ``destination.origin_invalid``, ``destination.signer_invalid``, ``destination.headers_invalid``,
            ``destination.timeout_invalid``.
    """

    def __init__(
        self,
        origin: str,
        signer: Signer,
        *,
        headers: HostHeaders | None = None,
        timeout: float = 30.0,
        allow_loopback_http: bool = False,
    ) -> None:
        self._origin = parse_origin(origin, allow_loopback_http=allow_loopback_http)
        if not callable(getattr(signer, "sign", None)):
            raise InputError("destination.signer_invalid", expected="an object with a method sign(body)")
        self.timeout = check_seconds(timeout, code="destination.timeout_invalid", longest=MAX_LEASE_SECONDS)
        self._signer = signer
        self._headers = check_headers(headers)
        self._sender = Sender(self._origin, _network(plain=self._origin.scheme == "http"))

    def deliver(self, claim: Claim) -> Mapping[str, Any]:
        """Send the claim's payload, byte for byte, and return the service's response.

        Raises:
            DeliveryFailed: with the codes of the contract's wire rules, ``network``, ``network.unsent``,
                ``authentication`` or ``signing``.
        """
        deadline = Deadline(self.timeout)
        body = claim.payload.encode("utf-8")
        headers = (
            *_FIXED_HEADERS,
            *self._sign(body),
            *request_headers(claim.headers),
            *authentication(self._headers, _RESERVED),
        )
        try:
            reply = self._sender.post(TARGET, headers, body, deadline=deadline, max_bytes=MAX_RESPONSE_BYTES)
        except TransportFailed as error:
            arrival: Arrival = "unsent" if error.unsent else "unknown"
            raise DeliveryFailed(error.code, retryable=True, arrival=arrival, outage=True) from error
        return CMS_CHANGE.read_response(
            reply.status,
            reply.content_type,
            reply.body,
            claim.event_id,
            content_encoding=reply.content_encoding,
            retry_after=retry_after(reply.retry_after, time.time()),
        )

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
        return f"CMSDestination({str(self._origin)!r}, timeout={self.timeout:g})"

    def _sign(self, body: bytes) -> list[Header]:
        try:
            return _signature_headers(self._signer.sign(body))
        except Exception:  # noqa: BLE001, S110
            pass
        # Raised out here, not in the handler: a signer's exception can quote the key, and would be chained even so.
        raise DeliveryFailed("signing", retryable=False, arrival="unsent")


def _network(*, plain: bool) -> Network:
    if plain:
        # Without TLS nothing proves who answers, so "localhost" has to be loopback whatever the hosts file says.
        return Network(permitting(lambda address: address.is_loopback, SystemResolver()))
    return Network(ssl_context=default_ssl_context())  # loaded now, not by every sender thread at its first request


def _check_key(key: object) -> bytes:
    if not isinstance(key, bytes) or not key:
        raise InputError("destination.key_invalid", expected="a key of at least one byte", found=type(key).__name__)
    return key


def _signature_headers(signed: object) -> list[Header]:
    if not isinstance(signed, tuple):  # three characters of text would unpack just as well
        raise TypeError
    algorithm, key_id, signature = signed
    if not (is_token(algorithm) and is_token(key_id) and _SIGNATURE.fullmatch(signature)):
        raise ValueError
    return [
        (b"X-Localization-Signature-Algorithm", algorithm.encode("ascii")),
        (b"X-Localization-Key-Id", key_id.encode("ascii")),
        (b"X-Localization-Signature", signature.encode("ascii")),
    ]
