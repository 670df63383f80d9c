"""The tables of a data directory: one SQLAlchemy Core schema for SQLite and PostgreSQL.

The database holds jobs and commit records, never rows: its size goes with the number of commits. What a server keeps
besides (files, keys, webhooks) stands in `service_tables`,
connectors and what belongs to them in `connector_tables`; how a database is opened, in `database`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text, column

metadata = MetaData()

schema = Table("schema", metadata, Column("version", Integer, primary_key=True))

_UNANNOUNCED = column("announced") <= column("generation")  # true of few, so that looking for them costs little
_WHOLE = column("compacted").is_(None)

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
    Column("rows_rejected", BigInteger, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("cost", Float),
    Column("output", Text),
    Column("errors_output", Text),
    Column("problems", LargeBinary),  # list[types.Problem] as JSON
    Column("problems_total", BigInteger, nullable=False, default=0),
    Column("project", String(64), nullable=False, server_default="default"),
    Column("door", String(32)),  # of the server that took it: origin["door"]
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("deadline", Float),  # seconds since the epoch, UTC
    Column("finalizing", Float),  # when its results began to be written
    Column("cancelling", Float),  # when it was asked to end early
    Column("announced", Integer, nullable=False, server_default="0"),  # generations whose end was made known, plus 1
    Column("bytes", BigInteger, nullable=False, server_default="0"),  # on the disk, its results apart
    Column("compacted", Float),  # when its segments went: what is left of it are its results
    Index("jobs_by_project", "project", "created"),
    Index("jobs_by_bytes", "project", "bytes"),
    Index("jobs_by_state", "project", "state"),
    Index("jobs_to_compact", "finished", sqlite_where=_WHOLE, postgresql_where=_WHOLE),
    Index("jobs_by_created", "created"),
    Index("jobs_by_state_created", "state", "created"),
    Index("jobs_to_announce", "finished", sqlite_where=_UNANNOUNCED, postgresql_where=_UNANNOUNCED),
)

job_models = Table(  # names of the models and adapters that a job's rows go to, once that is known
    "job_models",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("model", String(512), primary_key=True),
    Index("job_models_by_model", "model", "job"),
)

submissions = Table(  # which job an order that may arrive again has become; written with the job
    "submissions",
    metadata,
    Column("key", String(512), primary_key=True),  # types.Once
    Column("job", String(64), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("answered", Float),  # when the reply went out; None: it may not have arrived
)

shards = Table(  # only shards that were leased at least once: the others follow from the plan
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

notes = Table(  # what an engine must find again after a crash: which jobs at a provider hold the rows of a shard
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
