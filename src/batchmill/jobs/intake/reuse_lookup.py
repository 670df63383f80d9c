"""Looks the rows of a planned job up among results of earlier jobs, and writes those that are found as a segment.

It runs in a child process. The blocks that it writes are in no commit: the owner adopts them as it adopts those of a
worker that died, so a kill at any point leaves either an outcome of a row or an open row. Rows are handled in windows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from batchmill import faults
from batchmill.datasets.readers import open_rows
from batchmill.datasets.request_digests import DETERMINISTIC_BIT
from batchmill.datasets.sealed import DatasetRows
from batchmill.errors import BatchmillError, DatasetDamaged
from batchmill.jobs.intake.reuse_index import IndexUnsound, JobIndex, build, folder_of, locked
from batchmill.jobs.intake.reuse_orders import ALL, EarlierJob, LookupOrder, Reused
from batchmill.jobs.intake.reuse_requests import StoredRequests, read_requests
from batchmill.jobs.intake.reuse_results import HALF, LOW, ResultFiles
from batchmill.jobs.ledger.plan import ORDER, PlanReader
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.optional import require
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import PatientTerm, term_at
from batchmill.part_files import make_folder
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead, frame
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.json_bytes import encode
from batchmill.wire.rows.forms import TableForm

if TYPE_CHECKING:
    from batchmill.jobs.intake.reuse_media import EarlierMedia

WINDOW_ROWS = 1024 * 1024  # looked up at once, by each child
STRIPE_ROWS = 64 * 1024  # that follow each other, looked up by one child: new rows are often the last ones
READ_ROWS, READ_BYTES = 16 * 1024, 16 * 1024 * 1024  # rows and results in memory, but for one longer result
DENSE = 4  # of rows that are close together, those between are read too
BLOCK_ROWS, BLOCK_BYTES = 1024, 1024 * 1024  # of one block, about
HELD_BYTES_MAX = 64 * 1024 * 1024  # of lines that wait for their block
HELD_BYTES = 1024  # that a block takes besides its lines, about
Key = tuple[int, int]  # of a block: its shard, and when its results were made
WORKER = "reuse{}"  # in the name of a child's segment
IS_LAST_BIT = np.uint64(DETERMINISTIC_BIT << 56)  # of a digest's last word
NO_POSITION = 2**32 - 1


def look_up_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: LookupOrder in, Reused out, both as JSON."""
    request = msgspec.json.decode(order, type=LookupOrder)
    with ExitStack() as open_:
        lookup = _Lookup(request, open_)
        for window in lookup.windows():
            if lookup.unsound:
                return msgspec.json.encode(Reused(0, 0, lookup.skipped, lookup.unsound))
            lookup.take(window)
            progress(window.stop / lookup.rows)
        lookup.finish()
    return msgspec.json.encode(Reused(lookup.found, lookup.runs, lookup.skipped, lookup.unsound))


def keep_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: index the results of an EarlierJob where they stay when its segments are removed."""
    job = msgspec.json.decode(order, type=EarlierJob)
    with locked(folder_of(job)):
        build(job)
    return b""


def keep_small_offloaded(orders: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: index the results of some small EarlierJobs. Returns why it could not be done, of those of which."""
    failed = {}
    for job in msgspec.json.decode(orders, type=list[EarlierJob]):
        try:
            with locked(folder_of(job)):
                build(job)
        except BatchmillError as error:
            failed[job.spec.id] = error.message
        except OSError as error:
            failed[job.spec.id] = str(error)
    return msgspec.json.encode(failed)


