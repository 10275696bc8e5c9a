"""The CMS contract's rules: events, responses and the wire level of responses, both sides of every limit.

No database and no network: the contract is pure.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox import DeliveryFailed, InputError, IntegrityError
from outbox.contracts.cms import (
    CMS_CHANGE,
    CONTENT_TYPES,
    MAX_RESPONSE_BYTES,
    TARGET_LOCALES,
    canonical_locale,
)
from outbox.values import MAX_PAYLOAD_BYTES, sha256_hex
from tests.cms_events import MISSING, event
from tests.misbehaving import EVENT_ID, JSON, accepted, blocked, canonical

EVENTS = Path(__file__).parent / "data" / "events"
VALID = (EVENTS / "valid.jsonl").read_text(encoding="utf-8").splitlines()
INVALID = [json.loads(line) for line in (EVENTS / "invalid.jsonl").read_text(encoding="utf-8").splitlines()]
DEMO = (Path(__file__).parent.parent / "outbox" / "demo" / "events.jsonl").read_text(encoding="utf-8").splitlines()

BOUND = (
    "source_id", "source_revision", "source_locale", "content_type", "glossary_version", "policy_version",
    "provider_id", "model_id", "model_version", "software_version",
)  # fmt: skip
#: Bound fields without a vocabulary of their own.
FREE = tuple(name for name in BOUND if name not in {"source_locale", "content_type"})


def shown(changes: dict[str, Any]) -> str:
    return ",".join(f"{name}={value!s:.20}" for name, value in changes.items()) or "as it is"


def refused(value: Any) -> InputError:
    """The refusal of an event, the same whether it is checked or encoded."""
    with pytest.raises(InputError) as checked:
        CMS_CHANGE.check(value)
    with pytest.raises(InputError) as encoded:
        CMS_CHANGE.encode(value)
    assert checked.value.code == encoded.value.code == "dispatch.change_invalid"
    assert checked.value.expected
    return checked.value


# -- the shipped data -------------------------------------------------------------------------------------------------


def test_the_data_is_all_there() -> None:
    assert (len(VALID), len(INVALID), len(DEMO)) == (650, 82, 40)
    assert len({item["why"] for item in INVALID}) == 82
    assert "82 lines" in (EVENTS / "README.md").read_text(encoding="utf-8")


def test_every_valid_event_is_stored_as_it_stands() -> None:
    for line in VALID:
        encoded = CMS_CHANGE.encode(json.loads(line))
        assert encoded.payload == line
        assert encoded.payload_sha256 == sha256_hex(line)
        assert encoded.event_id == json.loads(line)["event_id"]
        CMS_CHANGE.verify(encoded.event_id, encoded.payload, encoded.payload_sha256)


@pytest.mark.parametrize("item", INVALID, ids=lambda item: item["why"])
def test_every_invalid_event_is_refused(item: dict[str, Any]) -> None:
    refused(item["event"])


def test_the_demo_shows_variety() -> None:
    assert set(DEMO) <= set(VALID)
    assert len(set(DEMO)) == 40
    localizations = [json.loads(line)["localization"] for line in DEMO]
    assert len({localization["source_locale"] for localization in localizations}) == 8
    assert {"target_locales" in localization for localization in localizations} == {True, False}


# -- events: what passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"event_id": "a"},
        {"event_id": "A-z_0.9:" * 32},
        {"site_id": "x" * 256},
        {"website_version": "x" * 256},
        {"source_sequence": 1},
        {"source_sequence": 2**63 - 1},
        {"target_locales": MISSING},
        {"target_locales": None},
        {"target_locales": ["ga-IE"]},
        {"target_locales": ["MT-mt"]},
        {"target_locales": sorted(TARGET_LOCALES - {"en-IE"})},
        {"source_locale": "en"},
        {"source_locale": "EN-ie"},
        {"source_locale": "abcdefgh"},
        {"source_locale": "sr-Latn-RS"},
        {"source_locale": "es-419"},
        {"source_locale": "ca-ES-valencia"},
        {"source_locale": "de-" + "-".join(["abcdefgh"] * 28)},
        {"source_locale": "autos"},
        {"source_locale": "auto-IE"},
        {"source_text": "x"},
        {"source_text": " x\n"},
        {"source_text": "\u0001\u0085"},
        {"source_text": "\U0010ffff\u200b"},
        {"source_text": "x" * 1_000_000},
        {"source_text": "é" * 500_000},
        {"source_id": "é" * 256},
        {"source_id": "in ner"},
        *({name: "x" * 256} for name in FREE),
        *({"content_type": name} for name in sorted(CONTENT_TYPES)),
    ],
    ids=shown,
)
def test_passes(changes: dict[str, Any]) -> None:
    given_event = event(**changes)
    before = copy.deepcopy(given_event)
    encoded = CMS_CHANGE.encode(given_event)
    assert given_event == before, "a check must not change the event"
    assert json.loads(encoded.payload) == before, "the payload is stored as given"
    CMS_CHANGE.verify(encoded.event_id, encoded.payload, encoded.payload_sha256)


def test_null_target_locales_are_kept_in_the_payload() -> None:
    assert '"target_locales":null' in CMS_CHANGE.encode(event(target_locales=None)).payload


def test_content_types_and_targets_are_the_documented_ones() -> None:
    assert len(CONTENT_TYPES) == 8
    assert len(TARGET_LOCALES) == 24
    assert all(canonical_locale(locale) == locale for locale in TARGET_LOCALES)


@pytest.mark.parametrize(
    ("given_locale", "expected"),
    [
        ("mt-mt", "mt-MT"),
        ("MT-MT", "mt-MT"),
        ("mt-MT", "mt-MT"),
        ("EN", "en"),
        ("SR-lATN-rs", "sr-Latn-RS"),
        ("ES-419", "es-419"),
        ("ca-es-VALENCIA", "ca-ES-valencia"),
    ],
)
def test_canonical_case(given_locale: str, expected: str) -> None:
    assert canonical_locale(given_locale) == expected


# -- events: what does not --------------------------------------------------------------------------------------------

LONE = "a\ud800b"
DECOMPOSED = "cafe\u0301"


class Text(str):
    """Equal to a string, and none."""

    __slots__ = ()


class Subclass(dict[str, Any]):
    """Equal to an object, and none."""


class Hostile:
    """Fails whoever looks at it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("looked at")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def cycle() -> Any:
    made: list[Any] = []
    made.append(made)
    return made


