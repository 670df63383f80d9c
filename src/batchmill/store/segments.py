"""Segments: append-only files of outcomes, in checksummed blocks that describe themselves.

A segment belongs to one job and one worker. A block holds finished output lines of one shard, all ok or all errors; or
the results of rows that succeeded as columns.
Nothing here decides which blocks count: that is the ledger's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct as Layout
from typing import NamedTuple

import msgspec
from msgspec import Struct

from batchmill.checksums import checksum, checksum_of
from batchmill.errors import LedgerBroken
from batchmill.types import RowError, SegmentRef, Usage

assert sys.byteorder == "little", "segments are written in the machine's own order, which must be little endian"

FILE_MAGIC = b"BMSEG\x00\x00\x01"
BLOCK_MAGIC = b"BMBK"
VERSION = 1
IS_ERROR, IS_CONTIGUOUS, IS_COLUMNAR = 1, 2, 4
SEGMENT_BYTES_MAX = 128 * 1024 * 1024  # a worker begins another file beyond this
FILE_HEAD_BYTES_MAX = 64 * 1024
SEARCH_BYTES = 1024 * 1024  # read at a time while searching for a valid header

SEGMENTS_OPEN_MAX = 64  # by one reader

Span = tuple[int, int]  # first byte, and the one after the last

_FILE = Layout("<8sII")  # magic, length of the description, its checksum
# magic, version, flags, generation, shard, epoch, position, row, n, payload, table, meta, checksum of these three |
# checksum of the header
_HEAD = Layout("<4sHHIIIQQIIIII")
_CHECKSUM = Layout("<I")
HEADER_BYTES = _HEAD.size + _CHECKSUM.size


class SegmentHead(Struct, frozen=True):
    """The owner of a segment: job and worker."""

    job: str
    identity: str
    worker: str


class BlockMeta(Struct, frozen=True, omit_defaults=True):
    """Sums over a block that a rebuild of the ledger needs."""

    usage: Usage = Usage()
    errors: dict[str, int] = {}
    samples: dict[str, str] = {}  # error code -> one message
    hidden: list[int] = []  # of columns: where the payload had BLOCK_MAGIC; its first byte is 0 there


class Block(Struct, frozen=True):
    """A block as described by its header. `table` is None if rows and positions are consecutive."""

    path: str
    offset: int
    length: int  # header included
    generation: int
    shard: int
    epoch: int
    position: int  # of the first row; the others are in the table
    row: int
    n: int
    ok: bool
    payload_offset: int  # in the file
    payload_bytes: int
    table: bytes | None
    meta: BlockMeta
    is_columnar: bool = False  # the payload is an Arrow stream, not lines

    def positions(self) -> Sequence[int]:
        """Plan position of every row, in the order of the payload's lines."""
        if self.table is None:
            return range(self.position, self.position + self.n)
        return [self.position + delta for delta in self._column(0)]

    def rows(self) -> Sequence[int]:
        """Number of every row, in the order of the payload's lines."""
        return range(self.row, self.row + self.n) if self.table is None else self._column(1)

    def line_lengths(self) -> Sequence[int] | None:
        """Bytes of every line, or None for a block without a table: split its payload."""
        return None if self.table is None or self.is_columnar else self._column(2)

    def restored(self, payload: bytes) -> bytes:
        """The payload as it was before `frame_columns` hid something in it."""
        if not self.meta.hidden:
            return payload
        data = bytearray(payload)
        for place in self.meta.hidden:
            data[place] = BLOCK_MAGIC[0]
        return bytes(data)

    def _column(self, k: int) -> array:
        assert self.table is not None
        column = array("I")
        column.frombytes(self.table[4 * self.n * k : 4 * self.n * (k + 1)])
        return column


class BlockRows(Struct):
    """The lines for one block: three parallel lists."""

    positions: list[int]
    rows: list[int]
    lines: list[bytes]


_meta_encoder = msgspec.json.Encoder()
_meta_decoder = msgspec.json.Decoder(BlockMeta)


def frame(part: BlockRows, *, generation: int, shard: int, epoch: int, ok: bool, meta: BlockMeta) -> bytes:
    """Encode a block. Rows may be in any order; each line ends with its newline."""
    lengths = array("I", map(len, part.lines))
    return frame_lines(
        b"".join(part.lines), lengths, part.positions, part.rows,
        generation=generation, shard=shard, epoch=epoch, ok=ok, meta=meta,
    )  # fmt: skip


