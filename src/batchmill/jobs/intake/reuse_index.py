"""The index of a job's results by their requests: where the result of each lies. That is a segment; once retention
removes the segments, the published results, or a copy beside the index of what rows may take over.

An index is derived: the first lookup in its job writes it, and a later one writes it anew if its bytes are not what was
written. Sorting is done in pieces on disk, so memory does not grow with the rows.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Struct

from batchmill import faults
from batchmill.checksums import checksum
from batchmill.datasets.external_sort import ExternalSort
from batchmill.datasets.sealed import load_seal
from batchmill.errors import LedgerBroken
from batchmill.jobs.intake.reuse_orders import (
    INDEX,
    RESULTS,
    VERSION,
    EarlierJob,
    IndexHead,
    Section,
    read_head,
    write_head,
)
from batchmill.jobs.intake.reuse_requests import requests_of
from batchmill.jobs.intake.reuse_results import HALF, LOW
from batchmill.jobs.intake.reuse_sections import (
    PLACE_WORDS,
    RECORD_WORDS,
    Damaged,
    Found,
    SectionFiles,
    write_section,
)
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import PatientTerm, term_at
from batchmill.part_files import make_folder
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import Block, read_outcomes, read_payload
from batchmill.wire.replies import FLAWS, flaws_of
from batchmill.wire.rows.forms import OpenAIForm
from batchmill.wire.rows.result_rows import number_in

LOCK = "lock"
SORTED_ROWS = 1024 * 1024  # in memory
READ_BYTES = 4 * 1024 * 1024  # of published results, at once


def folder_of(job: EarlierJob) -> Path:
    return JobFiles(Path(job.data_dir), job.spec.id).reuse


class IndexUnsound(LedgerBroken):
    """An index must be written anew, and what it is made of was not sent: the owner had seen one."""


class JobIndex:
    """The index of one job. It keeps no file open, since a lookup has as many indexes as there are jobs."""

    def __init__(self, job: EarlierJob, keys: Sequence[str]) -> None:
        """Args: keys: of the targets that are looked for.

        Raises: OSError if the job was removed meanwhile; IndexUnsound, LedgerBroken, InputChanged, DatasetDamaged.
        """
        self.job, self._home = job, folder_of(job)
        if not self._home.parent.is_dir():
            raise FileNotFoundError(f"the job {job.spec.id} is gone")
        with locked(self._home):
            head = read_head(self._home, job.spec.id, job.generation) or build(job)
        self._keys = keys
        self.damaged = 0  # blocks of records that were left out
        self._use(head)

    def _use(self, head: IndexHead) -> None:
        self._head = head
        self._sections = {section.key: section for section in head.sections if section.key in self._keys}
        folders = {RESULTS: self._home}
        # The files that places name by number. A published file has an absolute path.
        self.paths = [folders.get(name, Path(self.job.segments.folder)) / name for name in head.files]

    def renew(self) -> bool:
        """Whether the index was written anew since it was opened: it is read as it is now."""
        try:
            with locked(self._home):
                head = read_head(self._home, self.job.spec.id, self.job.generation)
        except OSError:
            return False
        if head is None or head == self._head:
            return False
        self._use(head)
        return True

    def find(self, key: str, digests: np.ndarray) -> Found:
        """Which of some digests [n, 4], in order of their first words, have a result, and its place [found, 4].

        Raises: IndexUnsound if bytes of it are not what was written.
        """
        files = self._opened(key) if key in self._sections and len(digests) else None
        if files is None:
            return np.empty(0, np.int64), np.empty((0, PLACE_WORDS), np.uint64)
        with closing(files):
            try:
                return files.find(digests)
            except Damaged:
                raise self._unsound() from None
            finally:
                self.damaged += files.damaged

    def _opened(self, key: str) -> SectionFiles | None:
        """The records of a target; None if the job was removed meanwhile."""
        try:
            with locked(self._home):
                head = read_head(self._home, self.job.spec.id, self.job.generation)
                if head is not None and head != self._head:
                    self._use(head)  # it was written anew, by retention perhaps
                if head is None or key not in self._sections:
                    return None
                return SectionFiles(self._home, self._sections[key], is_partial=self.job.is_reduced)
        except OSError:
            return None
        except Damaged:
            raise self._unsound() from None

    def _unsound(self) -> IndexUnsound:
        """Give up the index: who looks next writes it anew, from the segments."""
        if not self.job.is_reduced:
            with locked(self._home):
                if read_head(self._home, self.job.spec.id, self.job.generation) == self._head:
                    _owned_by(self.job).remove(self._home / INDEX)
        return IndexUnsound(f"the index of the job {self.job.spec.id} is damaged")


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """One process at a time writes an index; the kernel releases the lock of one that dies."""
    make_folder(home)
    fd = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def build(job: EarlierJob) -> IndexHead:
    """Write the index of a job from its results and its dataset."""
    home, files = folder_of(job), JobFiles(Path(job.data_dir), job.spec.id, Path(job.scratch) if job.scratch else None)
    owned = _owned_by(job)
    owned.remove(home / INDEX)  # first: a kill leaves columns without a head, which nobody reads
    if job.committed is None:  # the owner saw an index, or the segments are gone
        raise IndexUnsound(f"the index of the job {job.spec.id} is damaged")
    with ExitStack() as open_:
        requests = requests_of(job, files, open_)
        sorts = _Sorts(home, load_seal(files.dataset).rows, open_)
        if job.results == RESULTS:
            names = [RESULTS]
            with owned.part(home / RESULTS) as copies:
                for block, lines in _blocks(job, []):
                    places = _places(job, block, lines, 0)
                    digests, targets, keys = requests.of(lines, places)
                    is_known = digests.any(axis=1) & np.array([bool(key) for key in keys])[targets]
                    places[~is_known] = 0
                    sorts.add(digests, targets, keys, _copied(job, lines, places, copies))
                copies.publish()
        elif job.results:
            names = [job.results]
            published = _Published(job, sorts.rows, home)
            for block, lines in _blocks(job, []):
                published.note(block, lines)
            for lines, places in published.places():
                sorts.add(*requests.of(lines, places), places)
        else:
            names = []
            for block, lines in _blocks(job, names):
                places = _places(job, block, lines, names.index(block.segment))
                sorts.add(*requests.of(lines, places), places)
        sections = sorts.write()
    faults.point("in_reuse_index")
    head = IndexHead(VERSION, job.spec.id, job.generation, names, sections)
    write_head(home, head, owned)
    faults.point("after_reuse_index")
    return head


class _Copies(Protocol):
    """A file that results are copied to."""

    size_bytes: int

    def write(self, data: bytes, /) -> int: ...


def _owned_by(job: EarlierJob) -> OwnedFiles:
    return OwnedFiles(PatientTerm(term_at(job.term)))


def _blocks(job: EarlierJob, names: list[str]) -> Iterator[tuple[Block, list[bytes]]]:
    """The blocks of results that may be taken over, with their lines. Args: names: gets the names of their segments."""
    with closing(open_segments(job.segments)) as segments:
        for ref in job.committed or ():
            for block in read_outcomes(segments, ref):
                if not block.ok or block.generation or block.is_columnar:
                    continue
                if block.segment not in names:
                    names.append(block.segment)
                payload, lengths = read_payload(segments, block), block.line_lengths()
                lines = payload.splitlines(keepends=True) if lengths is None else _cut(payload, lengths)
                if len(lines) != block.n:
                    raise LedgerBroken(f"a block of {block.n} rows of the job {job.spec.id} has {len(lines)} lines")
                yield block, lines


def _places(job: EarlierJob, block: Block, lines: Sequence[bytes], file: int) -> np.ndarray:
    """The place [n, 4] of each result of a block; zeros for one whose reply has a flaw."""
    sizes = np.fromiter(map(len, lines), np.uint64, block.n)
    offsets = np.cumsum(sizes) - sizes + np.uint64(block.payload_offset)
    places = np.empty((block.n, PLACE_WORDS), np.uint64)
    places[:, 0], places[:, 1] = offsets, np.uint64(file) << HALF | sizes
    places[:, 2] = np.asarray(block.rows(), np.uint64) << HALF | np.fromiter(map(checksum, lines), np.uint64, block.n)
    places[:, 3] = block.meta.reused_at or int(job.finished)
    if block.meta.warnings:
        places[np.fromiter(map(_is_flawed, lines), bool, block.n)] = 0
    return places


def _copied(job: EarlierJob, lines: Sequence[bytes], places: np.ndarray, file: _Copies) -> np.ndarray:
    """Write what rows may take over of some results; returns the places [n, 4] of that, zeros as in `places`."""
    may_be_taken = np.flatnonzero(places[:, 3])
    copies = job.spec.form.cut_down([lines[number] for number in may_be_taken.tolist()])
    sizes = np.fromiter(map(len, copies), np.uint64, len(copies))
    copied = np.zeros_like(places)
    copied[may_be_taken, 0] = np.cumsum(sizes) - sizes + np.uint64(file.size_bytes)
    copied[may_be_taken, 1] = sizes
    sums = np.fromiter(map(checksum, copies), np.uint64, len(copies))
    copied[may_be_taken, 2] = places[may_be_taken, 2] & ~LOW | sums
    copied[may_be_taken, 3] = places[may_be_taken, 3]
    file.write(b"".join(copies))
    return copied


class _Published:
    """The results of a job in its published file. A line counts only if a segment has it, too."""

    def __init__(self, job: EarlierJob, rows: int, home: Path) -> None:
        self._job = job
        arrays = RowArrays(home, rows)
        self._sums, self._times = arrays.full(np.uint32, 0), arrays.full(np.uint32, 0)

    def note(self, block: Block, lines: Sequence[bytes]) -> None:
        """Note results of a segment."""
        places = _places(self._job, block, lines, 0)
        places = places[places[:, 3] != 0]
        rows = (places[:, 2] >> HALF).astype(np.int64)
        self._sums[rows], self._times[rows] = (places[:, 2] & LOW).astype(np.uint32), places[:, 3].astype(np.uint32)

    def places(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Lines of the file, and the place [n, 4] of each."""
        is_openai = isinstance(self._job.spec.form, OpenAIForm)
        offset = number = 0
        with open(self._job.results, "rb") as file:
            while lines := file.readlines(READ_BYTES):
                kept, places = [], []
                for line in lines:
                    row = number_in(line) if is_openai else number
                    number += 1
                    total = checksum(line)
                    if row < len(self._sums) and self._times[row] and self._sums[row] == total:
                        kept.append(line)
                        places.append((offset, len(line), row << 32 | total, int(self._times[row])))
                    offset += len(line)
                if kept:
                    yield kept, np.array(places, np.uint64)


