"""The results of a job of this machine, as a table and as rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batchmill.cli.jobs.result_files import Wanted, write_rows
from batchmill.cli.jobs.results import WITH_RESULTS, spooled_results
from batchmill.cli.local import LocalApp
from batchmill.cli.session import Session
from batchmill.client.frame_shapes import read_results
from batchmill.config import Config
from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger.files import is_folder
from batchmill.jobs.results.output_folders import read_manifest
from batchmill.jobs.results.result_rows import JSONL_NAME, ResultSource
from batchmill.object_store.urls import is_object_url
from batchmill.optional import require
from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.result_rows import RowShape, added_by, flat, is_openai, projected

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


async def read_table(config: Config, view: JobView) -> pyarrow.Table:
    """All rows in the order of the input; of OpenAI rows `custom_id`, `output` and `error`. Raises: InvalidInput."""
    if view.output is not None and not is_object_url(view.output):
        if is_folder(view.output) and (parts := _parquet_parts(view.output)):
            return require("pyarrow", "results as a frame").concat_tables(map(read_results, parts))
        if view.output.endswith(PARQUET):
            return read_results(view.output)
    with tempfile.TemporaryDirectory(prefix="batchmill-results-") as place:
        folder = Path(place)
        source = await spooled(config, view, folder)
        if source.name.endswith(PARQUET):
            return read_results(source.path)
        return _as_table(source, view, folder)


def read_numbered(path: Path, view: JobView) -> tuple[list[int], pyarrow.Table]:
    """The numbers of some rows and the rows as a table, from lines that begin with a number; the file is removed."""
    with tempfile.TemporaryDirectory(prefix="batchmill-results-") as place:
        folder = Path(place)
        numbers: list[int] = []
        try:
            with path.open("rb") as lines, (folder / JSONL_NAME).open("wb") as file:
                for line in lines:
                    number, _, row = line.partition(b"\t")
                    numbers.append(int(number))
                    file.write(row)
        finally:
            path.unlink()
        return numbers, _as_table(ResultSource(folder / JSONL_NAME, JSONL_NAME), view, folder)


def _as_table(source: ResultSource, view: JobView, folder: Path) -> pyarrow.Table:
    """Lines of results as a table. Args: folder: for files that the table maps."""
    table, scratch = folder / "table.parquet", folder / "scratch"
    scratch.mkdir()
    write_rows(source, Wanted(str(table), "parquet", RowShape(added=added_by(view))), [], scratch)
    return read_results(table)


def _parquet_parts(output: str) -> list[Path]:
    manifest = read_manifest(output)
    names = [part.name for part in manifest.parts] if manifest is not None else []
    return [Path(output, name) for name in names if name.endswith(PARQUET)]


async def spooled(config: Config, view: JobView, folder: Path) -> ResultSource:
    """The result files, copied to a folder."""
    return await spooled_results(Session(LocalApp()), config, view, folder)


def row_of(line: bytes) -> dict[str, Any]:
    members = split_object(line)
    if is_openai(members):
        return msgspec.json.decode(join_object(projected(flat(line, members), _FLAT.names((), openai=True))))
    return msgspec.json.decode(line)