def frame_lines(
    payload: bytes | memoryview, lengths: Sequence[int] | None, positions: Sequence[int], rows: Sequence[int], *,
    generation: int, shard: int, epoch: int, ok: bool, meta: BlockMeta,
) -> bytes:  # fmt: skip
    """As `frame`, for joined lines. Ranges of positions and rows need no lengths, and cost nothing for each row."""
    assert lengths is None or len(lengths) == len(rows), "every row has its line"
    assert lengths is not None or (_runs_on(positions) and _runs_on(rows)), "rows that do not run on need lengths"
    flags = 0 if ok else IS_ERROR
    return _frame(payload, lengths, positions, rows, (generation, shard, epoch), flags, meta)


def frame_columns(
    payload: bytes, positions: Sequence[int], rows: Sequence[int], *, generation: int, shard: int, epoch: int,
    meta: BlockMeta,
) -> bytes:  # fmt: skip
    """As `frame`, for results of rows that succeeded as an Arrow stream. What looks like a header in it is hidden."""
    payload, hidden = _hide_magic(payload)
    meta = msgspec.structs.replace(meta, hidden=hidden)
    return _frame(payload, [0] * len(rows), positions, rows, (generation, shard, epoch), IS_COLUMNAR, meta)


def _hide_magic(payload: bytes) -> tuple[bytes, list[int]]:
    place = payload.find(BLOCK_MAGIC)
    if place < 0:
        return payload, []
    data, hidden = bytearray(payload), []
    while place >= 0:
        data[place] = 0
        hidden.append(place)
        place = data.find(BLOCK_MAGIC, place + 1)
    return bytes(data), hidden


def _frame(
    payload: bytes | memoryview, lengths: Sequence[int] | None, positions: Sequence[int], rows: Sequence[int],
    lease: tuple[int, int, int], flags: int, meta: BlockMeta,
) -> bytes:  # fmt: skip
    """A block of a lease: generation, shard, epoch."""
    first, row, n = positions[0], rows[0], len(rows)
    assert len(positions) == n, "every row has its position"
    table = b""
    if _runs_on(positions) and _runs_on(rows):
        flags |= IS_CONTIGUOUS
    else:
        first = min(positions)
        deltas = array("I", [position - first for position in positions])
        table = deltas.tobytes() + array("I", rows).tobytes() + array("I", lengths or ()).tobytes()
    meta_bytes = b"" if meta == BlockMeta() else _meta_encoder.encode(meta)
    head = _HEAD.pack(
        BLOCK_MAGIC, VERSION, flags, *lease, first, row, n, len(payload), len(table), len(meta_bytes),
        checksum_of((table, meta_bytes, payload)),
    )  # fmt: skip
    return b"".join((head, _CHECKSUM.pack(checksum(head)), table, meta_bytes, payload))


def _runs_on(numbers: Sequence[int]) -> bool:
    """Whether each number is one more than the one before."""
    if isinstance(numbers, range):
        return numbers.step == 1
    first = numbers[0]
    return numbers[-1] == first + len(numbers) - 1 and list(numbers) == list(range(first, first + len(numbers)))


class Damage(Struct, frozen=True):
    """Bytes of a segment that are not a valid block: torn, or changed."""

    path: str
    offset: int
    length: int
    is_tail: bool  # they extend to the end of the file, like an incomplete block
    rows: int | None = None  # of the damaged block, if its header is valid
    generation: int | None = None
    shard: int | None = None

    def __str__(self) -> str:
        what = "bytes" if self.rows is None else f"generation {self.generation}, shard {self.shard}: {self.rows} rows"
        return f"{self.path}, bytes {self.offset} to {self.offset + self.length}: {what} cannot be read"


def scan(path: str | os.PathLike[str], start: int = 0, end: int | None = None) -> Iterator[Block]:
    """The valid blocks of a segment from byte `start` on, up to the first torn or damaged one.

    `start` is 0 or the offset of a block. `end` is where to stop, at most the size of the file.
    """
    for item in salvage(path, start, end):
        if isinstance(item, Damage):
            return
        yield item


def salvage(path: str | os.PathLike[str], start: int = 0, end: int | None = None) -> Iterator[Block | Damage]:
    """Every valid block of a segment between two bytes, and the damage between them.

    Every header contains NUL and JSON lines do not, so a header after damage is never part of a row.
    """
    with open(path, "rb", buffering=0) as file:
        fd, name = file.fileno(), os.fspath(path)
        size = os.fstat(fd).st_size
        end = size if end is None else min(end, size)
        offset = start or _read_file_head(fd)[1]
        while offset < end:
            block = _read_block(fd, name, offset, end)
            if block is not None:
                yield block
                offset += block.length
                continue
            header = _read_header(fd, offset)
            after = end
            if header is not None and offset + header.length <= end:
                after = offset + header.length
            else:
                header, after = None, _next_header(fd, offset + 1, end)
            details = (None, None, None) if header is None else (header.n, header.generation, header.shard)
            yield Damage(name, offset, after - offset, after == size, *details)
            offset = after


