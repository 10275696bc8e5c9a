"""How fast the outbox is, measured beside what it is compared with: ``python -m benchmarks``."""
