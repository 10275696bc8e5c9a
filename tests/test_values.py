"""Single values: what passes, what does not, and that no answer quotes what it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import InputError
from outbox.values import (
    MAX_DEPTH,
    MAX_PAYLOAD_BYTES,
    canonical_json,
    check_error,
    check_int,
    check_now,
    check_seconds,
    check_token,
    describe,
    is_error_code,
    is_sha256,
    is_token,
    parse_canonical,
    sha256_hex,
)
from tests.profiles import examples, settings
from tests.support import canonical, refused

CODE = "dispatch.change_invalid"


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Level(int, Enum):
    LOW = 1


@pytest.mark.parametrize("value", ["a", "A-Z_0.9:x", "x" * 256, Text("sub")])
def test_tokens(value: str) -> None:
    assert is_token(value)
    assert check_token(value, code=CODE) is value


@pytest.mark.parametrize(
    "value", ["", "x" * 257, "a b", "a\n", "\na", "é", "ａ", "a/b", "a\0", None, 1, True, b"abc", ["a"]]
)
def test_no_tokens(value: object) -> None:
    assert not is_token(value)
    with refused(CODE):
        check_token(value, code=CODE)


@pytest.mark.parametrize(("length", "fits"), [(128, True), (129, False)])
def test_a_tokens_length_can_be_bounded(length: int, fits: bool) -> None:
    assert is_token("x" * length, 128) is fits


@pytest.mark.parametrize("value", ["a", "a1", "a_b.c-d", "a" * 128])
def test_error_codes(value: str) -> None:
    assert is_error_code(value)
    assert check_error(value, None) == (value, None)


@pytest.mark.parametrize("value", ["", "A", "1a", "_a", ".a", "a b", "a\n", "a:b", "ä", "a" * 129, None, 1, b"a"])
def test_no_error_codes(value: object) -> None:
    with refused("dispatch.error_invalid"):
        check_error(value, None)


@pytest.mark.parametrize("value", ["0" * 63, "0" * 65, "G" * 64, "A" * 64, "0" * 64 + "\n", 0, b"0" * 64, ""])
def test_no_detail_hashes(value: object) -> None:
    assert not is_sha256(value)
    with refused("dispatch.error_invalid"):
        check_error("busy", value)


def test_a_detail_hash() -> None:
    assert check_error("busy", "0123456789abcdef" * 4) == ("busy", "0123456789abcdef" * 4)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 5e-324, 1, 1.5, 10**15, 1e300])
def test_times(value: float) -> None:
    found = check_now(value)
    assert found == value
    assert type(found) is float


def test_no_time_is_the_clocks() -> None:
    assert check_now(None) is None


NO_TIMES = [
    True, False, "1", b"1", -1, -5e-324, math.nan, math.inf, -math.inf, 10**400, Decimal(1), Fraction(1), 1j, [], object(),
]  # fmt: skip


def _shown(value: object) -> str:
    """A test's id, the same in every process: the default shows where an object lies in memory."""
    return "object" if type(value) is object else repr(value)[:40]


@pytest.mark.parametrize("value", NO_TIMES, ids=_shown)
def test_no_times(value: object) -> None:
    with refused("dispatch.time_invalid"):
        check_now(value)


@pytest.mark.parametrize("value", [*NO_TIMES, None, 0, 0.0, 10.000001, 11], ids=_shown)
def test_no_durations(value: object) -> None:
    with refused(CODE):
        check_seconds(value, code=CODE, longest=10)


@pytest.mark.parametrize("value", [5e-324, 1, 9.5, 10, 10.0])
def test_durations(value: float) -> None:
    found = check_seconds(value, code=CODE, longest=10)
    assert found == value
    assert type(found) is float


def test_a_duration_may_be_nothing_where_that_makes_sense() -> None:
    assert check_seconds(0, code=CODE, zero=True) == 0
    with refused(CODE):
        check_seconds(-5e-324, code=CODE, zero=True)


@pytest.mark.parametrize("value", [1, 20, Level.LOW, Whole(2)])
def test_whole_numbers(value: int) -> None:
    assert check_int(value, code=CODE, lowest=1, highest=20) == value


@pytest.mark.parametrize("value", [0, 21, -1, True, False, 1.0, "1", None, math.nan, Decimal(1), 10**400])
def test_no_whole_numbers(value: object) -> None:
    with refused(CODE):
        check_int(value, code=CODE, lowest=1, highest=20)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"), (True, "True"), (7, "7"), (1.5, "1.5"), (math.nan, "float"), (10**400, "int"), (1e200, "float"),
        ("secret", "str of length 6"), (b"secret", "bytes of length 6"), (["secret"], "list of length 1"),
        ({"secret": "secret"}, "dict of length 1"), (("secret",), "tuple of length 1"), ({"secret"}, "set"),
        (ValueError("secret"), "ValueError"),
    ],
)  # fmt: skip
def test_a_value_is_described_without_what_it_says(value: object, words: str) -> None:
    assert describe(value) == words


def test_hashes_are_of_the_utf8_bytes() -> None:
    assert sha256_hex("größer ✓") == hashlib.sha256("größer ✓".encode()).hexdigest()


# -- canonical JSON -------------------------------------------------------------------------------------------------


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


