"""The tables of version 4. Written by tools/make_revision.py."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "4", None


def text(length: int | None = None) -> sa.types.TypeEngine[str]:
    """Text; on PostgreSQL compared by its bytes, and of any length."""
    return (sa.Text() if length is None else sa.String(length)).with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create every table."""
    for create in (
        _adapters,
        _commits,
        _connectors,
        _datasets,
        _error_counts,
        _files,
        _job_models,
        _jobs,
        _jobs_indexes,
        _keys,
        _late_calls,
        _ledger,
        _llm_deployments,
        _logged_files,
        _model_groups,
        _model_routes,
        _model_versions,
        _notes,
        _outbox,
        _outcome_blocks,
        _packed_jobs,
        _quarantine,
        _remote_models,
        _remote_tasks,
        _removals,
        _schema,
        _secrets,
        _shards,
        _stored_files,
        _submissions,
        _unnamed_objects,
        _upload_parts,
        _uploads,
        _used_links,
        _webhook_endpoints,
    ):
        create()


def _adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(200), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("base", text(256), nullable=False),
        sa.Column("source", text(1024), nullable=False),
        sa.Column("state", text(16), nullable=False),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("adapters_by_bytes", "adapters", ["project", "state", "bytes"], unique=False)
    op.create_index("adapters_by_name", "adapters", ["project", "name", "version"], unique=True)


