"""Looks the rows of a planned job up among results of earlier jobs, and writes those that are found as a segment.

It runs in a child process. The blocks that it writes are in no commit: the owner adopts them as it adopts those of a
worker that died, so a kill at any point leaves either an outcome of a row or an open row. Rows are handled in windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np

from batchmill import faults
from batchmill.datasets.readers import open_rows
from batchmill.datasets.request_digests import DETERMINISTIC_BIT
from batchmill.datasets.sealed import DatasetRows
from batchmill.errors import BatchmillError, DatasetDamaged
from batchmill.jobs.intake.reuse_index import (
    PLACE_WORDS,
    IndexUnsound,
    JobIndex,
    ResultLines,
    StoredRequests,
    build,
    folder_of,
    locked,
    read_requests,
)
from batchmill.jobs.intake.reuse_orders import ALL, EarlierJob, LookupOrder, Reused
from batchmill.jobs.ledger.plan import ORDER, PlanReader
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead, frame
from batchmill.types import Row
from batchmill.wire.job_spec import JobSpec

WINDOW_ROWS = 1024 * 1024  # looked up at once
READ_ROWS = 4096  # read at once
DENSE = 4  # of rows that are close together, those between are read too
BLOCK_ROWS, BLOCK_BYTES = 1024, 1024 * 1024  # of one block, about
HELD_BYTES_MAX = 64 * 1024 * 1024  # of lines that wait for their block
HELD_BYTES = 1024  # that a block takes besides its lines, about
Key = tuple[int, int]  # of a block: its shard, and when its results were made
WORKER = "reuse"  # in the name of the segment
IS_LAST_BIT = np.uint64(DETERMINISTIC_BIT << 56)  # of a digest's last word
NO_POSITION = 2**32 - 1


def look_up_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: LookupOrder in, Reused out, both as JSON."""
    request = msgspec.json.decode(order, type=LookupOrder)
    with ExitStack() as open_:
        lookup = _Lookup(request, open_)
        if lookup.unsound:
            return msgspec.json.encode(Reused(0, lookup.skipped, lookup.unsound))
        for window in lookup.windows():
            lookup.take(window)
            progress(window.stop / lookup.rows)
        lookup.finish()
    return msgspec.json.encode(Reused(lookup.found, lookup.skipped))


