"""The tables of adapters and of language models that were deployed over an API. See `tables` for the jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, String, Table

from batchmill.store.tables import metadata

adapters = Table(
    "adapters",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("version", Integer, nullable=False),  # 1, 2 … of its name; a number is never given twice
    Column("base", String(256), nullable=False),  # the model it is for, by its name
    Column("source", String(1024), nullable=False),  # where it was fetched from, credentials left out
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
    Column("details", LargeBinary, nullable=False),  # its description, and what a dialect keeps of it, as JSON
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("llm_deployments_by_name", "project", "name", unique=True),
)

quarantine = Table(  # requests that engines died of
    "quarantine",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("model", String(1024), nullable=False),  # the base model, as its engine loads it
    Column("project", String(64), nullable=False),  # whose request it was
    Column("url", String(256), nullable=False),
    Column("deaths", Integer, nullable=False),  # with it alone in flight
    Column("at", Float, nullable=False),  # the last of them
)
