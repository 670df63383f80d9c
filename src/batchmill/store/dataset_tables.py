"""The tables of datasets that have names, and of links that were used. See `tables` for the jobs."""

from __future__ import annotations

from sqlalchemy import Column, Float, Index, LargeBinary, String, Table

from batchmill.store.tables import metadata

datasets = Table(  # uploads that have arrived or are to arrive, and what their owner calls them
    "datasets",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("connection", String(64), nullable=False),
    Column("name", String(256)),  # None while it is not named
    Column("file", String(64)),  # None while its bytes have not arrived
    Column("state", String(16), nullable=False),  # arriving, checking, connected, failed
    Column("details", LargeBinary, nullable=False),  # file name, media type, rows, problems …, as JSON
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Index("datasets_by_name", "project", "connection", "name", unique=True),
)

used_links = Table(  # of links that work once
    "used_links",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("expires", Float, nullable=False),  # of the link itself: then it is forgotten here
    Column("project", String(64), nullable=False, server_default="default", index=True),
)
