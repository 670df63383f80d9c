"""The records of datasets that have names: what the table `datasets` says, and how it changes."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidTransition
from batchmill.store.dataset_tables import datasets
from batchmill.store.quotas import refuse_beyond
from batchmill.types import Problem

OPENAI, CSV, PARQUET = "openai", "csv", "parquet"  # what the bytes are


class DatasetState(StrEnum):
    ARRIVING = "arriving"  # its bytes have not come, or nobody has named it
    CHECKING = "checking"
    CONNECTED = "connected"
    FAILED = "failed"  # its rows cannot be run, or could not be checked


class Details(Struct, frozen=True):
    """What is known of a dataset besides its name."""

    filename: str
    media: str = ""
    format: str = OPENAI
    bytes: int = 0
    rows: int | None = None  # None: not counted
    message: str = ""  # why it failed
    problems: list[Problem] = []  # the first rows that are wrong
    problems_total: int = 0
    same_as: str | None = None  # the same bytes came under this name before: the id of that dataset


class DatasetRecord(Struct, frozen=True):
    """A dataset of a project. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    connection: str
    name: str | None
    file: str | None
    state: str  # a DatasetState
    details: Details
    created: float
    changed: float


_FIELDS = [datasets.c[name] for name in DatasetRecord.__struct_fields__]
_details = msgspec.json.Decoder(Details)


def find(db: sa.Connection, dataset_id: str) -> DatasetRecord | None:
    return _one(db, datasets.c.id == dataset_id)


def find_named(db: sa.Connection, project: str, connection: str, name: str) -> DatasetRecord | None:
    return _one(
        db, datasets.c.project == project, datasets.c.connection == connection, datasets.c.name == name
    )  # fmt: skip


def insert(db: sa.Connection, record: DatasetRecord, unnamed_max: int, quota: int) -> None:
    """Raises: OverQuota; Conflict where so many of the project's wait for their bytes or a name already."""
    refuse_beyond(db, datasets, quota, quota="datasets", project=record.project, way_out="delete some")
    waiting = sa.select(sa.func.count()).where(datasets.c.project == record.project, datasets.c.name.is_(None))
    if db.execute(waiting.select_from(datasets)).scalar_one() >= unnamed_max:
        raise Conflict(
            f"{unnamed_max:,} uploads of this project have begun and were not finished: finish them, or come again in "
            "an hour",
            code="too_many_arrivals",
        )
    db.execute(datasets.insert().values(_values(record)))


def arrived(db: sa.Connection, dataset_id: str, file_id: str, size_bytes: int, now: float) -> DatasetRecord | None:
    """Its bytes are there; None where it is not awaited any more."""
    record = find(db, dataset_id)
    if record is None or record.state != DatasetState.ARRIVING or record.file is not None:
        return None
    return _update(
        db,
        replace(
            record,
            file=file_id,
            details=replace(record.details, bytes=size_bytes),
            changed=max(now, record.changed),
        ),
    )


def give_name(db: sa.Connection, dataset_id: str, name: str, now: float) -> DatasetRecord:
    """The dataset under its name; one that had the name and failed goes.

    Raises: InvalidTransition, when it has become something else meanwhile; Conflict, when the name is taken.
    """
    record = find(db, dataset_id)
    if record is None or record.file is None or record.name is not None or record.details.same_as is not None:
        raise InvalidTransition("this upload is no longer waiting for a name: upload it again", code="upload_ended")
    other = find_named(db, record.project, record.connection, name)
    if other is not None and other.state != DatasetState.FAILED:
        raise taken(name)
    if other is not None:
        abandon(db, other.id)
    is_table = record.details.format != OPENAI
    state = DatasetState.CONNECTED if is_table else DatasetState.CHECKING
    return _update(db, replace(record, name=name, state=state, changed=max(now, record.changed)))


def is_same(db: sa.Connection, dataset_id: str, other_id: str) -> None:
    """An upload was another dataset once more: its own bytes are not needed."""
    record = find(db, dataset_id)
    if record is not None and record.name is None:
        _update(db, replace(record, details=replace(record.details, same_as=other_id)))


def checked(db: sa.Connection, dataset_id: str, details: Details, state: str, now: float) -> None:
    """What came out of the check of a dataset that is still there."""
    record = find(db, dataset_id)
    if record is not None and record.state == DatasetState.CHECKING:
        _update(db, replace(record, state=state, details=details, changed=max(now, record.changed)))


def abandon(db: sa.Connection, dataset_id: str) -> None:
    """Nobody knows it any more: the next sweep takes it away."""
    change = {"name": None, "state": DatasetState.ARRIVING, "changed": 0.0}
    db.execute(datasets.update().where(datasets.c.id == dataset_id).values(change))


def delete(db: sa.Connection, dataset_id: str) -> None:
    db.execute(datasets.delete().where(datasets.c.id == dataset_id))


def unnamed(db: sa.Connection, before: float, limit: int) -> list[DatasetRecord]:
    """Those that nobody has named, and that nothing has become of since."""
    wanted = sa.select(*_FIELDS).where(datasets.c.name.is_(None), datasets.c.changed < before).limit(limit)
    return [_read(row) for row in db.execute(wanted)]


def unchecked(db: sa.Connection) -> list[DatasetRecord]:
    """Those whose check has not come to its end."""
    wanted = sa.select(*_FIELDS).where(datasets.c.state == DatasetState.CHECKING).order_by(datasets.c.changed)
    return [_read(row) for row in db.execute(wanted)]


def taken(name: str) -> Conflict:
    return Conflict(
        f"there is a dataset {name!r} with other rows already: give this one another name, or delete that one first "
        "(DELETE /v2/datasets/UUID)",
        code="dataset_exists",
    )


def _one(db: sa.Connection, *where: sa.ColumnElement[bool]) -> DatasetRecord | None:
    found = db.execute(sa.select(*_FIELDS).where(*where)).first()
    return None if found is None else _read(found)


def _read(row: sa.Row) -> DatasetRecord:
    told = dict(row._mapping)
    return DatasetRecord(**told | {"details": _details.decode(told["details"])})


def _update(db: sa.Connection, record: DatasetRecord) -> DatasetRecord:
    db.execute(datasets.update().where(datasets.c.id == record.id).values(_values(record)))
    return record


def _values(record: DatasetRecord) -> dict[str, object]:
    return msgspec.structs.asdict(record) | {"details": msgspec.json.encode(record.details)}
