"""The tables of connectors, the models made of them, their tasks, and of secrets. See `tables` for the jobs."""

from __future__ import annotations

from sqlalchemy import Column, Float, Index, Integer, LargeBinary, String, Table

from batchmill.store.tables import metadata

secrets = Table(  # encrypted; what a secret belongs to is its name: "openai", "connector/ID/KEY"
    "secrets",
    metadata,
    Column("name", String(256), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("hint", String(8), nullable=False),  # its last characters, where it is long enough to show some
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("project", String(64), index=True),  # whose quota it counts to; None: whoever runs the machine put it in
)

connectors = Table(
    "connectors",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Column("spec", LargeBinary, nullable=False),  # types.Connector as JSON; credentials by reference
    Column("access", LargeBinary, nullable=False),  # what a dialect keeps of it and the core never reads, as JSON
    Column("revision", Integer, nullable=False),  # 1 at first, one more with every change
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("connectors_by_project", "project", "created"),
)

remote_models = Table(  # models that are a connector
    "remote_models",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Column("group", String(64), nullable=False),
    Column("version", Integer, nullable=False),  # within its group
    Column("connector", String(64)),  # None: its own, in `spec`
    Column("spec", LargeBinary),  # types.Connector as JSON
    Column("state", String(32), nullable=False),  # REGISTERED, DEPLOYED, UNDEPLOYED
    Column("details", LargeBinary, nullable=False),  # the rest of its document, as JSON
    Column("revision", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("remote_models_by_project", "project", "created"),
)

model_groups = Table(
    "model_groups",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Column("latest", Integer, nullable=False),  # the newest version within it
    Column("details", LargeBinary, nullable=False),  # the rest of its document, as JSON
    Column("revision", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("model_groups_by_project", "project", "created"),
)

remote_tasks = Table(  # what was asked of a remote model and takes its time
    "remote_tasks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("model", String(64), nullable=False),
    Column("type", String(32), nullable=False),  # BATCH_PREDICTION, REGISTER_MODEL, DEPLOY_MODEL
    Column("state", String(32), nullable=False),  # RUNNING, COMPLETED, FAILED, CANCELLING, CANCELLED, EXPIRED …
    Column("job", String(64)),  # of batchmill, where its rows came from a dataset
    Column("once", String(80)),  # the name of its order while the same order is not another one: see services.repeats
    Column("remote_job", LargeBinary),  # what the provider last said of it, as JSON
    Column("details", LargeBinary, nullable=False),  # the rest of its document, as JSON
    Column("failures", Integer, nullable=False, server_default="0"),  # looks at the provider in a row that failed
    Column("due", Float),  # when to look again; None: it has ended
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("remote_tasks_by_project", "project", "created"),
    Index("remote_tasks_by_due", "due"),
    Index("remote_tasks_by_once", "once", unique=True),
    Index("remote_tasks_by_job", "job"),
)
