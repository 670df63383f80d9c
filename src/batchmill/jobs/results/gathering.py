"""Results written when a job has ended, whatever the order in which its rows ran: the newest outcome of every row.

Runs in a child process of the owner; `partial` in any process. The same outcomes always give the same bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Struct

from batchmill.datasets.sealed import load_seal
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.plan import Progress
from batchmill.jobs.results.result_lines import ResultLines
from batchmill.jobs.results.results import CAUSES_MAX, GatherOrder, Learned, Manifest, ResultFile, output_kind
from batchmill.jobs.results.row_windows import RowIndex, RowWindows, Window
from batchmill.optional import require
from batchmill.part_files import Digest
from batchmill.ports.storage import SegmentSource
from batchmill.types import OutputSchema
from batchmill.wire.rows.forms import Form
from batchmill.wire.sampling import rows_of

INDEX_SHARE = 0.3  # of the progress
OTHER = "other"

TABLES = {"csv": "batchmill.jobs.results.result_columns", "parquet": "batchmill.jobs.results.parquet.result_parquet"}


class Index(Protocol):
    """What is known of all outcomes before any is read."""

    rows: int
    missing: int  # rows without an outcome
    refused: int  # rows that validation refused
    followers: Sequence[int]  # rows that share another row's outcome
    segments: SegmentSource


class Windows(Protocol):
    """All rows in row order; can be iterated as often as asked."""

    added: Sequence[str]  # the columns that rows of a table have besides those of the input

    def __iter__(self) -> Iterator[Window]: ...

    def close(self) -> None: ...


class TableSource(Struct, frozen=True):
    """What a table of results is made from."""

    dataset: Path
    columns: list[str]  # of the input, in order
    fixed: bool  # no row has others
    added: Sequence[str] = ()  # behind all others
    schema: OutputSchema | None = None  # whose fields are some of these
    is_safe: bool = False  # no cell of CSV begins a formula


class TableFile(Protocol):
    """A table on its way to a file. Made by `create(output, source)` of its module."""

    must_learn: bool  # show it all rows once before they are written

    def learn(self, lines: Sequence[bytes]) -> None: ...

    def learned(self) -> Learned:
        """What `learn` has found."""

    def know(self, learned: Learned) -> None:
        """Take what others have learned instead."""

    def write(self, lines: Sequence[bytes]) -> None: ...

    def publish(self) -> ResultFile: ...

    def discard(self) -> None: ...


def create_table(kind: str, output: Path, source: TableSource, digest: Digest | None = None) -> TableFile:
    """The table file of a kind; its library is loaded only where it is needed.

    Args: digest: is updated with the bytes of the file.
    """
    return importlib.import_module(TABLES[kind]).create(output, source, digest)


def source_of(dataset: Path, form: Form, windows: Windows) -> TableSource:
    """What a table of the rows of these windows is made from."""
    seal = load_seal(dataset)
    is_fixed = seal.format in ("csv", "parquet")
    return TableSource(dataset, seal.columns, is_fixed, added=windows.added, schema=form.schema)


def gather_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: GatherOrder in, Manifest out, both as JSON."""
    return msgspec.json.encode(gather(msgspec.json.decode(order, type=GatherOrder), progress))


def gather(order: GatherOrder, progress: Progress) -> Manifest:
    """Write and publish the results of a job.

    Raises: LedgerBroken unless every row 0..N-1 has exactly one outcome (with `unrun`: at most one) and every
    byte is what was committed. InputChanged where followers or refused rows need a dataset that is gone. StorageFull.
    """
    index, windows = open_index(order, lambda share: progress(share * INDEX_SHARE))
    if index.missing and order.unrun is None:
        raise LedgerBroken(f"{index.missing} of {index.rows} rows have no outcome", code="row_missing")
    kind, _ = output_kind(Path(order.output))
    tally = Tally(order.form, index.rows, lambda share: progress(INDEX_SHARE + (1 - INDEX_SHARE) * share))
    try:
        if kind == "jsonl":
            output, errors = _write_lines(order, windows, tally)
        elif kind == "parquet" and not isinstance(windows, RowWindows):
            write = require("batchmill.jobs.results.parquet.column_parquet:write", "results as Parquet")
            output, errors = write(Path(order.output), index, windows, tally.count_columns), None
            tally.finish()
        else:
            output, errors = _write_table(order, windows, tally)
    finally:
        windows.close()
        index.segments.close()
    return Manifest(
        output, errors, rows=index.rows, ok=index.rows - tally.failed, failed=tally.failed,
        folded=len(index.followers), rejected=index.refused, unrun=index.missing, causes=tally.causes,
    )  # fmt: skip


