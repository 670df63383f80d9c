"""Small jobs: their dataset and plans lie in the database as one value, not as files of the data directory.

Most are prepared in memory, and run without files. What needs files of such a job unpacks them into a scratch
folder in memory, and the last one removes them. Their outcomes lie in the database too (`Commit.blocks`); only a worker
whose owner has died writes a segment file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill.datasets import formats, layout
from batchmill.datasets.folders import DiskFolder, Folder, MemoryFolder
from batchmill.datasets.sources import SHORT_BYTES, bytes_of_short, describe
from batchmill.errors import InvalidDataset
from batchmill.jobs.ledger.files import JobFiles
from batchmill.part_files import PartFile, sync_folder
from batchmill.store.sql.portable import put
from batchmill.store.sql.tables import packed_jobs
from batchmill.types import DatasetSpec
from batchmill.wire.input_urls import is_input_url

INPUT_BYTES_MAX = 1024 * 1024  # of the files of a small job: checked in a thread of the owner within some milliseconds
# Of the files of a short job, checked on the event loop within some ms. Requests are so long that no more fit;
# thousands of lines of a few bytes, each refused with a message, would take 90 ms.
SHORT_BYTES_MAX, SHORT_ROWS_MAX = SHORT_BYTES, 300
SHORT_FILES_MAX = 16
SHORT_MODELS_MAX = 64  # that its rows may name: a thousand take 45 ms to describe and to plan with
ROWS_MAX = 1000
PACKED_BYTES_MAX = 1024 * 1024  # of its dataset and plans
FOLDER_MODE = 0o700

_files = msgspec.msgpack.Decoder(dict[str, bytes])


def may_be_small(dataset: DatasetSpec) -> bool:
    """Whether the input is short, and read as it is: a thread of the owner unpacks and converts nothing.

    What it holds is known once it is sealed.
    """
    if any(map(is_input_url, dataset.paths)):
        return False
    try:
        sources = formats.classify(dataset)
    except (OSError, InvalidDataset):
        return False  # sealing reports it
    if sum(source.size_bytes for source in sources) > INPUT_BYTES_MAX:
        return False
    return all(source.format == "jsonl" and source.codec is None for source in sources)


def is_short(dataset: DatasetSpec, models: int) -> bool:
    """Whether the input is so short that to hand it over to a thread takes longer than to check it for the models."""
    if models > SHORT_MODELS_MAX or len(dataset.paths) > SHORT_FILES_MAX:
        return False
    try:
        if any(map(is_input_url, dataset.paths)):
            return False
        found = [describe(path) for path in dataset.paths]
        if sum(each.size_bytes for each in found) > SHORT_BYTES_MAX:
            return False
        return sum((bytes_of_short(each) or b"").count(b"\n") for each in found) <= SHORT_ROWS_MAX
    except (OSError, InvalidDataset):
        return False  # sealing reports it


class NewFolders:
    """The dataset and the first plan of a job that is being prepared in memory."""

    def __init__(self, files: JobFiles) -> None:
        self.dataset, self.plan = MemoryFolder(files.dataset), MemoryFolder(files.plan(0))

    def by_name(self) -> dict[str, Folder]:
        return {self.dataset.path.name: self.dataset, self.plan.path.name: self.plan}


def folders_of(files: JobFiles) -> dict[str, Folder]:
    """The dataset and the plans of a job that is unpacked: name -> folder."""
    names = [name for name in os.listdir(files.home) if name == "dataset" or name.startswith("plan-")]
    return {name: DiskFolder(files.home / name) for name in names}


def is_small(folders: Mapping[str, Folder], rows: int) -> bool:
    """Whether a dataset that was sealed and planned stays in the database. Converted rows lie in files of their own."""
    if rows > ROWS_MAX:
        return False
    sizes = 0
    for folder in folders.values():
        for name in folder.names():
            if name == layout.ROWS or fnmatchcase(name, layout.COPIES):
                return False
            sizes += folder.size(name)
    return sizes <= PACKED_BYTES_MAX


def pack(folders: Mapping[str, Folder]) -> bytes:
    """The dataset and the plans of a job as one value."""
    found = {f"{at}/{name}": folder.read(name) for at, folder in folders.items() for name in folder.names()}
    return msgspec.msgpack.encode(found)


def store(db: sa.Connection, job_id: str, packed: bytes) -> None:
    """Store what `pack` returned, in the place of what there was."""
    put(db, packed_jobs, {"job": job_id, "files": packed})


def read(db: sa.Connection, job_id: str) -> bytes | None:
    return db.execute(sa.select(packed_jobs.c.files).where(packed_jobs.c.job == job_id)).scalar()


def unpack(home: Path, packed: bytes | None) -> None:
    """Write the files of a job into a new folder. None: it has none yet."""
    files = _files.decode(packed) if packed is not None else {}
    home.mkdir(mode=FOLDER_MODE)
    for folder in {"dataset", "plan-0", *(name.partition("/")[0] for name in files)}:
        (home / folder).mkdir(mode=FOLDER_MODE)
    for name, data in files.items():
        (home / name).write_bytes(data)


def write(home: Path, packed: bytes) -> list[Path]:
    """Write the files of a job that is small no more into its folder, durably. Returns the folders that hold them."""
    files = _files.decode(packed)
    folders = sorted({(home / name).parent for name in files})
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for name, data in files.items():
        with PartFile(home / name) as file:
            file.write(data)
            file.publish()
    for folder in (*folders, home):
        sync_folder(folder)
    return folders