def deep(levels: int) -> Any:
    made: Any = "x"
    for _ in range(levels):
        made = [made]
    return made


#: No field of an event takes any of these.
NEVER: dict[str, Callable[[], Any]] = {
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "a float": lambda: 1.0,
    "a bool": lambda: True,
    "an endless integer": lambda: 10**5000,
    "zero": lambda: 0,
    "bytes": lambda: b"x",
    "a tuple": lambda: ("mt-MT",),
    "a set": lambda: {"mt-MT"},
    "an object": dict,
    "a cycle": cycle,
    "deep nesting": lambda: deep(10_000),
    "a lone surrogate": lambda: LONE,
    "a subclass of str": lambda: Text("en-IE"),
    "a hostile object": Hostile,
    "an empty string": lambda: "",
    "a NUL": lambda: "a\0b",
    "decomposed": lambda: DECOMPOSED,
}
FIELDS = [name for name in {**event(), **event()["localization"]} if name != "localization"]


@pytest.mark.parametrize("what", NEVER)
@pytest.mark.parametrize("name", [*FIELDS, "localization"])
def test_no_field_takes_what_is_no_json_or_no_good_text(name: str, what: str) -> None:
    value = NEVER[what]()
    refusal = refused(event(**{name: value}))
    assert refusal.expected is not None
    assert name in refusal.expected


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "target_locales"])
def test_only_target_locales_may_be_null(name: str) -> None:
    assert name in (refused(event(**{name: None})).expected or "")


@pytest.mark.parametrize("name", ["event_id", "site_id", "website_version"])
@pytest.mark.parametrize("value", ["x" * 257, "a b", "a/b", "é", "a\n", " a", "a\u2028"])
def test_tokens(name: str, value: str) -> None:
    refused(event(**{name: value}))


@pytest.mark.parametrize("value", [0, -1, 2**63, 1.0, True, "1"])
def test_sequence(value: Any) -> None:
    refused(event(source_sequence=value))


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("value", ["x" * 257, " x", "x ", "x\n", "\u00a0x", "x\u2003", "\x1fx", "   "])
def test_bound_fields(name: str, value: str) -> None:
    refused(event(**{name: value}))


