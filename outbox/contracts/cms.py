"""The CMS localization contract: what a content change looks like and what answers it. Pure: no I/O.

A rule returns what is wrong, or None. Its text names the field and what was expected there and never quotes the value,
because values are content.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from outbox.contracts.base import Contract, DeliveryFailed
from outbox.errors import InputError
from outbox.values import is_error_code, is_token, parse_canonical

EVENT_SCHEMA: Final = "blun.cms-content-change.v2"
RESPONSE_SCHEMA: Final = "blun.website-localization-api.v2"
MAX_RESPONSE_BYTES: Final = 4_000_000
MAX_SOURCE_TEXT_BYTES: Final = 1_000_000
MAX_BOUND_LENGTH: Final = 256
MAX_SEQUENCE: Final = 2**63 - 1

CONTENT_TYPES: Final = frozenset({"headline", "cta", "marketing", "ui", "documentation", "seo", "legal", "commercial"})
TARGET_LOCALES: Final = frozenset({
    "bg-BG", "hr-HR", "cs-CZ", "da-DK", "nl-NL", "en-IE", "et-EE", "fi-FI", "fr-FR", "de-AT", "el-GR", "hu-HU",
    "ga-IE", "it-IT", "lv-LV", "lt-LT", "mt-MT", "pl-PL", "pt-PT", "ro-RO", "sk-SK", "sl-SI", "es-ES", "sv-SE",
})  # fmt: skip
RESPONSE_STATUSES: Final = frozenset({"enqueued", "superseded", "cancelled"})

_EVENT_FIELDS: Final = frozenset(
    {"schema", "event_id", "site_id", "website_version", "source_sequence", "localization"}
)
_BOUND_FIELDS: Final = (
    "source_id", "source_revision", "source_locale", "content_type", "glossary_version", "policy_version",
    "provider_id", "model_id", "model_version", "software_version",
)  # fmt: skip
_LOCALIZATION_FIELDS: Final = frozenset({*_BOUND_FIELDS, "source_text"})
_RESPONSE_FIELDS: Final = frozenset({"schema", "event_id", "plan_id", "job_count", "inserted_jobs", "status"})
_RECEIPT_FIELDS: Final = ("plan_id", "job_count", "status")
_ERROR_FIELDS: Final = frozenset({"schema", "status", "error"})

#: All bound fields at once, as nearly all of them are: printable ASCII, no blank at either end, 256 characters at most.
_PLAIN_BOUND = re.compile(rf"(?:[!-~](?:[ -~]{{0,254}}[!-~])?\n){{{len(_BOUND_FIELDS)}}}")
_STRINGS_ONLY: Final = frozenset({str})
_LOCALE = re.compile(r"[A-Za-z]{2,8}(?:-(?:[A-Za-z]{4}|[A-Za-z]{2}|[0-9]{3}|[A-Za-z0-9]{5,8}))*")
_MEDIA_TYPE = re.compile(r'application/json[ \t]*(?:;[ \t]*charset=(?:utf-8|"utf-8")[ \t]*)?', re.IGNORECASE)
_SCRIPT_LENGTH: Final = 4
_REGION_LENGTH: Final = 2

_ACCEPTED: Final = frozenset({200, 202})
_REDIRECTS: Final = range(300, 400)
_SERVER_ERRORS: Final = range(500, 600)
#: Besides server errors, retried when the error body shows that it was the service itself that said so.
_TOO_MANY: Final = 429
_RETRIED: Final = frozenset({408, 425, _TOO_MANY})


class _Fault(NamedTuple):
    """Why a value was refused: content-free, fit for an error's ``expected`` and ``found``."""

    expected: str
    found: str | None = None


