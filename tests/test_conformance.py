"""The suite that ships in ``outbox.testing``, asked of both databases; and that it would notice a wrong answer."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.testing import Case, conformance_cases
from outbox.testing.conformance import World


@pytest.mark.parametrize("case", conformance_cases, ids=str)
def test_conformance(case: Case, engine: Engine) -> None:
    case(engine)
    if case.name != "tampered_payload_is_never_handed_out":  # which leaves a broken row behind
        World(engine).outbox.health(deep=True)


def test_every_case_has_a_name_and_a_question() -> None:
    assert len({case.name for case in conformance_cases}) == len(conformance_cases) > 30
    assert all(case.question.endswith(".") for case in conformance_cases)


BREAKAGES: dict[str, Any] = {
    "stale_owner_never_wins": ("_why_lost", lambda *_: "dispatch.claim_missing"),
    "tampered_payload_is_said": ("_proves_itself", lambda *_: True),
    "retried_waits_ever_longer": ("_failed", None),
}


@pytest.mark.parametrize("name", ["stale_owner_never_wins", "tampered_payload_is_said"])
def test_a_broken_engine_is_noticed(name: str, sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, broken = BREAKAGES[name]
    monkeypatch.setattr(f"outbox.store.{attribute}", broken)
    (case,) = (case for case in conformance_cases if case.name == name)
    with pytest.raises(AssertionError):
        case(sqlite_engine)


def test_cases_do_not_mind_each_other(sqlite_engine: Engine) -> None:
    for case in conformance_cases:
        if case.name != "deep_health_finds_what_breaks_the_rules":  # which looks at everybody's rows
            case(sqlite_engine)
    assert "conformance" not in Outbox.__module__
