"""Named datasets of projects: uploaded by a signed link, named, and checked before a job can read them.

The order is guaranteed: bytes and record durable -> named -> checked -> connected. A sweep removes uploads that stay
unnamed, and restarts interrupted checks. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import logging
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path, PurePosixPath
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill import faults
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.offload import Children
from batchmill.config import Config
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal_with_retry
from batchmill.errors import BatchmillError, Conflict, InvalidInput, InvalidTransition, Refused, UnknownName
from batchmill.jobs.intake import preview
from batchmill.ports.clock import Clock
from batchmill.services.files.files import FileService, checked_filename
from batchmill.services.files.incoming import run_to_completion
from batchmill.services.files.records import FileRecord
from batchmill.services.links import LinkService
from batchmill.store.disk_room import preparing
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import datasets
from batchmill.store.stored_files import using
from batchmill.types import DatasetSpec, Problem

OPENAI, CSV, PARQUET = "openai", "csv", "parquet"  # formats of the bytes


class DatasetState(StrEnum):
    ARRIVING = "arriving"  # its bytes have not arrived, or it has no name yet
    CHECKING = "checking"
    CONNECTED = "connected"
    FAILED = "failed"  # its rows are invalid, or could not be checked


class Details(Struct, frozen=True):
    """Facts about a dataset besides its name."""

    filename: str
    media: str = ""
    format: str = OPENAI
    bytes: int = 0
    rows: int | None = None  # None: not counted
    message: str = ""  # why it failed
    problems: list[Problem] = []  # the first invalid rows
    problems_total: int = 0
    same_as: str | None = None  # the id of the dataset with the same name and bytes, if this is a repeat


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
    """Raises: OverQuota; Conflict if too many uploads of the project wait for their bytes or a name."""
    refuse_beyond(db, datasets, quota, quota="datasets", project=record.project, way_out="delete some")
    waiting = sa.select(sa.func.count()).where(datasets.c.project == record.project, datasets.c.name.is_(None))
    if db.execute(waiting.select_from(datasets)).scalar_one() >= unnamed_max:
        raise Conflict(
            f"{unnamed_max:,} uploads of this project were started and are not finished: finish them, or try again in "
            "an hour",
            code="too_many_arrivals",
        )
    db.execute(datasets.insert().values(_values(record)))


def mark_arrived(db: sa.Connection, dataset_id: str, file_id: str, size_bytes: int, now: float) -> DatasetRecord | None:
    """Record that the bytes have arrived. Returns None if the upload no longer expects them."""
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
    """Give a dataset its name. A failed dataset with the same name is replaced.

    Raises: InvalidTransition if the upload has changed meanwhile; Conflict if the name is taken.
    """
    record = find(db, dataset_id)
    if record is None or record.file is None or record.name is not None or record.details.same_as is not None:
        raise InvalidTransition("this upload is no longer waiting for a name: upload it again", code="upload_ended")
    other = find_named(db, record.project, record.connection, name)
    if other is not None and other.state != DatasetState.FAILED:
        raise name_taken(name)
    if other is not None:
        remove_name(db, other.id)
    is_table = record.details.format != OPENAI
    state = DatasetState.CONNECTED if is_table else DatasetState.CHECKING
    return _update(db, replace(record, name=name, state=state, changed=max(now, record.changed)))


def mark_repeated(db: sa.Connection, dataset_id: str, other_id: str) -> None:
    """Record that an upload repeats another dataset, so that its own bytes are not needed."""
    record = find(db, dataset_id)
    if record is not None and record.name is None:
        _update(db, replace(record, details=replace(record.details, same_as=other_id)))


def store_check(db: sa.Connection, dataset_id: str, details: Details, state: str, now: float) -> None:
    """Store the result of a check, if the dataset still exists."""
    record = find(db, dataset_id)
    if record is not None and record.state == DatasetState.CHECKING:
        _update(db, replace(record, state=state, details=details, changed=max(now, record.changed)))


def remove_name(db: sa.Connection, dataset_id: str) -> None:
    """Remove a dataset's name, so that the next sweep deletes it."""
    change = {"name": None, "state": DatasetState.ARRIVING, "changed": 0.0}
    db.execute(datasets.update().where(datasets.c.id == dataset_id).values(change))


