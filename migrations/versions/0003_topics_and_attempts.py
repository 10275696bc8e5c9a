"""Topics that can be open or paused, and a record of failed attempts

Revision ID: 0003
Revises: 0002

A row of ``outbox_topic`` is how a topic's destination fares, for all workers; ``outbox_attempt`` keeps what failed. The
index finds failed events that hold up the later ones of their ordering key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox_topic",
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("paused_at", sa.Double(), nullable=True),
        sa.Column("pause_reason", sa.Text(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("last_failed_event", sa.Text(), nullable=True),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("probes", sa.Integer(), nullable=False),
        sa.Column("probe_at", sa.Double(), nullable=True),
        sa.Column("probe_token", sa.Text(), nullable=True),
        sa.Column("held_until", sa.Double(), nullable=True),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("ramp_claimed", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("topic", name="pk_outbox_topic"),
        sa.CheckConstraint(
            "(paused_at IS NOT NULL) = (pause_reason IS NOT NULL) AND (opened_at IS NOT NULL) = (probe_at IS NOT NULL)"
            " AND failures >= 0 AND probes >= 0 AND ramp_claimed >= 0",
            name="ck_outbox_topic_state",
        ),
    )
    op.create_table(
        "outbox_attempt",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(always=False), nullable=False
        ),
        sa.Column("event_row", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("arrival", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("detail_hash", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(
            "arrival = 'unsent' OR arrival = 'unknown' OR arrival = 'refused'", name="ck_outbox_attempt_arrival"
        ),
    )
    op.create_index("ix_outbox_attempt_event_row", "outbox_attempt", ["event_row", "id"])
    failed_head = sa.text("status = 'failed' AND ordering_key IS NOT NULL AND last_error_code <> 'discarded'")
    op.create_index(
        "ix_outbox_event_failed_head",
        "outbox_event",
        ["topic", "ordering_key"],
        postgresql_where=failed_head,
        sqlite_where=failed_head,
    )


def downgrade() -> None:
    op.drop_index("ix_outbox_event_failed_head", "outbox_event")
    op.drop_table("outbox_attempt")
    op.drop_table("outbox_topic")
