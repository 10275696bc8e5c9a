"""Generated input at the edges: what is accepted comes back as it was, what is refused changes nothing.

Each rule is spelled out here a second time, in another way, and the two have to agree on every value that hypothesis
can think of.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from outbox import Claim, DeliveryFailed, InputError, IntegrityError, Outbox, OutboxError, RetryPolicy
from outbox.contracts.cms import CMS_CHANGE, MAX_RESPONSE_BYTES
from outbox.destinations.cms import CMSDestination, HMACSigner
from outbox.rules import check_row
from outbox.schema import outbox_event
from outbox.values import MAX_DEPTH, canonical_json, parse_canonical
from tests.cms_events import event
from tests.misbehaving import EVENT_ID, Exchange, HangUpError, Server, accepted, blocked, canonical, chunked, message
from tests.profiles import PROFILE, examples, settings

CODE: Final = "dispatch.change_invalid"

pytestmark = pytest.mark.timeout(0 if PROFILE == "thorough" else 600)  # a failure takes minutes to be made small


def attempt(action: Callable[[], Any]) -> tuple[Any, OutboxError | None]:
    """What it returned, or how it was refused. Whatever else it raises is a fault."""
    try:
        return action(), None
    except OutboxError as refused:
        return None, refused


def is_refusal(refused: OutboxError, code: str = CODE) -> bool:
    """As declared, and without the foreign exception behind it, whose text would quote the value."""
    return isinstance(refused, InputError) and refused.code == code and refused.__cause__ is None


# -- values -----------------------------------------------------------------------------------------------------------


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Mapping(dict):  # type: ignore[type-arg]
    pass


class Items(list):  # type: ignore[type-arg]
    pass


def _cyclic_list() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def _cyclic_dict() -> dict[str, Any]:
    cycle: dict[str, Any] = {}
    cycle["again"] = {"and": [cycle]}
    return cycle


def _tower(height: int) -> list[Any]:
    tower: list[Any] = []
    for _ in range(height - 1):
        tower = [tower]
    return tower


plain_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from([-0.0, 1e16, 5e-324, 2**63, "\u2028", "\x7f", "𝄞", "\ufeff", "1", 10**400])
)
odd_leaves = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, "\ud800", "a\udfff", ..., Decimal(1)]),
    st.builds(lambda digits: 10**digits, st.sampled_from([4299, 4300, 9000])),  # made late: nothing can print them
    st.binary(max_size=3),
    st.tuples(st.integers()),
    st.frozensets(st.integers(), max_size=2),
    st.sampled_from([Text("a"), Whole(1), Mapping(a=1), Items([1]), b"", object(), int, _tower]),
    st.builds(_cyclic_list),
    st.builds(_cyclic_dict),
    st.builds(_tower, st.integers(MAX_DEPTH - 2, MAX_DEPTH + 2)),
    st.dictionaries(st.integers() | st.none() | st.booleans() | st.just(Text("k")), st.none(), min_size=1, max_size=2),
)
keys = st.text(max_size=5) | st.sampled_from(["\ud800", "a", "b", ""])


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


plain_values = nested(plain_leaves)
values = nested(plain_leaves | odd_leaves)


def is_plain(value: Any, room: int = MAX_DEPTH) -> bool:
    """Whether JSON in UTF-8 can carry the value and bring the very same back."""
    kind = type(value)
    if kind is str:
        return not any(0xD800 <= ord(character) <= 0xDFFF for character in value)
    if kind is int:
        return bool(-(10**4300) < value < 10**4300)  # Python prints no more digits
    if kind is float:
        return bool(math.isfinite(value))
    if kind is list:
        return room > 0 and all(is_plain(item, room - 1) for item in value)
    if kind is dict:
        return room > 0 and all(
            type(key) is str and is_plain(key) and is_plain(item, room - 1) for key, item in value.items()
        )
    return value is None or kind is bool


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, all the way down; 1, 1.0 and True are three things, and so are 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if type(one) is list:
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


@settings(max_examples=examples(300, 20_000))
@given(values)
@example(_tower(MAX_DEPTH))
@example(_tower(MAX_DEPTH + 1))
@example({"a": 1, "\ud800": 2})
@example([1, [2, {3: 4}]])
def test_a_value_makes_the_round_trip_or_is_refused(value: Any) -> None:
    text, refused = attempt(lambda: canonical_json(value, code=CODE))
    if refused is not None:
        assert is_refusal(refused)
        assert not is_plain(value)
        return
    assert is_plain(value)
    back = parse_canonical(text, code=CODE)
    assert same(back, value)
    assert same(json.loads(text), value)
    assert canonical_json(back, code=CODE) == text


@settings(max_examples=examples(100, 5_000))
@given(plain_values, st.randoms(use_true_random=False))
def test_the_order_of_keys_makes_no_difference(value: Any, random: Any) -> None:
    assume(is_plain(value))
    assert canonical_json(_shuffled(value, random), code=CODE) == canonical_json(value, code=CODE)


def _shuffled(value: Any, random: Any) -> Any:
    if type(value) is list:
        return [_shuffled(item, random) for item in value]
    if type(value) is not dict:
        return value
    items = [(key, _shuffled(item, random)) for key, item in value.items()]
    random.shuffle(items)
    return dict(items)


@settings(max_examples=examples(100, 5_000))
@given(plain_values, st.integers(-2, 2))
def test_size_is_bounded_to_the_byte(value: Any, slack: int) -> None:
    assume(is_plain(value))
    text = canonical_json(value, code=CODE)
    longest = len(text.encode()) + slack
    written, too_long_to_write = attempt(lambda: canonical_json(value, code=CODE, max_bytes=longest))
    read, too_long_to_read = attempt(lambda: parse_canonical(text, code=CODE, max_bytes=longest))
    if slack >= 0:
        assert written == text
        assert same(read, value)
    else:
        assert too_long_to_write is not None
        assert too_long_to_read is not None


# -- texts ------------------------------------------------------------------------------------------------------------

fragments = st.sampled_from([
    " ", "\n", "\t", "\ufeff", "\\u0061", "\\ud800", "\\ud834\\udd1e", "\\/", "\\u2028", "0", "00", ".0", "-", "-0",
    "1e2", "1E2", "+1", "NaN", "Infinity", "1" * 4301, "null", "true", '"', '"a"', '"a":1,', ",", ":", "[", "]", "{",
    "}", "{}", "[" * 70, "]" * 70, "[" * 100_000, "\0", "\x7f", "\ud800", "é", "e\u0301", "//", "'",
])  # fmt: skip


@st.composite
def spoilt_texts(draw: st.DrawFn) -> str:
    """Canonical JSON with something put in, taken out or written twice."""
    value = draw(plain_values.filter(is_plain))
    text = canonical_json(value, code=CODE)
    for _ in range(draw(st.integers(0, 2))):
        at, until = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = draw(
            st.sampled_from([
                text[:at] + draw(fragments) + text[at:],
                text[:at] + draw(fragments) + text[until:],
                text[:at] + text[until:],
                text[:until] + text[at:],
            ])
        )  # fmt: skip
    return text


@settings(max_examples=examples(300, 20_000))
@given(spoilt_texts() | st.text())
@example("[" * 1_000_000)
@example('{"a":1,"a":1}')
@example("1" * 5000)
@example('"\\ud800"')
@example("[1.0]")
@example("[1e2]")
def test_a_text_is_canonical_or_refused(text: str) -> None:
    value, refused = attempt(lambda: parse_canonical(text, code=CODE))
    if refused is not None:
        assert is_refusal(refused)
        assert _spelling(text) != text
        return
    assert is_plain(value)
    assert _spelling(text) == text


def _spelling(text: str) -> str | None:
    """The one spelling of what the text says, or None when it says nothing that could be kept."""
    try:
        value = json.loads(text)
        if not is_plain(value):
            return None
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return None


# -- events of the CMS contract ---------------------------------------------------------------------------------------

TARGETS: Final = {
    "bg-BG", "hr-HR", "cs-CZ", "da-DK", "nl-NL", "en-IE", "et-EE", "fi-FI", "fr-FR", "de-AT", "el-GR", "hu-HU", "ga-IE",
    "it-IT", "lv-LV", "lt-LT", "mt-MT", "pl-PL", "pt-PT", "ro-RO", "sk-SK", "sl-SI", "es-ES", "sv-SE",
}  # fmt: skip
BOUND: Final = {
    "source_id", "source_revision", "source_locale", "content_type", "glossary_version", "policy_version",
    "provider_id", "model_id", "model_version", "software_version",
}  # fmt: skip
OUTER: Final = {"schema", "event_id", "site_id", "website_version", "source_sequence", "localization"}
LOCALE: Final = r"[A-Za-z]{2,8}(-([A-Za-z]{4}|[A-Za-z]{2}|[0-9]{3}|[A-Za-z0-9]{5,8}))*"
TYPES: Final = {"headline", "cta", "marketing", "ui", "documentation", "seo", "legal", "commercial"}


def follows_contract(change: Any) -> bool:
    """Section 7 of the design, as one reads it."""
    if (
        not is_plain(change)
        or type(change) is not dict
        or set(change) != OUTER
        or type(change["localization"]) is not dict
    ):
        return False
    inner = change["localization"]
    sequence = change["source_sequence"]
    return (
        change["schema"] == "blun.cms-content-change.v2"
        and all(_token(change[name]) for name in ("event_id", "site_id", "website_version"))
        and type(sequence) is int
        and 1 <= sequence < 2**63
        and set(inner) - {"target_locales"} == BOUND | {"source_text"}
        and all(type(inner[name]) is str and 1 <= len(inner[name]) <= 256 and _good(inner[name]) for name in BOUND)
        and all(inner[name] == inner[name].strip() for name in BOUND)
        and type(inner["source_text"]) is str
        and inner["source_text"].strip() != ""
        and _good(inner["source_text"])
        and len(inner["source_text"].encode()) <= 1_000_000
        and inner["content_type"] in TYPES
        and re.fullmatch(LOCALE, inner["source_locale"]) is not None
        and inner["source_locale"].lower() not in ("auto", "all")
        and _good_targets(inner.get("target_locales"), inner["source_locale"])
    )


def _token(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[A-Za-z0-9_.:-]{1,256}", value) is not None


def _good(text: str) -> bool:
    return "\0" not in text and unicodedata.normalize("NFC", text) == text


def _good_targets(targets: Any, source: str) -> bool:
    if targets is None:
        return True
    if type(targets) is not list or not targets or not all(type(target) is str for target in targets):
        return False
    canonical_case = {name.lower(): name for name in TARGETS}
    found = [canonical_case.get(target.lower()) for target in targets]
    languages = {target.partition("-")[0].lower() for target in targets}
    return None not in found and len(set(found)) == len(found) and source.partition("-")[0].lower() not in languages


near_values: st.SearchStrategy[Any] = st.one_of(
    values,
    st.sampled_from([
        "", " ", "a b", " a", "a\u00a0", "\u3000", "e\u0301", "\u00e9", "a\0", "x" * 256, "x" * 257, "é" * 256,
        "auto", "ALL", "en", "EN-ie", "en-IE-", "sr-Latn-RS", "x-1", "mt-MT", "legal", "Legal", 0, 1, 2**63 - 1,
        2**63, 1.0, True, None, "blun.cms-content-change.v2", [], ["mt-MT"], ["mt-mt", "MT-MT"], ["en-IE"],
        ["de-DE"], ["ga-ie", "fr-FR"],
        ["mt-MT", None], {}, "y" * 1_000_000, "é" * 500_001, "\u2028",
    ]),
    st.lists(st.sampled_from([*sorted(TARGETS), "MT-mt", "xx-YY", "mt"]), max_size=4),
    st.text(alphabet="aé-:. \0\u0301İß", max_size=6),
)  # fmt: skip


some_tokens = st.text("aZ09_.:-", min_size=1, max_size=256)
good_texts = st.text(min_size=1).map(lambda text: unicodedata.normalize("NFC", text).replace("\0", ""))
FITTING: Final[dict[str, st.SearchStrategy[Any]]] = {
    "event_id": some_tokens, "site_id": some_tokens, "website_version": some_tokens,
    "source_sequence": st.integers(1, 2**63 - 1), "source_text": good_texts,
    "source_locale": st.sampled_from(["sr-Latn-RS", "en", "EN-ie", "zh-Hant-TW", "es-419", "sl-rozaj-biske"]),
    "content_type": st.sampled_from(sorted(TYPES)),
    "target_locales": st.sampled_from([None, ["FI-fi"], ["mt-MT", "cs-cz"]]),
}  # fmt: skip


@st.composite
def near_events(draw: st.DrawFn) -> Any:
    """A good event with up to two things wrong, or merely different."""
    change = copy.deepcopy(event())
    for _ in range(draw(st.integers(0, 2))):
        inside = draw(st.booleans())
        target = change["localization"] if inside and type(change.get("localization")) is dict else change
        name = draw(st.sampled_from([*sorted(target), "target_locales", "more"]) if target else st.just("more"))
        how = draw(st.sampled_from(["fitting", "fitting", "fitting", "near", "near", "missing"]))
        if how == "missing":
            target.pop(name, None)
        elif how == "near" or name in ("schema", "localization", "more"):
            target[name] = draw(near_values)
        else:
            target[name] = draw(FITTING.get(name, good_texts))
    return change


@settings(max_examples=examples(300, 20_000))
@given(near_events() | values)
def test_a_change_follows_its_contract_or_is_refused(change: Any) -> None:
    encoded, refused = attempt(lambda: CMS_CHANGE.encode(change))
    if refused is not None:
        assert is_refusal(refused)
        assert not follows_contract(change)
        return
    assert follows_contract(change)
    assert encoded.event_id == change["event_id"]
    assert encoded.payload_sha256 == hashlib.sha256(encoded.payload.encode()).hexdigest()
    assert same(json.loads(encoded.payload), change)
    CMS_CHANGE.verify(encoded.event_id, encoded.payload, encoded.payload_sha256)


@settings(max_examples=examples(200, 10_000))
@given(near_events(), st.data())
def test_a_spoilt_payload_never_proves_itself(change: Any, data: st.DataObject) -> None:
    assume(follows_contract(change))
    encoded = CMS_CHANGE.encode(change)
    at, until = sorted(
        (data.draw(st.integers(0, len(encoded.payload))), data.draw(st.integers(0, len(encoded.payload))))
    )
    spoilt = encoded.payload[:at] + data.draw(fragments) + encoded.payload[until:]
    assume(spoilt != encoded.payload)
    with pytest.raises(IntegrityError) as refused:
        CMS_CHANGE.verify(encoded.event_id, spoilt, encoded.payload_sha256)
    assert refused.value.code == "dispatch.payload_integrity"


def test_what_is_refused_leaves_the_database_as_it_was(engine: Engine) -> None:
    outbox = Outbox(engine, [CMS_CHANGE])

    @settings(max_examples=examples(40, 2_000))
    @given(st.lists(near_events() | values, min_size=1, max_size=3))
    def check(changes: list[Any]) -> None:
        before = _rows(engine)
        changes = [_renamed(change, len(before) + index) for index, change in enumerate(changes)]
        _, refused = attempt(lambda: outbox.enqueue_many(changes))
        if refused is not None:
            assert is_refusal(refused)
            assert not all(map(follows_contract, changes))
            assert _rows(engine) == before
            return
        stored = _rows(engine)[len(before) :]
        assert [same(json.loads(payload), change) for payload, change in zip(stored, changes, strict=True)]
        assert outbox.health(deep=True).counts["pending"] == len(before) + len(changes)

    check()


def _renamed(change: Any, number: int) -> Any:
    """Under an id of its own, where it has a good one: other examples' events are there already."""
    named = type(change) is dict and _token(change.get("event_id"))
    return {**change, "event_id": f"event-{number}"} if named else change


