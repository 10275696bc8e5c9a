"""W3C trace context: taken from the enqueuing program, kept beside the event, sent with each request.

OpenTelemetry is an extra (``outbox[trace]``). Where it is not installed nothing is imported and nothing is kept.
Source of the formats: https://www.w3.org/TR/trace-context/, 3.2 and 3.3.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Final

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[ -~]{1,512}")
_NAMES: Final = {"traceparent": _TRACEPARENT, "tracestate": _TRACESTATE}
_MAX_TEXT: Final = 2048


def current_headers() -> str | None:
    """The trace context of whoever calls, as JSON text to keep beside an event; None where there is none."""
    propagator = _propagator()
    if propagator is None:
        return None
    carrier: dict[str, str] = {}
    try:
        propagator.inject(carrier)
    except Exception:  # noqa: BLE001 - tracing must never cost an event
        return None
    kept = _vetted(carrier)
    return json.dumps(kept, sort_keys=True, separators=(",", ":")) if kept else None


def request_headers(kept: str | None) -> list[tuple[bytes, bytes]]:
    """The headers to send for what was kept. It is stored data: what is not trace context is left out."""
    if kept is None or len(kept) > _MAX_TEXT:
        return []
    try:
        found = json.loads(kept)
    except (ValueError, RecursionError):
        return []
    vetted = _vetted(found) if isinstance(found, dict) else {}
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in vetted.items()]


def _vetted(found: dict[str, Any]) -> dict[str, str]:
    """A valid ``traceparent``, and with it a valid ``tracestate``, which means nothing alone."""
    kept = {
        name: found[name]
        for name, form in _NAMES.items()
        if isinstance(found.get(name), str) and form.fullmatch(found[name]) is not None
    }
    return kept if "traceparent" in kept else {}


@functools.cache
def _propagator() -> Any:
    try:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - only where it is installed
            TraceContextTextMapPropagator,
        )
    except ImportError:
        return None
    return TraceContextTextMapPropagator()