def _commits() -> None:
    op.create_table(
        "commits",
        sa.Column("job", text(64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("segment", text(128), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("rows_ok", sa.Integer(), nullable=False),
        sa.Column("rows_failed", sa.Integer(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job", "generation", "shard", "seq"),
    )


def _connectors() -> None:
    op.create_table(
        "connectors",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(256), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("access", sa.LargeBinary(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("connectors_by_project", "connectors", ["project", "created"], unique=False)


def _datasets() -> None:
    op.create_table(
        "datasets",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("connection", text(64), nullable=False),
        sa.Column("name", text(256), nullable=True),
        sa.Column("file", text(64), nullable=True),
        sa.Column("state", text(16), nullable=False),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("datasets_by_name", "datasets", ["project", "connection", "name"], unique=True)


def _error_counts() -> None:
    op.create_table(
        "error_counts",
        sa.Column("job", text(64), nullable=False),
        sa.Column("code", text(256), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("sample", text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "code"),
    )


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("purpose", text(32), nullable=False),
        sa.Column("filename", text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", text(64), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("job", text(64), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("files_by_bytes", "files", ["project", "job", "bytes"], unique=False)
    op.create_index("files_by_project", "files", ["project", "created"], unique=False)


def _job_models() -> None:
    op.create_table(
        "job_models",
        sa.Column("job", text(64), nullable=False),
        sa.Column("model", text(512), nullable=False),
        sa.PrimaryKeyConstraint("job", "model"),
    )
    op.create_index("job_models_by_model", "job_models", ["model", "job"], unique=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", text(64), nullable=False),
        sa.Column("identity", text(64), nullable=False),
        sa.Column("state", text(16), nullable=False),
        sa.Column("reason", text(64), nullable=True),
        sa.Column("message", text(), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("finished", sa.Float(), nullable=True),
        sa.Column("elapsed_s", sa.Float(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("rows_ok", sa.BigInteger(), nullable=False),
        sa.Column("rows_failed", sa.BigInteger(), nullable=False),
        sa.Column("rows_folded", sa.BigInteger(), nullable=False),
        sa.Column("rows_reused", sa.BigInteger(), nullable=False),
        sa.Column("rows_rejected", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=True),
        sa.Column("warnings", sa.LargeBinary(), nullable=True),
        sa.Column("output", text(), nullable=True),
        sa.Column("errors_output", text(), nullable=True),
        sa.Column("problems", sa.LargeBinary(), nullable=True),
        sa.Column("problems_total", sa.BigInteger(), nullable=False),
        sa.Column("project", text(64), server_default="default", nullable=False),
        sa.Column("frontend", text(32), nullable=True),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("deadline", sa.Float(), nullable=True),
        sa.Column("finalizing", sa.Float(), nullable=True),
        sa.Column("cancelling", sa.Float(), nullable=True),
        sa.Column("announced", sa.Integer(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("internal_errors", sa.Integer(), server_default="0", nullable=False),
        sa.Column("compacted", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def _jobs_indexes() -> None:
    op.create_index(op.f("ix_jobs_identity"), "jobs", ["identity"], unique=False)
    op.create_index("jobs_by_bytes", "jobs", ["project", "bytes"], unique=False)
    op.create_index("jobs_by_created", "jobs", ["created"], unique=False)
    op.create_index(
        "jobs_by_end",
        "jobs",
        ["project", "finished"],
        unique=False,
        sqlite_where=sa.text("finished IS NOT NULL"),
        postgresql_where=sa.text("finished IS NOT NULL"),
    )
    op.create_index("jobs_by_project", "jobs", ["project", "created"], unique=False)
    op.create_index("jobs_by_state", "jobs", ["project", "state"], unique=False)
    op.create_index("jobs_by_state_created", "jobs", ["state", "created"], unique=False)
    op.create_index(
        "jobs_to_announce",
        "jobs",
        ["finished"],
        unique=False,
        sqlite_where=sa.text("announced <= generation"),
        postgresql_where=sa.text("announced <= generation"),
    )
    op.create_index(
        "jobs_to_compact",
        "jobs",
        ["finished"],
        unique=False,
        sqlite_where=sa.text("compacted IS NULL AND finished IS NOT NULL"),
        postgresql_where=sa.text("compacted IS NULL AND finished IS NOT NULL"),
    )


def _keys() -> None:
    op.create_table(
        "keys",
        sa.Column("id", text(32), nullable=False),
        sa.Column("name", text(256), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("hash", text(64), nullable=False),
        sa.Column("scopes", text(256), nullable=False),
        sa.Column("models", text(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.Column("last_used", sa.Float(), nullable=True),
        sa.Column("minted_by", text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_keys_project"), "keys", ["project"], unique=False)


def _late_calls() -> None:
    op.create_table(
        "late_calls",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("key", text(64), nullable=True),
        sa.Column("name", text(200), nullable=False),
        sa.Column("branch", text(200), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("order", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("reply", sa.LargeBinary(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("begun", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("late_calls_by_due", "late_calls", ["due"], unique=False)
    op.create_index("late_calls_by_project", "late_calls", ["project"], unique=False)


def _ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", text(32), nullable=False),
        sa.Column("objects", text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )


def _llm_deployments() -> None:
    op.create_table(
        "llm_deployments",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(200), nullable=False),
        sa.Column("settings", sa.LargeBinary(), nullable=False),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("llm_deployments_by_name", "llm_deployments", ["project", "name"], unique=True)


def _logged_files() -> None:
    op.create_table(
        "logged_files",
        sa.Column("path", text(512), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("source", text(512), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("path"),
    )


def _model_groups() -> None:
    op.create_table(
        "model_groups",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(256), nullable=False),
        sa.Column("latest", sa.Integer(), nullable=False),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("model_groups_by_project", "model_groups", ["project", "created"], unique=False)


def _model_routes() -> None:
    op.create_table(
        "model_routes",
        sa.Column("name", text(200), nullable=False),
        sa.Column("label", text(200), nullable=False),
        sa.Column("backends", sa.LargeBinary(), nullable=False),
        sa.Column("mirrors", sa.LargeBinary(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label"),
    )


def _model_versions() -> None:
    op.create_table(
        "model_versions",
        sa.Column("name", text(200), nullable=False),
        sa.Column("branch", text(200), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", text(16), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("finished", sa.Float(), nullable=True),
        sa.Column("source", text(), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=True),
        sa.Column("error", text(), nullable=True),
        sa.Column("project", text(64), server_default="default", nullable=False),
        sa.Column("key", text(64), nullable=True),
        sa.Column("shared", sa.Boolean(), server_default="1", nullable=False),
        sa.PrimaryKeyConstraint("name", "branch", "number"),
    )


def _notes() -> None:
    op.create_table(
        "notes",
        sa.Column("job", text(64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("key", text(128), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "shard", "key"),
    )


def _outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", text(64), nullable=False),
        sa.Column("endpoint", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("type", text(64), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due", sa.Float(), nullable=True),
        sa.Column("delivered", sa.Float(), nullable=True),
        sa.Column("failure", text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("outbox_by_due", "outbox", ["due", "endpoint"], unique=False)


def _outcome_blocks() -> None:
    op.create_table(
        "outcome_blocks",
        sa.Column("job", text(64), nullable=False),
        sa.Column("segment", text(128), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job", "segment", "offset"),
    )


def _packed_jobs() -> None:
    op.create_table(
        "packed_jobs",
        sa.Column("job", text(64), nullable=False),
        sa.Column("files", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )


def _quarantine() -> None:
    op.create_table(
        "quarantine",
        sa.Column("digest", text(64), nullable=False),
        sa.Column("model", text(1024), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("url", text(256), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )


def _remote_models() -> None:
    op.create_table(
        "remote_models",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(256), nullable=False),
        sa.Column("group", text(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("connector", text(64), nullable=True),
        sa.Column("spec", sa.LargeBinary(), nullable=True),
        sa.Column("state", text(32), nullable=False),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("remote_models_by_project", "remote_models", ["project", "created"], unique=False)


def _remote_tasks() -> None:
    op.create_table(
        "remote_tasks",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("model", text(64), nullable=False),
        sa.Column("type", text(32), nullable=False),
        sa.Column("state", text(32), nullable=False),
        sa.Column("job", text(64), nullable=True),
        sa.Column("once", text(80), nullable=True),
        sa.Column("remote_job", sa.LargeBinary(), nullable=True),
        sa.Column("details", sa.LargeBinary(), nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due", sa.Float(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("remote_tasks_by_due", "remote_tasks", ["due"], unique=False)
    op.create_index("remote_tasks_by_job", "remote_tasks", ["job"], unique=False)
    op.create_index("remote_tasks_by_once", "remote_tasks", ["once"], unique=True)
    op.create_index("remote_tasks_by_project", "remote_tasks", ["project", "created"], unique=False)


def _removals() -> None:
    op.create_table(
        "removals",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("job", text(64), nullable=False),
        sa.Column("by", text(256), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("pending", sa.Boolean(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("removals_by_job", "removals", ["job"], unique=False)
    op.create_index("removals_pending", "removals", ["pending"], unique=False)


def _schema() -> None:
    op.create_table("schema", sa.Column("version", sa.Integer(), nullable=False), sa.PrimaryKeyConstraint("version"))


def _secrets() -> None:
    op.create_table(
        "secrets",
        sa.Column("name", text(256), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("hint", text(8), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("project", text(64), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index(op.f("ix_secrets_project"), "secrets", ["project"], unique=False)


def _shards() -> None:
    op.create_table(
        "shards",
        sa.Column("job", text(64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("lo", sa.BigInteger(), nullable=False),
        sa.Column("hi", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
        sa.Column("bitmap", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "shard"),
    )


def _stored_files() -> None:
    op.create_table(
        "stored_files",
        sa.Column("path", text(512), nullable=False),
        sa.Column("object", text(640), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("path"),
    )
    op.create_index(op.f("ix_stored_files_object"), "stored_files", ["object"], unique=False)


def _submissions() -> None:
    op.create_table(
        "submissions",
        sa.Column("key", text(512), nullable=False),
        sa.Column("job", text(64), nullable=False),
        sa.Column("fingerprint", text(64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("answered", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("key"),
    )


def _unnamed_objects() -> None:
    op.create_table(
        "unnamed_objects", sa.Column("object", text(640), nullable=False), sa.PrimaryKeyConstraint("object")
    )


def _upload_parts() -> None:
    op.create_table(
        "upload_parts",
        sa.Column("id", text(64), nullable=False),
        sa.Column("upload", text(64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("project", text(64), server_default="default", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_upload_parts_upload"), "upload_parts", ["upload"], unique=False)
    op.create_index("upload_parts_by_bytes", "upload_parts", ["project", "bytes"], unique=False)


def _uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("purpose", text(32), nullable=False),
        sa.Column("filename", text(), nullable=False),
        sa.Column("mime_type", text(256), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", text(16), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.Column("file_expires_s", sa.Float(), nullable=True),
        sa.Column("file", text(64), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("uploads_by_project", "uploads", ["project", "status"], unique=False)


def _used_links() -> None:
    op.create_table(
        "used_links",
        sa.Column("id", text(64), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.Column("project", text(64), server_default="default", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_used_links_project"), "used_links", ["project"], unique=False)


def _webhook_endpoints() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", text(64), nullable=False),
        sa.Column("project", text(64), nullable=False),
        sa.Column("name", text(256), nullable=False),
        sa.Column("url", text(), nullable=False),
        sa.Column("events", text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("updated", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_webhook_endpoints_project"), "webhook_endpoints", ["project"], unique=False)
