"""Checks of single values, canonical JSON and hashing. Pure: no I/O, no clock.

Each check returns the value it was given, so that it can stand where the value is used, and raises
:class:`~outbox.errors.InputError` with the code the caller names.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Collection
from typing import Any, Final

from outbox.errors import InputError

MAX_PAYLOAD_BYTES: Final = 4_000_000
MAX_DEPTH: Final = 64
MAX_LEASE_SECONDS: Final = 86_400.0
MAX_ATTEMPTS: Final = 20

# Built once: json.dumps with these arguments would build one per call. Cycles are caught before it is used.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)
#: What holds nothing and cannot be wrong.
_PLAIN: Final = frozenset({str, int, bool, type(None)})
_TOKEN = re.compile(r"[A-Za-z0-9_.:-]+")
_ERROR_CODE = re.compile(r"[a-z][a-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_token(value: object, longest: int = 256) -> bool:
    """Whether ``value`` is a string matching ``^[A-Za-z0-9_.:-]{1,longest}$``."""
    return isinstance(value, str) and len(value) <= longest and _TOKEN.fullmatch(value) is not None


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_error_code(value: object) -> bool:
    return isinstance(value, str) and _ERROR_CODE.fullmatch(value) is not None


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite int or float. A bool is an int to Python and a mistake to us."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def check_token(value: object, *, code: str, longest: int = 256) -> str:
    if not is_token(value, longest):
        raise InputError(code, expected=f"a token of 1 to {longest} of A-Z a-z 0-9 _ . : -", found=describe(value))
    assert isinstance(value, str)
    return value


def check_now(now: object) -> float | None:
    """``now`` as a float of UTC epoch seconds, or None where the clock is to be asked.

    Raises:
        InputError: ``dispatch.time_invalid``.
    """
    if now is None:
        return None
    if not is_number(now) or now < 0:  # type: ignore[operator]
        raise InputError("dispatch.time_invalid", expected="UTC epoch seconds, finite, 0 or later", found=describe(now))
    return float(now)  # type: ignore[arg-type]


def check_seconds(value: object, *, code: str, longest: float = sys.float_info.max, zero: bool = False) -> float:
    """A duration in seconds, in (0, longest], or [0, longest] with ``zero``."""
    if not is_number(value) or not ((value >= 0 if zero else value > 0) and value <= longest):  # type: ignore[operator]
        bounds = f"{'[' if zero else '('}0, {longest:g}]"
        raise InputError(code, expected=f"seconds in {bounds}", found=describe(value))
    return float(value)  # type: ignore[arg-type]


def check_int(value: object, *, code: str, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InputError(code, expected=f"a whole number from {lowest} to {highest}", found=describe(value))
    return value


def check_error(error_code: object, detail_hash: object) -> tuple[str, str | None]:
    """An error code and an optional SHA-256 in lower-case hex.

    Raises:
        InputError: ``dispatch.error_invalid``.
    """
    if not is_error_code(error_code):
        raise InputError("dispatch.error_invalid", expected="a code matching ^[a-z][a-z0-9_.-]{0,127}$")
    if detail_hash is not None and not is_sha256(detail_hash):
        raise InputError("dispatch.error_invalid", expected="a detail hash of 64 lower-case hex digits, or None")
    return error_code, detail_hash  # type: ignore[return-value]


def check_label(value: object, *, code: str, longest: int = 256) -> str:
    """A short text for people: 1 to ``longest`` printable characters, without white space around them."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= longest
        or not value.isprintable()
        or value != value.strip()
    ):
        raise InputError(code, expected=f"1 to {longest} printable characters", found=describe(value))
    return str(value)


def describe(value: object) -> str:
    """What a value is, without what it says: safe to log whatever a caller passed."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if type(value) in (int, float) and is_number(value) and abs(value) < 1e18:  # type: ignore[arg-type]
        return f"{value:g}"
    if type(value) in (str, bytes, list, tuple, dict):  # exactly: a subclass may do anything when asked
        return f"{type(value).__name__} of length {len(value)}"  # type: ignore[arg-type]
    return type(value).__name__


def sha256_hex(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in lower-case hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def canonical_json(value: object, *, code: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
    """The one JSON text of ``value``: sorted keys, no white space, no escapes beyond JSON's own.

    What would not come back from that text as the very same value is refused, never repaired.

    Raises:
        InputError: ``code``, for anything that is not plain JSON, is nested deeper than 64 levels, holds a lone
            surrogate or an endless integer, or is longer than ``max_bytes`` in UTF-8.
    """
    _check_json(value, code)
    try:
        text = _ENCODER.encode(value)
        size = len(text.encode("utf-8"))
    except ValueError:  # a lone surrogate, or an integer past sys.get_int_max_str_digits(); it quotes the whole value
        raise InputError(code, expected="text and numbers that JSON in UTF-8 can carry") from None
    if size > max_bytes:
        raise InputError(code, expected=f"at most {max_bytes} bytes of JSON", found=f"{size} bytes")
    return text


def parse_canonical(text: str, *, code: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> Any:
    """The value of a canonical JSON text; any other spelling of it is refused.

    Comparing with the re-encoded text also catches duplicate keys, which ``json.loads`` drops silently.

    Raises:
        InputError: ``code``.
    """
    try:
        value = json.loads(text)
        again = _ENCODER.encode(value)
        size = len(text.encode("utf-8"))
    except (ValueError, RecursionError):
        raise InputError(code, expected="canonical JSON") from None
    if again != text or size > max_bytes:
        raise InputError(code, expected="canonical JSON")
    # What json.loads made is plain JSON; only its depth is left to doubt, and brackets are at least as many as levels.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_json(value, code)
    return value


def _check_json(value: object, code: str) -> None:
    """Level by level: a cycle ends at the depth allowed, and what unfolds without end at the width."""
    level: list[object] = [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[object] = []
        width = 0
        for item in level:
            inside = _inside(item, code, depth)
            width += len(inside)
            if width > MAX_PAYLOAD_BYTES:  # each takes a byte at least
                raise InputError(code, expected=f"at most {MAX_PAYLOAD_BYTES} bytes of JSON")
            below += [each for each in inside if type(each) not in _PLAIN]
        if not below:
            return
        level = below


def _inside(value: object, code: str, depth: int) -> Collection[object]:
    """What a list or dict holds; nothing for plain values."""
    # Exact types: a subclass may print or compare as it likes, and then text and value part company.
    kind = type(value)
    if kind in _PLAIN:
        return ()
    if kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]
            raise InputError(code, expected="finite numbers")
        return ()
    if kind is not dict and kind is not list:
        raise InputError(code, expected="plain JSON: dict, list, str, int, float, bool, None", found=kind.__name__)
    if depth >= MAX_DEPTH:
        raise InputError(code, expected=f"at most {MAX_DEPTH} levels of nesting")
    if kind is list:
        return value  # type: ignore[return-value]
    for key in value:  # type: ignore[attr-defined]
        if type(key) is not str:
            raise InputError(code, expected="keys that are strings", found=type(key).__name__)
    return value.values()  # type: ignore[attr-defined, no-any-return]
