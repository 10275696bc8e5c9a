"""A leased transactional outbox for SQLite and PostgreSQL."""

from outbox.contracts.base import Contract, DeliveryFailed, Destination
from outbox.errors import (
    ClaimLostError,
    CollisionError,
    DatabaseError,
    InputError,
    IntegrityError,
    NotFoundError,
    OutboxError,
    SchemaError,
)
from outbox.policy import BreakerPolicy, RetryPolicy
from outbox.records import (
    Claim,
    EventStatus,
    FailedAttempt,
    Failure,
    Health,
    Outcome,
    Receipt,
    Settled,
    Success,
    TopicStatus,
)
from outbox.store import Outbox
from outbox.worker import Worker

__all__ = [
    "BreakerPolicy",
    "Claim",
    "ClaimLostError",
    "CollisionError",
    "Contract",
    "DatabaseError",
    "DeliveryFailed",
    "Destination",
    "EventStatus",
    "FailedAttempt",
    "Failure",
    "Health",
    "InputError",
    "IntegrityError",
    "NotFoundError",
    "Outbox",
    "OutboxError",
    "Outcome",
    "Receipt",
    "RetryPolicy",
    "SchemaError",
    "Settled",
    "Success",
    "TopicStatus",
    "Worker",
]