@pytest.mark.parametrize("value", [" \t\n", "\u00a0\u2003", "x" * 1_000_001, "é" * 500_000 + "x"])
def test_source_text(value: str) -> None:
    refused(event(source_text=value))


@pytest.mark.parametrize("value", ["UI", "ui ", "uis", "other"])
def test_content_type(value: str) -> None:
    refused(event(content_type=value))


@pytest.mark.parametrize(
    "value",
    [
        "auto", "AUTO", "all", "All", "e", "abcdefghi", "en_IE", "en-", "-en", "en--IE", "en-I", "en-IRL", "en-12",
        "en-1234", "en-abcdefghi", "en-IE\n", "en-ÏE", "e1", "*",
    ],
)  # fmt: skip
def test_source_locale(value: str) -> None:
    refused(event(source_locale=value))


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        "mt-MT",
        ("mt-MT",),
        ["mt-MT", "mt-MT"],
        ["mt-MT", "mt-mt"],
        ["en-IE"],
        ["EN-ie"],
        ["en-US"],
        ["de-DE"],
        ["mt"],
        ["auto"],
        ["all"],
        [""],
        ["mt-MT", None],
        ["mt-MT\n"],
        [["mt-MT"]],
        [Text("mt-MT")],
        [LONE],
        [7],
        ["mt-MT" * 100_000],
        sorted(TARGET_LOCALES),
    ],
    ids=lambda value: f"{value!s:.30}",
)
def test_target_locales(value: Any) -> None:
    assert "localization.target_locales" in (refused(event(target_locales=value)).expected or "")


def test_a_source_in_the_other_case_is_still_the_same_language() -> None:
    refused(event(source_locale="MT", target_locales=["mt-MT"]))
    CMS_CHANGE.check(event(source_locale="MT", target_locales=["fi-FI"]))


@pytest.mark.parametrize("name", [*FIELDS, "localization"])
def test_missing_fields(name: str) -> None:
    if name == "target_locales":
        CMS_CHANGE.check(event(target_locales=MISSING))
    else:
        made = event()
        del (made if name in made else made["localization"])[name]
        assert name in (refused(made).expected or "")


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("key", ["extra", "", LONE, 1, None, True, b"schema", ("schema",), Text("extra")])
def test_unknown_keys_and_keys_that_are_no_strings(inner: bool, key: Any) -> None:
    made = event()
    (made["localization"] if inner else made)[key] = "x"
    refused(made)


def test_a_key_that_only_equals_a_string() -> None:
    made = event()
    made[Text("schema")] = made.pop("schema")
    refused(made)


def test_a_misplaced_text_is_not_quoted_even_as_a_key() -> None:
    made = event()
    made["Confidential draft"] = 1
    assert "Confidential" not in str(refused(made))


#: Made anew for each test, since the test runner itself looks at its parameters.
NO_OBJECTS: dict[str, Callable[[], Any]] = {
    **NEVER,
    "null": lambda: None,
    "a number": lambda: 1,
    "JSON text": lambda: json.dumps(event()),
    "JSON bytes": lambda: json.dumps(event()).encode(),
    "an array of events": lambda: [event()],
    "a subclass of dict": lambda: Subclass(event()),
    "an ordered dict": lambda: OrderedDict(event()),
    "a class": lambda: dict,
    "a function": lambda: event,
}


@pytest.mark.parametrize("what", NO_OBJECTS)
def test_what_is_no_object(what: str) -> None:
    refused(NO_OBJECTS[what]())


@pytest.mark.parametrize("build", [cycle, lambda: deep(10_000)])
def test_cycles_and_towers_on_top(build: Callable[[], Any]) -> None:
    refused(build())
    made = event()
    made["localization"] = made
    refused(made)


def test_a_payload_that_escapes_make_too_long_is_refused() -> None:
    # 700,000 control characters are 4,200,000 bytes of JSON, though the text alone is within its limit.
    made = event(source_text="x" + "\u0001" * 699_999)
    CMS_CHANGE.check(made)
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.encode(made)
    assert caught.value.code == "dispatch.change_invalid"


