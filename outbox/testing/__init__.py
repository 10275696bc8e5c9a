"""What a host's own tests need, and the questions every database has to answer.

``Clock``, ``ScriptedDestination`` and ``LedgerServer`` are doubles for time, for a destination and for the CMS
localization service. ``conformance_cases`` are plain callables for any test runner: each takes an engine on a migrated
database, returns when the outbox behaves there as it should, and raises ``AssertionError`` when it does not.

    @pytest.mark.parametrize("case", conformance_cases, ids=str)
    def test_conformance(case, engine):
        case(engine)
"""

from outbox.testing.conformance import Case, Note, conformance_cases
from outbox.testing.doubles import Clock, Gate, ScriptedDestination, cms_response
from outbox.testing.ledger import Arrival, Entry, Ledger, LedgerServer, Manner, Service

__all__ = [
    "Arrival",
    "Case",
    "Clock",
    "Entry",
    "Gate",
    "Ledger",
    "LedgerServer",
    "Manner",
    "Note",
    "ScriptedDestination",
    "Service",
    "cms_response",
    "conformance_cases",
]
