"""Workers that are idle say so

Revision ID: 0002
Revises: 0001

Where hosts can wake a worker (PostgreSQL's NOTIFY), they do so only while a row here says that one is waiting. Rows are
few and short-lived, and nothing is lost with them but a second of patience.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox_idle",
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("idle_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("topic", "worker_id", name="pk_outbox_idle"),
    )


def downgrade() -> None:
    op.drop_table("outbox_idle")