class _Lookup:
    def __init__(self, order: LookupOrder, open_: ExitStack) -> None:
        self._order = order
        self._dataset = Path(order.dataset)
        self._plan = PlanReader(Path(order.plan))
        requests = read_requests(self._dataset)
        if requests is None:
            raise DatasetDamaged(f"the digests of the requests in {order.dataset} are not what was written")
        self._requests: StoredRequests = requests
        self.rows, self.found, self.runs = self._plan.plan.rows, 0, 0
        self.skipped: list[str] = []
        self.unsound: list[str] = []  # jobs whose index can be written anew once their commits are known
        self._keys = requests.keys
        takes_all = order.spec.policy.reuse == ALL
        self._takes_all = [takes_all or is_deterministic for is_deterministic in requests.deterministic]
        self._positions = self._positions_of_rows()
        self._indexes = list(self._opened(order.earlier))
        self._results = open_.enter_context(closing(ResultFiles(order.store)))
        form = order.spec.form
        has_media = isinstance(form, TableForm) and bool(form.media)
        self._media = _earlier_media(order.spec) if has_media else None
        self._writer = _Writer(order, self._plan) if order.segments else None

    def windows(self) -> Iterator[range]:
        step = WINDOW_ROWS * self._order.parts
        for start in range(0, self.rows, step):
            yield range(start, min(start + step, self.rows))

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
                self._note_unsound(job, error)
            except (BatchmillError, OSError) as error:
                self.skipped.append(f"the job {job.spec.id}: {error}")

    def _note_unsound(self, job: EarlierJob, error: IndexUnsound) -> None:
        if job.is_reduced:
            self.skipped.append(f"the job {job.spec.id}: {error}")
        else:
            self.unsound.append(job.spec.id)

    def take(self, window: range) -> None:
        """Look up the rows of a window, and write what is found."""
        digests = np.asarray(self._requests.digests[window.start : window.stop])
        targets = self._requests.targets[window.start : window.stop]
        is_wanted = (self._positions[window.start : window.stop] != NO_POSITION) & digests.any(axis=1)
        if self._order.parts > 1:
            stripes = np.arange(window.start, window.stop) // STRIPE_ROWS
            is_wanted &= stripes % self._order.parts == self._order.part
        for number in np.unique(targets).tolist():
            wanted = np.flatnonzero((targets == number) & is_wanted)
            if not self._takes_all[number]:
                wanted = wanted[(digests[wanted, -1] & IS_LAST_BIT) != 0]
            wanted = wanted[np.argsort(digests[wanted, 0])]
            for index in self._indexes:
                if not len(wanted):
                    break
                wanted = self._take_from(index, self._keys[number], wanted, digests, window.start)

    def _take_from(self, index: JobIndex, key: str, wanted: np.ndarray, digests: np.ndarray, start: int) -> np.ndarray:
        """Take what one job has of the wanted rows of a window, and return the others: older jobs may have them."""
        try:
            found, places = index.find(key, digests[wanted])
        except IndexUnsound as error:
            self._note_unsound(index.job, error)
            return wanted
        is_new = places[:, -1] >= np.uint64(max(0, self._order.since))
        found, places, are_gone = found[is_new], places[is_new], False
        if self._writer is not None:
            in_order = np.argsort(wanted[found])
            found, places = found[in_order], places[in_order]
            is_taken = self._write(self._writer, index, wanted[found] + start, places)
            are_gone, found = not is_taken.all(), found[is_taken]
        self.found += len(found)
        left = np.delete(wanted, found)
        if are_gone and index.renew():  # retention has moved the results
            return self._take_from(index, key, left, digests, start)
        return left

    def _write(self, writer: _Writer, index: JobIndex, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Write the results at some places as those of rows, ascending; returns which [n] of them were sound."""
        is_taken = np.zeros(len(numbers), bool)
        source = encode(index.job.spec.id)[:-1] + b'/%d"'
        with closing(open_rows(self._dataset)) as rows:
            for some in _pieces(places):
                lines = self._results.lines(index.paths, places[some])
                is_sound = np.fromiter((line is not None for line in lines), bool, len(lines))
                raws = _read(rows, numbers[some][is_sound].tolist())
                sound = [line for line in lines if line is not None]
                if self._media is not None:
                    is_same = self._media.are_same(sound, raws)
                    is_sound[is_sound] = is_same
                    sound, raws = list(compress(sound, is_same)), list(compress(raws, is_same))
                is_taken[some] = is_sound
                taken, made = numbers[some][is_sound], places[some][is_sound]
                results = self._order.spec.form.take_over(
                    sound,
                    raws,
                    taken.tolist(),
                    [source % row for row in (made[:, 2] >> HALF).tolist()],
                )
                self.runs += int(np.count_nonzero(np.diff(taken) != 1)) + 1
                writer.add(self._positions[taken], taken, results, made[:, 3])
        return is_taken

    def finish(self) -> None:
        self.skipped += self._results.unread()
        self.skipped += [
            f"the job {index.job.spec.id}: {index.damaged} blocks of its index are damaged"
            for index in self._indexes
            if index.damaged
        ]
        if self._media is not None:
            self.skipped += self._media.unasked()
        if self._writer is not None:
            self._writer.close()


def _earlier_media(spec: JobSpec) -> EarlierMedia:
    return require("batchmill.jobs.intake.reuse_media:EarlierMedia", "media")(spec.dataset)


def _pieces(places: np.ndarray) -> Iterator[slice]:
    """Ranges of some places, whose results are in memory together."""
    ends = np.cumsum(places[:, 1] & LOW)
    start = 0
    while start < len(places):
        before = ends[start - 1] if start else np.uint64(0)
        stop = int(np.searchsorted(ends, before + np.uint64(READ_BYTES), "right"))
        stop = min(max(stop, start + 1), start + READ_ROWS)
        yield slice(start, stop)
        start = stop


def _read(rows: DatasetRows, numbers: Sequence[int]) -> list[bytes]:
    """Rows by number, ascending."""
    if not numbers:
        return []
    first, last = numbers[0], numbers[-1] + 1
    if last - first > DENSE * len(numbers):
        return rows.read_many(numbers)
    lines = rows.read(first, last)
    return lines if len(lines) == len(numbers) else [lines[number - first] for number in numbers]


class _Writer:
    """Writes results into blocks of their shards."""

    def __init__(self, order: LookupOrder, plan: PlanReader) -> None:
        spec, folder, worker = order.spec, Path(order.segments), WORKER.format(order.part)
        self._bounds = np.array([shard.lo for shard in plan.shards()], np.uint64)
        owned = OwnedFiles(PatientTerm(term_at(order.term)))
        owned.remove(*folder.glob(f"{worker}-*.seg"))  # of an attempt that was killed: nothing of it was adopted
        make_folder(folder)
        self._file = SegmentFile(folder, SegmentHead(spec.id, spec.identity, worker))
        self._held: defaultdict[Key, BlockRows] = defaultdict(lambda: BlockRows([], [], []))
        self._bytes: defaultdict[Key, int] = defaultdict(int)
        self._held_bytes = 0  # of all blocks

    def add(self, positions: np.ndarray, rows: np.ndarray, lines: Sequence[bytes], made: np.ndarray) -> None:
        """Args: positions, rows, made: [n] of each line; made: when, in seconds since the epoch."""
        if not len(rows):
            return
        shards = np.searchsorted(self._bounds, positions.astype(np.uint64), "right") - 1
        is_other = np.flatnonzero((shards[1:] != shards[:-1]) | (made[1:] != made[:-1])) + 1
        bounds = [0, *is_other.tolist(), len(rows)]
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            key = int(shards[start]), int(made[start])
            for first in range(start, stop, BLOCK_ROWS):
                some = slice(first, min(first + BLOCK_ROWS, stop))
                self._hold(key, BlockRows(positions[some].tolist(), rows[some].tolist(), list(lines[some])))

    def _hold(self, key: Key, some: BlockRows) -> None:
        if key in self._held and len(self._held[key].rows) + len(some.rows) > BLOCK_ROWS:
            self._flush(key)
        size = sum(map(len, some.lines))
        self._held_bytes += size + (0 if key in self._held else HELD_BYTES)
        held = self._held[key]
        held.positions += some.positions
        held.rows += some.rows
        held.lines += some.lines
        self._bytes[key] += size
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
