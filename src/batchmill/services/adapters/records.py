"""Adapters: their names, their records in the table `adapters`, and how callers see them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.files import read_spec
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import adapters
from batchmill.wire.native_models import AdapterInfo

NAME_CHARS_MAX = 190
NUMBER_MAX = 10**9
SHOWN_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


def check_name(name: str) -> str:
    """Return the name, if it is valid for an adapter. Raises: InvalidInput (`invalid_name`)."""
    is_version = _VERSION.fullmatch(name.rpartition("/")[2]) is not None and "/" in name
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or is_version:
        raise InvalidInput(
            f"{name[:SHOWN_CHARS]!r} is not a valid adapter name: use NAME or ORG/NAME, of letters, digits and . _ -, "
            f"{NAME_CHARS_MAX} characters at most; its last part must not be a number, because that is a version",
            code="invalid_name",
        )
    return name


def read_reference(text: str) -> tuple[str, int | None]:
    """Split "NAME" or "NAME/VERSION" into the name and version. None: the newest version."""
    name, slash, version = text.rpartition("/")
    if slash and _VERSION.fullmatch(version):
        return name, int(version)
    return text, None


FETCHING, READY, FAILED, REMOVED = "fetching", "ready", "failed", "removed"


class AdapterRecord(Struct, frozen=True):
    """A version of an adapter."""

    id: str
    project: str
    name: str
    version: int
    base: str  # the name of its base model
    source: str  # a folder, a hub id, a URL, or "upload"
    state: str = FETCHING
    message: str = ""  # why it failed
    digest: str = ""  # sha256 of its files
    rank: int = 0
    bytes: int = 0
    folder: str = ""
    created: float = 0.0  # seconds since the epoch
    changed: float = 0.0
    trained_for: str = ""  # the base model that its own configuration names
    token: str | None = None  # for a model hub: "secret:NAME", "env:NAME" or "file:PATH"

    @property
    def own_name(self) -> str:
        """Return its name in engines and results."""
        return f"{self.name}/{self.version}"


class _Details(Struct, frozen=True, omit_defaults=True):
    message: str = ""
    digest: str = ""
    rank: int = 0
    folder: str = ""
    trained_for: str = ""
    token: str | None = None


_COLUMNS = ("id", "project", "name", "version", "base", "source", "state", "bytes", "created", "changed")
_DETAILS = _Details.__struct_fields__


def _values(record: AdapterRecord) -> dict[str, Any]:
    details = _Details(**{name: getattr(record, name) for name in _DETAILS})
    return {name: getattr(record, name) for name in _COLUMNS} | {"details": msgspec.json.encode(details)}


def _record(row: sa.RowMapping) -> AdapterRecord:
    details = msgspec.json.decode(row["details"], type=_Details)
    return AdapterRecord(**{name: row[name] for name in _COLUMNS}, **msgspec.structs.asdict(details))


def begin(db: sa.Connection, record: AdapterRecord, quota: int) -> AdapterRecord:
    """Store the record with the next version number of its name, and return it. Raises: OverQuota."""
    in_project = adapters.c.project == record.project
    refuse_beyond(
        db, adapters, quota, quota="adapters", project=record.project, way_out="remove some",
        where=adapters.c.state != REMOVED,
    )  # fmt: skip
    last = db.execute(
        sa.select(sa.func.max(adapters.c.version)).where(in_project, adapters.c.name == record.name)
    ).scalar()
    record = msgspec.structs.replace(record, version=(last or 0) + 1)
    db.execute(adapters.insert().values(**_values(record)))
    return record


def update(db: sa.Connection, records: Sequence[AdapterRecord]) -> None:
    """Update records. A removed record stays removed."""
    for record in records:
        is_live = sa.and_(adapters.c.id == record.id, adapters.c.state != REMOVED)
        db.execute(adapters.update().where(is_live).values(**_values(record)))


def read_all(db: sa.Connection) -> list[AdapterRecord]:
    """Return all adapters that are not removed, by project, name and version."""
    columns = adapters.c
    query = sa.select(adapters).where(columns.state != REMOVED)
    rows = db.execute(query.order_by(columns.project, columns.name, columns.version)).mappings()
    return [_record(row) for row in rows]


def removed_after(db: sa.Connection, ids: Sequence[str], moment: float) -> set[str]:
    """Return those of these adapters that were removed after `moment` (seconds since the epoch)."""
    columns = adapters.c
    query = sa.select(columns.id).where(columns.id.in_(ids), columns.state == REMOVED, columns.changed > moment)
    return set(db.execute(query).scalars())


def used_folders(db: sa.Connection) -> set[str]:
    """Return the folders of adapters that unfinished jobs use."""
    specs = [read_spec(record["spec"]) for record in job_records.unfinished(db)]
    return {folder for spec in specs for model in spec.models for folder in model.adapters.values()}


def adapter_info(record: AdapterRecord) -> AdapterInfo:
    """Return an adapter as the operator sees it."""
    return msgspec.convert(record, AdapterInfo, from_attributes=True)


def shown_info(record: AdapterRecord) -> AdapterInfo:
    """Return an adapter as callers of the server see it: without paths of the server."""
    info = adapter_info(record)
    if not os.path.isabs(record.source):
        return info
    name = os.path.basename(record.source)
    return replace(info, source=name, message=record.message.replace(record.source, name))
