"""Copies of a job's result files on this machine, read as rows: Parquet and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.client.frame_shapes import is_parquet
from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.types import JobView
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.json_bytes import split_object
from batchmill.wire.result_rows import Row, flat_rows, is_openai, number_in

ROWS_AT_ONCE = 1000
UNREAD = (".csv", ".gz", ".zst")  # ends of files that `download` brings, and no row is read of

_encode = msgspec.json.Encoder(enc_hook=str).encode


class ResultCopy(Struct, frozen=True):
    """The results of a job that has ended."""

    view: JobView
    path: Path | None  # None: all rows failed, and are in `errors`
    errors: Path | None = None  # OpenAI lines that failed

    @property
    def is_parquet(self) -> bool:
        return self.path is not None and is_parquet(self.path)

    @property
    def is_openai(self) -> bool:
        return not self.is_parquet and any(is_openai(split_object(line)) for line in islice(self._lines(), 1))

    def rows(self) -> Iterator[Row]:
        """Every row, in the order of the input, OpenAI rows as those of a table."""
        return flat_rows(self._lines())

    def _lines(self) -> Iterator[bytes]:
        if self.path is not None and self.is_parquet:
            return _parquet_lines(self.path)
        files = [each for each in (self.path, self.errors) if each is not None]
        if len(files) == 1:
            return _lines_of(files[0])
        numbered = (((number_in(line), line) for line in _lines_of(each)) for each in files)
        return map(itemgetter(1), merge(*numbered, key=itemgetter(0)))


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line := line.strip():
                yield line


def _parquet_lines(path: Path) -> Iterator[bytes]:
    parquet = require("pyarrow.parquet", "results in Parquet", InvalidInput)
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from map(_encode, batch.to_pylist())


def ends_of(name: str) -> str:
    """The ends of a file's name that say its format: ".csv.gz". A pattern of DuckDB is none."""
    return "".join(each for each in Path(name).suffixes[-2:] if each[1:].isalnum())


def refuse_unread(name: str) -> None:
    """Refuse a result file that is not read as rows here. Args: name: the file's own. Raises: InvalidInput."""
    if is_input_url(name):
        raise InvalidInput(f"the results are in {name}: read them there", code="no_copy_here")
    if name.endswith(UNREAD):
        raise InvalidInput(f"the results in {name} are neither JSON lines nor Parquet: download them", code="not_lines")