class CMSChange(Contract):
    """Topic ``cms.change``: one change of one source text, to be localized by the remote service."""

    topic = "cms.change"

    def check(self, event: Any) -> str:
        """Check an event and return its id. Whatever is handed in, the only exception is the declared one.

        Raises:
            InputError: ``dispatch.change_invalid``, naming the first field that breaks a rule.
        """
        fault = _object_fault("event", event, _EVENT_FIELDS) or _token_fault("event_id", event["event_id"])
        if fault is not None:
            raise InputError("dispatch.change_invalid", expected=fault.expected, found=fault.found)
        event_id: str = event["event_id"]
        fault = _event_fault(event)
        if fault is not None:
            raise InputError("dispatch.change_invalid", event_id=event_id, expected=fault.expected, found=fault.found)
        return event_id

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        """Check the response to ``event_id`` and return ``plan_id``, ``job_count`` and ``status``.

        Raises:
            InputError: ``dispatch.response_invalid``.
        """
        fault = _response_fault(event_id, response)
        if fault is not None:
            raise InputError("dispatch.response_invalid", event_id=event_id, expected=fault.expected, found=fault.found)
        return {name: response[name] for name in _RECEIPT_FIELDS}

    def read_response(
        self,
        status: int,
        content_type: str | None,
        body: bytes | None,
        event_id: str,
        *,
        content_encoding: str | None = None,
        retry_after: float | None = None,
    ) -> dict[str, Any]:
        """The response mapping that the wire carries, once everything about it has been proven.

        The status decides first: an error keeps its meaning however badly its body is dressed, so that a proxy's HTML
        page with 404 ends the event instead of being retried as a wrong content type.

        Args:
            status: the HTTP status.
            content_type: the Content-Type header, or None.
            body: the body as sent, or None when it was longer than ``MAX_RESPONSE_BYTES`` and dropped.
            event_id: the event that was sent.
            content_encoding: the Content-Encoding header, or None; any encoding is one we did not ask for.
            retry_after: seconds the server asked to be left alone; passed on where the failure is retried.

        Raises:
            DeliveryFailed: ``redirect``, ``http_status``, the server's own code, ``response_content_type``,
                ``response_size``, ``response_json`` or ``response_binding``.
        """
        identity = content_encoding is None or content_encoding.strip().lower() in {"", "identity"}
        if status not in _ACCEPTED:
            _refuse_status(status, body if identity else None, retry_after)
        if not identity or content_type is None or _MEDIA_TYPE.fullmatch(content_type.strip(" \t")) is None:
            raise _wrong_response("response_content_type", body)
        if body is None or len(body) > MAX_RESPONSE_BYTES:
            raise _wrong_response("response_size", None)
        response = _canonical(body)
        if _response_fault(event_id, response) is not None:
            raise _wrong_response("response_binding", body)
        assert isinstance(response, dict)
        return response


#: The contract as hosts register it: ``Outbox(engine, contracts=(CMS_CHANGE,))``.
CMS_CHANGE: Final = CMSChange()


def canonical_locale(locale: str) -> str:
    """A well-formed locale in canonical case: ``mt-mt`` is ``mt-MT``, ``sr-latn-rs`` is ``sr-Latn-RS``."""
    language, *rest = locale.split("-")
    return "-".join([language.lower(), *map(_canonical_subtag, rest)])


def _canonical_subtag(subtag: str) -> str:
    if len(subtag) == _REGION_LENGTH:
        return subtag.upper()
    return subtag.title() if len(subtag) == _SCRIPT_LENGTH else subtag.lower()


# -- the event --------------------------------------------------------------------------------------------------------


def _event_fault(event: dict[str, Any]) -> _Fault | None:
    localization = event["localization"]
    return (
        _constant_fault("schema", event["schema"], EVENT_SCHEMA)
        or _token_fault("site_id", event["site_id"])
        or _token_fault("website_version", event["website_version"])
        or _int_fault("source_sequence", event["source_sequence"], 1, MAX_SEQUENCE)
        or _object_fault("localization", localization, _LOCALIZATION_FIELDS, frozenset({"target_locales"}))
        or _localization_fault(localization)
    )


def _localization_fault(localization: dict[str, Any]) -> _Fault | None:
    return (
        _bound_faults(localization)
        or _source_text_fault("localization.source_text", localization["source_text"])
        or _choice_fault("localization.content_type", localization["content_type"], CONTENT_TYPES)
        or _locale_fault("localization.source_locale", localization["source_locale"])
        or _targets_fault(
            "localization.target_locales", localization.get("target_locales"), localization["source_locale"]
        )
    )