def read_block(path: str | os.PathLike[str], offset: int) -> Block:
    """The block at `offset`. Raises: LedgerBroken if there is none."""
    for block in scan(path, offset):
        return block
    raise LedgerBroken(f"{path} has no valid block at byte {offset}", code="segment_corrupt")


REPAIR = "`batchmill ledger rebuild` of its job keeps the valid results; resuming the job then runs the other rows"


def read_ref(folder: Path, ref: SegmentRef) -> list[Block]:
    """The blocks of a committed range. Raises: LedgerBroken if they differ from what was committed."""
    path = folder / ref.segment
    end = ref.offset + ref.length
    try:
        blocks = list(scan(path, ref.offset, end))
    except FileNotFoundError:
        raise LedgerBroken(f"the segment {path} is missing: {REPAIR}", code="segment_missing") from None
    if sum(block.length for block in blocks) != ref.length:
        raise LedgerBroken(
            f"{path} is damaged between bytes {ref.offset} and {end}, checksums do not match: {REPAIR}",
            code="segment_corrupt",
        )
    return blocks


def read_payload(block: Block) -> bytes:
    """The lines of a block, as bytes."""
    with open(block.path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), block.payload_bytes, block.payload_offset)


def read_head(path: str | os.PathLike[str]) -> SegmentHead | None:
    """The owner of a segment; None if the head of the file is incomplete or damaged."""
    with open(path, "rb", buffering=0) as file:
        return _read_file_head(file.fileno())[0]


class _OpenFile:
    """One file of a segment, with the sizes that are written and synced."""

    def __init__(self, path: Path) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600)
        self.size_bytes = self.synced_bytes = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view)
            self.size_bytes += written
            view = view[written:]

    def sync(self) -> None:
        size_bytes = self.size_bytes  # another thread may append meanwhile
        os.fdatasync(self.fd)
        self.synced_bytes = size_bytes

    def drop_unsynced(self) -> None:
        """After a failed sync the file's contents are unknown: blocks after the last good sync must not be found."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, self.synced_bytes)

    def close(self) -> None:
        os.close(self.fd)


class SegmentFile:
    """A worker's open segment: appends go to the kernel at once, to the disk with `sync`.

    An error of the file system is final: no byte after it is ever referenced, and nothing more can be appended.

    Args:
        roll: the number of the last file that this worker has written for this job; 0 for none.
    """

    def __init__(self, folder: Path, head: SegmentHead, roll: int = 0) -> None:
        self.folder, self.head = folder, head
        self.roll = roll
        self._file: _OpenFile | None = None
        self._full: list[_OpenFile] = []  # files that are not yet synced
        self._writing = threading.Lock()  # held while bytes are appended or truncated
        self._syncing = threading.Lock()  # held during a sync; the next sync also covers its bytes
        self._broken: OSError | None = None

    def append(self, blocks: bytes) -> SegmentRef:
        with self._writing:
            self._raise_if_broken()
            try:
                file = self._file
                if file is None or file.size_bytes >= SEGMENT_BYTES_MAX:
                    file = self._begin()
                offset = file.size_bytes
                file.write(blocks)
            except OSError as error:
                self._broken = error
                raise
            return SegmentRef(self.name, offset, len(blocks))

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise OSError(self._broken.errno, f"{self._broken.strerror} (earlier)")

    @property
    def name(self) -> str:
        return f"{self.head.worker}-{self.roll:04d}.seg"

    def sync(self) -> None:
        """Sync earlier appends to disk. May run in a thread while another thread appends."""
        with self._syncing:
            self._raise_if_broken()
            with self._writing:
                full, self._full, last = self._full, [], self._file
            files = [*full, last] if last is not None else full
            try:
                for file in files:
                    file.sync()
            except OSError as error:
                with self._writing:
                    self._broken = error
                    for file in files:
                        file.drop_unsynced()
                raise
            finally:
                for file in full:
                    file.close()

    def close(self) -> None:
        """Sync and close. Raises: OSError if that fails."""
        try:
            if self._broken is None:
                self.sync()
        finally:
            for file in [*self._full, self._file]:
                if file is not None:
                    file.close()
            self._full, self._file = [], None

    def _begin(self) -> _OpenFile:
        self.roll += 1
        file = _OpenFile(self.folder / self.name)
        if self._file is not None:
            self._full.append(self._file)
        self._file = file
        data = msgspec.json.encode(self.head)
        file.write(_FILE.pack(FILE_MAGIC, len(data), checksum(data)) + data)
        sync_folder(self.folder)
        return file


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_file_head(fd: int) -> tuple[SegmentHead | None, int]:
    """Whose segment this is and where its blocks begin; (None, 0) where that cannot be read."""
    head = os.pread(fd, _FILE.size, 0)
    if len(head) < _FILE.size:
        return None, 0
    magic, length, stored = _FILE.unpack(head)
    if magic != FILE_MAGIC or length > FILE_HEAD_BYTES_MAX:
        return None, 0
    data = os.pread(fd, length, _FILE.size)
    if checksum(data) != stored:
        return None, 0
    return msgspec.json.decode(data, type=SegmentHead), _FILE.size + length


class _Header(NamedTuple):
    """The fields of a block's header, in the order of `_HEAD`."""

    magic: bytes
    version: int
    flags: int
    generation: int
    shard: int
    epoch: int
    position: int
    row: int
    n: int
    payload: int
    table: int
    meta: int
    checksum: int

    @property
    def length(self) -> int:
        return HEADER_BYTES + self.table + self.meta + self.payload