def delete(db: sa.Connection, dataset_id: str) -> None:
    db.execute(datasets.delete().where(datasets.c.id == dataset_id))


def find_unnamed(db: sa.Connection, before: float, limit: int) -> list[DatasetRecord]:
    """Return datasets without a name that have not changed since `before`."""
    statement = sa.select(*_FIELDS).where(datasets.c.name.is_(None), datasets.c.changed < before).limit(limit)
    return [_read(row) for row in db.execute(statement)]


def find_unchecked(db: sa.Connection) -> list[DatasetRecord]:
    """Return datasets whose check has not finished."""
    statement = sa.select(*_FIELDS).where(datasets.c.state == DatasetState.CHECKING).order_by(datasets.c.changed)
    return [_read(row) for row in db.execute(statement)]


def name_taken(name: str) -> Conflict:
    return Conflict(
        f"there is already a dataset {name!r} with other rows: choose another name, or delete that dataset first "
        "(DELETE /v2/datasets/UUID)",
        code="dataset_exists",
    )


def _one(db: sa.Connection, *where: sa.ColumnElement[bool]) -> DatasetRecord | None:
    row = db.execute(sa.select(*_FIELDS).where(*where)).first()
    return None if row is None else _read(row)


def _read(row: sa.Row) -> DatasetRecord:
    fields = dict(row._mapping)
    return DatasetRecord(**fields | {"details": _details.decode(fields["details"])})


def _update(db: sa.Connection, record: DatasetRecord) -> DatasetRecord:
    db.execute(datasets.update().where(datasets.c.id == record.id).values(_values(record)))
    return record


def _values(record: DatasetRecord) -> dict[str, object]:
    return msgspec.structs.asdict(record) | {"details": msgspec.json.encode(record.details)}


PROBLEMS_MAX = 100  # stored with a dataset
TARGET = f"{__name__}:check"


class DatasetCheck(Struct, frozen=True):
    """The order of a check. `home` is an empty folder that the caller removes: this process may be killed."""

    dataset: DatasetSpec
    home: str
    rows_max: int | None
    bytes_left: int | None = None  # see SealOrder
    no_space_message: str = ""


class DatasetReport(Struct, frozen=True):
    rows: int
    problems: list[Problem]
    problems_total: int
    rejected: int


