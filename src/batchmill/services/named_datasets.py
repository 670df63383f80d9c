"""Named datasets of projects: they arrive by a signed link, get their name, and are checked before a job may read them.

The order is the promise: bytes and their record durable -> named -> checked -> connected. What a crash leaves unnamed
is swept, and a check that was cut off is done again. Knows no dialect.
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
from batchmill.datasets.sealing import seal_patiently
from batchmill.errors import BatchmillError, Conflict, InvalidInput, InvalidTransition, Refused, UnknownName
from batchmill.jobs.intake import preview
from batchmill.ports import Clock
from batchmill.services.files import FileRecord, FileService, checked_filename
from batchmill.services.incoming import to_its_end
from batchmill.services.links import LinkService
from batchmill.store.database import Database
from batchmill.store.disk_room import preparing
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import datasets
from batchmill.types import DatasetSpec, Problem

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
    fields = dict(row._mapping)
    return DatasetRecord(**fields | {"details": _details.decode(fields["details"])})


def _update(db: sa.Connection, record: DatasetRecord) -> DatasetRecord:
    db.execute(datasets.update().where(datasets.c.id == record.id).values(_values(record)))
    return record


def _values(record: DatasetRecord) -> dict[str, object]:
    return msgspec.structs.asdict(record) | {"details": msgspec.json.encode(record.details)}


PROBLEMS_MAX = 100  # that are kept with a dataset
TARGET = f"{__name__}:check"


class DatasetCheck(Struct, frozen=True):
    """What to check. `home` is an empty folder, which whoever asks removes: this process may be killed."""

    dataset: DatasetSpec
    home: str
    rows_max: int | None
    bytes_left: int | None = None  # see SealOrder
    no_room: str = ""


class DatasetReport(Struct, frozen=True):
    rows: int
    problems: list[Problem]
    problems_total: int
    rejected: int


def check(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: DatasetCheck in, Checked out, both as JSON. Raises: InvalidDataset, InputChanged, StorageFull."""
    asked = msgspec.json.decode(order, type=DatasetCheck)
    wanted = SealOrder(
        asked.dataset, any_model=True, urls=[None], rows_max=asked.rows_max, problems_max=PROBLEMS_MAX,
        bytes_left=asked.bytes_left, no_room=asked.no_room,
    )  # fmt: skip
    report = seal_patiently(wanted, Path(asked.home), progress)
    return msgspec.json.encode(DatasetReport(report.seal.rows, report.problems, report.problems_total, report.rejected))


CONNECTION = "file_uploads"  # where all uploads are; there is no other
NAME_CHARS_MAX = 256
UNFIT = "/\\?#%"  # of a URL that clients write names into as they are
FORMATS = {".csv": CSV, ".parquet": PARQUET}
MEDIA = {"text/csv": CSV, "application/vnd.apache.parquet": PARQUET}
PACKED = (".gz", ".zst")
_SHOWN_CHARS = 80


def checked_name(name: str) -> str:
    """Raises: InvalidInput (`invalid_dataset_name`)."""
    unfit = [char for char in name if char in UNFIT or not char.isprintable()]
    if not name or len(name) > NAME_CHARS_MAX or name.strip() != name or name in (".", "..") or unfit:
        holds = f": it holds {unfit[0]!r}" if unfit else ""
        raise InvalidInput(
            f"a dataset cannot be called {name[:_SHOWN_CHARS]!r}{holds}; give it a name of 1 to {NAME_CHARS_MAX} "
            f"printable characters without {' '.join(UNFIT)} and without spaces around it",
            code="invalid_dataset_name",
        )
    return name


def format_of(filename: str, media: str) -> str:
    """What bytes are that come under this file name and Content-Type: a table, or else batch rows."""
    found = FORMATS.get(PurePosixPath(unpacked(filename)).suffix.lower())
    return found or MEDIA.get(media.partition(";")[0].strip().lower(), OPENAI)


def extension_of(filename: str) -> str:
    """What stands behind the first point of a file name's last two: "jsonl", "csv.gz"; empty: nothing."""
    plain = unpacked(filename)
    suffix = PurePosixPath(plain).suffix + filename[len(plain) :]
    return suffix.lstrip(".")


def unpacked(filename: str) -> str:
    """The name without the suffix of what it is packed with."""
    return next((filename.removesuffix(each) for each in PACKED if filename.lower().endswith(each)), filename)


log = logging.getLogger("batchmill.server")

PURPOSE = "dataset"  # of the file that holds its bytes
UPLOAD = "the upload of"  # what its link is for
LIFETIME_S = 3600.0  # of the link, and how long an upload may wait for its name
UNNAMED_MAX = 1000  # uploads of a project that are under way
SWEEP_MAX = 200
CHECKS_AT_ONCE = 2  # each reads its whole dataset in processes of its own
MEDIA_CHARS_MAX = 256
SHOWN_CHARS = 80  # of what nobody knows, in a message


