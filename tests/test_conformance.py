"""The suite that ships in ``outbox.testing``, asked of both databases; and that it notices a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox, OutboxError
from outbox.contracts.cms import CMS_CHANGE
from outbox.dialects.sqlite import SQLiteDialect
from outbox.testing import Case, conformance_cases

CASES = {case.name: case for case in conformance_cases}


@pytest.mark.parametrize("case", conformance_cases, ids=str)
def test_conformance(case: Case, engine: Engine) -> None:
    case(engine)
    Outbox(engine, contracts=(CMS_CHANGE,)).health(deep=True)


def test_every_case_has_a_name_and_a_question() -> None:
    assert len(CASES) == len(conformance_cases) > 40
    assert all(case.question.endswith(".") for case in conformance_cases)


def test_cases_do_not_mind_each_other(sqlite_engine: Engine) -> None:
    for case in reversed(conformance_cases):
        case(sqlite_engine)


def _settle_without_fence(_dialect: Any, _connection: Any, changes: Any, _now: float) -> set[str]:
    return {change.claim.lease_token for change in changes}


_lease: Any = SQLiteDialect.lease

#: What is broken, how, and which case has to notice.
BREAKAGES: list[tuple[str, str, Callable[..., Any]]] = [
    ("stale_owner_never_wins", "outbox.dialects.sqlite.SQLiteDialect.settle", _settle_without_fence),
    ("settled_each_for_itself", "outbox.dialects.sqlite.SQLiteDialect.settle", _settle_without_fence),
    ("settled_once_only", "outbox.dialects.sqlite.fence", lambda claim: ()),
    ("renewed_replaces_the_claim", "outbox.dialects.sqlite.SQLiteDialect.renew", lambda *_: set()),
    ("expired_lease_is_recovered", "outbox.store.Outbox._recover", lambda *_: None),
    ("claims_are_bounded", "outbox.dialects.sqlite.SQLiteDialect.lease", lambda *given: _lease(*given[:6], 100)),
    ("claimed_in_due_order", "outbox.dialects.base._due_order", lambda claim: (-claim.due_at, claim.id)),
    ("refused_event_leaves_the_transaction_usable", "outbox.store.Outbox._undo", lambda *_: None),
    ("enqueued_otherwise_collides", "outbox.store._differs", lambda *_: False),
    ("tampered_payload_is_said", "outbox.store._proves_itself", lambda *_: True),
    ("retried_waits_ever_longer", "outbox.policy.RetryPolicy.delay", lambda *_, **__: 5.0),
    ("retry_after_is_a_lower_bound", "outbox.policy.RetryPolicy.delay", lambda *_, **__: 5.0),
    ("no_transaction_to_join", "outbox.dialects.sqlite.SQLiteDialect.in_transaction", lambda *_: True),
    ("deep_health_finds_what_breaks_the_rules", "outbox.store.check_row", lambda *_: None),
]


@pytest.mark.parametrize(("name", "target", "broken"), BREAKAGES, ids=[name for name, *_ in BREAKAGES])
def test_a_broken_engine_is_noticed(
    name: str, target: str, broken: Any, sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, broken)
    with pytest.raises((AssertionError, OutboxError, ValueError)):
        CASES[name](sqlite_engine)
