"""Sources that are not plain JSONL become one: `rows.jsonl`, a JSON object a line, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from batchmill.datasets import late, layout
from batchmill.datasets.allowance import Allowance
from batchmill.datasets.formats import Source
from batchmill.datasets.inflate import blocks
from batchmill.datasets.orders import Part, Refused
from batchmill.datasets.sources import describe
from batchmill.errors import InputChanged
from batchmill.types import DatasetSpec, Problem, SealedFile

COPY_BYTES = 8 * 1024 * 1024
PROBLEMS_KEPT = 10_000  # of rows that no converter could read


class Converted(Struct, frozen=True):
    """Rows of a source as JSON lines. `refused` counts rows from the first of `data`; its lines are the source's."""

    data: bytes
    rows: int = 0
    refused: list[Refused] = []


class Material(Struct, frozen=True):
    """What sealing reads."""

    parts: list[Part]
    files: list[SealedFile]
    converted: bool  # the files are ours, and say nothing of the sources' bytes
    problems: list[Problem] = []  # of rows that no converter could read: the first ones
    refused: Path | None = None  # {"row","code","message"} of all of them


Progress = Callable[[float], None]


def in_place(paths: list[str]) -> Material:
    """Plain JSONL is read where it lies."""
    files = [describe(path) for path in paths]
    return Material(_parts_of(files, paths), files, converted=False)


def copied(paths: list[str], home: Path, progress: Progress) -> Material:
    """Plain JSONL, copied into `home`."""
    total = sum(describe(path).size_bytes for path in paths) or 1
    done, targets = 0, []
    for number, path in enumerate(paths):
        target = str(home / layout.COPIES.replace("*", f"{number:06d}"))
        for size in copy(path, target):
            done += size
            progress(min(1.0, done / total))
        if os.path.getsize(target) != os.path.getsize(path):
            raise InputChanged(f"{path} changed while it was copied; run the command again")
        targets.append(target)
    files = [describe(target) for target in targets]
    return Material(_parts_of(files, paths), files, converted=False)


def copy(path: str, target: str) -> Iterator[int]:
    """Copy a file and yield the size of each step. The kernel shares the blocks where the file system can."""
    with open(path, "rb") as source, open(target, "wb") as copied_file:
        by_kernel = hasattr(os, "copy_file_range")
        while True:
            size = 0
            if by_kernel:
                try:
                    size = os.copy_file_range(source.fileno(), copied_file.fileno(), COPY_BYTES)
                except OSError:
                    by_kernel = False  # across some file systems it cannot; both offsets are where they were
            if not by_kernel:
                block = os.read(source.fileno(), COPY_BYTES)
                size = copied_file.write(block)
                copied_file.flush()
            if size == 0:
                break
            yield size
        os.fsync(copied_file.fileno())


def convert(
    sources: list[Source], spec: DatasetSpec, columns: list[str], home: Path, progress: Progress, allowance: Allowance
) -> Material:
    """Write `rows.jsonl`. Raises: InvalidDataset when a source as a whole cannot be read."""
    total = sum(describe(source.path).size_bytes for source in sources) or 1
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(min(1.0, done / total))

    told = [late.load(source.format).rows_in(source.path) for source in sources if source.format == "parquet"]
    allowance.foresee(sum(told))
    path = home / layout.ROWS
    with open(path, "wb") as rows_file, open(home / layout.REFUSED_EARLY, "wb") as refused_file:
        target = _Target(rows_file, refused_file, allowance)
        spans = []
        for source in sources:
            start = rows_file.tell()
            for piece in _pieces(source, spec, columns, home, advance):
                target.add(source, piece)
            target.end_line()
            spans.append((source.path, start, rows_file.tell()))
        rows_file.flush()
        os.fsync(rows_file.fileno())
    parts = [Part(number, str(path), source, 0, start, end) for number, (source, start, end) in enumerate(spans)]
    refused = home / layout.REFUSED_EARLY if target.refused else None
    return Material(parts, [describe(str(path))], converted=True, problems=target.problems, refused=refused)


class _Target:
    """`rows.jsonl` and the rows of it that no converter could read."""

    def __init__(self, rows_file: BinaryIO, refused_file: BinaryIO, allowance: Allowance) -> None:
        self._allowance = allowance
        self._rows_file = rows_file
        self._refused_file = refused_file
        self._rows = 0
        self._last = b"\n"
        self.refused = 0
        self.problems: list[Problem] = []

    def add(self, source: Source, piece: Converted) -> None:
        if not piece.data:
            return
        self._allowance.take(len(piece.data), piece.rows)
        self._rows_file.write(piece.data)
        self._last = piece.data[-1:]
        for refused in piece.refused:
            row = self._rows + refused.row
            entry = {"row": row, "code": refused.code, "message": refused.message}
            line = msgspec.json.encode(entry) + b"\n"
            self._allowance.take(len(line))
            self._refused_file.write(line)
            if self.refused < PROBLEMS_KEPT:
                self.problems.append(Problem(refused.code, refused.message, refused.line, source.path, row))
            self.refused += 1
        self._rows += piece.rows

    def end_line(self) -> None:
        """A source whose last line has no end must not run into the next one."""
        if self._last != b"\n":
            self._rows_file.write(b"\n")
            self._last = b"\n"


def _pieces(
    source: Source, spec: DatasetSpec, columns: list[str], home: Path, advance: Callable[[int], None]
) -> Iterator[Converted]:
    if source.format == "jsonl":
        return (Converted(block) for block in blocks(source.path, source.codec, advance))
    module = late.load(source.format)
    if source.format == "parquet":
        module.keep_schema(source, home / layout.SCHEMA)
    return module.convert(source, spec, columns, advance)


def _parts_of(files: list[SealedFile], sources: list[str]) -> list[Part]:
    parts, base = [], 0
    for number, (file, source) in enumerate(zip(files, sources, strict=True)):
        parts.append(Part(number, file.path, source, base, 0, file.size_bytes))
        base += file.size_bytes
    return parts
