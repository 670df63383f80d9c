"""The results of a job of this machine, as a table and as rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import weakref
from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.cli.jobs.result_files import Wanted, write_rows
from batchmill.cli.jobs.results import WITH_RESULTS, spooled_results
from batchmill.cli.local import LocalApp
from batchmill.cli.session import Session
from batchmill.client.frame_shapes import PURPOSE, read_failed, read_results
from batchmill.config import Config
from batchmill.datasets import spooled_inputs
from batchmill.errors import InvalidInput, InvalidTransition
from batchmill.jobs.ledger.files import is_folder
from batchmill.jobs.results.parts.output_folders import read_manifest
from batchmill.jobs.results.result_rows import JSONL_NAME, ResultSource, lines_of
from batchmill.object_store.urls import is_object_url
from batchmill.optional import require
from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.rows.result_rows import RowShape, added_by, flat, is_openai, projected

if TYPE_CHECKING:
    import pyarrow

PARQUET = ".parquet"
_FLAT = RowShape()


def refuse_unfinished(view: JobView) -> None:
    """Raises: InvalidTransition before the job has ended."""
    if view.state not in WITH_RESULTS:
        way = "call batchmill.run again to resume it" if view.state == JobState.PAUSED else "wait() for it"
        raise InvalidTransition(
            f"the job {view.id} is {view.state}: {way}, or iterate over the job for the rows that are finished"
        )


class _OpenFile:
    """A file that may lose its name: it ends with this object."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        self.path = Path(f"/proc/self/fd/{descriptor}")


class StoredTable(Struct, frozen=True, eq=False):
    """Results as Parquet files on disk. Each call reads what it returns, and keeps nothing of it."""

    files: Sequence[Path]
    numbers: Sequence[int] | None = None  # of its rows; None: all rows of the job
    held: _OpenFile | None = None

    def read(self) -> pyarrow.Table:
        """All rows in the order of the input. Raises: InvalidInput for a file that cannot be read."""
        return require("pyarrow", PURPOSE).concat_tables(map(read_results, self.files))

    def read_failed(self) -> tuple[pyarrow.Table, Sequence[int]]:
        """The rows that failed, and the number of each. Raises: as `read`."""
        tables, numbers, first = [], array("Q"), 0
        for file in self.files:
            table, rows, at = read_failed(file)
            tables.append(table)
            numbers.extend(first + each if self.numbers is None else self.numbers[first + each] for each in at)
            first += rows
        return require("pyarrow", PURPOSE).concat_tables(tables), numbers


async def stored_table(config: Config, view: JobView) -> StoredTable:
    """The results of a job that has ended; of OpenAI rows `custom_id`, `output` and `error`. Raises: InvalidInput."""
    if parts := _local_parts(view):
        return StoredTable(parts)
    source = _result_files(view)
    if source is not None and source.name.endswith(PARQUET):
        return StoredTable([source.path])
    with scratch_folder(config) as folder:
        source = source or await _spooled(config, view, folder)
        return await asyncio.to_thread(_converted, source, view, folder)


def numbered_table(config: Config, path: Path, view: JobView, only: Container[int] | None) -> StoredTable:
    """Some rows, from lines that begin with their number; the file is removed. Args: only: of these rows; None: all."""
    numbers = array("Q")
    with scratch_folder(config) as folder:
        try:
            with path.open("rb") as lines, (folder / JSONL_NAME).open("wb") as file:
                for line in lines:
                    number, _, row = line.partition(b"\t")
                    if only is None or int(number) in only:
                        numbers.append(int(number))
                        file.write(row)
        finally:
            path.unlink()
        return replace(_converted(ResultSource(folder / JSONL_NAME, JSONL_NAME), view, folder), numbers=numbers)


def _converted(source: ResultSource, view: JobView, folder: Path) -> StoredTable:
    """Lines of results as a table, whose file has no name once its folder is removed. Raises: InvalidInput."""
    require("pyarrow", PURPOSE, InvalidInput)
    path, scratch = source.path, folder / "scratch"
    if not source.name.endswith(PARQUET):
        path = folder / "table.parquet"
        scratch.mkdir()
        write_rows(source, Wanted(str(path), "parquet", RowShape(added=added_by(view))), [], scratch)
    file = _OpenFile(path)
    return StoredTable([file.path], held=file)


@contextlib.contextmanager
def scratch_folder(config: Config) -> Iterator[Path]:
    """A folder on the disk of the data directory. One that a kill leaves is removed as data of a program is."""
    parent = config.data_dir / spooled_inputs.FOLDER
    with spooled_inputs.storage_errors():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=spooled_inputs.PART) as folder:
            yield Path(folder)


def _local_parts(view: JobView) -> list[Path]:
    """The Parquet files of results that are a folder on this machine."""
    output = view.output
    if output is None or is_object_url(output) or not is_folder(output):
        return []
    manifest = read_manifest(output)
    names = [part.name for part in manifest.parts] if manifest is not None else []
    return [Path(output, name) for name in names if name.endswith(PARQUET)]


def _result_files(view: JobView) -> ResultSource | None:
    """The result files of a job where they lie; None: they are objects or parts. Raises: InvalidInput."""
    paths = [each for each in (view.output, view.errors_output) if each is not None]
    if not paths:
        why = view.message or "it ended before its rows were planned"
        raise InvalidInput(f"the job {view.id} is {view.state} and has no results: {why}", code="no_file")
    if any(is_object_url(each) or is_folder(each) for each in paths):
        return None
    for path in paths:
        if not os.path.isfile(path):
            raise InvalidInput(f"the results in {path} are not there any more", code="no_file")
    return ResultSource(Path(paths[0]), paths[0], Path(paths[1]) if paths[1:] else None)


async def result_lines(config: Config, view: JobView, folder: Path) -> Iterator[bytes]:
    """Every row of a job that has ended as a JSON object, in the order of the input.

    Args: folder: for a copy of results that are objects; it stays until the last line is read.
    Raises: InvalidInput.
    """
    if parts := _local_parts(view):
        return chain.from_iterable(lines_of(part, part.name) for part in parts)
    return (_result_files(view) or await _spooled(config, view, folder)).lines()


async def _spooled(config: Config, view: JobView, folder: Path) -> ResultSource:
    """The result files, copied to a folder."""
    return await spooled_results(Session(LocalApp()), config, view, folder)


def row_of(line: bytes) -> dict[str, Any]:
    members = split_object(line)
    if is_openai(members):
        return msgspec.json.decode(join_object(projected(flat(line, members), _FLAT.names((), openai=True))))
    return msgspec.json.decode(line)
