"""A laboratory in which everything breaks: ``python -m tests.faults --help``."""
