"""The tables, and how a database is opened: one SQLAlchemy Core schema for SQLite and PostgreSQL.

The database holds jobs and commit records, never rows: its size goes with the number of commits.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Float, Integer, LargeBinary, MetaData, String, Table, Text

from batchmill.errors import InvalidConfig

SCHEMA_VERSION = 1

metadata = MetaData()

schema = Table("schema", metadata, Column("version", Integer, primary_key=True))

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

error_counts = Table(  # rows whose outcome now is an error, by cause
    "error_counts",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("code", String(256), primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("sample", Text, nullable=False, default=""),
)


def open_database(path: Path) -> sa.Engine:
    """The database of a data directory, its tables made if they are not there. One process at a time.

    Raises: InvalidConfig for a database of another version, or one that cannot be opened.
    """
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False, "timeout": 5.0})
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        metadata.create_all(engine)
        with engine.begin() as db:
            version = db.execute(sa.select(schema.c.version)).scalar()
            if version is None:
                db.execute(schema.insert().values(version=SCHEMA_VERSION))
    except sa.exc.DatabaseError as error:
        engine.dispose()
        raise InvalidConfig(f"the database {path} cannot be opened: {error.orig}") from error
    if version not in (None, SCHEMA_VERSION):
        engine.dispose()
        raise InvalidConfig(
            f"the database {path} has schema version {version}, this batchmill knows {SCHEMA_VERSION}: "
            "use the batchmill that wrote it, or another --data-dir"
        )
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say, with BEGIN IMMEDIATE
    connection.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=5000; PRAGMA foreign_keys=ON;"
        "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;"
    )
