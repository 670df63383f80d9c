"""Converts sources that are not plain JSONL to `rows.jsonl`, and writes the files of a sealed dataset.

Memory is bounded.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from heapq import merge
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Struct

from batchmill.datasets import layout, readers
from batchmill.datasets.folders import Folder
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.inflate import blocks
from batchmill.datasets.orders import RefusedRow, SealOrder, SizeLimits, SourcePart, ValidatedChunk
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sources import describe, open_file
from batchmill.datasets.validation import id_of, quoted
from batchmill.errors import InputChanged
from batchmill.object_store.urls import is_object_url
from batchmill.types import DatasetSpec, Problem, Seal, SealedFile
from batchmill.wire.native import SealReport
from batchmill.wire.rows.forms import OpenAIForm

COPY_BYTES = 8 * 1024 * 1024
PROBLEMS_MAX = 10_000  # problems of unreadable rows that are reported; further ones are only counted


class Converted(Struct, frozen=True):
    """Rows of a source as JSON lines. In `refused`, rows count from the first of `data`, lines from the source's."""

    data: bytes
    rows: int = 0
    refused: list[RefusedRow] = []


class Material(Struct, frozen=True):
    """The files that sealing reads."""

    parts: list[SourcePart]
    files: list[SealedFile]
    converted: bool  # batchmill wrote the files: their bytes are not those of the sources
    sources: list[SourceFile] = []  # that were converted
    problems: list[Problem] = []  # the first problems of rows that no converter could read
    refused: Path | None = None  # JSON lines {"row","code","message"}, one for each such row


Progress = Callable[[float], None]


class Additions(Protocol):
    """Adds members to the rows of a source: see `additions.RowAdditions`."""

    def add(self, pieces: Iterator[Converted], source: SourceFile) -> Iterator[Converted]: ...


def read_in_place(paths: list[str]) -> Material:
    """Read plain JSONL from where it is."""
    files = [describe(path) for path in paths]
    return Material(_parts_of(files, paths), files, converted=False)


def copy_sources(paths: list[str], home: Path, progress: Progress) -> Material:
    """Copy plain JSONL into `home`."""
    total = sum(describe(path).size_bytes for path in paths) or 1
    done, targets = 0, []
    for number, path in enumerate(paths):
        target = str(home / layout.COPIES.replace("*", f"{number:06d}"))
        for size in copy(path, target):
            done += size
            progress(min(1.0, done / total))
        if os.path.getsize(target) != describe(path).size_bytes:
            raise InputChanged(f"{path} changed while it was copied; run the command again")
        targets.append(target)
    files = [describe(target) for target in targets]
    return Material(_parts_of(files, paths), files, converted=False)


def copy(path: str, target: str) -> Iterator[int]:
    """Copy a file and yield the size of each step. The kernel shares the blocks where the file system can."""
    if is_object_url(path):
        yield from _download(path, target)
        return
    with open(path, "rb") as source, open(target, "wb") as copied_file:
        by_kernel = hasattr(os, "copy_file_range")
        while True:
            size = 0
            if by_kernel:
                try:
                    size = os.copy_file_range(source.fileno(), copied_file.fileno(), COPY_BYTES)
                except OSError:
                    by_kernel = False  # not between all file systems; both offsets are unchanged
            if not by_kernel:
                block = os.read(source.fileno(), COPY_BYTES)
                size = copied_file.write(block)
                copied_file.flush()
            if size == 0:
                break
            yield size
        os.fsync(copied_file.fileno())


def _download(path: str, target: str) -> Iterator[int]:
    with open_file(path) as source, open(target, "wb") as copied_file:
        while block := source.read(COPY_BYTES):
            copied_file.write(block)
            yield len(block)
        copied_file.flush()
        os.fsync(copied_file.fileno())


def convert(
    sources: list[SourceFile],
    spec: DatasetSpec,
    columns: list[str],
    home: Path,
    progress: Progress,
    size_limits: SizeLimits,
    additions: Additions | None = None,
) -> Material:
    """Write `rows.jsonl`, with what `additions` add to rows.

    Raises: InvalidDataset when a source as a whole cannot be read.
    """
    total = sum(describe(source.path).size_bytes for source in sources) or 1
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(min(1.0, done / total))

    row_counts = [readers.load(source.format).rows_in(source.path) for source in sources if source.format == "parquet"]
    size_limits.check_rows(sum(row_counts))
    path = home / layout.ROWS
    with open(path, "wb") as rows_file, open(home / layout.REFUSED_EARLY, "wb") as refused_file:
        writer = _RowsWriter(rows_file, refused_file, size_limits)
        spans = []
        for source in sources:
            start = rows_file.tell()
            pieces = _pieces(source, spec, columns, home, advance)
            if additions is not None:
                pieces = additions.add(pieces, source)
            for piece in pieces:
                writer.add(source, piece)
            writer.end_line()
            spans.append((source.path, start, rows_file.tell()))
        rows_file.flush()
        os.fsync(rows_file.fileno())
    parts = [SourcePart(number, str(path), source, 0, start, end) for number, (source, start, end) in enumerate(spans)]
    refused = home / layout.REFUSED_EARLY if writer.refused else None
    return Material(
        parts, [describe(str(path))], converted=True, sources=list(sources), problems=writer.problems, refused=refused
    )


