"""What Alembic runs for every command; the work itself is in :mod:`outbox.migrate`, shared with the API."""

from __future__ import annotations

from alembic import context

from outbox import migrate

migrate.run_environment(context)
