"""Results written when a job has ended, whatever the order in which its rows ran: the newest outcome of every row.

Runs in a child process of the owner; `partial` in any process. The same outcomes always give the same bytes.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import zstandard
from msgspec import Struct

from batchmill.datasets.sealed import load_seal
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.files import PartFile, remove_files
from batchmill.jobs.ledger.plan import Progress
from batchmill.jobs.results.results import GatherOrder, Manifest, ResultFile, errors_path, output_kind
from batchmill.jobs.results.row_windows import RowIndex, RowWindows, Window
from batchmill.wire.forms import Form

GZIP_LEVEL, ZSTD_LEVEL = 5, 3


class _Compressor(Protocol):
    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes: ...


class LineFile:
    """Lines on their way to a file; `.gz` and `.zst` are compressed. The same writes give the same bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self._compressor = _compressor(output_kind(path)[1])
        self._file = PartFile(path)

    def write(self, data: bytes | memoryview, rows: int) -> None:
        """Append `rows` whole lines; the caller leaves their bytes as they are."""
        self.rows += rows
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def publish(self) -> ResultFile:
        if self._compressor is not None:
            self._file.write(self._compressor.flush())
        digest = self._file.publish()
        return ResultFile(str(self.path), self.rows, self._file.size_bytes, digest)

    def discard(self) -> None:
        self._file.discard()


class ResultLines:
    """Finished lines in row order: one file, or with `errors_apart` the rows that failed in a file of their own."""

    def __init__(self, output: Path, errors_apart: bool) -> None:
        self.ok = self.failed = 0
        self._errors_apart = errors_apart
        self.output = output
        self._errors_path = errors_path(output)
        self._lines = LineFile(output)
        self._errors: LineFile | None = None

    def write(self, data: bytes | memoryview, rows: int, *, ok: bool) -> None:
        """Append lines that are all ok or all errors."""
        self.ok += rows if ok else 0
        self.failed += 0 if ok else rows
        self._file(ok).write(data, rows)

    def write_window(self, lines: Sequence[bytes], failed: Sequence[int]) -> None:
        """Append lines in row order; `failed` are the indexes of those that are errors, ascending."""
        self.ok += len(lines) - len(failed)
        self.failed += len(failed)
        if failed and self._errors_apart:
            self._file(ok=False).write(b"".join([lines[index] for index in failed]), len(failed))
            skip = set(failed)
            lines = [line for index, line in enumerate(lines) if index not in skip]
        self._lines.write(b"".join(lines), len(lines))

    def publish(self) -> tuple[ResultFile, ResultFile | None]:
        """(output, error file or None). The output comes last: who sees it sees everything."""
        errors = None
        if self._errors is not None:
            errors = self._errors.publish()
        elif self._errors_apart:
            remove_files([self._errors_path])  # of an earlier generation
        return self._lines.publish(), errors

    def discard(self) -> None:
        """Drop what was not published."""
        self._lines.discard()
        if self._errors is not None:
            self._errors.discard()

    def _file(self, ok: bool) -> LineFile:
        if ok or not self._errors_apart:
            return self._lines
        if self._errors is None:
            self._errors = LineFile(self._errors_path)
        return self._errors


def _compressor(suffix: str) -> _Compressor | None:
    if suffix == ".gz":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)  # a gzip header without a time
    if suffix == ".zst":
        return zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True).compressobj()
    return None


INDEX_SHARE = 0.3  # of the progress
CAUSES_MAX = 1000  # error codes told apart
OTHER = "other"

TABLES = {"csv": "batchmill.jobs.results.result_columns", "parquet": "batchmill.jobs.results.result_parquet"}


class TableSource(Struct, frozen=True):
    """What a table of results is made from."""

    dataset: Path
    columns: list[str]  # of the input, in order
    fixed: bool  # no row has others
    folds: bool  # the results have a column folded_from


class TableFile(Protocol):
    """A table on its way to a file. Made by `create(output, source)` of its module."""

    must_learn: bool  # show it all rows once before they are written

    def learn(self, lines: Sequence[bytes]) -> None: ...

    def write(self, lines: Sequence[bytes]) -> None: ...

    def publish(self) -> ResultFile: ...

    def discard(self) -> None: ...


def create_table(kind: str, output: Path, source: TableSource) -> TableFile:
    """The table file of a kind; its library is loaded only where it is needed."""
    return importlib.import_module(TABLES[kind]).create(output, source)