class _RowsWriter:
    """Writes `rows.jsonl`, and the list of rows that no converter could read."""

    def __init__(self, rows_file: BinaryIO, refused_file: BinaryIO, size_limits: SizeLimits) -> None:
        self._size_limits = size_limits
        self._rows_file = rows_file
        self._refused_file = refused_file
        self._rows = 0
        self._last = b"\n"
        self.refused = 0
        self.problems: list[Problem] = []

    def add(self, source: SourceFile, piece: Converted) -> None:
        if not piece.data:
            return
        self._size_limits.add(len(piece.data), piece.rows)
        self._rows_file.write(piece.data)
        self._last = piece.data[-1:]
        for refused in piece.refused:
            row = self._rows + refused.row
            entry = {"row": row, "code": refused.code, "message": refused.message}
            line = msgspec.json.encode(entry) + b"\n"
            self._size_limits.add(len(line))
            self._refused_file.write(line)
            if self.refused < PROBLEMS_MAX:
                self.problems.append(Problem(refused.code, refused.message, refused.line, source.path, row))
            self.refused += 1
        self._rows += piece.rows

    def end_line(self) -> None:
        """End the last line of a source, so that the next source begins a new one."""
        if self._last != b"\n":
            self._rows_file.write(b"\n")
            self._last = b"\n"


def _pieces(
    source: SourceFile, spec: DatasetSpec, columns: list[str], home: Path, advance: Callable[[int], None]
) -> Iterator[Converted]:
    if source.format == "jsonl":
        return (Converted(block) for block in blocks(source.path, source.codec, advance))
    module = readers.load(source.format)
    if source.format == "parquet":
        module.keep_schema(source, home / layout.SCHEMA)
    return module.convert(source, spec, columns, advance)


def _parts_of(files: list[SealedFile], sources: list[str]) -> list[SourcePart]:
    parts, base = [], 0
    for number, (file, source) in enumerate(zip(files, sources, strict=True)):
        parts.append(SourcePart(number, file.path, source, base, 0, file.size_bytes))
        base += file.size_bytes
    return parts


FEW_ROWS = 100_000  # up to this many hashes are compared here, before numpy is imported for more

Duplicates = Callable[[Folder, SealedRows], Iterator[tuple[int, int]]]

_encode = msgspec.json.encode


class Rejection(Struct, frozen=True):
    """A line of `rejected.jsonl`."""

    row: int
    code: str
    message: str


