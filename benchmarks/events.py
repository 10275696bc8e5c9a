"""The event that everything is measured with: a CMS change of ordinary size, about 480 bytes of JSON."""

from __future__ import annotations

from typing import Any, Final

from outbox.contracts.cms import CMS_CHANGE, RESPONSE_SCHEMA
from outbox.records import Claim
from outbox.values import canonical_json, sha256_hex

TOPIC: Final = CMS_CHANGE.topic
RECEIPT: Final = '{"job_count":2,"plan_id":"plan-1","status":"enqueued"}'
RESPONSE_SHA256: Final = sha256_hex(RECEIPT)
#: Stands for the event's number in :data:`PAYLOAD_TEMPLATE`.
NUMBER: Final = "@"


def event(number: int) -> dict[str, Any]:
    """The event of that number."""
    return {
        "schema": "blun.cms-content-change.v2",
        "event_id": f"bench:{number}",
        "site_id": "site-1",
        "website_version": "web-2026.12",
        "source_sequence": number,
        "localization": {
            "content_type": "ui",
            "glossary_version": "public-1",
            "model_id": "model",
            "model_version": "1",
            "policy_version": "site-2",
            "provider_id": "customer-llm",
            "software_version": "6.42.18",
            "source_id": "auth.msg-0467",
            "source_locale": "en-IE",
            "source_revision": "rev-6",
            "source_text": "Prices exclude VAT: €480. Delivery takes three working days.",
            "target_locales": ["mt-MT", "fi-FI", "bg-BG"],
        },
    }


def payload(number: int) -> str:
    """The event's canonical JSON."""
    return PAYLOAD_TEMPLATE.replace(NUMBER, str(number))


def response(event_id: str) -> dict[str, Any]:
    """What the service answers to an event."""
    return {
        "schema": RESPONSE_SCHEMA,
        "event_id": event_id,
        "plan_id": "plan-1",
        "job_count": 2,
        "inserted_jobs": 2,
        "status": "enqueued",
    }


class NoOp:
    """A destination that accepts everything at once."""

    timeout = 30.0

    def deliver(self, claim: Claim) -> dict[str, Any]:
        return response(claim.event_id)


def _template() -> str:
    text = canonical_json(event(9_876_543_210), code="dispatch.change_invalid")
    return text.replace("9876543210", NUMBER)


PAYLOAD_TEMPLATE: Final = _template()