def _rows(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        payloads = outbox_event.select().with_only_columns(outbox_event.c.payload).order_by(outbox_event.c.id)
        return list(connection.execute(payloads).scalars())


# -- the retry policy -------------------------------------------------------------------------------------------------

seconds = st.floats(1e-3, 1e6)


@settings(max_examples=examples(200, 10_000))
@given(
    base=seconds, longest=seconds, cap=seconds, attempt=st.integers(1, 20), more=st.integers(0, 19),
    now=st.floats(0, 1e12), asked=st.none() | st.floats(0, 1e300),
)  # fmt: skip
def test_a_decision_is_never_early_never_late_and_ends(
    base: float, longest: float, cap: float, attempt: int, more: int, now: float, asked: float | None
) -> None:
    assume(base <= longest)
    policy = RetryPolicy(base, longest, cap)
    decide = {"attempt": attempt, "max_attempts": attempt + more, "now": now, "retry_after": asked}
    assert policy.decide(**decide, retryable=False).status == "failed"  # type: ignore[arg-type]
    decision = policy.decide(**decide, retryable=True)  # type: ignore[arg-type]
    assert decision.status == ("retry_wait" if more else "failed")
    if more:
        plain = min(longest, base * 2 ** (attempt - 1))
        assert now + plain <= decision.next_attempt_at <= now + max(plain, cap)
        assert asked is None or decision.next_attempt_at >= now + min(asked, cap)


# -- rows: the rules and the constraints ------------------------------------------------------------------------------

NOW: Final = 1_700_000_000.5
GOOD_ROWS: Final = [
    {}, {"status": "waiting", "ordering_key": "k"},
    {"status": "leased", "attempts": 1, "lease_owner": "w", "lease_token": "t", "lease_expires_at": NOW + 9},
    {"status": "retry_wait", "attempts": 1, "last_error_code": "network"},
    {"status": "succeeded", "attempts": 5, "receipt": "{}", "response_sha256": "b" * 64},
    {"status": "failed", "attempts": 5, "last_error_code": "network", "last_error_detail_hash": "c" * 64},
]  # fmt: skip
moments = st.sampled_from([NOW, NOW - 1, NOW + 1, math.nextafter(NOW, 0), 0.0, -1.0, -0.0, math.inf, None])
hashes = st.sampled_from(["a" * 64, "a" * 63, "a" * 65, "A" * 64, "", None])
tokens = st.sampled_from(["t", "", " ", "x" * 300, None])
COLUMNS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "topic": tokens, "event_id": tokens, "payload_sha256": hashes, "ordering_key": tokens,
    "status": st.sampled_from(
        ["pending", "waiting", "leased", "retry_wait", "succeeded", "failed", "done", "", "Pending", None]
    ),
    "attempts": st.sampled_from([0, 1, 5, 6, 20, -1, None]),
    "max_attempts": st.sampled_from([1, 5, 20, 0, 21, -1, None]),
    "redrives": st.sampled_from([0, 7, -1, None]),
    "next_attempt_at": moments, "created_at": moments, "updated_at": moments, "lease_expires_at": moments,
    "lease_owner": tokens, "lease_token": tokens,
    "last_error_code": st.sampled_from(["network", "BAD", "", None]), "last_error_detail_hash": hashes,
    "receipt": st.sampled_from(["{}", "[]", "{", "", None]), "response_sha256": hashes,
}  # fmt: skip