def open_index(
    order: GatherOrder, progress: Progress, *, partial: bool = False, rows: range | None = None
) -> tuple[Index, Windows]:
    """Where the outcomes are, and the rows with them. Raises: LedgerBroken, InputChanged.

    Args: rows: those of the windows; None: all.
    """
    if load_seal(Path(order.dataset)).is_columnar:
        open_columns = require("batchmill.jobs.results.column_windows:open_columns", "results of Parquet")
        return open_columns(order, progress, partial=partial, rows=rows)
    index = RowIndex(order, progress)
    return index, RowWindows(order, index, partial=partial, rows=rows)


def partial(order: GatherOrder, out: BinaryIO, errors: BinaryIO | None = None) -> int:
    """Write the rows that have an outcome so far as JSON lines, in row order; returns how many.

    Rows that failed go to `errors`, or among the others if there is no such file.
    """
    wanted = None if order.sample is None else rows_of(order.sample, load_seal(Path(order.dataset)).rows)
    index, windows = open_index(order, lambda _: None, partial=True, rows=None if wanted is None else _spanned(wanted))
    chosen = None if wanted is None or isinstance(wanted, range) else frozenset(wanted)
    rows = 0
    try:
        for window in windows:
            failed = set(window.failed)
            for at, (number, line) in enumerate(zip(window.numbers, window.lines, strict=True)):
                if chosen is not None and number not in chosen:
                    continue
                rows += 1
                if order.is_numbered:
                    line = b"%d\t%s" % (number, line)
                (errors if errors is not None and at in failed else out).write(line)
    finally:
        windows.close()
        index.segments.close()
    return rows


def _spanned(numbers: Sequence[int]) -> range:
    """From the first to the last of some numbers, which ascend."""
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


def partial_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: GatherOrder in, the number of rows out as JSON. Its output is a new file for all rows there are."""
    request = msgspec.json.decode(order, type=GatherOrder)
    with open(request.output, "wb") as out:  # what a child that was killed had written is written over
        return msgspec.json.encode(partial(request, out))


class Tally:
    """The audit: rows come exactly once and in order. Counts those that failed, by cause."""

    def __init__(self, form: Form, rows: int, progress: Progress, *, first: int = 0) -> None:
        """Args: first, rows: the rows first <= n < rows are counted."""
        self._form, self._rows, self._progress = form, rows, progress
        self._first = self._next = first
        self.failed = 0
        self.causes: dict[str, tuple[int, str]] = {}

    def count(self, window: Window) -> None:
        if window.numbers != range(self._next, self._next + len(window.lines)) or None in window.lines:
            raise LedgerBroken(f"the rows after {self._next - 1} do not follow each other")
        self._add(len(window.lines), [window.lines[index] for index in window.failed])

    def count_columns(self, first: int, rows: int, errors: Sequence[bytes]) -> None:
        """Count rows first..first+rows; `errors` are the lines of those that failed."""
        if first != self._next:
            raise LedgerBroken(f"the rows after {self._next - 1} do not follow each other")
        self._add(rows, errors)

    def _add(self, rows: int, errors: Sequence[bytes]) -> None:
        self._next += rows
        self.failed += len(errors)
        for line in errors:
            error = self._form.cause(line)
            code = error.code if error.code in self.causes or len(self.causes) < CAUSES_MAX else OTHER
            rows, sample = self.causes.get(code, (0, error.message))
            self.causes[code] = rows + 1, sample
        self._progress((self._next - self._first) / (self._rows - self._first))

    def finish(self) -> None:
        if self._next != self._rows:
            raise LedgerBroken(f"{self._next} rows written of {self._rows}", code="row_missing")


def _write_lines(order: GatherOrder, windows: Windows, tally: Tally) -> tuple[ResultFile, ResultFile | None]:
    lines = ResultLines(Path(order.output), order.form.errors_apart)
    try:
        for window in windows:
            tally.count(window)
            lines.write_window(window.lines, window.failed)
        tally.finish()
        return lines.publish()
    finally:
        lines.discard()


def _write_table(order: GatherOrder, windows: Windows, tally: Tally) -> tuple[ResultFile, None]:
    source = source_of(Path(order.dataset), order.form, windows)
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