def test_the_longest_payload_there_can_be() -> None:
    room = MAX_PAYLOAD_BYTES - len(canonical(event(source_text="")))
    escapes, rest = divmod(room, 6)
    fits = event(source_text="\u0001" * escapes + "x" * rest)
    assert len(CMS_CHANGE.encode(fits).payload.encode()) == MAX_PAYLOAD_BYTES
    fits["localization"]["source_text"] += "x"
    with pytest.raises(InputError):
        CMS_CHANGE.encode(fits)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    ),
    st.sampled_from([None, *FIELDS, "localization"]),
)
def test_nothing_but_a_refusal_comes_out(value: Any, name: str | None) -> None:
    subject = value if name is None else event(**{name: value})
    code, payload = None, None
    try:
        payload = CMS_CHANGE.encode(subject).payload
    except InputError as error:
        code = error.code
    assert code == "dispatch.change_invalid" if payload is None else json.loads(payload) == subject


def test_a_refusal_names_the_place_and_never_quotes() -> None:
    secret = "Confidential_draft"
    for name in FIELDS:
        for value in (secret + "\0", [secret], {secret: secret}, secret.encode()):
            refusal = refused(event(**{name: value}))
            assert name in (refusal.expected or "")
            for said in (str(refusal), repr(refusal), refusal.message, refusal.expected, refusal.found):
                assert secret not in (said or "")
            assert refusal.__cause__ is None
            assert refusal.event_id in {None, EVENT_ID}
    assert refused(event(source_text="")).event_id == EVENT_ID


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: payload.replace('"ui"', '"ux"'),
        lambda payload: payload.replace('"ui"', '"u\\u0069"'),
        lambda payload: payload + " ",
        lambda payload: payload.replace('"schema"', '"schema":"x","schema"'),
    ],
)
def test_verify_refuses_what_no_longer_proves_itself(spoil: Callable[[str], str]) -> None:
    spoilt = spoil(CMS_CHANGE.encode(event()).payload)
    with pytest.raises(IntegrityError):
        CMS_CHANGE.verify(EVENT_ID, spoilt, sha256_hex(spoilt))


def test_verify_refuses_another_rows_payload() -> None:
    encoded = CMS_CHANGE.encode(event())
    with pytest.raises(IntegrityError):
        CMS_CHANGE.verify("event-2", encoded.payload, encoded.payload_sha256)


# -- responses as mappings --------------------------------------------------------------------------------------------

GOOD_RESPONSES: list[dict[str, Any]] = [
    {},
    {"status": "superseded"},
    {"status": "cancelled"},
    {"job_count": 1, "inserted_jobs": 0},
    {"job_count": 3, "inserted_jobs": 3},
    {"plan_id": "x" * 256},
]
BAD_RESPONSES: list[dict[str, Any]] = [
    *({name: MISSING} for name in accepted()),
    {"extra": 1},
    {"schema": "blun.website-localization-api.v1"},
    {"event_id": "event-2"},
    {"event_id": EVENT_ID.upper()},
    {"event_id": None},
    {"plan_id": ""},
    {"plan_id": "x" * 257},
    {"plan_id": "a b"},
    {"plan_id": 1},
    {"job_count": 0},
    {"job_count": -1},
    {"job_count": True},
    {"job_count": 3.0},
    {"job_count": "3"},
    {"job_count": None},
    {"inserted_jobs": -1},
    {"inserted_jobs": 4},
    {"inserted_jobs": False},
    {"inserted_jobs": 2.0},
    {"status": "queued"},
    {"status": "ENQUEUED"},
    {"status": "BLOCK"},
    {"status": None},
    {"status": ["enqueued"]},
]


def response(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in accepted(**changes).items() if value is not MISSING}


@pytest.mark.parametrize("changes", GOOD_RESPONSES, ids=shown)
def test_good_responses(changes: dict[str, Any]) -> None:
    given_response = response(changes)
    expected = {name: given_response[name] for name in ("plan_id", "job_count", "status")}
    assert CMS_CHANGE.accept(EVENT_ID, given_response) == expected
    receipt = CMS_CHANGE.receipt(EVENT_ID, given_response)
    assert receipt.text == canonical(expected).decode()
    assert receipt.response_sha256 == hashlib.sha256(canonical(given_response)).hexdigest()
    assert CMS_CHANGE.read_response(202, JSON, canonical(given_response), EVENT_ID) == given_response


