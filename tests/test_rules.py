"""The row rules on rows made up for them: what each rule takes, and each way to break it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.rules import check_payload, check_row
from outbox.values import sha256_hex
from tests.support import STATES, TOPIC, Notes, T, canonical, note, refused, response

PAYLOAD = canonical(note())
NOTHING: dict[str, Any] = dict.fromkeys(
    ["lease_owner", "lease_token", "lease_expires_at", "last_error_code", "last_error_detail_hash", "receipt",
     "response_sha256", "ordering_key", "headers"]
)  # fmt: skip
LEASE = {"lease_owner": "worker-1", "lease_token": "t" * 32, "lease_expires_at": T + 600}
OF_STATE: dict[str, dict[str, Any]] = {
    "pending": {"attempts": 0},
    "waiting": {"attempts": 0, "ordering_key": "a key"},
    "leased": {"attempts": 1, **LEASE},
    "retry_wait": {"attempts": 1, "last_error_code": "busy"},
    "succeeded": {"attempts": 1, "receipt": '{"place":7}', "response_sha256": sha256_hex(canonical(response()))},
    "failed": {"attempts": 5, "last_error_code": "busy", "last_error_detail_hash": "0" * 64},
}


def row(status: str = "pending", **changes: Any) -> SimpleNamespace:
    common = {
        "id": 1, "topic": TOPIC, "event_id": "note-1", "payload": PAYLOAD, "payload_sha256": sha256_hex(PAYLOAD),
        "status": status, "max_attempts": 5, "redrives": 0,
        "next_attempt_at": T, "created_at": T, "updated_at": T,
    }  # fmt: skip
    return SimpleNamespace(**{**common, **NOTHING, **OF_STATE.get(status, {}), **changes})


GOOD: dict[str, SimpleNamespace] = {
    **{status: row(status) for status in OF_STATE},
    "redriven": row(redrives=3),
    "released after a first attempt": row("retry_wait", attempts=1, last_error_code="lease_released"),
    "failed before any attempt of its last life": row("failed", attempts=0),
    "at the limits": row("failed", attempts=20, max_attempts=20),
    "created at the epoch": row(created_at=0.0, updated_at=0.0, next_attempt_at=0.0),
    "due later": row("retry_wait", next_attempt_at=T + 300, updated_at=T + 10),
    "a lease as short as can be": row("leased", lease_expires_at=math.nextafter(T, math.inf)),
    "an ordering key though it need not wait": row(ordering_key="a key"),
    "an empty receipt": row("succeeded", receipt="{}"),
}


@pytest.mark.parametrize("each", GOOD.values(), ids=GOOD)
def test_good_rows(each: SimpleNamespace) -> None:
    check_row(each)


WELL_FORMED = "topic, event id, hash and status well formed"
ATTEMPTS = "0 <= attempts <= max_attempts <= 20"
PROGRESS = "attempts that fit the status"
TIMES = "times not before created_at"
LEASED = "owner, token and expiry exactly when leased"
ERROR = "an error code exactly when retry_wait or failed"
RECEIPT = "receipt and response hash exactly when succeeded"
ORDERING = "an ordering key when waiting"

BROKEN: list[tuple[str, str, dict[str, Any]]] = [
    *((WELL_FORMED, "pending", {"topic": value}) for value in ("", "a b", "x" * 257, None, b"topic", 1)),
    *((WELL_FORMED, "pending", {"event_id": value}) for value in ("", "a\n", "x" * 257, None, b"id")),
    *((WELL_FORMED, "pending", {"payload_sha256": value}) for value in ("", "0" * 63, "Z" * 64, None, b"0" * 64)),
    *((WELL_FORMED, value, {"attempts": 0}) for value in ("", "done", "PENDING")),
    *((ATTEMPTS, "pending", {"attempts": value}) for value in (-1, 6, True, 1.0, "0", None)),
    *((ATTEMPTS, "pending", {"max_attempts": value}) for value in (0, 21, -1, True, "5", None)),
    *((ATTEMPTS, "pending", {"redrives": value}) for value in (-1, True, None, 0.0)),
    (PROGRESS, "pending", {"attempts": 1}),
    (PROGRESS, "waiting", {"attempts": 1}),
    (PROGRESS, "leased", {"attempts": 0}),
    (PROGRESS, "succeeded", {"attempts": 0}),
    (PROGRESS, "retry_wait", {"attempts": 5}),
    *((TIMES, "pending", {"created_at": value}) for value in (-1.0, T + 1, math.nan, math.inf, None, "0", True)),
    *((TIMES, "pending", {"updated_at": value}) for value in (T - 1, math.nan, math.inf, None, b"0")),
    *((TIMES, "pending", {"next_attempt_at": value}) for value in (T - 1, math.nan, math.inf, None, "soon")),
    *((LEASED, "leased", {name: None}) for name in LEASE),
    *((LEASED, status, {name: value}) for status in OF_STATE if status != "leased" for name, value in LEASE.items()),
    *((LEASED, "leased", {"lease_owner": value}) for value in ("", "a b", "w" * 129, 1)),
    *((LEASED, "leased", {"lease_token": value}) for value in ("", "a b", "t" * 129, b"t")),
    *((LEASED, "leased", {"lease_expires_at": value}) for value in (T, T - 1, math.nan, math.inf, "later", True)),
    *((ERROR, status, {"last_error_code": None, "last_error_detail_hash": None}) for status in ("retry_wait", "failed")),
    *((ERROR, "failed", {"last_error_code": value}) for value in ("", "Busy", "a b", "a" * 129, 1)),
    *((ERROR, "failed", {"last_error_detail_hash": value}) for value in ("", "0" * 63, "X" * 64, 0)),
    *((ERROR, s, {"last_error_code": "busy"}) for s in OF_STATE if s not in ("retry_wait", "failed")),
    *((ERROR, s, {"last_error_detail_hash": "0" * 64}) for s in OF_STATE if s not in ("retry_wait", "failed")),
    *((RECEIPT, "succeeded", {name: None}) for name in ("receipt", "response_sha256")),
    *((RECEIPT, status, {"receipt": "{}"}) for status in OF_STATE if status != "succeeded"),
    *((RECEIPT, status, {"response_sha256": "0" * 64}) for status in OF_STATE if status != "succeeded"),
    *((RECEIPT, "succeeded", {"receipt": value}) for value in ("", "[]", "1", "{", '{"b":1,"a":2}', '{"a": 1}', b"{}", 1)),
    *((RECEIPT, "succeeded", {"response_sha256": value}) for value in ("", "0" * 63, "G" * 64)),
    (ORDERING, "waiting", {"ordering_key": None}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "status", "changes"), BROKEN)
def test_broken_rows(rule: str, status: str, changes: dict[str, Any]) -> None:
    with refused("dispatch.state_invalid", says=rule):
        check_row(row(status, **changes))


def test_a_broken_row_is_named_when_its_name_is_one() -> None:
    with refused("dispatch.state_invalid", event_id="note-1"):
        check_row(row(redrives=-1))
    with refused("dispatch.state_invalid") as caught:
        check_row(row(event_id="not a token"))
    assert caught.value.event_id is None
    assert "not a token" not in str(caught.value)


FORGED = {
    "another text": canonical(note(text="other")),
    "white space": PAYLOAD.replace(":", ": "),
    "another id": canonical(note(2)),
    "no JSON": "hello",
    "not by the contract": canonical({"id": "note-1"}),
    "not text": None,
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED)
def test_a_payload_that_does_not_prove_itself(payload: Any) -> None:
    with refused("dispatch.state_invalid", event_id="note-1", says="a payload that proves itself"):
        check_payload(row(payload=payload), Notes())


@pytest.mark.parametrize("payload", [text for text in FORGED.values() if text and text != FORGED["another text"]])
def test_a_hash_alone_proves_nothing(payload: str) -> None:
    with refused("dispatch.state_invalid"):
        check_payload(row(payload=payload, payload_sha256=sha256_hex(payload)), Notes())


@pytest.mark.parametrize("status", STATES)
def test_a_payload_that_does(status: str) -> None:
    check_payload(row(status), Notes())


def test_a_quarantined_payload_is_known_to_be_bad() -> None:
    check_payload(row("failed", payload="{}", last_error_code="dispatch.payload_integrity"), Notes())


def test_a_topic_without_a_contract_has_no_payload_to_check() -> None:
    check_payload(row(payload="{}"), None)
