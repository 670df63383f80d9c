"""Reads result files, whatever their format, as JSON lines; and the rows and columns that are wanted of them.

Every function streams: memory does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from operator import itemgetter
from pathlib import Path

from msgspec import Struct

from batchmill.datasets import formats, layout
from batchmill.datasets.inflate import blocks
from batchmill.errors import InvalidInput
from batchmill.jobs.results.results import COLUMNS_MAX, COMPRESSED, KINDS, too_many_columns
from batchmill.optional import require
from batchmill.types import DatasetSpec
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.rows.csv_lines import csv_lines
from batchmill.wire.rows.result_rows import (
    Row,
    RowShape,
    beside_request,
    flat,
    has_failed,
    is_openai,
    projected,
    row_number,
)

CODECS = {".gz": "gzip", ".zst": "zstd"}
UNSUPPORTED = frozenset((".arrow", ".avro", ".feather", ".json", ".orc", ".pkl", ".tsv", ".xls", ".xlsx", ".zip"))
JSONL, CSV, PARQUET = "jsonl", "csv", "parquet"
LINES_AT_ONCE = 1000


def kind_of(name: str) -> tuple[str, str]:
    """(jsonl, csv, parquet, or "" if unknown; "", ".gz" or ".zst") by the name of a file. Raises: InvalidInput."""
    suffixes = [each.lower() for each in Path(name).suffixes]
    codec = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    last = suffixes[-1] if suffixes else ""
    if last in UNSUPPORTED:
        raise InvalidInput(
            f"results cannot be written as {last[1:]}: end {name} in {', '.join(KINDS)}",
            code="invalid_output",
        )
    return KINDS.get(last, ""), codec


class ResultSource(Struct, frozen=True):
    """The result files of a job on this machine, each a copy with a name that says its format."""

    path: Path
    name: str  # the file's own, by which it is read
    errors: Path | None = None  # OpenAI lines that failed, if they are apart
    inputs: list[str] = []  # the job's own, if they are to stand beside

    def lines(self, *, only_failed: bool = False) -> Iterator[bytes]:
        """Every row as a JSON object, in the order of the input."""
        found = lines_of(self.path, self.name)
        if self.errors is not None:
            found = _in_order(found, lines_of(self.errors, JSONL_NAME))
        return (line for line in found if has_failed(split_object(line))) if only_failed else found


JSONL_NAME = "results.jsonl"


class ShapedRows:
    """The wanted rows and columns of results; can be iterated as often as asked.

    Raises, when it is made: InvalidInput for a column that no row has. While it is iterated: InvalidInput where the
    input is not that of the results.
    """

    def __init__(self, source: ResultSource, shape: RowShape, *, only_failed: bool) -> None:
        self._source, self._shape, self._only_failed = source, shape, only_failed
        self._is_openai = False
        known: dict[str, None] = {}
        self.rows = 0
        for line in source.lines(only_failed=only_failed):
            members = split_object(line)
            self._is_openai = self._is_openai or is_openai(members)
            self.rows += 1
            if not self._is_openai and not known.keys() >= members.keys():
                known.update(dict.fromkeys(members))
                if len(known) > COLUMNS_MAX:
                    raise too_many_columns(COLUMNS_MAX)
        self.names = (
            shape.names(shape.ordered(known), openai=self._is_openai) if self.rows else list(shape.columns or ())
        )

    def __iter__(self) -> Iterator[bytes]:
        lines = self._source.lines(only_failed=self._only_failed)
        if not self._is_openai:
            return (join_object(projected(split_object(line), self.names)) for line in lines)
        rows = (flat(line, split_object(line)) for line in lines)
        if self._shape.join:
            rows = _beside_requests(rows, request_lines(self._source.inputs))
        return (join_object(projected(row, self.names)) for row in rows)


def _beside_requests(rows: Iterable[Row], requests: Iterator[bytes]) -> Iterator[Row]:
    """Each row with its request. Both are in the order of the input, where some requests have no row yet."""
    next_number = 0
    request: bytes | None = None
    for row in rows:
        number = row_number(row)
        while next_number <= number:
            request = next(requests, None)
            next_number += 1
        yield beside_request(row, request, number)


def request_lines(paths: Sequence[str]) -> Iterator[bytes]:
    """The rows of a dataset of JSON lines, as they are counted. Raises: InvalidInput, InvalidDataset."""
    for source in formats.classify(DatasetSpec(list(paths), format="openai")):
        is_first = True
        for line in split_lines(blocks(source.path, source.codec, lambda _: None)):
            line = line.removeprefix(layout.BOM) if is_first else line
            is_first = False
            if line := line.strip():
                yield line


def _in_order(lines: Iterator[bytes], errors: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of both files of an OpenAI job, in the order of the input."""
    numbered = (((row_number(split_object(line)), line) for line in each) for each in (lines, errors))
    return map(itemgetter(1), merge(*numbered, key=itemgetter(0)))


def lines_of(path: Path, name: str) -> Iterator[bytes]:
    """Yield every row of a result file as a JSON object. Args: name: says the format."""
    kind, codec = kind_of(name)
    if kind == PARQUET:
        yield from require("batchmill.wire.rows.parquet_lines:result_lines", "results as Parquet")(path, LINES_AT_ONCE)
        return
    lines = split_lines(blocks(str(path), CODECS.get(codec), lambda _: None))
    yield from lines if kind != CSV else csv_lines(lines)


def split_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for piece in pieces:
        first, *others = piece.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    if last := b"".join(rest):
        yield last
