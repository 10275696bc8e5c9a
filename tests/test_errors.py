"""The errors themselves, and that the list of codes is the whole truth: none missing, none unused, none untested."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outbox
from outbox import DeliveryFailed, InputError, NotFoundError, OutboxError
from outbox.errors import CODES, CollisionError, IntegrityError
from tests.support import FAMILY_OF, refused

PACKAGE = Path(outbox.__file__).parent
TESTS = Path(__file__).parent
CODE = re.compile(r"(?:dispatch|destination)\.[a-z_]+|lease_(?:expired|released)|discarded")


def codes_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every string in the folder's code that is an error code of ours and nothing else."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                yield node.value, path


def test_every_code_that_is_used_is_listed() -> None:
    used = {code for code, path in codes_in(PACKAGE) if path.name != "errors.py"}
    assert used - CODES.keys() == set()


def test_every_code_that_is_listed_is_used() -> None:
    used = {code for code, path in codes_in(PACKAGE) if path.name != "errors.py"}
    assert CODES.keys() - used == set()


def test_every_code_is_tested() -> None:
    helpers = {TESTS / "support.py", Path(__file__)}
    tested = {code for code, path in codes_in(TESTS) if path not in helpers}
    assert CODES.keys() - tested == set()


def test_every_family_is_of_listed_codes() -> None:
    assert FAMILY_OF.keys() <= CODES.keys()


@pytest.mark.parametrize("code", CODES)
def test_a_code_brings_its_meaning(code: str) -> None:
    error = OutboxError(code)
    assert error.code == code
    assert error.message == CODES[code]
    assert str(error) == f"{code}: {CODES[code]}"
    assert (error.event_id, error.expected, error.found) == (None, None, None)


def test_an_error_says_what_it_is_about() -> None:
    error = OutboxError("dispatch.claim_lost", "words", event_id="e-1", expected="this", found="that")
    assert str(error) == "dispatch.claim_lost: words (event e-1); expected this; found that"
    assert (error.event_id, error.expected, error.found) == ("e-1", "this", "that")


def test_a_code_of_a_hosts_own_falls_back_on_its_family() -> None:
    assert str(CollisionError("mine.taken")).startswith("mine.taken: The event id is taken")


def test_families_can_be_caught_as_python_would() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(NotFoundError, LookupError)
    for family in {*FAMILY_OF.values(), InputError, DeliveryFailed}:
        assert issubclass(family, OutboxError)


ERRORS = [
    InputError("dispatch.time_invalid", expected="this", found="that"),
    IntegrityError("dispatch.payload_integrity", "words", event_id="e-1"),
    DeliveryFailed("network", retryable=True, retry_after=5, detail_hash="0" * 64),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_travel_between_processes(error: OutboxError, travel) -> None:
    again = travel(error)
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        {"code": "Network", "retryable": True},
        {"code": "", "retryable": True},
        {"code": None, "retryable": True},
        {"code": "a" * 129, "retryable": True},
        {"code": "network", "retryable": True, "retry_after": -1},
        {"code": "network", "retryable": True, "retry_after": float("nan")},
        {"code": "network", "retryable": True, "retry_after": float("inf")},
        {"code": "network", "retryable": True, "retry_after": True},
        {"code": "network", "retryable": True, "retry_after": "5"},
        {"code": "network", "retryable": True, "detail_hash": "secret"},
    ],
)
def test_a_malformed_failure_is_refused_where_it_is_made(arguments: dict) -> None:
    with refused("dispatch.error_invalid"):
        DeliveryFailed(**arguments)


def test_a_failure_carries_what_it_was_given() -> None:
    error = DeliveryFailed("network", retryable=False, retry_after=7, detail_hash="a" * 64)
    assert (error.code, error.retryable, error.retry_after, error.detail_hash) == ("network", False, 7.0, "a" * 64)
    assert str(error) == "network: delivery failed"