@pytest.mark.parametrize("changes", BAD_RESPONSES, ids=shown)
def test_bad_responses(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.accept(EVENT_ID, response(changes))
    assert caught.value.code == "dispatch.response_invalid"
    failure = failed(200, canonical(response(changes)))
    assert (failure.code, failure.retryable) == ("response_binding", True)


@pytest.mark.parametrize("what", NO_OBJECTS)
def test_responses_that_are_no_object(what: str) -> None:
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.accept(EVENT_ID, NO_OBJECTS[what]())
    assert caught.value.code == "dispatch.response_invalid"


@pytest.mark.parametrize("key", [None, 1, b"status", Text("extra")])
def test_responses_with_keys_that_are_no_strings(key: Any) -> None:
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.accept(EVENT_ID, {**accepted(), key: None})
    assert caught.value.code == "dispatch.response_invalid"


@pytest.mark.parametrize("name", accepted())
@pytest.mark.parametrize("what", [what for what in NEVER if what != "zero"])
def test_no_field_of_a_response_takes_what_is_no_json(name: str, what: str) -> None:
    if (name, what) == ("job_count", "an endless integer"):
        return  # the next test's
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.accept(EVENT_ID, accepted(**{name: NEVER[what]()}))
    assert caught.value.code == "dispatch.response_invalid"


def test_a_job_count_too_long_to_print_makes_no_receipt() -> None:
    with pytest.raises(InputError) as caught:
        CMS_CHANGE.receipt(EVENT_ID, accepted(job_count=10**5000))
    assert caught.value.code == "dispatch.response_invalid"


# -- responses on the wire --------------------------------------------------------------------------------------------


def failed(status: int, body: bytes | None, content_type: str | None = JSON, **more: Any) -> DeliveryFailed:
    with pytest.raises(DeliveryFailed) as caught:
        CMS_CHANGE.read_response(status, content_type, body, EVENT_ID, **more)
    assert caught.value.__context__ is None
    return caught.value


@pytest.mark.parametrize("status", [200, 202])
@pytest.mark.parametrize(
    "content_type",
    [
        "application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8",
        'application/json ; charset="utf-8"', " application/json ",
    ],
)  # fmt: skip
def test_accepted_types(status: int, content_type: str) -> None:
    assert CMS_CHANGE.read_response(status, content_type, canonical(accepted()), EVENT_ID) == accepted()


@pytest.mark.parametrize("encoding", [None, "", "identity", "Identity"])
def test_identity_is_no_encoding(encoding: str | None) -> None:
    body = canonical(accepted())
    assert CMS_CHANGE.read_response(200, JSON, body, EVENT_ID, content_encoding=encoding) == accepted()


@pytest.mark.parametrize(
    "content_type",
    [
        None, "", "text/html", "text/json", "application/jsonp", "application/problem+json", "application/json,",
        "application/json; charset=latin-1", "application/json; charset=utf-16", "application/json; charset=utf-8x",
        "application/json; charset=utf-8; charset=latin-1", "application/json; charset=", "application/json, text/html",
        "application/json\n", "application/json; charset='utf-8'",
    ],
)  # fmt: skip
def test_other_types(content_type: str | None) -> None:
    failure = failed(200, canonical(accepted()), content_type)
    assert (failure.code, failure.retryable) == ("response_content_type", True)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "identity, gzip", "x"])
def test_an_encoding_nobody_asked_for(encoding: str) -> None:
    failure = failed(200, canonical(accepted()), content_encoding=encoding)
    assert (failure.code, failure.retryable) == ("response_content_type", True)


def padded(size: int) -> bytes:
    """Canonical JSON of exactly ``size`` bytes."""
    return b'{"x":"' + b"x" * (size - 8) + b'"}'


def test_size() -> None:
    assert failed(200, padded(MAX_RESPONSE_BYTES)).code == "response_binding"
    for body in (padded(MAX_RESPONSE_BYTES + 1), None):
        failure = failed(200, body)
        assert (failure.code, failure.retryable) == ("response_size", True)


