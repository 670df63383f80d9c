"""The index of a job's results by their requests: sorted digests, and where each result lies: in a segment, or in the
published results once retention removes the segments.

An index is derived: the first lookup in its job writes it, and a later one writes it anew if its bytes are not what was
written. It holds no result. Sorting is done in pieces on disk, so memory does not grow with the rows.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batchmill import faults
from batchmill.checksums import checksum
from batchmill.datasets import layout
from batchmill.datasets.checking.fan_out import validators
from batchmill.datasets.external_sort import ExternalSort
from batchmill.datasets.orders import SourcePart, ValidatedChunk
from batchmill.datasets.request_digests import DIGEST_BYTES, canonical_of, digest_of
from batchmill.datasets.sealed import load_seal
from batchmill.errors import InputChanged, LedgerBroken
from batchmill.jobs.intake.preparation import seal_order
from batchmill.jobs.intake.reuse_orders import (
    INDEX,
    EarlierJob,
    IndexHead,
    Section,
    read_head,
    read_keys,
    sum_of,
    target_keys,
)
from batchmill.jobs.ledger.files import JobFiles, PartFile
from batchmill.jobs.results.row_arrays import RowArrays
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import Block, read_outcomes, read_payload
from batchmill.types import Seal
from batchmill.wire.forms import OpenAIForm, TableForm
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.replies import FLAWS, flaws_of
from batchmill.wire.result_rows import number_in

LOCK = "lock"
WORDS = DIGEST_BYTES // 8
PLACE_WORDS = 4  # offset; file << 32 | length; row << 32 | checksum; when it was made, in seconds since the epoch
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)
SORTED_ROWS = 1024 * 1024  # in memory
READ_BYTES = 4 * 1024 * 1024  # of published results, at once
FILES_OPEN_MAX = 64  # with results of all jobs together


COLUMNS = ("first", "rest", "place")
KINDS = (np.uint64, np.uint16)  # of a digest's words, and of a target


def folder_of(job: EarlierJob) -> Path:
    return JobFiles(Path(job.data_dir), job.spec.id).reuse


class IndexUnsound(LedgerBroken):
    """An index must be written anew, and what it is made of was not sent: the owner had seen one."""


class ResultLines:
    """Reads results from the files of many jobs, of which a bounded number is open. Close it."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Fewer bytes at the end of the file. Raises: OSError."""
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return os.pread(fd, length, offset)
        if len(self._open) >= FILES_OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, length, offset)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class JobIndex:
    """The sound index of one job. It keeps no file open, since a lookup has as many indexes as there are jobs."""

    def __init__(self, job: EarlierJob, keys: Sequence[str]) -> None:
        """Args: keys: of the targets that are looked for.

        Raises: OSError if the job was removed meanwhile; IndexUnsound, LedgerBroken, InputChanged, DatasetDamaged.
        """
        self.job, self._home = job, folder_of(job)
        if not self._home.parent.is_dir():
            raise FileNotFoundError(f"the job {job.spec.id} is gone")
        with locked(self._home):
            head = read_head(self._home, job.spec.id, job.generation)
            if head is None or not _is_sound(self._home, head, keys):
                head = build(job)
        self._head = head
        self._sections = {section.key: section for section in head.sections if section.key in keys}

    def _columns(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Those of a target; None if the job was removed, or its index written anew, since this one was checked."""
        section = self._sections[key]
        try:
            with locked(self._home):
                if read_head(self._home, self.job.spec.id, self.job.generation) != self._head:
                    return None
                first, rest, place = (
                    np.memmap(self._home / f"{section.number}.{name}", np.uint64, "r") for name in COLUMNS
                )  # fmt: skip
        except OSError:
            return None
        return first, rest.reshape(-1, WORDS - 1), place.reshape(-1, PLACE_WORDS)

    def find(self, key: str, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some digests [n, 4] have a result, and the places [found, 4] of these results."""
        columns = self._columns(key) if key in self._sections and len(digests) else None
        if columns is None:
            return np.empty(0, np.int64), np.empty((0, PLACE_WORDS), np.uint64)
        first, rest, place = columns
        order = np.argsort(digests[:, 0])  # so that the index is read from its beginning to its end
        wanted = digests[order]
        at = np.searchsorted(first, wanted[:, 0])
        is_inside = at < len(first)
        at, wanted, order = at[is_inside], wanted[is_inside], order[is_inside]
        is_same = first[at] == wanted[:, 0]
        at, wanted, order = at[is_same], wanted[is_same], order[is_same]
        is_whole = np.all(rest[at] == wanted[:, 1:], axis=1)
        for number in np.flatnonzero(~is_whole).tolist():  # another digest begins with the same 64 bits
            place_at = _search(first, rest, int(at[number]), wanted[number])
            if place_at is not None:
                at[number], is_whole[number] = place_at, True
        return order[is_whole], np.asarray(place[at[is_whole]])

    def line(self, place: Sequence[int], results: ResultLines) -> bytes | None:
        """The result at a place; None if it is not there any more as it was."""
        offset, where, about, _ = place
        length = where & 0xFFFFFFFF
        try:
            line = results.read(Path(self.job.segments.folder) / self._head.files[where >> 32], offset, length)
        except OSError:
            return None
        return line if len(line) == length and checksum(line) == about & 0xFFFFFFFF else None


def _search(first: np.ndarray, rest: np.ndarray, at: int, wanted: np.ndarray) -> int | None:
    """Where a digest is, from the first that begins like it on."""
    while at < len(first) and first[at] == wanted[0]:
        if np.array_equal(rest[at], wanted[1:]):
            return at
        at += 1
    return None


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """One process at a time writes an index; the kernel releases the lock of one that dies."""
    home.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_sound(home: Path, head: IndexHead, keys: Sequence[str]) -> bool:
    """Whether every byte of these sections is what was written."""
    for section in head.sections:
        if section.key not in keys:
            continue
        for name, expected in zip(COLUMNS, section.sums, strict=True):
            path = home / f"{section.number}.{name}"
            if not path.exists() or sum_of(path) != expected:
                return False
    return True


def build(job: EarlierJob) -> IndexHead:
    """Write the index of a job from its results and its dataset."""
    home, files = folder_of(job), JobFiles(Path(job.data_dir), job.spec.id)
    (home / INDEX).unlink(missing_ok=True)  # first: a kill leaves columns without a head, which nobody reads
    if job.committed is None:  # the owner saw an index, or the segments are gone
        raise IndexUnsound(f"the index of the job {job.spec.id} is damaged")
    with ExitStack() as open_:
        requests = _requests_of(job, files, open_)
        sorts = _Sorts(home, load_seal(files.dataset).rows, open_)
        if job.results:
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
    head = IndexHead(job.spec.id, job.generation, names, sections)
    with PartFile(home / INDEX, 0o600) as file:
        file.write(msgspec.json.encode(head))
        file.publish()
    faults.point("after_reuse_index")
    return head


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
                sort = ExternalSort(self._home, WORDS + PLACE_WORDS, self.rows, piece_rows=SORTED_ROWS)
                self._sorts[key] = self._open.enter_context(sort)
            mine = may_be_taken & (targets == target)
            self._sorts[key].add(*digests[mine].T, *places[mine].T)

    def write(self) -> list[Section]:
        return [_write(self._home, number, key, sort) for number, (key, sort) in enumerate(self._sorts.items())]


def _write(home: Path, number: int, key: str, sort: ExternalSort) -> Section:
    """Write the columns of one target. Of equal requests one result is enough."""
    rows = 0
    last: np.ndarray | None = None
    with ExitStack() as open_:
        files = [open_.enter_context(PartFile(home / f"{number}.{name}", 0o600)) for name in COLUMNS]
        for records in sort.blocks():
            is_new = np.ones(len(records), bool)
            is_new[1:] = np.any(records[1:, :WORDS] != records[:-1, :WORDS], axis=1)
            is_new[0] = last is None or not np.array_equal(last, records[0, :WORDS])
            last = records[-1, :WORDS].copy()
            kept = records[is_new]
            rows += len(kept)
            for file, (lo, hi) in zip(files, ((0, 1), (1, WORDS), (WORDS, WORDS + PLACE_WORDS)), strict=True):
                file.write(np.ascontiguousarray(kept[:, lo:hi]).tobytes())
        for file in files:
            file.publish()
    return Section(key, number, rows, [sum_of(home / f"{number}.{name}") for name in COLUMNS])


Found = tuple[np.ndarray, np.ndarray, list[str]]  # digests [n, 4], targets [n], and the keys of the targets


class StoredRequests(Struct, frozen=True):
    """The digest and the target of each row of a dataset."""

    digests: np.ndarray  # [rows, 4] u64
    targets: np.ndarray  # [rows] u16
    keys: list[str]  # of the targets
    deterministic: list[bool] = []  # of the targets

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Found:
        """Those of results."""
        rows = (places[:, 2] >> HALF).astype(np.int64)
        return self.digests[rows], self.targets[rows], self.keys


class LineRequests:
    """The same from results of a function, which hold the columns of their rows: the input may have changed since."""

    def __init__(self, job: EarlierJob) -> None:
        self._added = frozenset(job.spec.form.reserved)
        self._keys = target_keys(job.spec)

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Found:
        """Those of results."""
        data = b"".join(map(self._digest, lines))
        digests = np.frombuffer(data, np.uint64).reshape(-1, WORDS)
        return digests, np.zeros(len(lines), np.uint16), self._keys

    def _digest(self, line: bytes) -> bytes:
        members = {name: value for name, value in split_object(line).items() if name not in self._added}
        return digest_of("", canonical_of(join_object(members)), is_deterministic=False)


class NoRequests:
    """The same of a job of which nothing can be taken over."""

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Found:
        return np.zeros((len(lines), WORDS), np.uint64), np.zeros(len(lines), np.uint16), [""]


def _requests_of(job: EarlierJob, files: JobFiles, open_: ExitStack) -> StoredRequests | LineRequests | NoRequests:
    """The digests that were written when the dataset was sealed, or new ones."""
    found = read_requests(files.dataset)
    if found is not None:
        return found
    seal, form = load_seal(files.dataset), job.spec.form
    if seal.is_columnar or job.generation or job.spec.routing:  # rows ran with other models than the job has now
        return NoRequests()
    if isinstance(form, TableForm) and not form.makes_requests and len(job.spec.models) == 1:
        return LineRequests(job)
    return _digested(job, files.dataset, seal, open_)


def read_requests(dataset: Path) -> StoredRequests | None:
    """The digests of a dataset; None if it has none, or they are not what was written."""
    keys = read_keys(dataset)
    if keys is None:
        return None
    paths = dataset / layout.REQUESTS, dataset / layout.TARGET
    try:
        if [sum_of(path) for path in paths] != [keys.requests, keys.targets]:
            return None
        digests, targets = (np.memmap(path, kind, "r") for path, kind in zip(paths, KINDS, strict=True))
    except FileNotFoundError:
        return None
    return StoredRequests(digests.reshape(-1, WORDS), targets, keys.keys, keys.deterministic)


def _digested(job: EarlierJob, dataset: Path, seal: Seal, open_: ExitStack) -> StoredRequests:
    """Read and check the rows again for their digests. Raises: InputChanged if they are not those that were sealed."""
    form = OpenAIForm() if seal.format == "openai" else TableForm()
    order = seal_order(job.spec)
    order = replace(order, form=order.form or form, files=seal.files, requests=True, keys=True, fold="none")
    parts = [SourcePart(number, file.path, file.path, 0, 0, file.size_bytes) for number, file in enumerate(seal.files)]
    columns = [open_.enter_context(tempfile.TemporaryFile(dir=folder_of(job))) for _ in KINDS]  # noqa: SIM115
    sums, rows = [], 0
    with validators(order, sum(part.end for part in parts)) as validator:
        for _, chunk in validator.check(parts):
            if isinstance(chunk, ValidatedChunk):
                sums.append(chunk.checksums)
                rows += chunk.rows
                for file, column in zip(columns, (chunk.requests, chunk.keys[0]), strict=True):
                    file.write(column)
    if rows != seal.rows or b"".join(sums) != (dataset / layout.CHECKSUMS).read_bytes():
        raise InputChanged(f"the input of the job {job.spec.id} changed since it was sealed")
    for file in columns:
        file.flush()
    digests, targets = (np.memmap(file, kind, "r") for file, kind in zip(columns, KINDS, strict=True))
    return StoredRequests(digests.reshape(-1, WORDS), targets, target_keys(job.spec))