@st.composite
def near_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A good row of any status with up to three columns changed."""
    row = {
        "topic": "t", "event_id": "e", "payload": "{}", "payload_sha256": "a" * 64, "ordering_key": None,
        "headers": None, "status": "pending", "attempts": 0, "max_attempts": 5, "redrives": 0, "next_attempt_at": NOW,
        "lease_owner": None, "lease_token": None, "lease_expires_at": None, "last_error_code": None,
        "last_error_detail_hash": None, "receipt": None, "response_sha256": None, "created_at": NOW, "updated_at": NOW,
        **draw(st.sampled_from(GOOD_ROWS)),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(COLUMNS)), max_size=3)):
        row[name] = draw(COLUMNS[name])
    return row


class Record:
    """A row as it would be read."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.__dict__.update(columns)


def obeys_rules(row: Any) -> bool:
    _, broken = attempt(lambda: check_row(row))
    assert broken is None or (isinstance(broken, IntegrityError) and broken.code == "dispatch.state_invalid")
    return broken is None


def test_what_the_constraints_refuse_the_rules_refuse(engine: Engine) -> None:
    with engine.connect() as connection:

        @settings(max_examples=examples(300, 20_000))
        @given(near_rows())
        def check(row: dict[str, Any]) -> None:
            found = _stored(connection, row)
            if found is None:
                assert not obeys_rules(Record(row))
            else:
                assert obeys_rules(found) == obeys_rules(Record(row))

        check()


