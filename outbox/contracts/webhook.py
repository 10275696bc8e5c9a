"""Any JSON object with an id as an event, for webhooks and the like. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from outbox.contracts.base import Contract
from outbox.errors import InputError
from outbox.values import check_token, describe

_ACCEPTED: Final = range(200, 300)


class WebhookContract(Contract):
    """A topic whose events are JSON objects of any shape, as long as each has an id.

    Args:
        topic: the topic's name, a token.
        event_id: the member that holds the event's id (a token of at most 256 characters), or a function that gives it.
        ordering_key: the member that holds the event's ordering key (text, or null or absent for none), or a function
            that gives it; None for no order.
        hold_on_failure: whether an event that failed holds the later ones of its key.

    Raises:
        InputError: ``dispatch.contract_invalid``.
    """

    def __init__(
        self,
        topic: str,
        *,
        event_id: str | Callable[[Mapping[str, Any]], str] = "id",
        ordering_key: str | Callable[[Mapping[str, Any]], str | None] | None = None,
        hold_on_failure: bool = True,
    ) -> None:
        code = "dispatch.contract_invalid"
        self.topic = check_token(topic, code=code)
        _check_member(event_id)
        if ordering_key is not None:
            _check_member(ordering_key)
        if not isinstance(hold_on_failure, bool):
            raise InputError(code, expected="True or False for hold_on_failure", found=describe(hold_on_failure))
        self.hold_on_failure = hold_on_failure
        self._event_id = event_id
        self._ordering_key = ordering_key

    def check(self, event: Any) -> str:
        """Check an event and return its id.

        Raises:
            InputError: ``dispatch.change_invalid``.
        """
        if type(event) is not dict:
            raise InputError("dispatch.change_invalid", expected="a JSON object", found=describe(event))
        found = self._event_id(event) if callable(self._event_id) else event.get(self._event_id)
        return check_token(found, code="dispatch.change_invalid")

    def ordering_key(self, event: Any) -> str | None:
        """The event's own key. What is no text is refused where it is stored."""
        if self._ordering_key is None:
            return None
        return self._ordering_key(event) if callable(self._ordering_key) else event.get(self._ordering_key)

    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        """Check what the destination returned, ``{"status": 200}``, and keep it.

        Raises:
            InputError: ``dispatch.response_invalid``.
        """
        del event_id
        status = response.get("status") if type(response) is dict else None
        if type(status) is not int or status not in _ACCEPTED:
            raise InputError("dispatch.response_invalid", expected="a status from 200 to 299", found=describe(status))
        return {"status": status}


def _check_member(given: object) -> None:
    if not callable(given) and not (isinstance(given, str) and given):
        expected = "the name of a member, or a function"
        raise InputError("dispatch.contract_invalid", expected=expected, found=describe(given))
