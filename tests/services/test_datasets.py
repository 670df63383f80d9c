"""Named datasets over a real database: what a restart finds, what is swept, and what file names say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, SQLITE, open_database
from fakes.held_clock import HeldClock

from batchmill.config import Config, ServerEntry
from batchmill.errors import Conflict, InvalidInput, Refused, TooLarge, UnknownName
from batchmill.services import named_datasets
from batchmill.services import named_datasets as datasets
from batchmill.services import named_datasets as records
from batchmill.services.files.files import FileService
from batchmill.services.links import LinkService
from batchmill.services.named_datasets import DatasetRecord, DatasetService, DatasetState, Details
from batchmill.services.secrets.box import SecretBox

BODY = {"messages": [{"role": "user", "content": "a"}]}
ROW = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
LINE = json.dumps(ROW).encode() + b"\n"
TWICE = LINE + LINE


class Room:
    """A data directory as a server has it."""

    def __init__(self, data_dir: Path, **limits: int) -> None:
        self.config = Config(data_dir=data_dir, base=data_dir, server=ServerEntry(**limits))
        self.clock = HeldClock()
        self.open()

    def open(self) -> None:
        data_dir = self.config.data_dir
        self.database = open_database(data_dir / "batchmill.db")
        self.files = FileService(self.database, data_dir, self.clock, self.config.server)
        self.links = LinkService(self.database, self.clock, SecretBox(data_dir / "secrets.key"))
        self.datasets = DatasetService(self.database, self.files, self.links, self.clock, self.config)

    async def close(self) -> None:
        await self.datasets.close()
        self.files.close()
        self.database.close()

    async def arrived(self, data: bytes = LINE, filename: str = "in.jsonl", project: str = "one") -> str:
        """The id of an upload that waits for its name."""
        begun = await self.datasets.begin(project, filename)
        await self.datasets.receive(begun.id, begun.signature, pieces(data), lambda _: None)
        return begun.id

    async def checked(self, name: str) -> DatasetRecord:
        while (
            record := await self.datasets.get("one", named_datasets.CONNECTION, name)
        ).state == DatasetState.CHECKING:
            await asyncio.sleep(0.02)
        return record

    def left(self) -> list[str]:
        """The files that hold bytes."""
        return [each.name for each in (self.config.data_dir / "files").iterdir() if each.is_file()]


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


@pytest.fixture
async def room(tmp_path):
    room = Room(tmp_path, file_bytes_max=1000)
    yield room
    await room.close()


async def test_a_check_that_was_cut_off_is_done_again(room):
    """A server that stops while it looks at rows looks at them when it comes back."""
    upload = await room.arrived()
    await room.datasets.name("one", upload, "rows")
    await room.close()
    room.open()
    assert (await room.datasets.get("one", named_datasets.CONNECTION, "rows")).state == DatasetState.CHECKING
    await room.datasets.open()
    record = await room.checked("rows")
    assert (record.state, record.details.rows) == (DatasetState.CONNECTED, 1)
    assert not list(room.config.data_dir.glob("preview-*"))


async def test_what_nobody_names_is_swept(room):
    """Uploads that never arrived, and those that nobody named, go an hour later, with their bytes."""
    waiting = await room.arrived()
    await room.datasets.begin("one", "never.jsonl")
    kept = await room.arrived()
    await room.datasets.name("one", kept, "kept")
    await room.checked("kept")
    assert await room.datasets.sweep() == 0 and len(room.left()) == 2
    await room.clock.sleep(datasets.LIFETIME_S + 1)
    assert await room.datasets.sweep() == 2
    assert room.left() == [(await room.datasets.by_id("one", kept)).file]
    with pytest.raises(UnknownName):
        await room.datasets.name("one", waiting, "too late")


async def test_an_upload_that_takes_long(room):
    """Bytes that are coming when their time is over are still awaited: a slow line is not a reason to begin again."""
    begun = await room.datasets.begin("one", "slow.jsonl")

    async def slowly() -> AsyncIterator[bytes]:
        yield LINE[:5]
        await room.clock.sleep(2 * datasets.LIFETIME_S)
        assert await room.datasets.sweep() == 0
        yield LINE[5:]

    await room.datasets.receive(begun.id, begun.signature, slowly(), lambda _: None)
    assert await room.datasets.sweep() == 0
    assert (await room.datasets.name("one", begun.id, "slow")).details.bytes == len(LINE)
    broken = await room.datasets.begin("one", "broken.jsonl")

    async def breaks() -> AsyncIterator[bytes]:
        yield LINE[:5]
        raise ConnectionError("the client left")

    with pytest.raises(ConnectionError):
        await room.datasets.receive(broken.id, broken.signature, breaks(), lambda _: None)
    await room.clock.sleep(2 * datasets.LIFETIME_S)
    assert await room.datasets.sweep() == 1


REFUSAL = {  # of the end of a check
    SQLITE: ["CREATE TRIGGER no_end BEFORE UPDATE ON datasets WHEN NEW.state = 'connected' "
             "BEGIN SELECT RAISE(ABORT, ''); END"],
    POSTGRESQL: ["CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no end''; END'",
                 "CREATE TRIGGER no_end BEFORE UPDATE ON datasets FOR EACH ROW WHEN (NEW.state = 'connected') "
                 "EXECUTE FUNCTION refuse()"],
}  # fmt: skip
ALLOWANCE = {SQLITE: "DROP TRIGGER no_end", POSTGRESQL: "DROP FUNCTION refuse CASCADE"}


async def test_a_check_that_broke_down_is_begun_again(room, caplog, database_kind):
    """Where not even its failure could be written down, whoever waits for the dataset does not wait for ever."""
    for statement in REFUSAL[database_kind]:
        await room.database.write(lambda db, text=statement: db.execute(sa.text(text)) and None)
    await room.datasets.name("one", await room.arrived(), "rows")
    while "failed" not in caplog.text:
        await asyncio.sleep(0.02)
    assert (await room.datasets.get("one", named_datasets.CONNECTION, "rows")).state == DatasetState.CHECKING
    await room.database.write(lambda db: db.execute(sa.text(ALLOWANCE[database_kind])) and None)
    await room.datasets.sweep()
    assert (await room.checked("rows")).state == DatasetState.CONNECTED


async def test_bytes_that_are_not_needed_are_swept(room):
    """Those of a dataset that failed and was replaced, and those that had come before."""
    for data in (TWICE, LINE, LINE):
        await room.datasets.name("one", await room.arrived(data), "rows")
        await room.checked("rows")
    record = await room.checked("rows")
    assert (record.state, len(room.left())) == (DatasetState.CONNECTED, 3)
    await room.datasets.sweep()
    await room.clock.sleep(datasets.LIFETIME_S + 1)
    await room.datasets.sweep()
    assert room.left() == [record.file]


async def test_an_upload_after_its_time(room):
    """Neither its link nor its place is there any more."""
    begun = await room.datasets.begin("one", "a.jsonl")
    await room.clock.sleep(datasets.LIFETIME_S)
    with pytest.raises(Refused, match="expired"):
        await room.datasets.receive(begun.id, begun.signature, pieces(LINE), lambda _: None)


async def test_an_upload_that_is_too_large(room):
    """At the limit it is taken, one byte more is not, and may be sent again smaller."""
    begun = await room.datasets.begin("one", "a.jsonl")
    with pytest.raises(TooLarge):
        await room.datasets.receive(begun.id, begun.signature, pieces(b"x" * 1000, b"x"), lambda _: None)
    file = await room.datasets.receive(begun.id, begun.signature, pieces(b"x" * 1000), lambda _: None)
    assert (file.bytes, len(room.left())) == (1000, 1)


async def test_so_many_uploads_wait_at_most(room):
    """A project that begins uploads and never ends them is told so; another one is not kept from its own."""

    async def begin(project: str, number: int) -> None:
        record = DatasetRecord(
            f"{project}-{number}",
            project,
            named_datasets.CONNECTION,
            None,
            None,
            DatasetState.ARRIVING,
            Details("a"),
            1.0,
            1.0,
        )
        await room.database.write(records.insert, record, 2, 100)

    for number in range(2):
        await begin("one", number)
    with pytest.raises(Conflict, match="2 uploads of this project"):
        await begin("one", 2)
    await begin("two", 0)


async def test_datasets_of_another_project(room):
    """They are unknown, in the words for those that never were; the same name is free there."""
    upload = await room.arrived()
    with pytest.raises(UnknownName):
        await room.datasets.name("two", upload, "rows")
    await room.datasets.name("one", upload, "rows")
    await room.datasets.name("two", await room.arrived(project="two"), "rows")
    for call in (room.datasets.by_id, room.datasets.find, room.datasets.remove):
        with pytest.raises(UnknownName, match=upload):
            await call("two", upload)
    assert (await room.datasets.find("two", "rows")).id != upload


async def test_a_dataset_whose_file_was_deleted(room):
    """It is told so when somebody wants to read it, and can still be deleted."""
    upload = await room.arrived()
    await room.datasets.name("one", upload, "rows")
    record = await room.checked("rows")
    await room.files.delete("one", record.file, "ada")
    with pytest.raises(UnknownName, match="was deleted"):
        async with room.datasets.hold(record):
            pass
    await room.datasets.remove("one", upload)
    with pytest.raises(UnknownName):
        await room.datasets.find("one", "rows")


async def test_wrong_rows_are_kept_with_the_dataset(room):
    """As many as are shown to people, and how many there are in all."""
    rows = b"".join(json.dumps({"custom_id": n}).encode() + b"\n" for n in range(50))
    await room.datasets.name("one", await room.arrived(rows), "rows")
    details = (await room.checked("rows")).details
    assert (details.rows, details.problems_total, details.problems[0].line) == (50, 50, 1)


@pytest.mark.parametrize(
    ("filename", "media", "form", "extension"),
    [
        ("a.jsonl", "text/plain", "openai", "jsonl"),
        ("a.jsonl.gz", "application/gzip", "openai", "jsonl.gz"),
        ("a.CSV", "", "csv", "CSV"),
        ("a.csv.zst", "", "csv", "csv.zst"),
        ("a.parquet", "application/octet-stream", "parquet", "parquet"),
        ("a", "text/csv; charset=utf-8", "csv", ""),
        ("a", "", "openai", ""),
        ("my.file.v2.jsonl", "", "openai", "jsonl"),
    ],
)
@pytest.mark.once
def test_what_a_file_name_says(filename, media, form, extension):
    assert (named_datasets.format_of(filename, media), named_datasets.extension_of(filename)) == (form, extension)


@pytest.mark.once
def test_the_longest_name():
    """Its characters are counted, up to the limit and not beyond."""
    assert named_datasets.checked_name("n" * named_datasets.NAME_CHARS_MAX)
    with pytest.raises(InvalidInput, match="1 to 256"):
        named_datasets.checked_name("n" * (named_datasets.NAME_CHARS_MAX + 1))
