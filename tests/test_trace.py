"""Trace context travels with the event, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import Engine

from outbox import Outbox, trace
from outbox.trace import current_headers, request_headers
from tests.plain import Plain

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_a_span_nothing_is_kept() -> None:
    assert current_headers() is None


def test_the_enqueuing_span_is_kept_with_the_event(engine: Engine) -> None:
    outbox = Outbox(engine, [Plain()])
    tracer = TracerProvider().get_tracer("host")
    with tracer.start_as_current_span("change") as span:
        outbox.enqueue({"id": "event-1"})
    outbox.enqueue({"id": "event-2"})
    first, second = outbox.claim_batch("w")
    ((name, value),) = request_headers(first.headers)
    context = span.get_span_context()
    assert name == b"traceparent"
    assert value == f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
    assert second.headers is None
    assert outbox.health(deep=True).status == "ok"


def test_a_propagator_that_fails_costs_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def inject(self, carrier: Any) -> None:
            raise RuntimeError("secret")

    monkeypatch.setattr(trace, "_propagator", Broken)
    assert current_headers() is None


def test_without_opentelemetry_nothing_is_imported() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import outbox, outbox.trace; assert outbox.trace.current_headers() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    lazy = "import sys, outbox; assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", lazy], check=True, timeout=60)


@pytest.mark.parametrize(
    "kept",
    [
        None, "", "[]", "nonsense", "[" * 5000, '"text"', "{}", json.dumps({"tracestate": "a=1"}),
        json.dumps({"traceparent": PARENT.upper()}), json.dumps({"traceparent": PARENT + "\r\nX: y"}),
        json.dumps({"traceparent": "ff" + PARENT[2:]}), json.dumps({"traceparent": 7}),
        json.dumps({"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"}), json.dumps({"authorization": "secret"}),
        json.dumps({"traceparent": PARENT, "padding": "x" * 3000}),
    ],
)  # fmt: skip
def test_what_is_no_trace_context_is_not_sent(kept: str | None) -> None:
    assert request_headers(kept) == []


@pytest.mark.parametrize("state", ["x\r\nY: z", "x" * 513, "é", "", 5])
def test_a_bad_tracestate_is_left_out(state: Any) -> None:
    assert request_headers(json.dumps({"traceparent": PARENT, "tracestate": state})) == [
        (b"traceparent", PARENT.encode())
    ]


def test_a_tracestate_goes_along() -> None:
    kept = json.dumps({"traceparent": PARENT, "tracestate": "vendor=1,other=2"})
    assert request_headers(kept)[1] == (b"tracestate", b"vendor=1,other=2")