def _stored(connection: Connection, row: dict[str, Any]) -> Any:
    """The row read back, or None where the database does not take it."""
    with connection.begin() as transaction:
        try:
            connection.execute(outbox_event.insert(), row)
        except DBAPIError:
            return None
        else:
            return connection.execute(outbox_event.select()).one()
        finally:
            transaction.rollback()


# -- responses --------------------------------------------------------------------------------------------------------

OUR_CODES: Final = {
    "redirect", "http_status", "response_content_type", "response_size", "response_json", "response_binding",
}  # fmt: skip
CODE_OF_A_SERVER: Final = "source.unknown_locale"
statuses = st.sampled_from([*[200, 202] * 9, 201, 204, 301, 307, 400, 404, 408, 425, 429, 500, 503, 599])
content_types = st.sampled_from([
    *["application/json"] * 20, "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"',
    "application/json;", "application/json; charset=latin-1", "text/html", "application/jsonp", "", None,
])  # fmt: skip
encodings = st.sampled_from([*[None] * 9, "identity", "", "gzip", "identity, gzip"])


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """The bytes of a good answer or of the service's error, near misses of them, or any bytes at all."""
    value: Any = draw(st.sampled_from([accepted(), accepted(), blocked(CODE_OF_A_SERVER)]))
    for name in draw(st.lists(st.sampled_from([*sorted(value), "more"]), max_size=1)):
        value[name] = draw(
            st.sampled_from(
                [0, 1, 3, 2, -1, True, None, 1.0, "", "plan-2", "event-2", "cancelled", "Cancelled", "PASS", [], {}]
            )
            | plain_values.filter(is_plain)
        )
    body = canonical(value)
    if draw(st.booleans()):
        return body
    at, until = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
    middle = draw(st.binary(max_size=8) | fragments.map(lambda text: text.encode("utf-8", "surrogatepass")))
    return draw(st.sampled_from([body[:at] + middle + body[at:], body[:at] + middle + body[until:], middle, b""]))


