"""What must hold of every row, checked on rows as they are read. Pure.

The CHECK constraints hold what SQL can say; these rules say it again in one place, with what SQL cannot: that hashes
are hashes, JSON is JSON and a payload proves itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from outbox.contracts.base import Contract
from outbox.errors import InputError, IntegrityError
from outbox.records import STATUSES
from outbox.values import MAX_ATTEMPTS, is_error_code, is_number, is_sha256, is_token, parse_canonical


def _whole(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _finite(*values: Any) -> bool:
    return all(is_number(value) and math.isfinite(value) for value in values)


def _identity(row: Any) -> bool:
    tokens = is_token(row.topic) and is_token(row.event_id)
    return tokens and is_sha256(row.payload_sha256) and row.status in STATUSES


def _attempts(row: Any) -> bool:
    if not _whole(row.attempts, row.max_attempts, row.redrives):
        return False
    return bool(0 <= row.attempts <= row.max_attempts <= MAX_ATTEMPTS and row.max_attempts >= 1 and row.redrives >= 0)


def _progress(row: Any) -> bool:
    """A claim counts its attempt, so what has been claimed has at least one and what is due has one left."""
    if row.status in ("leased", "succeeded"):
        return bool(row.attempts >= 1)
    if row.status in ("pending", "waiting"):
        return bool(row.attempts == 0)
    return bool(row.attempts < row.max_attempts) if row.status == "retry_wait" else True


def _times(row: Any) -> bool:
    if not _finite(row.created_at, row.updated_at, row.next_attempt_at):
        return False
    return bool(row.created_at >= 0 and row.updated_at >= row.created_at and row.next_attempt_at >= row.created_at)


def _lease(row: Any) -> bool:
    lease = (row.lease_owner, row.lease_token, row.lease_expires_at)
    if row.status != "leased":
        return lease == (None, None, None)
    tokens = is_token(row.lease_owner, 128) and is_token(row.lease_token, 128)
    return tokens and _finite(row.lease_expires_at) and bool(row.lease_expires_at > row.updated_at)


def _error(row: Any) -> bool:
    if row.status not in ("retry_wait", "failed"):
        return row.last_error_code is None and row.last_error_detail_hash is None
    return is_error_code(row.last_error_code) and (
        row.last_error_detail_hash is None or is_sha256(row.last_error_detail_hash)
    )


def _receipt(row: Any) -> bool:
    if row.status != "succeeded":
        return row.receipt is None and row.response_sha256 is None
    return is_sha256(row.response_sha256) and _is_object(row.receipt)


def _ordering(row: Any) -> bool:
    return row.ordering_key is not None or row.status != "waiting"


def _is_object(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return isinstance(parse_canonical(value, code="dispatch.state_invalid"), dict)
    except InputError:
        return False


_RULES: Final[dict[str, Callable[[Any], bool]]] = {
    "topic, event id, hash and status well formed": _identity,
    "0 <= attempts <= max_attempts <= 20": _attempts,
    "attempts that fit the status": _progress,
    "times not before created_at": _times,
    "owner, token and expiry exactly when leased": _lease,
    "an error code exactly when retry_wait or failed": _error,
    "receipt and response hash exactly when succeeded": _receipt,
    "an ordering key when waiting": _ordering,
}


def check_row(row: Any) -> None:
    """Hold a row of ``outbox_event`` against the row rules; its payload is :func:`check_payload`'s.

    Raises:
        IntegrityError: ``dispatch.state_invalid``, naming the rule.
    """
    for rule, holds in _RULES.items():
        if not holds(row):
            raise IntegrityError("dispatch.state_invalid", event_id=_name(row), expected=rule)


def check_payload(row: Any, contract: Contract | None) -> None:
    """Hold a row's payload against its hash and its contract. A quarantined event is known to break them.

    Raises:
        IntegrityError: ``dispatch.state_invalid``.
    """
    if contract is None or row.last_error_code == "dispatch.payload_integrity":
        return
    try:
        contract.verify(row.event_id, row.payload, row.payload_sha256)
    except IntegrityError:
        raise IntegrityError(
            "dispatch.state_invalid", event_id=_name(row), expected="a payload that proves itself"
        ) from None


def _name(row: Any) -> str | None:
    return row.event_id if is_token(row.event_id) else None
