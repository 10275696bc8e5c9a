"""Request headers that come from the host or travel with the event, vetted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from outbox.contracts.base import DeliveryFailed
from outbox.errors import InputError

Header = tuple[bytes, bytes]
HostHeaders = Callable[[], Mapping[str, str]]

#: Names the host may not give: they frame the message, say what it is, or are the event's own.
_PROTOCOL_HEADERS: Final = frozenset({
    "accept", "accept-charset", "accept-encoding", "accept-language", "connection", "expect", "host", "keep-alive",
    "te", "traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_PROTOCOL_PREFIXES: Final = ("content-", "proxy-")

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]+(?:[ \t]+[\x21-\x7e]+)*")
_MAX_HEADER_VALUE: Final = 16_384


def check_headers(headers: object) -> HostHeaders | None:
    """Refuse what cannot be called.

    Raises:
        InputError: ``destination.headers_invalid``.
    """
    if headers is not None and not callable(headers):
        raise InputError("destination.headers_invalid", expected="a callable, or None")
    return headers


def authentication(headers: HostHeaders | None, reserved: str) -> list[Header]:
    """The host's authentication headers for one attempt, none of whose names may begin with ``reserved``.

    Raises:
        DeliveryFailed: ``authentication``, or what the host itself declares.
    """
    if headers is None:
        return []
    try:
        return _vetted(headers(), reserved)
    except DeliveryFailed as error:
        failure = DeliveryFailed(
            error.code, retryable=error.retryable, retry_after=error.retry_after, detail_hash=error.detail_hash,
            arrival="unsent", outage=error.outage,
        )  # fmt: skip
    except Exception:  # noqa: BLE001
        failure = DeliveryFailed("authentication", retryable=False, arrival="unsent")
    raise failure  # out here, not in the handler: what the host raised can quote a secret, and would be chained


def _vetted(headers: Mapping[str, str], reserved: str) -> list[Header]:
    items = list(headers.items())
    names = {name.lower() for name, _ in items}
    if len(names) < len(items) or not all(_is_header(name, value, reserved) for name, value in items):
        raise ValueError
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in items]


def _is_header(name: str, value: str, reserved: str) -> bool:
    lowered = name.lower()
    return (
        _HEADER_NAME.fullmatch(name) is not None
        and lowered not in _PROTOCOL_HEADERS
        and not lowered.startswith((*_PROTOCOL_PREFIXES, reserved))
        and len(value) <= _MAX_HEADER_VALUE
        and _HEADER_VALUE.fullmatch(value) is not None
    )