def _bound_faults(localization: dict[str, Any]) -> _Fault | None:
    values = [localization[name] for name in _BOUND_FIELDS]
    # One match instead of ten looks: each claim of an event passes here. What does not match may still be right.
    if _only_strings(values) and _PLAIN_BOUND.fullmatch("\n".join([*values, ""])) is not None:
        return None
    faults = (_bound_fault(f"localization.{name}", localization[name]) for name in _BOUND_FIELDS)
    return next(filter(None, faults), None)


def _bound_fault(path: str, value: object) -> _Fault | None:
    fault = _text_fault(path, value)
    if fault is not None:
        return fault
    assert isinstance(value, str)
    if not 1 <= len(value) <= MAX_BOUND_LENGTH:
        return _fault(path, f"1 to {MAX_BOUND_LENGTH} characters", value)
    if value != value.strip():
        return _fault(path, "no surrounding white space", value)
    return None


def _source_text_fault(path: str, value: object) -> _Fault | None:
    fault = _text_fault(path, value)
    if fault is not None:
        return fault
    assert isinstance(value, str)
    if not value.strip():
        return _fault(path, "text that is not blank", value)
    size = len(value.encode("utf-8"))
    if size > MAX_SOURCE_TEXT_BYTES:
        return _Fault(f"{path}: at most {MAX_SOURCE_TEXT_BYTES} bytes of UTF-8", f"{size} bytes")
    return None


def _text_fault(path: str, value: object) -> _Fault | None:
    if type(value) is not str:
        return _fault(path, "a string", value)
    if "\0" in value:
        return _fault(path, "no NUL", value)
    if value.isascii():
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return _fault(path, "no lone surrogates", value)
    return None if unicodedata.is_normalized("NFC", value) else _fault(path, "text in Unicode NFC", value)


def _locale_fault(path: str, value: str) -> _Fault | None:
    if _LOCALE.fullmatch(value) is None or value.lower() in {"auto", "all"}:
        return _fault(path, "a locale such as en-IE, not auto or all", value)
    return None


def _targets_fault(path: str, value: object, source_locale: str) -> _Fault | None:
    if value is None:
        return None
    if type(value) is not list or not value:
        return _fault(path, "an array that is not empty, null, or no such field", value)
    seen: set[str] = set()
    source_language = _language(source_locale)
    for index, item in enumerate(value):
        spelled_out = type(item) is str and item in TARGET_LOCALES
        if not spelled_out and (type(item) is not str or _LOCALE.fullmatch(item) is None):
            return _fault(f"{path}[{index}]", "a locale", item)
        target = item if spelled_out else canonical_locale(item)
        if target not in TARGET_LOCALES:
            return _fault(f"{path}[{index}]", f"one of the {len(TARGET_LOCALES)} target locales", item)
        if target in seen:
            return _fault(f"{path}[{index}]", "no locale twice", item)
        if _language(target) == source_language:
            return _fault(f"{path}[{index}]", "a language other than the source's", item)
        seen.add(target)
    return None


def _language(locale: str) -> str:
    return locale.partition("-")[0].lower()


# -- the response -----------------------------------------------------------------------------------------------------


def _response_fault(event_id: str, response: Any) -> _Fault | None:
    return _object_fault("response", response, _RESPONSE_FIELDS) or (
        _constant_fault("schema", response["schema"], RESPONSE_SCHEMA)
        or _constant_fault("event_id", response["event_id"], event_id, "the id of the event sent")
        or _token_fault("plan_id", response["plan_id"])
        or _int_fault("job_count", response["job_count"], 1)
        or _int_fault("inserted_jobs", response["inserted_jobs"], 0, response["job_count"], "job_count")
        or _choice_fault("status", response["status"], RESPONSE_STATUSES)
    )


def _canonical(body: bytes) -> Any:
    try:
        return parse_canonical(body.decode("utf-8"), code="response_json", max_bytes=MAX_RESPONSE_BYTES)
    except (InputError, UnicodeDecodeError):
        pass
    raise _wrong_response("response_json", body)  # out here, so that no parser's quotation is chained to it