@settings(max_examples=examples(300, 30_000))
@given(statuses, content_types, answers() | st.none() | st.just(b" " * (MAX_RESPONSE_BYTES + 1)), encodings)
def test_an_answer_is_a_response_or_a_declared_failure(
    status: int, content_type: str | None, body: bytes | None, encoding: str | None
) -> None:
    response, failure = attempt(
        lambda: CMS_CHANGE.read_response(status, content_type, body, EVENT_ID, content_encoding=encoding)
    )
    if failure is not None:
        _check_failure(failure, status, body)
        return
    assert status in (200, 202)
    assert body is not None
    assert canonical(response) == body, "a response is the one spelling of what it says"
    assert response["event_id"] == EVENT_ID
    assert CMS_CHANGE.receipt(EVENT_ID, response).response_sha256 == hashlib.sha256(body).hexdigest()


def _check_failure(failure: OutboxError, status: int, body: bytes | None) -> None:
    assert isinstance(failure, DeliveryFailed)
    assert failure.code in OUR_CODES or (body and status not in (200, 202) and failure.code.encode() in body)
    assert failure.detail_hash in (None, hashlib.sha256(body or b"").hexdigest())
    assert failure.__cause__ is None
    if failure.code.startswith("response_"):
        assert failure.retryable
    elif 300 <= status < 400:
        assert (failure.code, failure.retryable) == ("redirect", False)
    elif status >= 500:
        assert failure.retryable