class Begun(Struct, frozen=True):
    """An upload that may arrive: whoever has the signature may bring it."""

    id: str
    signature: str


class DatasetService:
    """Raises, everywhere: UnknownName (`unknown_dataset`, `unknown_connection`) for what this project does not have."""

    def __init__(
        self, database: Database, files: FileService, links: LinkService, clock: Clock, config: Config
    ) -> None:
        self._database, self._files, self._links, self._clock = database, files, links, clock
        self._config, self._children = config, Children()
        self._places = FairSemaphore(CHECKS_AT_ONCE)
        self._checks: dict[str, asyncio.Task[None]] = {}  # by dataset
        self._arriving: Counter[str] = Counter()  # uploads whose bytes are coming, however slowly
        self._naming: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # by project and name

    async def open(self) -> None:
        """Go on with the checks that an earlier process did not end."""
        await self._check_all()

    async def close(self) -> None:
        """Leave the checks that run: they are done again."""
        for check in self._checks.values():
            check.cancel()
        if self._checks:
            await asyncio.wait(list(self._checks.values()))
        await self._children.close()

    # -- in ---------------------------------------------------------------------------------------------------------

    async def begin(self, project: str, filename: str, media: str = "") -> Begun:
        """An upload under way. Raises: InvalidInput for a name that cannot be shown; OverQuota; Conflict: too many
        wait."""
        details = Details(checked_filename(filename), media[:MEDIA_CHARS_MAX], format_of(filename, media))
        now = self._clock.now()
        record = DatasetRecord(
            str(uuid.uuid4()), project, CONNECTION, None, None, DatasetState.ARRIVING, details, now, now
        )  # fmt: skip
        await self._database.write(insert, record, UNNAMED_MAX, self._config.project_quotas.of(project).datasets)
        faults.point("after_begin")
        return Begun(record.id, self._links.sign(UPLOAD, record.id, project, LIFETIME_S))

    async def receive(
        self, dataset_id: str, signature: str, pieces: AsyncIterator[bytes], belongs_to: Callable[[str], None]
    ) -> FileRecord:
        """The bytes of an upload: durable when this returns, and its link is used up. What breaks off may come again.

        Args: belongs_to: is told whose it is, before the first piece.

        Raises: Refused for a link that does not hold (any more); TooLarge, StorageFull; what `belongs_to` raises.
        """
        link = await self._links.open(signature, UPLOAD, dataset_id)
        belongs_to(link.project)
        record = await self._database.read(find, dataset_id)
        if record is None:
            raise _ended(dataset_id)

        def arrive(db: sa.Connection, file: FileRecord) -> None:
            self._links.use(db, link)
            if arrived(db, dataset_id, file.id, file.bytes, self._clock.now()) is None:
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
        """Name an upload that has arrived; from now on it is checked. Done twice, it is once.

        The same bytes under the name they have already are that dataset. A dataset that failed gives its name away.

        Raises: InvalidInput for a name that no URL can hold; InvalidTransition while nothing has arrived; Conflict
        (`dataset_exists`) where other rows have the name.
        """
        checked_name(name)
        async with self._naming.setdefault((project, name), asyncio.Lock()):
            record = await self._database.read(find, dataset_id)
            if record is None or record.project != project:
                raise UnknownName(
                    f"there is no upload {dataset_id[:SHOWN_CHARS]!r}: begin another", code="unknown_upload"
                )  # fmt: skip
            if (known := await self._named_before(record, name)) is not None:
                return known
            if record.file is None:
                raise InvalidTransition(
                    "nothing of this upload has arrived: PUT the file to its presignedUrl first, whole",
                    code="upload_incomplete",
                )
            if (same := await self._same(record, name)) is not None:
                await self._database.write(is_same, record.id, same.id)
                return same
            named = await self._database.write(give_name, record.id, name, self._clock.now())
        faults.point("after_name")
        if named.state == DatasetState.CHECKING:
            self._begin_check(named)
        return named

    async def _named_before(self, record: DatasetRecord, name: str) -> DatasetRecord | None:
        """The dataset that an upload was named before, when this is only asked again. Raises: Conflict."""
        known = record
        if record.details.same_as is not None:
            known = await self._database.read(find, record.details.same_as) or record
        if known.name == name:
            return known
        if known.name is not None:
            raise Conflict(
                f"this upload is the dataset {known.name!r} already: upload it again for another name",
                code="upload_named",
            )
        return None

    async def _same(self, record: DatasetRecord, name: str) -> DatasetRecord | None:
        """The dataset of this name, where it holds the same bytes. Raises: Conflict where it holds others."""
        other = await self._database.read(find_named, record.project, record.connection, name)
        if other is None or other.state == DatasetState.FAILED:
            return None
        if other.details.bytes == record.details.bytes and other.details.format == record.details.format:
            paths = [self._files.home / each.file for each in (record, other) if each.file is not None]
            with contextlib.suppress(FileNotFoundError):  # whose bytes somebody has deleted
                if await self._files.disk.run(filecmp.cmp, *paths, False):
                    return other
        raise taken(name)

    # -- out --------------------------------------------------------------------------------------------------------

    async def get(self, project: str, connection: str, name: str) -> DatasetRecord:
        if connection != CONNECTION:
            raise UnknownName(
                f"there is no connection {connection[:SHOWN_CHARS]!r}: uploaded datasets are in {CONNECTION!r}, the "
                "only one there is",
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
        """The dataset that NAME, CONNECTION/NAME or an id means; a name goes before an id."""
        connection, slash, name = reference.rpartition("/")
        with contextlib.suppress(UnknownName):
            return await self.get(project, connection if slash else CONNECTION, name)
        if slash:
            return await self.get(project, connection, name)
        return await self.by_id(project, reference)

    @contextlib.asynccontextmanager
    async def hold(self, record: DatasetRecord) -> AsyncIterator[FileRecord]:
        """Its file, which nobody deletes before the job that reads it is stored."""
        async with contextlib.AsyncExitStack() as held:
            try:
                file = await held.enter_async_context(self._files.hold(record.project, record.file or ""))
            except UnknownName:
                raise UnknownName(
                    f"the file of the dataset {record.name!r} was deleted: delete the dataset too, and upload it again",
                    code="unknown_dataset",
                ) from None
            yield file

    # -- away -------------------------------------------------------------------------------------------------------

    async def remove(self, project: str, dataset_id: str) -> None:
        """Raises: Conflict (`file_in_use`) while a job that has not ended reads it."""
        record = await self.by_id(project, dataset_id)
        await self._drop(record)

    async def sweep(self) -> int:
        """Take away what nobody has named in its time, returns how much; and begin again checks that broke down."""
        await self._check_all()
        late = await self._database.read(unnamed, self._clock.now() - LIFETIME_S, SWEEP_MAX)
        gone = [record for record in late if record.id not in self._arriving]
        for record in gone:
            with contextlib.suppress(Conflict):  # a job made before it was replaced reads it still
                await self._drop(record)
        return len(gone)

    async def _drop(self, record: DatasetRecord) -> None:
        """The bytes first: a record without them is met, bytes without one would stay for ever."""
        if record.file is not None:
            with contextlib.suppress(UnknownName):
                await self._files.delete(record.project, record.file, "the deletion of its dataset")
        await self._database.write(delete, record.id)
        if (check := self._checks.get(record.id)) is not None:
            check.cancel()

    # -- checks -----------------------------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        for record in await self._database.read(unchecked):
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
        """Have every row looked at, and write down what was found."""
        details, state = record.details, DatasetState.FAILED
        path = self._files.home / (record.file or "")
        try:
            async with self._places.place(record.project):
                found = await self._looked_at(record.project, path)
            details = replace(
                details, rows=found.rows, problems=found.problems, problems_total=found.problems_total
            )  # fmt: skip
            state = DatasetState.FAILED if found.rejected else DatasetState.CONNECTED
        except BatchmillError as error:
            detail = error.message.replace(str(path), details.filename)
            details = replace(
                details, message=detail if error.blame == "caller" else f"it could not be checked: {detail}"
            )
            if error.blame != "caller":
                log.warning("the dataset %s could not be checked: %s", record.id, error.message)
        faults.point("after_check")
        await self._database.write(checked, record.id, details, state, self._clock.now())

    async def _looked_at(self, project: str, path: Path) -> DatasetReport:
        dataset = DatasetSpec([str(path)], format="openai", **msgspec.structs.asdict(self._config.limits))
        home = preview.new_home(self._config.data_dir)
        try:
            async with preparing(self._files.room, project, home) as room:
                order = DatasetCheck(dataset, str(home), self._config.server.rows_max, room.bytes_left, room.no_room)
                answer = await self._children.offload(TARGET, msgspec.json.encode(order), _unseen)
                return msgspec.json.decode(answer, type=DatasetReport)
        finally:
            await to_its_end(asyncio.to_thread(shutil.rmtree, home))


def _unseen(share: float) -> None:
    """Nobody watches how far it is."""


def _ended(dataset_id: str) -> Refused:
    return Refused(f"the upload {dataset_id[:SHOWN_CHARS]} is not awaited any more: begin another", code="link_expired")


def _unknown(name: str) -> UnknownName:
    return UnknownName(f"there is no dataset {name[:SHOWN_CHARS]!r}", code="unknown_dataset")
