"""The event table

Revision ID: 0001
Revises:

A migration is frozen history: it spells every operation out, imports nothing from the package and asks the database
nothing, so that ``--sql`` works and a later change of ``outbox.schema`` cannot rewrite what this one did.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox_event",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(always=False), nullable=False
        ),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("payload_sha256", sa.Text(), nullable=False),
        sa.Column("ordering_key", sa.Text(), nullable=True),
        sa.Column("headers", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("redrives", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.Double(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("last_error_code", sa.Text(), nullable=True),
        sa.Column("last_error_detail_hash", sa.Text(), nullable=True),
        sa.Column("receipt", sa.Text(), nullable=True),
        sa.Column("response_sha256", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("topic", "event_id", name="uq_outbox_event_topic_event_id"),
        sa.CheckConstraint(
            "status = 'pending' OR status = 'waiting' OR status = 'leased' OR status = 'retry_wait'"
            " OR status = 'succeeded' OR status = 'failed'",
            name="ck_outbox_event_status",
        ),
        sa.CheckConstraint(
            "(status = 'leased') = (lease_owner IS NOT NULL)"
            " AND (status = 'leased') = (lease_token IS NOT NULL)"
            " AND (status = 'leased') = (lease_expires_at IS NOT NULL)",
            name="ck_outbox_event_lease",
        ),
        sa.CheckConstraint(
            "(status = 'retry_wait' OR status = 'failed') = (last_error_code IS NOT NULL)"
            " AND (last_error_code IS NOT NULL OR last_error_detail_hash IS NULL)",
            name="ck_outbox_event_error",
        ),
        sa.CheckConstraint(
            "(status = 'succeeded') = (receipt IS NOT NULL) AND (status = 'succeeded') = (response_sha256 IS NOT NULL)",
            name="ck_outbox_event_receipt",
        ),
        sa.CheckConstraint(
            "attempts >= 0 AND attempts <= max_attempts AND max_attempts >= 1 AND max_attempts <= 20 AND redrives >= 0",
            name="ck_outbox_event_attempts",
        ),
        sa.CheckConstraint(
            "created_at >= 0 AND next_attempt_at >= created_at AND updated_at >= created_at"
            " AND (lease_expires_at IS NULL OR lease_expires_at > updated_at)",
            name="ck_outbox_event_times",
        ),
        sa.CheckConstraint("length(payload_sha256) = 64", name="ck_outbox_event_payload_sha256"),
    )
    create_partial_index(
        "ix_outbox_event_due",
        ["topic", "next_attempt_at", "id"],
        where="status = 'pending' OR status = 'retry_wait'",
    )
    create_partial_index("ix_outbox_event_lease", ["lease_expires_at"], where="status = 'leased'")
    create_partial_index(
        "uq_outbox_event_ordering_head",
        ["topic", "ordering_key"],
        where="(status = 'pending' OR status = 'leased' OR status = 'retry_wait') AND ordering_key IS NOT NULL",
        unique=True,
    )
    create_partial_index("ix_outbox_event_waiting", ["topic", "ordering_key", "id"], where="status = 'waiting'")
    create_partial_index("ix_outbox_event_retry_wait", ["next_attempt_at"], where="status = 'retry_wait'")
    create_partial_index("ix_outbox_event_succeeded", ["updated_at"], where="status = 'succeeded'")
    create_partial_index("ix_outbox_event_failed", ["updated_at"], where="status = 'failed'")
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "ALTER TABLE outbox_event SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0,"
            " autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_insert_scale_factor = 0,"
            " autovacuum_vacuum_insert_threshold = 50000, autovacuum_analyze_scale_factor = 0,"
            " autovacuum_analyze_threshold = 10000)"
        )


def downgrade() -> None:
    op.drop_table("outbox_event")  # its indexes go with it


def create_partial_index(name: str, columns: list[str], *, where: str, unique: bool = False) -> None:
    predicate = sa.text(where)
    op.create_index(name, "outbox_event", columns, unique=unique, postgresql_where=predicate, sqlite_where=predicate)