def doubling(levels: int) -> list[Any]:
    """A few lists in memory, 2 ** levels of them on paper."""
    value: list[Any] = ["x"]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, False, None]}, '{"a":[true,false,null],"b":1}'),
        ({}, "{}"),
        ("é✓\u2028\x7f", '"é✓\u2028\x7f"'),
        ('\0\x1f"\\/\n', '"\\u0000\\u001f\\"\\\\/\\n"'),
        ([1.0, -0.0, 1e22, 0.1, 5e-324], "[1.0,-0.0,1e+22,0.1,5e-324]"),
        ({"é": 1, "z": 2, "": 3}, '{"":3,"z":2,"é":1}'),
        (2**63, "9223372036854775808"),
    ],
    ids=repr,
)
def test_one_text_for_a_value(value: object, text: str) -> None:
    assert canonical_json(value, code=CODE) == text == canonical(value)
    assert parse_canonical(text, code=CODE) == value


NO_JSON = {
    "a tuple": (1, 2),
    "a set": {1},
    "bytes": b"abc",
    "a key that is a number": {1: 2},
    "a key that is None": {None: 2},
    "a key that is True": {True: 2},
    "a key of a subclass": {Text("a"): 2},
    "a string of a subclass": [Text("a")],
    "an int of a subclass": [Whole(1)],
    "an enum": [Level.LOW],
    "a dict of a subclass": OrderedDict(a=1),
    "not a number": [math.nan],
    "infinity": {"a": -math.inf},
    "a decimal": Decimal(1),
    "a lone surrogate": "\ud800",
    "a key with a lone surrogate": {"\udfff": 1},
    "a cycle": cycle(),
    "65 levels": nested(65),
    "an endless integer": 10**5000,
    "an object": object(),
    "a class": dict,
}


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON)
def test_what_would_not_come_back_is_refused(value: object) -> None:
    with refused(CODE):
        canonical_json(value, code=CODE)


def test_a_small_value_that_unfolds_without_end_is_refused_at_once() -> None:
    with refused(CODE):
        canonical_json(doubling(60), code=CODE)


def test_depth() -> None:
    deepest = nested(MAX_DEPTH)
    text = canonical_json(deepest, code=CODE)
    assert parse_canonical(text, code=CODE) == deepest
    with refused(CODE):
        parse_canonical(canonical(nested(MAX_DEPTH + 1)), code=CODE)
    with refused(CODE):
        parse_canonical("[" * 100_000 + "]" * 100_000, code=CODE)
    wide = [[]] * (MAX_DEPTH + 1)
    assert parse_canonical(canonical(wide), code=CODE) == wide


@pytest.mark.parametrize("character", ["a", "é", "✓", "😀"])
def test_size_is_counted_in_bytes(character: str) -> None:
    width = len(character.encode())
    fits = character * ((MAX_PAYLOAD_BYTES - 2) // width)
    text = canonical_json(fits, code=CODE)
    assert parse_canonical(text, code=CODE) == fits
    with refused(CODE):
        canonical_json(fits + character, code=CODE)
    with refused(CODE):
        parse_canonical(f'"{fits}{character}"', code=CODE)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"a":1} ', ' {"a":1}', '{"a": 1}', '{"b":1,"a":2}', '{"a":1,"a":1}', '{"a":1,"a":2}', "[1,]",
        "NaN", "Infinity", "[1e400]", "1E5", "1.50", "-0", "01", '"\\u0061"', '"\\/"', '"\\ud800"', '"\ud800"', "\ufeff{}", "'a'",
        "1" * 5000, "{}{}", "nul",
    ],
)  # fmt: skip
def test_any_other_spelling_is_refused(text: str) -> None:
    with refused(CODE):
        parse_canonical(text, code=CODE)


@pytest.mark.parametrize("value", [None, 1, {}, bytearray(b"{}")])
def test_only_text_is_parsed(value: Any) -> None:
    with pytest.raises((InputError, TypeError, AttributeError)):
        parse_canonical(value, code=CODE)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


def same(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down: to Python 1, 1.0 and True are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        assert isinstance(other, float)
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return one == other


@settings(max_examples=examples(150, 5000))
@given(json_values)
def test_round_trip(value: Any) -> None:
    text = canonical_json(value, code=CODE)
    again = parse_canonical(text, code=CODE)
    assert same(again, value)
    assert canonical_json(again, code=CODE) == text
    assert text == json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


@settings(max_examples=examples(150, 5000))
@given(st.text(max_size=30))
def test_whatever_parses_is_canonical(text: str) -> None:
    try:
        value = parse_canonical(text, code=CODE)
    except InputError:
        return
    assert canonical_json(value, code=CODE) == text


SECRET: Mapping[str, Any] = {
    "in a key": {"s3cret": {1: 2}},
    "beside a bad value": {"a": "s3cret", "b": math.nan},
    "with a surrogate": ["s3cret\ud800"],
    "in bytes": b"s3cret",
    "too long": "s3cret" * MAX_PAYLOAD_BYTES,
}


@pytest.mark.parametrize("value", SECRET.values(), ids=SECRET)
def test_a_refusal_quotes_nothing(value: object) -> None:
    with refused(CODE) as caught:
        canonical_json(value, code=CODE)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(caught.value)


def test_an_integer_at_the_limit_of_digits() -> None:
    longest = 10 ** (sys.get_int_max_str_digits() - 1)
    assert parse_canonical(canonical_json(longest, code=CODE), code=CODE) == longest