@st.composite
def wires(draw: st.DrawFn) -> bytes:
    """What a broken server or a proxy in a bad mood sends: a whole response, bitten and patched."""
    body = draw(answers())
    whole = message(draw(statuses), body, length=draw(st.sampled_from([None, None, None, 0, 1, 10**12])))
    data = draw(st.sampled_from([whole, whole, chunked(body[:7], body[7:]), b"HTTP/1.1 100 Continue\r\n\r\n" + whole]))
    for _ in range(draw(st.integers(0, 2))):
        at, until = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        patch = draw(
            st.binary(max_size=8) | st.sampled_from([b"\r\n", b"\r\n\r\n", b"\n", b": ", b"\0", b"ffffffff\r\n"])
        )
        data = draw(st.sampled_from([data[:at] + patch + data[at:], data[:at] + patch + data[until:], data[:at]]))
    return data


def test_whatever_comes_over_the_wire_is_a_response_or_a_declared_failure() -> None:
    wire: list[bytes] = []

    def say(exchange: Exchange) -> None:
        exchange.send(wire[0])
        raise HangUpError

    with Server(say) as server:
        destination = CMSDestination(server.origin, HMACSigner("key-1", b"k"), timeout=30, allow_loopback_http=True)
        claim = _claim()

        @settings(max_examples=examples(100, 10_000))
        @given(wires())
        def check(data: bytes) -> None:
            wire[:] = [data]
            response, failure = attempt(lambda: destination.deliver(claim))
            if failure is None:
                assert CMS_CHANGE.receipt(EVENT_ID, response).response_sha256
            else:
                assert isinstance(failure, DeliveryFailed)
                assert failure.code in {*OUR_CODES, "network"} or failure.code.encode() in data

        check()


def _claim() -> Claim:
    encoded = CMS_CHANGE.encode(event())
    return Claim("cms.change", EVENT_ID, encoded.payload, encoded.payload_sha256, 1, 5, "w", "t", 2e9, 1)