GOOD = canonical(accepted())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"\xef\xbb\xbf" + GOOD,
        GOOD.decode().encode("utf-16"),
        GOOD + b"\n",
        b" " + GOOD,
        json.dumps(accepted(), sort_keys=True).encode(),
        json.dumps(dict(reversed(accepted().items())), separators=(",", ":")).encode(),
        GOOD.replace(b'"plan-1"', b'"pl\\u0061n-1"'),
        GOOD.replace(b'"status"', b'"status":"enqueued","status"'),
        GOOD.replace(b'"job_count":3', b'"job_count":3,"job_count":3'),
        GOOD.replace(b'"job_count":3', b'"job_count":NaN'),
        GOOD.replace(b'"job_count":3', b'"job_count":1e999'),
        GOOD.replace(b'"job_count":3', b'"job_count":' + b"9" * 5000),
        GOOD.replace(b'"plan-1"', b'"\\ud800"'),
        b"[" * 100_000,
        b"[" * 1000 + b"]" * 1000,
        GOOD + GOOD,
    ],
    ids=lambda body: f"{body!s:.24}",
)
def test_what_is_not_canonical_json(body: bytes) -> None:
    failure = failed(200, body)
    assert (failure.code, failure.retryable) == ("response_json", True)


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', canonical(blocked("x")), canonical([accepted()])])
def test_canonical_json_that_is_no_answer(body: bytes) -> None:
    failure = failed(202, body)
    assert (failure.code, failure.retryable) == ("response_binding", True)


def test_failures_of_the_answer_carry_its_hash() -> None:
    assert failed(200, b"{").detail_hash == hashlib.sha256(b"{").hexdigest()
    assert failed(404, b"gone").detail_hash == hashlib.sha256(b"gone").hexdigest()
    assert failed(404, b"").detail_hash is None


def test_redirects() -> None:
    for status in range(300, 400):
        for body in (b"", canonical(blocked("rate_limited")), None):
            failure = failed(status, body, None, retry_after=5.0)
            assert (failure.code, failure.retryable, failure.retry_after) == ("redirect", False, None), status


OTHER_STATUSES = [status for status in range(201, 600) if status != 202 and not 300 <= status < 400]


def test_the_servers_code_is_kept() -> None:
    for status in OTHER_STATUSES:
        retried = status in {408, 425, 429} or status >= 500
        failure = failed(status, canonical(blocked("rate_limited")), retry_after=5.0)
        assert (failure.code, failure.retryable) == ("rate_limited", retried), status
        assert failure.retry_after == (5.0 if retried else None), status


def test_without_a_code_only_the_status_counts() -> None:
    for status in OTHER_STATUSES:
        failure = failed(status, b"<html>", "text/html", retry_after=5.0)
        retried = status in {408, 425, 429} or status >= 500
        assert (failure.code, failure.retryable) == ("http_status", retried), status
        assert failure.retry_after == (5.0 if retried else None), status


@pytest.mark.parametrize(
    "body",
    [json.dumps(blocked("a.b-c_9"), indent=2).encode(), canonical(blocked("a.b-c_9"))],
)
def test_an_error_object_may_be_spelt_in_any_way(body: bytes) -> None:
    assert failed(422, body, None).code == "a.b-c_9"


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"error":' + b"9" * 5000,
        b"\xef\xbb\xbf" + canonical(blocked("code")),
        canonical(blocked("")),
        canonical(blocked("Code")),
        canonical(blocked("9code")),
        canonical(blocked("code\n")),
        canonical(blocked("co de")),
        canonical(blocked("c" * 129)),
        canonical(blocked("code", error=None)),
        canonical(blocked("code", error=["code"])),
        canonical(blocked("code", schema="blun.website-localization-api.v1")),
        canonical(blocked("code", status="block")),
        canonical(blocked("code", detail="x")),
        canonical({"error": "code", "status": "BLOCK"}),
        canonical([blocked("code")]),
        canonical(blocked("code")).replace(b'"error"', b'"error":"other","error"'),
        canonical(blocked("code")) + b" " * MAX_RESPONSE_BYTES,
        canonical(accepted()),
    ],
    ids=lambda body: f"{body!s:.40}",
)
def test_what_is_no_error_object(body: bytes | None) -> None:
    for status in (400, 429, 503):
        failure = failed(status, body)
        assert (failure.code, failure.retryable) == ("http_status", status != 400)


def test_a_code_of_the_longest_kind() -> None:
    assert failed(400, canonical(blocked("c" * 128))).code == "c" * 128


def test_a_compressed_error_object_is_none() -> None:
    failure = failed(503, canonical(blocked("code")), content_encoding="gzip")
    assert (failure.code, failure.retryable) == ("http_status", True)
