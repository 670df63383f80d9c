"""The records of adapters: what the table `adapters` says. A number of a name is never given twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.jobs import job_records
from batchmill.jobs.job_files import read_spec
from batchmill.store.llm_tables import adapters
from batchmill.store.quotas import refuse_beyond

FETCHING, READY, FAILED, REMOVED = "fetching", "ready", "failed", "removed"


class AdapterRecord(Struct, frozen=True):
    """A version of an adapter."""

    id: str
    project: str
    name: str
    version: int
    base: str  # the model it is for, by its name
    source: str  # where it came from
    state: str = FETCHING
    message: str = ""  # why it failed
    digest: str = ""  # sha256 of its files
    rank: int = 0
    bytes: int = 0
    folder: str = ""
    created: float = 0.0  # seconds since the epoch
    changed: float = 0.0
    trained_for: str = ""  # the base model, as its maker called it
    token: str | None = None  # what a model hub is shown: "secret:NAME", "env:NAME" or "file:PATH"

    @property
    def own_name(self) -> str:
        """What engines and results call it."""
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
    """The record with the next number of its name, written down. Raises: OverQuota."""
    mine = adapters.c.project == record.project
    refuse_beyond(
        db, adapters, quota, quota="adapters", project=record.project, way_out="remove some",
        where=adapters.c.state != REMOVED,
    )  # fmt: skip
    last = db.execute(sa.select(sa.func.max(adapters.c.version)).where(mine, adapters.c.name == record.name)).scalar()
    record = msgspec.structs.replace(record, version=(last or 0) + 1)
    db.execute(adapters.insert().values(**_values(record)))
    return record


def update(db: sa.Connection, records: Sequence[AdapterRecord]) -> None:
    """One that was removed stays so, whatever is written of it after that."""
    for record in records:
        is_kept = sa.and_(adapters.c.id == record.id, adapters.c.state != REMOVED)
        db.execute(adapters.update().where(is_kept).values(**_values(record)))


def read_all(db: sa.Connection) -> list[AdapterRecord]:
    """All that are not removed, by project, name and version."""
    columns = adapters.c
    query = sa.select(adapters).where(columns.state != REMOVED)
    found = db.execute(query.order_by(columns.project, columns.name, columns.version)).mappings()
    return [_record(row) for row in found]


def removed_after(db: sa.Connection, ids: Sequence[str], moment: float) -> set[str]:
    """Those of these adapters that were removed later than that."""
    columns = adapters.c
    query = sa.select(columns.id).where(columns.id.in_(ids), columns.state == REMOVED, columns.changed > moment)
    return set(db.execute(query).scalars())


def used_folders(db: sa.Connection) -> set[str]:
    """The folders of adapters that jobs name which have not ended."""
    specs = [read_spec(record["spec"]) for record in job_records.unfinished(db)]
    return {place for spec in specs for model in spec.models for place in model.adapters.values()}
