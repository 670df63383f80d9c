"""The tables of a data directory: one SQLAlchemy Core schema for SQLite and PostgreSQL.

The database holds jobs and commit records; of small jobs also the index of their rows and the outcomes. The rows of
others are never in it: its size goes with the number of commits. What a server keeps
besides (files, keys, webhooks) is in `service_tables`,
connectors and what belongs to them in `connector_tables`; how a database is opened, in `database`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    column,
)

metadata = MetaData()

schema = Table("schema", metadata, Column("version", Integer, primary_key=True))

_UNANNOUNCED = column("announced") <= column("generation")  # true for few jobs, so that finding them is cheap
_HAS_ENDED = column("finished").is_not(None)  # a running job has no entry in these indexes
_WHOLE = column("compacted").is_(None) & _HAS_ENDED

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("identity", String(64), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("reason", String(64)),
    Column("message", Text, nullable=False, default=""),
    Column("spec", LargeBinary, nullable=False),  # types.JobSpec as JSON
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("finished", Float),
    Column("elapsed_s", Float, nullable=False, default=0.0),
    Column("generation", Integer, nullable=False, default=0),
    Column("rows", BigInteger, nullable=False, default=0),
    Column("rows_ok", BigInteger, nullable=False, default=0),
    Column("rows_failed", BigInteger, nullable=False, default=0),
    Column("rows_folded", BigInteger, nullable=False, default=0),
    Column("rows_reused", BigInteger, nullable=False, default=0),
    Column("rows_rejected", BigInteger, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("cost", Float),
    Column("warnings", LargeBinary),  # dict[str, int] as JSON: types.JobView.warnings
    Column("output", Text),
    Column("errors_output", Text),
    Column("problems", LargeBinary),  # list[types.Problem] as JSON
    Column("problems_total", BigInteger, nullable=False, default=0),
    Column("project", String(64), nullable=False, server_default="default"),
    Column("frontend", String(32)),  # of the server that took it: origin["frontend"]
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("deadline", Float),  # seconds since the epoch, UTC
    Column("finalizing", Float),  # when its results began to be written
    Column("cancelling", Float),  # when its cancellation was requested
    Column("announced", Integer, nullable=False, server_default="0"),  # generations whose end was announced, plus 1
    Column("bytes", BigInteger, nullable=False, server_default="0"),  # on the disk, without its results
    Column("internal_errors", Integer, nullable=False, server_default="0"),  # core tasks that failed while it ran
    Column("compacted", Float),  # when its segments were deleted and only its results remained
    Index("jobs_by_project", "project", "created"),
    Index("jobs_by_bytes", "project", "bytes"),
    Index("jobs_by_state", "project", "state"),
    Index("jobs_by_end", "project", "finished", sqlite_where=_HAS_ENDED, postgresql_where=_HAS_ENDED),
    Index("jobs_to_compact", "finished", sqlite_where=_WHOLE, postgresql_where=_WHOLE),
    Index("jobs_by_created", "created"),
    Index("jobs_by_state_created", "state", "created"),
    Index("jobs_to_announce", "finished", sqlite_where=_UNANNOUNCED, postgresql_where=_UNANNOUNCED),
)

job_models = Table(  # names of the models and adapters of a job's rows, once known
    "job_models",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("model", String(512), primary_key=True),
    Index("job_models_by_model", "model", "job"),
)

submissions = Table(  # the job of an order, or of a retry, that may be repeated; written with it
    "submissions",
    metadata,
    Column("key", String(512), primary_key=True),  # types.Once
    Column("job", String(64), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("answered", Float),  # when the reply was sent; None: it may not have arrived
)

shards = Table(  # only shards that were leased at least once; the plan gives the others
    "shards",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("lo", BigInteger, nullable=False),
    Column("hi", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("seq", Integer, nullable=False, default=0),
    Column("done", Integer, nullable=False, default=0),
    Column("bitmap", LargeBinary, nullable=False),  # bit i, lowest first: position lo + i has its outcome
)

commits = Table(
    "commits",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("segment", String(128), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("rows_ok", Integer, nullable=False),
    Column("rows_failed", Integer, nullable=False),
    Column("cost", Float),
)

outcome_blocks = Table(  # of small jobs: the blocks that a commit carried; they lie in no file
    "outcome_blocks",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("segment", String(128), primary_key=True),
    Column("offset", BigInteger, primary_key=True),
    Column("blocks", LargeBinary, nullable=False),
)

packed_jobs = Table(  # of small jobs: the files of their dataset and plans
    "packed_jobs",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("files", LargeBinary, nullable=False),  # path below the job's folder -> bytes, as msgpack
)

logged_files = Table(  # short files that are not synced yet; see `store.file_log`
    "logged_files",
    metadata,
    Column("path", String(512), primary_key=True),  # below the data directory
    Column("number", BigInteger, nullable=False),
    Column("source", String(512)),  # the file that it is a link to
    Column("data", LargeBinary),
)

notes = Table(  # what an engine must recover after a crash: the provider's jobs for the rows of a shard
    "notes",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("key", String(128), primary_key=True),
    Column("data", LargeBinary, nullable=False),
    Column("changed", Float, nullable=False),
)

error_counts = Table(  # rows whose outcome now is an error, by cause
    "error_counts",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("code", String(256), primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("sample", Text, nullable=False, default=""),
)


secrets = Table(  # encrypted; the name tells the owner: "openai", "connector/ID/KEY"
    "secrets",
    metadata,
    Column("name", String(256), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("hint", String(8), nullable=False),  # its last characters, if it is long enough to show some
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("project", String(64), index=True),  # whose quota it counts toward; None: the machine's user added it
)

connectors = Table(
    "connectors",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Column("spec", LargeBinary, nullable=False),  # types.Connector as JSON; credentials by reference
    Column("access", LargeBinary, nullable=False),  # data of a dialect that the core never reads, as JSON
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

remote_tasks = Table(  # long-running requests to a remote model
    "remote_tasks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("model", String(64), nullable=False),
    Column("type", String(32), nullable=False),  # BATCH_PREDICTION, REGISTER_MODEL, DEPLOY_MODEL
    Column("state", String(32), nullable=False),  # RUNNING, COMPLETED, FAILED, CANCELLING, CANCELLED, EXPIRED …
    Column("job", String(64)),  # of batchmill, if its rows are from a dataset
    Column("once", String(80)),  # the name of its order while the same order is not another one: see services.repeats
    Column("remote_job", LargeBinary),  # its last known state at the provider, as JSON
    Column("details", LargeBinary, nullable=False),  # the rest of its document, as JSON
    Column("failures", Integer, nullable=False, server_default="0"),  # failed polls of the provider in a row
    Column("due", Float),  # when to poll again; None: it has ended
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("remote_tasks_by_project", "project", "created"),
    Index("remote_tasks_by_due", "due"),
    Index("remote_tasks_by_once", "once", unique=True),
    Index("remote_tasks_by_job", "job"),
)


datasets = Table(  # uploads, complete or expected, with their owner's names
    "datasets",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("connection", String(64), nullable=False),
    Column("name", String(256)),  # None while it has no name
    Column("file", String(64)),  # None while its bytes have not arrived
    Column("state", String(16), nullable=False),  # arriving, checking, connected, failed
    Column("details", LargeBinary, nullable=False),  # file name, media type, rows, problems …, as JSON
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("datasets_by_name", "project", "connection", "name", unique=True),
)

used_links = Table(  # links that work only once
    "used_links",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("expires", Float, nullable=False),  # of the link; afterwards this row is deleted
    Column("project", String(64), nullable=False, server_default="default", index=True),
)


adapters = Table(
    "adapters",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("version", Integer, nullable=False),  # 1, 2 … of its name; a number is never reused
    Column("base", String(256), nullable=False),  # the model it is for, by its name
    Column("source", String(1024), nullable=False),  # where it was fetched from, without credentials
    Column("state", String(16), nullable=False),  # fetching, ready, failed, removed
    Column("details", LargeBinary, nullable=False),  # digest, rank, bytes, message …, as JSON
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("bytes", BigInteger, nullable=False, server_default="0"),  # of its files
    Index("adapters_by_bytes", "project", "state", "bytes"),
    Index("adapters_by_name", "project", "name", "version", unique=True),
)

llm_deployments = Table(
    "llm_deployments",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("settings", LargeBinary, nullable=False),  # types.LlmSettings as JSON
    Column("details", LargeBinary, nullable=False),  # its description, and data of a dialect, as JSON
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("llm_deployments_by_name", "project", "name", unique=True),
)

quarantine = Table(  # requests that crashed engines
    "quarantine",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("model", String(1024), nullable=False),  # the base model, as its engine loads it
    Column("project", String(64), nullable=False),  # whose request it was
    Column("url", String(256), nullable=False),
    Column("deaths", Integer, nullable=False),  # with only this request in flight
    Column("at", Float, nullable=False),  # the last of them
)


files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),  # for people; never used in a path
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64)),  # of an upload; None for results
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("job", String(64)),  # for results: their job
    Index("files_by_project", "project", "created"),
    Index("files_by_bytes", "project", "job", "bytes"),
)

removals = Table(  # deleted objects, for later requests for them; `pending`: some files still exist
    "removals",
    metadata,
    Column("id", String(64), primary_key=True),  # of a result file or a job
    Column("project", String(64), nullable=False),
    Column("job", String(64), nullable=False),
    Column("by", String(256), nullable=False),  # in words
    Column("at", Float, nullable=False),
    Column("pending", Boolean, nullable=False, server_default="0"),
    Index("removals_by_job", "job"),
    Index("removals_pending", "pending"),
)

uploads = Table(  # a file that arrives in parts
    "uploads",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("mime_type", String(256), nullable=False),
    Column("bytes", BigInteger, nullable=False),  # as announced
    Column("status", String(16), nullable=False),  # pending, completed, cancelled, expired
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("file_expires_s", Float),  # of the file it becomes, from its creation
    Column("file", String(64)),
    Index("uploads_by_project", "project", "status"),
)

upload_parts = Table(
    "upload_parts",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("upload", String(64), nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("project", String(64), nullable=False, server_default="default"),
    Index("upload_parts_by_bytes", "project", "bytes"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),  # the public half of the key
    Column("name", String(256), nullable=False),
    Column("project", String(64), nullable=False, index=True),
    Column("hash", String(64), nullable=False),  # sha256 of the whole key, as hexadecimal digits
    Column("scopes", String(256), nullable=False),  # types.Scope values, separated by spaces
    Column("models", Text),  # names it may use, as a JSON list; None: all of its project
    Column("requests_per_minute", Integer),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
    Column("last_used", Float),
    Column(
        "minted_by", Text
    ),  # [[key id, requests a minute], …] as JSON: who minted it, and who minted that, the first first
)

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False, index=True),
    Column("name", String(256), nullable=False),
    Column("url", Text, nullable=False),
    Column("events", Text, nullable=False),  # types of events, as a JSON list
    Column("secret", LargeBinary, nullable=False),  # the key that signs deliveries, encrypted
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
)

outbox = Table(  # events to deliver to an endpoint; written with the event or derived from it
    "outbox",
    metadata,
    Column(
        "id", String(64), primary_key=True
    ),  # derived from event and endpoint, so that a repeated insert has no effect
    Column("endpoint", String(64), nullable=False),
    Column("project", String(64), nullable=False),
    Column("type", String(64), nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("created", Float, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due", Float),  # when to try (again); None: delivered or given up
    Column("delivered", Float),
    Column("failure", Text),  # of the last attempt
    Index("outbox_by_due", "due", "endpoint"),
)

model_versions = Table(  # deployed functions; a row never changes once its state is ready or failed
    "model_versions",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("branch", String(200), primary_key=True),
    Column("number", Integer, primary_key=True),  # 1, 2, … within a branch; a number is never used again
    Column("state", String(16), nullable=False),  # building, ready, failed, removed
    Column("created", Float, nullable=False),
    Column("finished", Float),
    Column("source", Text, nullable=False),  # for people: app.py:fn, a git URL at its revision
    Column("spec", LargeBinary),  # types.ModelSpec as JSON, once it is ready
    Column("error", Text),  # why it failed: the traceback
    Column("project", String(64), nullable=False, server_default="default"),  # its owner
    Column("key", String(64)),  # the public id of the key that deployed it; None: the machine's user
    Column("shared", Boolean, nullable=False, server_default="1"),  # other projects may call it
)

model_routes = Table(  # the versions of a branch's `latest` or of an alias
    "model_routes",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("label", String(200), primary_key=True),  # "main", "feat/x"; "@prod" is the alias prod
    Column("backends", LargeBinary, nullable=False),  # JSON: [[branch, number, weight], …]; one for a branch
    Column("mirrors", LargeBinary, nullable=False),  # JSON: [[branch, number], …]: shadow copies
    Column("changed", Float, nullable=False),
)

late_calls = Table(  # calls whose answers are sent to a URL later; the row is deleted after the delivery
    "late_calls",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("key", String(64)),  # the public id of the caller's key
    Column("name", String(200), nullable=False),  # of the function; its version:
    Column("branch", String(200), nullable=False),
    Column("number", Integer, nullable=False),
    Column("order", LargeBinary, nullable=False),  # the inputs and outputs of its interface: JSON
    Column("body", LargeBinary, nullable=False),  # empty once the call is answered
    Column("reply", LargeBinary),  # None: not answered yet
    Column("bytes", BigInteger, nullable=False),  # of both
    Column("created", Float, nullable=False),
    Column("begun", Float),  # when its current attempt began
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due", Float, nullable=False),  # when to work on it next
    Index("late_calls_by_due", "due"),
    Index("late_calls_by_project", "project"),
)

stored_files = Table(  # the files and folders of the data directory that are kept in an object store; see store.catalog
    "stored_files",
    metadata,
    Column("path", String(512), primary_key=True),  # below the data directory
    Column("object", String(640), nullable=False, index=True),  # what the names of its objects begin with
    Column("bytes", BigInteger, nullable=False),
)

ledger = Table(  # one row, once an object store is used; see store.prefix_owner
    "ledger",
    metadata,
    Column("id", String(32), primary_key=True),  # random: other databases have others
    Column("objects", Text),  # the URL of the prefix that it has claimed
)

unnamed_objects = Table(  # being written, or to be deleted
    "unnamed_objects",
    metadata,
    Column("object", String(640), primary_key=True),
)


def _on_postgresql() -> None:
    """Compare and order text by its bytes, as SQLite does, and let lengths be checked where values come in."""
    for table in metadata.tables.values():
        for each in table.columns:
            if isinstance(each.type, String):
                each.type = each.type.with_variant(Text(collation="C"), "postgresql")


_on_postgresql()