def check(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Check a dataset in a child process. Takes a DatasetCheck and returns a DatasetReport, both as JSON.

    Raises: InvalidDataset, InputChanged, StorageFull.
    """
    check_order = msgspec.json.decode(order, type=DatasetCheck)
    seal_order = SealOrder(
        check_order.dataset, any_model=True, urls=[None], rows_max=check_order.rows_max, problems_max=PROBLEMS_MAX,
        bytes_left=check_order.bytes_left, no_space_message=check_order.no_space_message,
    )  # fmt: skip
    report = seal_with_retry(seal_order, Path(check_order.home), progress)
    return msgspec.json.encode(DatasetReport(report.seal.rows, report.problems, report.problems_total, report.rejected))


CONNECTION = "file_uploads"  # the only connection: all uploads are in it
NAME_CHARS_MAX = 256
FORBIDDEN_CHARS = "/\\?#%"  # because clients write names into URLs unquoted
FORMATS = {".csv": CSV, ".parquet": PARQUET}
MEDIA = {"text/csv": CSV, "application/vnd.apache.parquet": PARQUET}
COMPRESSED = (".gz", ".zst")
_SHOWN_CHARS = 80


def checked_name(name: str) -> str:
    """Raises: InvalidInput (`invalid_dataset_name`)."""
    unfit = [char for char in name if char in FORBIDDEN_CHARS or not char.isprintable()]
    if not name or len(name) > NAME_CHARS_MAX or name.strip() != name or name in (".", "..") or unfit:
        reason = f" because it contains {unfit[0]!r}" if unfit else ""
        raise InvalidInput(
            f"a dataset cannot be called {name[:_SHOWN_CHARS]!r}{reason}: give it a name of 1 to {NAME_CHARS_MAX} "
            f"printable characters without {' '.join(FORBIDDEN_CHARS)} and without spaces around it",
            code="invalid_dataset_name",
        )
    return name


def format_of(filename: str, media: str) -> str:
    """Return the format of a file with this name and Content-Type: that of a table, or else batch rows."""
    table_format = FORMATS.get(PurePosixPath(uncompressed_name(filename)).suffix.lower())
    return table_format or MEDIA.get(media.partition(";")[0].strip().lower(), OPENAI)


def extension_of(filename: str) -> str:
    """Return a file name's extension with that of its compression: "jsonl", "csv.gz"; empty if it has none."""
    uncompressed = uncompressed_name(filename)
    suffix = PurePosixPath(uncompressed).suffix + filename[len(uncompressed) :]
    return suffix.lstrip(".")


def uncompressed_name(filename: str) -> str:
    """Return the name without the suffix of its compression."""
    return next((filename.removesuffix(each) for each in COMPRESSED if filename.lower().endswith(each)), filename)


log = logging.getLogger("batchmill.server")

PURPOSE = "dataset"  # of the file with its bytes
UPLOAD = "the upload of"  # the purpose of its link
LIFETIME_S = 3600.0  # of the link, and of an upload without a name
UNNAMED_MAX = 1000  # unnamed uploads of a project
SWEEP_MAX = 200
CHECKS_AT_ONCE = 2  # each reads its whole dataset in its own processes
MEDIA_CHARS_MAX = 256
SHOWN_CHARS = 80  # of an unknown name or id, in a message


class PresignedUpload(Struct, frozen=True):
    """A started upload. Its signature allows the upload of the bytes."""

    id: str
    signature: str


class DatasetService:
    """Raises, everywhere: UnknownName (`unknown_dataset`, `unknown_connection`) for what this project does not have."""

    def __init__(
        self, database: Database, files: FileService, links: LinkService, clock: Clock, config: Config
    ) -> None:
        self._database, self._files, self._links, self._clock = database, files, links, clock
        self._config, self._children = config, Children()
        self._semaphore = FairSemaphore(CHECKS_AT_ONCE)
        self._checks: dict[str, asyncio.Task[None]] = {}  # by dataset
        self._arriving: Counter[str] = Counter()  # uploads whose bytes are arriving now
        self._naming: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # by project and name

    async def open(self) -> None:
        """Restart the checks that an earlier process did not finish."""
        await self._check_all()

    async def close(self) -> None:
        """Cancel running checks. The next process restarts them."""
        for check in self._checks.values():
            check.cancel()
        if self._checks:
            await asyncio.wait(list(self._checks.values()))
        await self._children.close()

    # -- upload -----------------------------------------------------------------------------------------------------

    async def begin(self, project: str, filename: str, media: str = "") -> PresignedUpload:
        """Start an upload. Raises: InvalidInput for an invalid file name; OverQuota; Conflict if too many wait."""
        details = Details(checked_filename(filename), media[:MEDIA_CHARS_MAX], format_of(filename, media))
        now = self._clock.now()
        record = DatasetRecord(
            str(uuid.uuid4()), project, CONNECTION, None, None, DatasetState.ARRIVING, details, now, now
        )  # fmt: skip
        await self._database.write(insert, record, UNNAMED_MAX, self._config.project_quotas.of(project).datasets)
        faults.point("after_begin")
        return PresignedUpload(record.id, self._links.sign(UPLOAD, record.id, project, LIFETIME_S))

    async def receive(
        self, dataset_id: str, signature: str, pieces: AsyncIterator[bytes], on_project: Callable[[str], None]
    ) -> FileRecord:
        """Receive the bytes of an upload. When this returns they are durable and the link is used up.

        An interrupted upload can be repeated with the same link.

        Args: on_project: is called with the project of the upload before the first piece.

        Raises: Refused for an invalid or expired link; TooLarge, StorageFull; what `on_project` raises.
        """
        link = await self._links.open(signature, UPLOAD, dataset_id)
        on_project(link.project)
        record = await self._database.read(find, dataset_id)
        if record is None:
            raise _ended(dataset_id)

        def arrive(db: sa.Connection, file: FileRecord) -> None:
            self._links.use(db, link)
            if mark_arrived(db, dataset_id, file.id, file.bytes, self._clock.now()) is None:
                raise _ended(dataset_id)

        writer = await self._files.writer(link.project)
        self._arriving[dataset_id] += 1
        try:
            async for piece in pieces:
                await writer.write(piece)
            file = await writer.commit(purpose=PURPOSE, filename=record.details.filename, within=arrive)
        finally:
            self._arriving -= Counter([dataset_id])
            await writer.discard()
        faults.point("after_arrival")
        return file

    async def name(self, project: str, dataset_id: str, name: str) -> DatasetRecord:
        """Name an upload that has arrived, and start its check. Idempotent.

        If a dataset of this name has the same bytes, it is returned instead. A failed dataset of this name is replaced.

        Raises: InvalidInput for a name that cannot be part of a URL; InvalidTransition if no bytes have arrived;
        Conflict (`dataset_exists`) if a dataset of this name has other bytes.
        """
        checked_name(name)
        async with self._naming.setdefault((project, name), asyncio.Lock()):
            record = await self._database.read(find, dataset_id)
            if record is None or record.project != project:
                raise UnknownName(
                    f"there is no upload {dataset_id[:SHOWN_CHARS]!r}: start another", code="unknown_upload"
                )  # fmt: skip
            if (existing := await self._named_before(record, name)) is not None:
                return existing
            if record.file is None:
                raise InvalidTransition(
                    "no complete file has arrived for this upload: PUT the whole file to its presignedUrl first",
                    code="upload_incomplete",
                )
            if (same := await self._same(record, name)) is not None:
                await self._database.write(mark_repeated, record.id, same.id)
                return same
            named = await self._database.write(give_name, record.id, name, self._clock.now())
        faults.point("after_name")
        if named.state == DatasetState.CHECKING:
            self._begin_check(named)
        return named

    async def _named_before(self, record: DatasetRecord, name: str) -> DatasetRecord | None:
        """Return the dataset that an upload already became under this name. Raises: Conflict for another name."""
        existing = record
        if record.details.same_as is not None:
            existing = await self._database.read(find, record.details.same_as) or record
        if existing.name == name:
            return existing
        if existing.name is not None:
            raise Conflict(
                f"this upload is already the dataset {existing.name!r}: upload it again for another name",
                code="upload_named",
            )
        return None

    async def _same(self, record: DatasetRecord, name: str) -> DatasetRecord | None:
        """Return the dataset of this name if it has the same bytes. Raises: Conflict if it has others."""
        other = await self._database.read(find_named, record.project, record.connection, name)
        if other is None or other.state == DatasetState.FAILED:
            return None
        if other.details.bytes == record.details.bytes and other.details.format == record.details.format:
            paths = [self._files.home / each.file for each in (record, other) if each.file is not None]
            with contextlib.suppress(FileNotFoundError):  # its bytes were deleted
                async with using(self._files.stored, *paths):
                    if await self._files.disk.run(filecmp.cmp, *paths, False):
                        return other
        raise name_taken(name)

    # -- read -------------------------------------------------------------------------------------------------------

    async def get(self, project: str, connection: str, name: str) -> DatasetRecord:
        if connection != CONNECTION:
            raise UnknownName(
                f"there is no connection {connection[:SHOWN_CHARS]!r}: uploaded datasets are in {CONNECTION!r}, the "
                "only connection",
                code="unknown_connection",
            )
        record = await self._database.read(find_named, project, connection, name)
        if record is None:
            raise _unknown(name)
        return record

    async def by_id(self, project: str, dataset_id: str) -> DatasetRecord:
        record = await self._database.read(find, dataset_id)
        if record is None or record.project != project or record.name is None:
            raise _unknown(dataset_id)
        return record

    async def find(self, project: str, reference: str) -> DatasetRecord:
        """Return the dataset of a NAME, CONNECTION/NAME or id. A name takes precedence over an id."""
        connection, slash, name = reference.rpartition("/")
        with contextlib.suppress(UnknownName):
            return await self.get(project, connection if slash else CONNECTION, name)
        if slash:
            return await self.get(project, connection, name)
        return await self.by_id(project, reference)

    @contextlib.asynccontextmanager
    async def hold(self, record: DatasetRecord) -> AsyncIterator[FileRecord]:
        """Return its file, which cannot be deleted until the job that reads it is stored."""
        async with contextlib.AsyncExitStack() as held:
            try:
                file = await held.enter_async_context(self._files.hold(record.project, record.file or ""))
            except UnknownName:
                raise UnknownName(
                    f"the file of the dataset {record.name!r} was deleted: delete the dataset too, and upload it again",
                    code="unknown_dataset",
                ) from None
            yield file

    # -- delete -----------------------------------------------------------------------------------------------------

    async def remove(self, project: str, dataset_id: str) -> None:
        """Raises: Conflict (`file_in_use`) while a job that has not ended reads it."""
        record = await self.by_id(project, dataset_id)
        await self._drop(record)

    async def sweep(self) -> int:
        """Delete uploads that were not named in time, and restart failed checks. Returns the number of deletions."""
        await self._check_all()
        overdue = await self._database.read(find_unnamed, self._clock.now() - LIFETIME_S, SWEEP_MAX)
        to_drop = [record for record in overdue if record.id not in self._arriving]
        for record in to_drop:
            with contextlib.suppress(Conflict):  # a job that was created before it was replaced still reads it
                await self._drop(record)
        return len(to_drop)

    async def _drop(self, record: DatasetRecord) -> None:
        """Delete the bytes first. A record without bytes is found later; bytes without a record would stay forever."""
        if record.file is not None:
            with contextlib.suppress(UnknownName):
                await self._files.delete(record.project, record.file, "the deletion of its dataset")
        await self._database.write(delete, record.id)
        if (check := self._checks.get(record.id)) is not None:
            check.cancel()

    # -- checks -----------------------------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        for record in await self._database.read(find_unchecked):
            self._begin_check(record)

    def _begin_check(self, record: DatasetRecord) -> None:
        if record.id in self._checks:
            return
        task = self._checks[record.id] = asyncio.create_task(self._check(record))

        def ended(done: asyncio.Task[None]) -> None:
            del self._checks[record.id]
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("the check of the dataset %s failed", record.id, exc_info=error)

        task.add_done_callback(ended)

    async def _check(self, record: DatasetRecord) -> None:
        """Check every row, and store the result."""
        details, state = record.details, DatasetState.FAILED
        path = self._files.home / (record.file or "")
        try:
            async with self._semaphore.slot(record.project), using(self._files.stored, path):
                report = await self._check_rows(record.project, path)
            details = replace(
                details, rows=report.rows, problems=report.problems, problems_total=report.problems_total
            )  # fmt: skip
            state = DatasetState.FAILED if report.rejected else DatasetState.CONNECTED
        except BatchmillError as error:
            detail = error.message.replace(str(path), details.filename)
            details = replace(
                details, message=detail if error.blame == "caller" else f"it could not be checked: {detail}"
            )
            if error.blame != "caller":
                log.warning("the dataset %s could not be checked: %s", record.id, error.message)
        faults.point("after_check")
        await self._database.write(store_check, record.id, details, state, self._clock.now())

    async def _check_rows(self, project: str, path: Path) -> DatasetReport:
        dataset = DatasetSpec([str(path)], format="openai", **msgspec.structs.asdict(self._config.limits))
        home = preview.new_home(self._config.data_dir)
        try:
            async with preparing(self._files.disk_quota, project, home) as preparation:
                order = DatasetCheck(
                    dataset,
                    str(home),
                    self._config.server.rows_max,
                    preparation.bytes_left,
                    preparation.no_space_message,
                )
                report = await self._children.offload(TARGET, msgspec.json.encode(order), _ignore_progress)
                return msgspec.json.decode(report, type=DatasetReport)
        finally:
            await run_to_completion(asyncio.to_thread(shutil.rmtree, home))


def _ignore_progress(share: float) -> None:
    """Nothing shows the progress of a check."""


def _ended(dataset_id: str) -> Refused:
    return Refused(f"the upload {dataset_id[:SHOWN_CHARS]} has ended or expired: start another", code="link_expired")


def _unknown(name: str) -> UnknownName:
    return UnknownName(f"there is no dataset {name[:SHOWN_CHARS]!r}", code="unknown_dataset")