class Tables:
    """Writes the files of a sealed dataset. Rows are added in order; `finish` completes the dataset."""

    def __init__(self, folder: Folder, order: SealOrder, material: Material, size_limits: SizeLimits) -> None:
        self._folder, self._size_limits = folder, size_limits
        self._material = material
        self._spec, self._problems_max = order.dataset, order.problems_max
        self._open_files = ExitStack()
        self._offsets = self._create(layout.OFFSETS)
        self._chunks = self._create(layout.CHUNKS)
        self._checksums = self._create(layout.CHECKSUMS)
        self._rejected = self._create(layout.REJECTED)
        self._keys = [self._create(name) for name in layout.KEYS] if order.keys else []
        self._requests = self._create(layout.REQUESTS) if order.requests else None
        self.has_ids = isinstance(order.form, OpenAIForm)
        self._hashes = self._create(layout.HASHES) if self.has_ids else None
        self.rows = 0
        self._blocks = 0
        self._end = 0  # offset of the end of the last row
        self._part = -1
        self._line = 1  # first line of the part's next chunk
        self._rejected_count = 0
        self._problems: list[Problem] = []

    def __enter__(self) -> Tables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()
        self._folder.remove(layout.HASHES)

    def add(self, chunk: ValidatedChunk, part: SourcePart) -> None:
        """Add the next chunk, whose lines are from `part`."""
        rejected = [Rejection(self.rows + each.row, each.code, each.message) for each in chunk.refused]
        lines = [_encode(each) + b"\n" for each in rejected]
        self._check_limits(chunk, sum(map(len, lines)))
        if part.number != self._part:
            self._part, self._line = part.number, 1
        if chunk.rows:
            record = (self.rows, chunk.rows, chunk.block_rows, self._blocks, chunk.start, chunk.end)
            self._chunks.write(layout.CHUNK.pack(*record, self._line, chunk.lines, part.number))
            self._offsets.write(chunk.offsets)
            self._checksums.write(chunk.checksums)
            if self._hashes is not None:
                self._hashes.write(chunk.ids)
            for file, column in zip(self._keys, chunk.keys, strict=False):
                file.write(column)
            if self._requests is not None:
                self._requests.write(chunk.requests)
            self._end = chunk.end
        self._rejected.writelines(lines)
        for refused in chunk.refused[: self._problems_max - len(self._problems)]:
            row, line = self.rows + refused.row, self._line + refused.line
            self._problems.append(Problem(refused.code, refused.message, line, part.source, row))
        self._rejected_count += len(chunk.refused)
        self._blocks += len(chunk.checksums) // 4
        self._line += chunk.lines
        self.rows += chunk.rows

    def _check_limits(self, chunk: ValidatedChunk, rejected_bytes: int) -> None:
        """Count a chunk before it is written. Raises: InvalidDataset, OverQuota, StorageFull."""
        columns = [chunk.offsets, chunk.checksums, chunk.ids, chunk.requests, *(chunk.keys if self._keys else ())]
        if self.rows + chunk.rows > self._size_limits.rows_max:
            self._size_limits.refuse_rows()
        self._size_limits.add(layout.CHUNK.size + sum(map(len, columns)) + rejected_bytes)

    def finish(self, seal: Seal, duplicates: Duplicates | None) -> SealReport:
        """Find repeated custom_ids, make everything durable, and write the seal last."""
        self._offsets.write(array("Q", [self._end]).tobytes())
        self._open_files.close()
        repeated: list[Problem] = []
        rejections = None
        if duplicates is not None and self._may_have_duplicates():
            rejections = self._duplicates(seal, duplicates, repeated)
        if self._material.refused is not None or rejections is not None:
            self._merge_rejected(rejections or iter(()))
        self._folder.remove(layout.HASHES)
        problems = _first_of([self._material.problems, self._at_lines(), repeated], self._problems_max)
        seal = msgspec.structs.replace(seal, rejected=self._rejected_count)
        layout.write_seal(self._folder, seal)
        return SealReport(seal, problems, self._rejected_count, self._rejected_count)

    def _at_lines(self) -> list[Problem]:
        """The problems of rows; those of CSV, where a row was a line of what it was converted to, at its own lines."""
        placed = self._problems
        for source in self._material.sources:
            rows = {each.line - 1 for each in placed if each.path == source.path}
            if source.format != "csv" or not rows:
                continue
            lines = readers.load("csv").lines_of(source, self._spec, rows)
            placed = [
                msgspec.structs.replace(each, line=lines[each.line - 1]) if each.path == source.path else each
                for each in placed
            ]
        return placed

    def _create(self, name: str) -> BinaryIO:
        return self._open_files.enter_context(self._folder.create(name))

    def _may_have_duplicates(self) -> bool:
        if self.rows > FEW_ROWS:
            return True
        hashes = array("Q")
        hashes.frombytes(self._folder.read(layout.HASHES))
        return len(set(hashes)) < len(hashes)

    def _duplicates(self, seal: Seal, duplicates: Duplicates, problems: list[Problem]) -> Iterator[Rejection]:
        """Reject every row whose custom_id an earlier row has; add the first of them to `problems`."""
        rows = SealedRows(self._folder, seal)
        sources = [part.source for part in self._material.parts]
        try:
            for row, first in duplicates(self._folder, rows):
                part, first_part = rows.chunk_of(row).part, rows.chunk_of(first).part
                source_note = "" if part == first_part else f" of {sources[first_part]}"
                first_line = f"line {rows.line_of(first)}{source_note}"
                line = rows.line_of(row)
                custom_id = quoted(id_of(rows.read_many([row])[0]))
                message = f"line {line} repeats the custom_id {custom_id} of {first_line}: each row needs its own"
                if len(problems) < self._problems_max:
                    problems.append(Problem("duplicate_custom_id", message, line, sources[part], row))
                yield Rejection(row, "duplicate_custom_id", message)
        finally:
            rows.close()

    def _merge_rejected(self, duplicates: Iterator[Rejection]) -> None:
        """Write one list of all refused rows in row order; a row that was refused twice keeps the first reason."""
        folder = self._folder
        folder.rename(layout.REJECTED, layout.REFUSED_BY_LINE)
        unreadable = self._material.refused
        by_line = _read(folder.open(layout.REFUSED_BY_LINE))
        early = iter(()) if unreadable is None else _read(unreadable.open("rb"))
        streams = [early, by_line, duplicates]
        last = -1
        self._rejected_count = 0
        with folder.create(layout.REJECTED) as file:
            for rejection in merge(*streams, key=attrgetter("row")):
                if rejection.row != last:
                    file.write(_encode(rejection) + b"\n")
                    self._rejected_count += 1
                last = rejection.row
        folder.remove(layout.REFUSED_BY_LINE)
        if unreadable is not None:
            unreadable.unlink()


def _read(file: BinaryIO) -> Iterator[Rejection]:
    decode = msgspec.json.Decoder(Rejection).decode
    with file:
        yield from map(decode, file)


def _first_of(lists: list[list[Problem]], count: int) -> list[Problem]:
    """The first problems of all lists, one a row; the earlier list has precedence."""
    by_row: dict[int | None, Problem] = {}
    for problem in merge(*lists, key=lambda problem: problem.row or 0):
        by_row.setdefault(problem.row, problem)
    return list(by_row.values())[:count]
