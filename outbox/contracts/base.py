"""What the engine asks of a topic's contract and of the destination its events go to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from outbox.errors import InputError, IntegrityError, OutboxError
from outbox.records import Arrival, Claim, Receipt, check_attempt
from outbox.values import canonical_json, check_error, check_seconds, check_token, parse_canonical, sha256_hex

MAX_RECEIPT_BYTES: Final = 64_000


class DeliveryFailed(OutboxError):  # noqa: N818 - the name hosts raise, fixed by the public API
    """A destination's attempt failed in a way it knows.

    Args:
        code: why, matching ``^[a-z][a-z0-9_.-]{0,127}$``.
        retryable: whether another attempt could succeed.
        retry_after: seconds the remote side asked to be left alone, or None.
        detail_hash: SHA-256 hex of detail kept elsewhere, or None.
        arrival: how far it got: ``"unsent"`` (surely no byte of the event left), ``"unknown"`` (it may have arrived) or
            ``"refused"`` (the remote side answered that it does not take it).
        http_status: the status it answered with, 100 to 999, or None.
        outage: whether this says that the remote side is down (no answer, 5xx, 429) and nothing about this event. A run
            of such failures opens the topic's breaker.
        gone: whether the remote side wants no more events at all, ever (410): the topic is paused.

    Raises:
        InputError: ``dispatch.error_invalid``.
    """

    def __init__(
        self,
        code: str,
        *,
        retryable: bool,
        retry_after: float | None = None,
        detail_hash: str | None = None,
        arrival: Arrival = "unknown",
        http_status: int | None = None,
        outage: bool = False,
        gone: bool = False,
    ) -> None:
        check_error(code, detail_hash)
        if retry_after is not None:
            retry_after = check_seconds(retry_after, code="dispatch.error_invalid", zero=True)
        check_attempt(arrival, http_status, None)
        super().__init__(code, "delivery failed")
        self.retryable = retryable
        self.retry_after = retry_after
        self.detail_hash = detail_hash
        self.arrival: Arrival = arrival
        self.http_status = http_status
        self.outage = outage
        self.gone = gone


@runtime_checkable
class Destination(Protocol):
    """Where a topic's events go. Shared by sender threads, so ``deliver`` must be thread-safe.

    Attributes:
        timeout: the most seconds that one ``deliver`` takes, everything included; the lease must outlast it.
    """

    timeout: float

    def deliver(self, claim: Claim) -> Mapping[str, Any]:
        """Submit the event once and return the response.

        Raises:
            DeliveryFailed: the attempt failed; any other exception fails the event with ``dispatch.client_failure``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """An event made ready for the table."""

    event_id: str
    payload: str = field(repr=False)
    payload_sha256: str
    ordering_key: str | None = None


class Contract(ABC):
    """The rules of one topic. A host's own contract gives ``topic``, ``check`` and ``accept``.

    Attributes:
        hold_on_failure: whether an event that failed holds the later ones of its ordering key until it is redriven or
            discarded; otherwise they pass it.
    """

    topic: str
    hold_on_failure: bool = True

    @abstractmethod
    def check(self, event: Any) -> str:
        """Check an event and return its id.

        Must not change the event, and must hold for the event read back from its JSON as it does now.

        Raises:
            InputError: ``dispatch.change_invalid``.
        """

    @abstractmethod
    def accept(self, event_id: str, response: Any) -> Mapping[str, Any]:
        """Check the destination's response to an event and return the fields to keep as its receipt.

        Raises:
            InputError: ``dispatch.response_invalid``.
        """

    def ordering_key(self, event: Any) -> str | None:
        """The key whose events are delivered one after another, or None for no order."""
        del event
        return None

    def encode(self, event: Any) -> Encoded:
        """The event as it is stored and sent.

        Raises:
            InputError: ``dispatch.change_invalid``.
        """
        with _refusing("dispatch.change_invalid"):
            event_id = check_token(self.check(event), code="dispatch.change_invalid")
            payload = canonical_json(event, code="dispatch.change_invalid")
            return Encoded(event_id, payload, sha256_hex(payload), self.ordering_key(event))

    def verify(self, event_id: str, payload: str, payload_sha256: str) -> None:
        """Prove that a stored payload is canonical, hashes right, keeps the contract and names its row.

        Raises:
            IntegrityError: ``dispatch.payload_integrity``.
        """
        code = "dispatch.payload_integrity"
        try:
            with _refusing(code):
                proven = sha256_hex(payload) == payload_sha256
                proven = proven and event_id == self.check(parse_canonical(payload, code=code))
        except InputError:
            proven = False
        if not proven:
            raise IntegrityError(code, event_id=event_id)

    def receipt(self, event_id: str, response: Any) -> Receipt:
        """What to keep of a response.

        Raises:
            InputError: ``dispatch.response_invalid``.
        """
        code = "dispatch.response_invalid"
        with _refusing(code):
            fields = dict(self.accept(event_id, response))
            kept = canonical_json(fields, code=code, max_bytes=MAX_RECEIPT_BYTES)
            return Receipt(kept, sha256_hex(canonical_json(response, code=code)))


@contextmanager
def _refusing(code: str) -> Iterator[None]:
    """Whatever else a host's contract raises is a refusal too: one odd event must not stop a worker for all others.

    Not chained, since the text of a foreign exception may quote the payload.
    """
    try:
        yield
    except InputError as error:
        if error.code == code:
            raise
        raise InputError(code, expected=error.expected, found=error.code) from None
    except Exception as error:  # noqa: BLE001 - see above
        raise InputError(code, found=type(error).__name__) from None