def _read_header(fd: int, offset: int) -> _Header | None:
    """The header at `offset`; None if it is not valid."""
    return _parse_header(os.pread(fd, HEADER_BYTES, offset))


def _parse_header(head: bytes) -> _Header | None:
    if len(head) < HEADER_BYTES or head[:4] != BLOCK_MAGIC or _CHECKSUM.unpack(head[-4:])[0] != checksum(head[:-4]):
        return None
    header = _Header._make(_HEAD.unpack(head[:-4]))
    return header if header.version == VERSION else None


def _next_header(fd: int, offset: int, end: int) -> int:
    """The offset of the next valid header, or `end`."""
    while offset < end:
        chunk = os.pread(fd, min(SEARCH_BYTES, end - offset), offset)
        at = chunk.find(BLOCK_MAGIC)
        while at >= 0:
            head = chunk[at : at + HEADER_BYTES]
            if len(head) < HEADER_BYTES:
                head = os.pread(fd, HEADER_BYTES, offset + at)
            if _parse_header(head) is not None:
                return offset + at
            at = chunk.find(BLOCK_MAGIC, at + 1)
        if len(chunk) < len(BLOCK_MAGIC):
            return end
        offset += len(chunk) - len(BLOCK_MAGIC) + 1
    return end


def _read_block(fd: int, path: str, offset: int, end: int) -> Block | None:
    header = _read_header(fd, offset)
    if header is None or offset + header.length > end:
        return None
    size = header.length - HEADER_BYTES
    body = os.pread(fd, size, offset + HEADER_BYTES)
    if len(body) < size or checksum(body) != header.checksum:
        return None
    table, meta = header.table, header.meta
    return Block(
        path=path, offset=offset, length=header.length, generation=header.generation, shard=header.shard,
        epoch=header.epoch, position=header.position, row=header.row, n=header.n, ok=not header.flags & IS_ERROR,
        payload_offset=offset + HEADER_BYTES + table + meta, payload_bytes=header.payload,
        table=None if header.flags & IS_CONTIGUOUS else body[:table],
        meta=_meta_decoder.decode(body[table : table + meta]) if meta else BlockMeta(),
        is_columnar=bool(header.flags & IS_COLUMNAR),
    )  # fmt: skip


def error_meta(errors: Sequence[RowError], usage: Usage) -> BlockMeta:
    """The sums of a block of error rows."""
    counts: dict[str, int] = {}
    samples: dict[str, str] = {}
    for error in errors:
        counts[error.code] = counts.get(error.code, 0) + 1
        samples.setdefault(error.code, error.message[:500])
    return BlockMeta(usage, counts, samples)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in ascending order and as few spans as possible."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def gaps_of(path: Path, spans: Iterable[Span]) -> Iterator[Span]:
    """The gaps before, between and after merged spans. The first gap includes the head of the file."""
    size, reached = os.stat(path).st_size, 0
    for start, end in spans:
        if start > reached:
            yield reached, start
        reached = end
    if size > reached:
        yield reached, size


class SegmentReader:
    """Reads through a bounded number of open files. Concurrency: one thread at a time."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def payload(self, block: Block) -> bytes:
        """The lines of a block, or its Arrow stream."""
        return block.restored(self.read(block.path, block.payload_bytes, block.payload_offset))

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Read exactly these bytes. Raises: LedgerBroken if the segment has become shorter."""
        data = os.pread(self._descriptor(path), size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor(path), size - len(data), offset + len(data))
            if not more:
                raise LedgerBroken(
                    f"{path} ends before byte {offset + size}, which is committed", code="segment_corrupt"
                )
            data += more
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= SEGMENTS_OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]
