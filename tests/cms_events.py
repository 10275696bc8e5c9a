"""CMS events made to order."""

from __future__ import annotations

from typing import Any

from tests.misbehaving import EVENT_ID

#: Given as a field's value, it takes the field away.
MISSING = "(missing)"


def event(**changes: Any) -> dict[str, Any]:
    """A valid event; changes to ``localization`` are given with their field's own name, MISSING takes one away."""
    localization = {
        "content_type": "ui",
        "glossary_version": "glossary-1",
        "model_id": "model",
        "model_version": "1",
        "policy_version": "policy-1",
        "provider_id": "provider",
        "software_version": "1.2.3",
        "source_id": "page.title",
        "source_locale": "en-IE",
        "source_revision": "rev-1",
        "source_text": "Prices exclude VAT: €480.",
        "target_locales": ["mt-MT", "fi-FI"],
    }
    made = {
        "event_id": EVENT_ID,
        "localization": localization,
        "schema": "blun.cms-content-change.v2",
        "site_id": "site-1",
        "source_sequence": 1,
        "website_version": "web-1",
    }
    for name, value in changes.items():
        inner = name in localization
        target: dict[str, Any] = localization if inner else made
        if value is MISSING:
            del target[name]
        else:
            target[name] = value
    return made