def gather_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: GatherOrder in, Manifest out, both as JSON."""
    return msgspec.json.encode(gather(msgspec.json.decode(order, type=GatherOrder), progress))


def gather(order: GatherOrder, progress: Progress) -> Manifest:
    """Write and publish the results of a job.

    Raises: LedgerBroken unless every row 0..N-1 has exactly one outcome (with `unrun`: at most one) and every
    byte is what was committed. InputChanged where followers or refused rows need a dataset that is gone. StorageFull.
    """
    index = RowIndex(order, lambda share: progress(share * INDEX_SHARE))
    if index.missing and order.unrun is None:
        raise LedgerBroken(f"{index.missing} of {index.rows} rows have no outcome", code="row_missing")
    windows = RowWindows(order, index)
    kind, _ = output_kind(Path(order.output))
    tally = _Tally(order.form, index.rows, lambda share: progress(INDEX_SHARE + (1 - INDEX_SHARE) * share))
    try:
        write = _write_lines if kind == "jsonl" else _write_table
        output, errors = write(order, windows, tally)
    finally:
        windows.close()
        index.reader.close()
    return Manifest(
        output, errors, rows=index.rows, ok=index.rows - tally.failed, failed=tally.failed,
        folded=len(index.followers), rejected=index.refused, unrun=index.missing, causes=tally.causes,
    )  # fmt: skip


def partial(order: GatherOrder, out: BinaryIO, errors: BinaryIO | None = None) -> int:
    """Write the rows that have an outcome so far as JSON lines, in row order; returns how many.

    Rows that failed go to `errors`, or stand among the others where there is none.
    """
    index = RowIndex(order, lambda _: None)
    windows, rows = RowWindows(order, index, partial=True), 0
    try:
        for window in windows:
            rows += len(window.lines)
            failed = set(window.failed)
            for number, line in enumerate(window.lines):
                (errors if errors is not None and number in failed else out).write(line)
    finally:
        windows.close()
        index.reader.close()
    return rows


def partial_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: GatherOrder in, the number of rows out as JSON. Its output is a new file for all rows there are."""
    asked = msgspec.json.decode(order, type=GatherOrder)
    with open(asked.output, "wb") as out:  # what a child that was killed had written is written over
        return msgspec.json.encode(partial(asked, out))


class _Tally:
    """The audit: rows come exactly once and in order. Counts those that failed, by cause."""

    def __init__(self, form: Form, rows: int, progress: Progress) -> None:
        self._form, self._rows, self._progress = form, rows, progress
        self._next = 0
        self.failed = 0
        self.causes: dict[str, tuple[int, str]] = {}

    def count(self, window: Window) -> None:
        if window.numbers != range(self._next, self._next + len(window.lines)) or None in window.lines:
            raise LedgerBroken(f"the rows after {self._next - 1} do not follow each other")
        self._next += len(window.lines)
        self.failed += len(window.failed)
        for index in window.failed:
            error = self._form.cause(window.lines[index])
            code = error.code if error.code in self.causes or len(self.causes) < CAUSES_MAX else OTHER
            rows, sample = self.causes.get(code, (0, error.message))
            self.causes[code] = rows + 1, sample
        self._progress(self._next / self._rows)

    def finish(self) -> None:
        if self._next != self._rows:
            raise LedgerBroken(f"{self._next} rows written of {self._rows}", code="row_missing")


def _write_lines(order: GatherOrder, windows: RowWindows, tally: _Tally) -> tuple[ResultFile, ResultFile | None]:
    lines = ResultLines(Path(order.output), order.form.errors_apart)
    try:
        for window in windows:
            tally.count(window)
            lines.write_window(window.lines, window.failed)
        tally.finish()
        return lines.publish()
    finally:
        lines.discard()


def _write_table(order: GatherOrder, windows: RowWindows, tally: _Tally) -> tuple[ResultFile, None]:
    seal = load_seal(Path(order.dataset))
    source = TableSource(
        Path(order.dataset), seal.columns, fixed=seal.format in ("csv", "parquet"), folds=windows.folds
    )
    table = create_table(output_kind(Path(order.output))[0], Path(order.output), source)
    try:
        if table.must_learn:
            for window in windows:
                table.learn(window.lines)
        for window in windows:
            tally.count(window)
            table.write(window.lines)
        tally.finish()
        return table.publish(), None
    finally:
        table.discard()
