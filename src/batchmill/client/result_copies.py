"""Copies of a job's result files on this machine, read as rows, whatever their format."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct

from batchmill.client.frame_shapes import is_parquet
from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.types import JobView
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows.csv_lines import csv_lines
from batchmill.wire.rows.result_rows import Row, flat_rows, is_openai, number_in

ROWS_AT_ONCE = 1000
CSV, GZIP, ZSTD = ".csv", ".gz", ".zst"  # ends of names


class ResultCopy(Struct, frozen=True):
    """The results of a job that has ended."""

    view: JobView
    path: Path | None  # None: all rows failed, and are in `errors`
    name: str = ""  # that the server gives the file of `path`: it says the format
    errors: Path | None = None  # OpenAI lines that failed

    @property
    def is_parquet(self) -> bool:
        return self.path is not None and is_parquet(self.path)

    @property
    def is_csv(self) -> bool:
        """Whether all values are text."""
        return CSV in Path(self.name).suffixes

    @property
    def is_openai(self) -> bool:
        return not self.is_parquet and any(is_openai(split_object(line)) for line in islice(self.lines(), 1))

    def rows(self) -> Iterator[Row]:
        """Every row, in the order of the input, OpenAI rows as those of a table."""
        return flat_rows(self.lines())

    def lines(self) -> Iterator[bytes]:
        """Every row as a JSON object, in the order of the input."""
        if self.path is not None and self.is_parquet:
            read = require("batchmill.wire.rows.parquet_lines:result_lines", "results in Parquet", InvalidInput)
            return read(self.path, ROWS_AT_ONCE)
        files = [
            *([_lines_of(self.path, self.name)] if self.path is not None else []),
            *([_lines_of(self.errors, "")] if self.errors is not None else []),
        ]
        if len(files) == 1:
            return files[0]
        numbered = (((number_in(line), line) for line in lines) for lines in files)
        return map(itemgetter(1), merge(*numbered, key=itemgetter(0)))


def _lines_of(path: Path, name: str) -> Iterator[bytes]:
    """The rows of a file of JSON lines or CSV. Args: name: says which, and how it is compressed."""
    with path.open("rb") as packed, _unpacked(packed, name) as file:
        lines = (line.removesuffix(b"\n") for line in file)
        if CSV in Path(name).suffixes:
            yield from csv_lines(lines)
            return
        for line in lines:
            if line := line.strip():
                yield line


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if name.endswith(ZSTD):
        reader = require("zstandard", "compressed results", InvalidInput).ZstdDecompressor()
        return cast(BinaryIO, io.BufferedReader(reader.stream_reader(file, read_across_frames=True)))
    return file


def lines_at_once(lines: Iterator[bytes]) -> list[bytes]:
    """The next lines; none at the end."""
    return list(islice(lines, ROWS_AT_ONCE))


def ends_of(name: str) -> str:
    """The ends of a file's name that say its format: ".csv.gz". A pattern of DuckDB is none."""
    return "".join(each for each in Path(name).suffixes[-2:] if each[1:].isalnum())


def refuse_far(name: str) -> None:
    """Refuse results that the server has no file of. Args: name: the output. Raises: InvalidInput."""
    if is_input_url(name):
        raise InvalidInput(f"the results are in {name}: read them there", code="no_copy_here")