def index_published_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: index the published results of an EarlierJob, whose segments will be removed."""
    job = msgspec.json.decode(order, type=EarlierJob)
    with locked(folder_of(job)):
        build(job)
    return b""


class _Lookup:
    def __init__(self, order: LookupOrder, open_: ExitStack) -> None:
        self._order = order
        self._dataset = Path(order.dataset)
        self._plan = PlanReader(Path(order.plan))
        requests = read_requests(self._dataset)
        if requests is None:
            raise DatasetDamaged(f"the digests of the requests in {order.dataset} are not what was written")
        self._requests: StoredRequests = requests
        self.rows, self.found = self._plan.plan.rows, 0
        self.skipped: list[str] = []
        self.unsound: list[str] = []  # jobs whose index can be written anew once their commits are known
        self._keys = requests.keys
        takes_all = order.spec.policy.reuse == ALL
        self._takes_all = [takes_all or is_deterministic for is_deterministic in requests.deterministic]
        self._positions = self._positions_of_rows()
        self._indexes = list(self._opened(order.earlier))
        self._results = open_.enter_context(closing(ResultLines()))
        self._writer = _Writer(order.spec, self._plan, Path(order.segments)) if order.segments else None

    def windows(self) -> Iterator[range]:
        for start in range(0, self.rows, WINDOW_ROWS):
            yield range(start, min(start + WINDOW_ROWS, self.rows))

    def _positions_of_rows(self) -> np.ndarray:
        """The position of each row that runs; NO_POSITION of others."""
        arrays = RowArrays(Path(self._order.plan), self.rows)
        positions = arrays.full(np.uint32, NO_POSITION)
        if not self._plan.plan.permuted:
            positions[: self._plan.leaders] = np.arange(self._plan.leaders, dtype=np.uint32)
            return positions
        planned = np.memmap(self._plan.home / ORDER, np.uint32, "r") if self._plan.leaders else []
        for start in range(0, self._plan.leaders, WINDOW_ROWS):
            some = planned[start : start + WINDOW_ROWS]
            positions[some] = np.arange(start, start + len(some), dtype=np.uint32)
            arrays.touch(len(some))
        return positions

    def _opened(self, earlier: Sequence[EarlierJob]) -> Iterator[JobIndex]:
        """The indexes of earlier jobs. One that cannot be read is left out: its rows run again."""
        for job in earlier:
            try:
                yield JobIndex(job, self._keys)
            except IndexUnsound as error:
                if job.is_reduced:
                    self.skipped.append(f"{job.spec.id}: {error}")
                else:
                    self.unsound.append(job.spec.id)
            except (BatchmillError, OSError) as error:
                self.skipped.append(f"{job.spec.id}: {error}")

    def take(self, window: range) -> None:
        """Look up the rows of a window, and write what is found."""
        digests, where = self._requests.digests[window.start : window.stop], np.full(len(window), -1, np.int32)
        places = np.zeros((len(window), PLACE_WORDS), np.uint64)
        positions = self._positions[window.start : window.stop]
        target = self._requests.targets[window.start : window.stop]
        for number in np.unique(target).tolist():
            wanted = np.flatnonzero((target == number) & (positions != NO_POSITION) & digests.any(axis=1))
            if not self._takes_all[number]:
                wanted = wanted[(digests[wanted, -1] & IS_LAST_BIT) != 0]
            for at, index in enumerate(self._indexes):
                if not len(wanted):
                    break
                found, found_places = index.find(self._keys[number], digests[wanted])
                is_new = found_places[:, -1] >= np.uint64(max(0, self._order.since))
                found, found_places = found[is_new], found_places[is_new]
                where[wanted[found]], places[wanted[found]] = at, found_places
                wanted = np.delete(wanted, found)
        found = np.flatnonzero(where >= 0)
        if self._writer is None:
            self.found += len(found)
        else:
            self._write(self._writer, window.start, found, where, places)

    def _write(self, writer: _Writer, start: int, found: np.ndarray, where: np.ndarray, places: np.ndarray) -> None:
        """Args: found: indexes in the window, which begins at row `start`, of rows whose results are at `places`."""
        form = self._order.spec.form
        with closing(open_rows(self._dataset)) as rows:
            for first in range(0, len(found), READ_ROWS):
                some = found[first : first + READ_ROWS]
                raws = _read(rows, (some + start).tolist())
                about = zip(some.tolist(), where[some].tolist(), places[some].tolist(), raws, strict=True)
                for at, number, place, raw in about:
                    index = self._indexes[number]
                    result = index.line(place, self._results)
                    if result is None:
                        continue  # it is damaged, or was removed: the row runs
                    position, row = int(self._positions[start + at]), start + at
                    source = b'"%b/%d"' % (index.job.spec.id.encode(), place[2] >> 32)
                    line = form.take_over(result, Row(position, row, raw, form), source)
                    writer.add(position, row, line, place[3])
                    self.found += 1

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _read(rows: DatasetRows, numbers: Sequence[int]) -> list[bytes]:
    """Rows by number, ascending."""
    first, last = numbers[0], numbers[-1] + 1
    if last - first > DENSE * len(numbers):
        return rows.read_many(numbers)
    lines = rows.read(first, last)
    return [lines[number - first] for number in numbers]


class _Writer:
    """Writes results into blocks of their shards."""

    def __init__(self, spec: JobSpec, plan: PlanReader, folder: Path) -> None:
        self._shards = plan.shards()
        self._bounds = [shard.lo for shard in self._shards]
        for path in folder.glob(f"{WORKER}-*.seg"):  # of an attempt that was killed: nothing of it was adopted
            path.unlink()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = SegmentFile(folder, SegmentHead(spec.id, spec.identity, WORKER))
        self._held: defaultdict[Key, BlockRows] = defaultdict(lambda: BlockRows([], [], []))
        self._bytes: defaultdict[Key, int] = defaultdict(int)
        self._held_bytes = 0  # of all blocks

    def add(self, position: int, row: int, line: bytes, made: int) -> None:
        """Args: made: when, in seconds since the epoch."""
        key = bisect_right(self._bounds, position) - 1, made
        self._held_bytes += len(line) + (0 if key in self._held else HELD_BYTES)
        held = self._held[key]
        held.positions.append(position)
        held.rows.append(row)
        held.lines.append(line)
        self._bytes[key] += len(line)
        if len(held.rows) >= BLOCK_ROWS or self._bytes[key] >= BLOCK_BYTES:
            self._flush(key)
        elif self._held_bytes > HELD_BYTES_MAX:
            self._flush_all()

    def _flush(self, key: Key) -> None:
        (shard, made), held = key, self._held.pop(key)
        self._held_bytes -= self._bytes.pop(key) + HELD_BYTES
        meta = BlockMeta(reused=len(held.rows), reused_at=made)
        self._file.append(frame(held, generation=0, shard=shard, epoch=0, ok=True, meta=meta))
        faults.point("in_reuse_segment")

    def _flush_all(self) -> None:
        for key in list(self._held):
            self._flush(key)

    def close(self) -> None:
        """Write the rest and make everything durable."""
        self._flush_all()
        self._file.close()
