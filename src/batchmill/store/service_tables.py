"""The tables of what a server keeps besides jobs: files, uploads, keys, webhooks. See `tables` for the jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, String, Table, Text

from batchmill.store.tables import metadata

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),  # for people: no path is ever made of it
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64)),  # of an upload; None for results
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("job", String(64)),  # of results: the job they are of
    Index("files_by_project", "project", "created"),
    Index("files_by_bytes", "project", "job", "bytes"),
)

removals = Table(  # what was deleted, so that whoever asks for it hears of that; `pending`: some of it still lies there
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
    Column("models", Text),  # names it may use, as a JSON list; None: all that its project may
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
    Column("secret", LargeBinary, nullable=False),  # what deliveries are signed with, encrypted
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
)

outbox = Table(  # events on their way to an endpoint; written with, or made from, what they tell of
    "outbox",
    metadata,
    Column("id", String(64), primary_key=True),  # made of the event and the endpoint: written twice, it is one
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

model_versions = Table(  # functions as they were deployed; a row never changes once its state is ready or failed
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
    Column("project", String(64), nullable=False, server_default="default"),  # whose it is
    Column("key", String(64)),  # the public id of the key that brought it; None: whoever runs the machine
    Column("shared", Boolean, nullable=False, server_default="1"),  # other projects may call it
)

model_routes = Table(  # what a branch's `latest`, or an alias, stands for
    "model_routes",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("label", String(200), primary_key=True),  # "main", "feat/x"; "@prod" is the alias prod
    Column("backends", LargeBinary, nullable=False),  # JSON: [[branch, number, weight], …]; one for a branch
    Column("mirrors", LargeBinary, nullable=False),  # JSON: [[branch, number], …]: shadow copies
    Column("changed", Float, nullable=False),
)

late_calls = Table(  # calls whose answers are sent to a URL once they are there; a row goes when that was done
    "late_calls",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("key", String(64)),  # the public id of the caller's
    Column("name", String(200), nullable=False),  # of the function; its version:
    Column("branch", String(200), nullable=False),
    Column("number", Integer, nullable=False),
    Column("order", LargeBinary, nullable=False),  # how it is asked and told: JSON
    Column("body", LargeBinary, nullable=False),  # empty once it was answered
    Column("reply", LargeBinary),  # None: not answered yet
    Column("bytes", BigInteger, nullable=False),  # of both
    Column("created", Float, nullable=False),
    Column("begun", Float),  # when it was asked
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due", Float, nullable=False),  # when to go on with it
    Index("late_calls_by_due", "due"),
    Index("late_calls_by_project", "project"),
)