class _Response(Struct, frozen=True, gc=False):
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Line(Struct, gc=False):
    """What of a result says whether its reply has a flaw: a column of a table, or the reply itself."""

    warnings: str = ""
    response: _Response = _Response()


_line = msgspec.json.Decoder(_Line)


def _is_flawed(line: bytes) -> bool:
    found = _line.decode(line)
    return not FLAWS.keys().isdisjoint(found.warnings.split(",")) or bool(flaws_of(bytes(found.response.body)))


def _cut(payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    ends = np.cumsum(np.asarray(lengths, np.int64)).tolist()
    return [payload[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class _Sorts:
    """The results of each target, sorted by their requests."""

    def __init__(self, home: Path, rows: int, open_: ExitStack) -> None:
        self.rows = rows
        self._home, self._open = home, open_
        self._sorts: dict[str, ExternalSort] = {}

    def add(self, digests: np.ndarray, targets: np.ndarray, keys: Sequence[str], places: np.ndarray) -> None:
        """Args: digests [n, 4], targets [n], places [n, 4]: of n results."""
        may_be_taken = digests.any(axis=1) & (places[:, 3] != 0)
        for target in np.unique(targets[may_be_taken]).tolist():
            key = keys[target]
            if not key:
                continue
            if key not in self._sorts:
                sort = ExternalSort(self._home, RECORD_WORDS, self.rows, piece_rows=SORTED_ROWS)
                self._sorts[key] = self._open.enter_context(sort)
            mine = may_be_taken & (targets == target)
            self._sorts[key].add(*digests[mine].T, *places[mine].T)

    def write(self) -> list[Section]:
        return [
            write_section(self._home, number, key, sort.blocks())
            for number, (key, sort) in enumerate(self._sorts.items())
        ]