def _wrong_response(code: str, body: bytes | None) -> DeliveryFailed:
    # Retried: the event may well have been taken, and sending it again asks for the same answer.
    return DeliveryFailed(code, retryable=True, detail_hash=_detail_hash(body))


def _refuse_status(status: int, body: bytes | None, retry_after: float | None) -> NoReturn:
    if status in _REDIRECTS:
        raise DeliveryFailed("redirect", retryable=False, arrival="refused", http_status=status)
    # Also without the service's own error body: a plain 429 is some proxy's, and as temporary.
    retryable = status in _SERVER_ERRORS or status in _RETRIED
    raise DeliveryFailed(
        _server_code(body) or "http_status",
        retryable=retryable,
        retry_after=retry_after if retryable else None,
        detail_hash=_detail_hash(body),
        arrival="refused",
        http_status=status,
        outage=status in _SERVER_ERRORS or status == _TOO_MANY,
    )


def _server_code(body: bytes | None) -> str | None:
    """The code of a body that is exactly the service's error object, in any spelling of JSON; else None."""
    if body is None or len(body) > MAX_RESPONSE_BYTES:
        return None
    try:
        error = json.loads(body.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        return None
    if type(error) is not dict or error.keys() != _ERROR_FIELDS:
        return None
    code = error["error"]
    ours = error["schema"] == RESPONSE_SCHEMA and error["status"] == "BLOCK"
    return code if ours and is_error_code(code) else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _detail_hash(body: bytes | None) -> str | None:
    """Lets an operator find the body in a log of the server's, without our keeping any of it."""
    return hashlib.sha256(body).hexdigest() if body else None


# -- single values ----------------------------------------------------------------------------------------------------


def _object_fault(
    path: str, value: object, required: frozenset[str], optional: frozenset[str] = frozenset()
) -> _Fault | None:
    if type(value) is not dict:
        return _fault(path, "an object", value)
    if not _only_strings(value):
        return _Fault(f"{path}: keys that are strings")
    if value.keys() == required or value.keys() == required | optional:
        return None
    missing = required - value.keys()
    if missing:
        return _Fault(f"{path}: the field {min(missing)}", "no such field")
    unknown = value.keys() - required - optional
    if unknown:  # counted, not named: a misplaced text can be a key
        return _Fault(f"{path}: no fields but the contract's", f"{len(unknown)} unknown")
    return None


def _only_strings(values: Iterable[object]) -> bool:
    """Strings proper: a subclass may compare and hash as it likes."""
    return _STRINGS_ONLY.issuperset(map(type, values))


def _constant_fault(path: str, value: object, constant: str, words: str | None = None) -> _Fault | None:
    return None if type(value) is str and value == constant else _fault(path, words or constant, value)


def _choice_fault(path: str, value: object, choices: frozenset[str]) -> _Fault | None:
    if type(value) is str and value in choices:
        return None
    return _fault(path, f"one of {', '.join(sorted(choices))}", value)


def _token_fault(path: str, value: object) -> _Fault | None:
    if type(value) is str and is_token(value):
        return None
    return _fault(path, "a token of 1 to 256 of A-Z a-z 0-9 _ . : -", value)


def _int_fault(
    path: str, value: object, lowest: int, highest: int | None = None, words: str | None = None
) -> _Fault | None:
    if type(value) is int and lowest <= value and (highest is None or value <= highest):  # a bool is no number here
        return None
    upper = "" if highest is None else f" to {words or highest}"
    return _fault(path, f"a whole number from {lowest}{upper}", value)


def _fault(path: str, expected: str, value: object) -> _Fault:
    return _Fault(f"{path}: {expected}", _kind(value))


def _kind(value: object) -> str:
    """What a value is, asked without running any code of the value's own."""
    kind: type = type(value)
    if kind is str:
        return f"a string of length {len(value)}"  # type: ignore[arg-type]
    for name, plain in (("null", type(None)), ("a bool", bool), ("an int", int), ("a float", float)):
        if kind is plain:
            return name
    if kind is list:
        return "an array"
    return "an object" if kind is dict else "something that is not plain JSON"
