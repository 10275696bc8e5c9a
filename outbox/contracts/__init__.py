"""Contracts say what an event of a topic looks like and what an answer to it must look like. Pure: no I/O."""

from outbox.contracts.base import Contract, DeliveryFailed, Destination, Encoded

__all__ = ["Contract", "DeliveryFailed", "Destination", "Encoded"]
