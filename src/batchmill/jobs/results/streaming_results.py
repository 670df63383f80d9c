"""Writes results while the job runs: copies committed blocks as long as rows follow without a gap.

For plans in file order (`results.can_stream`); every other job is gathered when it has ended. No numpy: it lives in
the owner, on a thread of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

from batchmill.errors import LedgerBroken
from batchmill.jobs.results.result_lines import ResultLines
from batchmill.jobs.results.results import Manifest
from batchmill.part_files import HeldFile
from batchmill.ports.storage import SegmentSource
from batchmill.store.segments.format import Block, read_outcomes, read_payload, where
from batchmill.types import SegmentRef
from batchmill.wire.rows.forms import Form

Run = tuple[int, int, int, int]  # first row, rows, and where their lines start and end in the payload


class StreamingGather:
    """Writes OUTPUT.part and its error file, row after row; `finish` publishes them.

    A job that is resumed begins anew: offer every committed range again.

    Concurrency: any thread; one call waits for another.
    """

    def __init__(
        self, segments: SegmentSource, output: Path, form: Form, rows: int, *, held: list[HeldFile] | None = None
    ) -> None:  # fmt: skip
        """Args: segments: closed with this object. held: as of `ResultLines`."""
        self.rows = rows
        self.written = 0  # rows 0..written-1 are in the files
        self._segments = segments
        self._lines = ResultLines(output, form.errors_apart, held=held)
        self._waiting: list[tuple[int, int, _Pending]] = []  # a heap by the next row of each block
        self._offered = 0
        self._causes: dict[str, tuple[int, str]] = {}
        self._discarded = False
        self._lock = Lock()

    def offer(self, refs: Iterable[SegmentRef]) -> None:
        """Take committed ranges over, in any order, each once, and write what can be written; nothing once discarded.

        Raises: LedgerBroken when a range is damaged or a row has two outcomes. StorageFull.
        """
        with self._lock:
            if self._discarded:
                return
            for ref in refs:
                for block in read_outcomes(self._segments, ref):
                    self._take(block)
            self._advance()
            self._lines.flush()  # who reads the results while the job runs sees them now

    def finish(self) -> Manifest:
        """Publish. Raises: LedgerBroken unless exactly the rows 0..N-1 were written."""
        with self._lock:
            assert not self._discarded, "results that were discarded are not published"
            if self.written != self.rows or self._waiting:
                raise LedgerBroken(
                    f"{self.written} of {self.rows} rows could be written to {self._lines.output}: row {self.written} "
                    "has no outcome",
                    code="row_missing",
                )
            output, errors = self._lines.publish()
        return Manifest(
            output, errors, rows=self.rows, ok=self._lines.ok, failed=self._lines.failed, causes=self._causes
        )

    def discard(self) -> None:
        """Remove unpublished files. Safe to call twice."""
        with self._lock:
            self._discarded = True
            self._segments.close()
            self._lines.discard()

    def _take(self, block: Block) -> None:
        pending = _Pending(block)
        rows = block.rows()
        if block.table is None:
            first, last, in_place = block.row, block.row + block.n - 1, block.row == block.position
        else:
            first, last, in_place = min(rows), max(rows), list(block.positions()) == list(rows)
        if not in_place:
            raise LedgerBroken(f"{where(self._segments, block)}: rows are not where the plan, in file order, has them")
        if last >= self.rows:
            raise LedgerBroken(f"{where(self._segments, block)}: row {last} of a dataset of {self.rows}")
        self._offered += 1
        heapq.heappush(self._waiting, (first, self._offered, pending))
        for code, count in block.meta.errors.items():
            before, sample = self._causes.get(code, (0, block.meta.samples.get(code, "")))
            self._causes[code] = before + count, sample

    def _advance(self) -> None:
        """Write rows as long as the next one is available."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.written:
            row, number, pending = waiting[0]
            if row < self.written:
                raise LedgerBroken(f"{where(self._segments, pending.block)}: row {row} has two outcomes")
            _, count, start, end = pending.next_run(self._segments)
            self._lines.write(pending.payload[start:end], count, ok=pending.block.ok)
            self.written += count
            if pending.runs:
                heapq.heapreplace(waiting, (pending.runs[-1][0], number, pending))
            else:
                heapq.heappop(waiting)


class _Pending:
    """A block that waits to be written. Its payload is read when its first row is due."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.payload = memoryview(b"")
        self.runs: list[Run] = []  # not yet written, the next one last
        self._opened = False

    def next_run(self, segments: SegmentSource) -> Run:
        if not self._opened:
            self._opened = True
            data = read_payload(segments, self.block)
            self.payload = memoryview(data)
            self.runs = _runs_of(self.block, data, where(segments, self.block))[::-1]
        return self.runs.pop()


def _runs_of(block: Block, payload: bytes, place: str) -> list[Run]:
    """The rows of a block in row order, grouped where both numbers and lines are consecutive."""
    lengths = block.line_lengths()
    if lengths is None:
        if (lines := payload.count(b"\n")) != block.n:
            raise LedgerBroken(f"{place}: {lines} lines for {block.n} rows")
        return [(block.row, block.n, 0, len(payload))]
    rows = block.rows()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    if starts[-1] != len(payload):
        raise LedgerBroken(f"{place}: lines of {starts[-1]} bytes in a payload of {len(payload)}")
    runs: list[Run] = []
    for index in _in_row_order(rows):
        row, start, end = rows[index], starts[index], starts[index + 1]
        if runs and runs[-1][0] + runs[-1][1] == row and runs[-1][3] == start:
            first, count, begin, _ = runs[-1]
            runs[-1] = (first, count + 1, begin, end)
        else:
            runs.append((row, 1, start, end))
    return runs


def _in_row_order(rows: Sequence[int]) -> Sequence[int]:
    return sorted(range(len(rows)), key=rows.__getitem__)
