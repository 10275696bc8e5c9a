"""Every error the package raises on purpose, under one root.

An error carries a stable ``code`` and, where they help, the event it is about and what was expected and found. Text is
content-free: identifiers, codes, counts and times, never a payload, a credential or a raw transport error.
"""

from __future__ import annotations

from typing import Any, Final


class OutboxError(Exception):
    """Something about the outbox went wrong.

    Attributes:
        code: stable machine-readable code, such as ``dispatch.claim_lost``.
        event_id: the event concerned, or None.
        expected: what would have been right, in words, or None.
        found: what was there instead, content-free, or None.
    """

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        event_id: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        self.code = code
        self.message = message or CODES.get(code) or (type(self).__doc__ or "").partition("\n")[0]
        self.event_id = event_id
        self.expected = expected
        self.found = found
        super().__init__(code, self.message)

    def __str__(self) -> str:
        about = f" (event {self.event_id})" if self.event_id is not None else ""
        expected = f"; expected {self.expected}" if self.expected else ""
        found = f"; found {self.found}" if self.found else ""
        return f"{self.code}: {self.message}{about}{expected}{found}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self), self.args), vars(self)  # a subclass may ask for arguments that pickle does not know


def _blank(kind: type[OutboxError], args: tuple[Any, ...]) -> OutboxError:
    return kind.__new__(kind, *args)


class InputError(OutboxError, ValueError):
    """An argument was refused; nothing was changed."""


class CollisionError(OutboxError):
    """The event id is taken by a different event; nothing was changed."""


class NotFoundError(OutboxError, LookupError):
    """No such event."""


class ClaimLostError(OutboxError):
    """The caller no longer owns the event; nothing was changed."""


class IntegrityError(OutboxError):
    """Stored data no longer proves itself."""


class SchemaError(OutboxError):
    """The database is not at the revision this package needs."""


class DatabaseError(OutboxError):
    """The database could not be reached or did not let us write."""


#: Every code the engine itself uses, with what it means. Servers and hosts add their own to ``last_error_code``.
CODES: Final[dict[str, str]] = {
    "dispatch.change_invalid": "the event does not follow its topic's contract",
    "dispatch.idempotency_collision": "the event id is already taken by a different event",
    "dispatch.max_attempts_invalid": "max_attempts is not a whole number from 1 to 20",
    "dispatch.time_invalid": "now is not a finite, non-negative number of seconds",
    "dispatch.topic_unknown": "no contract is registered for the topic",
    "dispatch.contract_invalid": "the contracts do not form a usable set",
    "dispatch.policy_invalid": "the retry policy's numbers make no schedule",
    "dispatch.connection_invalid": "the connection is no SQLAlchemy Connection or Session on the outbox's database",
    "dispatch.transaction_required": "the connection is in autocommit mode and has no transaction to join",
    "dispatch.worker_invalid": "the worker id is not a token of at most 128 characters",
    "dispatch.lease_invalid": "lease_seconds is not a number in (0, 86400]",
    "dispatch.lease_too_short": "the lease would end before the destination's timeout",
    "dispatch.limit_invalid": "limit is not a whole number in its range",
    "dispatch.client_invalid": "the destination has no callable deliver or no positive finite timeout",
    "dispatch.event_invalid": "the event id is not a token",
    "dispatch.event_missing": "there is no such event",
    "dispatch.claim_invalid": "the claim is not one that claim() made",
    "dispatch.claim_missing": "the claimed event is no longer there",
    "dispatch.claim_lost": "another owner has the event, or it has been settled",
    "dispatch.lease_expired": "the lease ran out before the result was recorded",
    "dispatch.clock_regressed": "now lies before the event's last change",
    "dispatch.response_invalid": "the response does not follow its topic's contract",
    "dispatch.error_invalid": "the error code or detail hash is malformed",
    "dispatch.retention_invalid": "older_than_seconds is not a number of seconds",
    "dispatch.ordering_key_invalid": "the ordering key is not 1 to 256 printable characters",
    "dispatch.reason_invalid": "the reason is not 1 to 256 printable characters",
    "dispatch.discard_invalid": "only a failed event can be discarded",
    "dispatch.redrive_invalid": "only a failed event can be redriven",
    "dispatch.payload_integrity": "a stored payload no longer proves itself; the event was quarantined",
    "dispatch.state_invalid": "a stored row breaks the row rules",
    "dispatch.database_integrity": "the database reports damage to itself",
    "dispatch.schema_altered": "the database is not at the migration head, or its table is not the declared one",
    "dispatch.migration_failed": "the migration was not carried out; nothing of it remains",
    "dispatch.database_busy": "the database stayed locked by somebody else for too long",
    "dispatch.database_unavailable": "the database cannot be reached or refused the operation",
    "dispatch.database_unsupported": "no dialect supports this database",
    "dispatch.client_failure": "the destination raised an exception it does not declare",
    "lease_expired": "recorded on an event whose owner let its lease run out",
    "discarded": "recorded on a failed event that was given up, so that it no longer holds its ordering key",
    "lease_released": "recorded on an event given back unsent",
    "destination.url_invalid": "the URL is not HTTPS to a host, with a path and query at most",
    "destination.address_forbidden": "the address is not a public one",
    "destination.secret_invalid": "the webhook secret is not whsec_ and 24 to 64 bytes in base64",
    "destination.origin_invalid": "the origin is not scheme and host, HTTPS unless plain HTTP to loopback is allowed",
    "destination.signer_invalid": "the signer has no callable sign",
    "destination.key_invalid": "the signing key or its id is malformed",
    "destination.headers_invalid": "headers is not a callable",
    "destination.timeout_invalid": "the timeout is not a number of seconds in (0, 86400]",
}
