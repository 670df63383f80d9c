"""Segments: append-only sequences of outcomes, in checksummed blocks that describe themselves.

A segment belongs to one job and one worker. It is read through a `ports.storage.SegmentSource`: a file is one, see
`files.py`. A block holds finished output lines of one shard, all ok or all errors; or the results of rows that
succeeded as columns; or no rows: then it says what answers have cost that are no row's result.
Nothing here decides which blocks count: that is the ledger's.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct as Layout
from typing import NamedTuple

import msgspec
from msgspec import Struct

from batchmill.checksums import checksum, checksum_of
from batchmill.errors import LedgerBroken
from batchmill.ports.storage import SegmentSource
from batchmill.types import RowError, SegmentRef, Usage

assert sys.byteorder == "little", "segments are written in the machine's own order, which must be little endian"

SAMPLE_CHARS_MAX = 500  # of the message that is kept for an error code
FILE_MAGIC = b"BMSEG\x00\x00\x01"
BLOCK_MAGIC = b"BMBK"
VERSION = 1
IS_ERROR, IS_CONTIGUOUS, IS_COLUMNAR = 1, 2, 4
FILE_HEAD_BYTES_MAX = 64 * 1024
SEARCH_BYTES = 1024 * 1024  # read at a time while searching for a valid header

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
    warnings: dict[str, int] = {}  # of replies that are results: name in wire.replies.WARNINGS -> replies
    reused: int = 0  # rows whose results are those of an earlier job: all of the block, or none
    reused_at: int = 0  # when these results were made, in seconds since the epoch
    hidden: list[int] = []  # of columns: where the payload had BLOCK_MAGIC; its first byte is 0 there
    # Of a block without rows: tag of a RemoteJob -> its answers that the usage is of. Each has its plan position, and
    # its input, cached and output tokens: those that another block has too are counted once.
    misfits: dict[str, list[tuple[int, int, int, int]]] = {}


class Block(Struct, frozen=True):
    """A block as described by its header. `table` is None if rows and positions are consecutive."""

    segment: str  # its name
    offset: int
    length: int  # header included
    generation: int
    shard: int
    epoch: int
    position: int  # of the first row; the others are in the table
    row: int
    n: int
    ok: bool
    payload_offset: int  # in the segment
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
    """Encode a block. Rows may be in any order; each line ends with its newline. Without rows it only counts `meta`."""
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
    n = len(rows)
    assert len(positions) == n, "every row has its position"
    first, row = (positions[0], rows[0]) if n else (0, 0)
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
    if not numbers:
        return True
    first = numbers[0]
    return numbers[-1] == first + len(numbers) - 1 and list(numbers) == list(range(first, first + len(numbers)))


class Damage(Struct, frozen=True):
    """Bytes of a segment that are not a valid block: torn, or changed."""

    where: str  # the place of the segment, for people
    offset: int
    length: int
    is_tail: bool  # they extend to the end of the segment, like an incomplete block
    rows: int | None = None  # of the damaged block, if its header is valid
    generation: int | None = None
    shard: int | None = None

    def __str__(self) -> str:
        what = "bytes" if self.rows is None else f"generation {self.generation}, shard {self.shard}: {self.rows} rows"
        return f"{self.where}, bytes {self.offset} to {self.offset + self.length}: {what} cannot be read"


def scan(source: SegmentSource, name: str, start: int = 0, end: int | None = None) -> Iterator[Block]:
    """The valid blocks of a segment from byte `start` on, up to the first torn or damaged one.

    `start` is 0 or the offset of a block. `end` is where to stop, at most the size of the segment.
    """
    for item in salvage(source, name, start, end):
        if isinstance(item, Damage):
            return
        yield item


def salvage(source: SegmentSource, name: str, start: int = 0, end: int | None = None) -> Iterator[Block | Damage]:
    """Every valid block of a segment between two bytes, and the damage between them.

    Every header contains NUL and JSON lines do not, so a header after damage is never part of a row.
    """
    size = source.size(name)
    end = size if end is None else min(end, size)
    offset = start or _read_segment_head(source, name)[1]
    while offset < end:
        block = _read_block(source, name, offset, end)
        if block is not None:
            yield block
            offset += block.length
            continue
        header = _parse_header(source.read(name, offset, HEADER_BYTES))
        after = end
        if header is not None and offset + header.length <= end:
            after = offset + header.length
        else:
            header, after = None, _next_header(source, name, offset + 1, end)
        details = (None, None, None) if header is None else (header.n, header.generation, header.shard)
        yield Damage(source.where(name), offset, after - offset, after == size, *details)
        offset = after


def read_block(source: SegmentSource, name: str, offset: int) -> Block:
    """The block at `offset`. Raises: LedgerBroken if there is none."""
    for block in scan(source, name, offset):
        return block
    raise LedgerBroken(f"{source.where(name)} has no valid block at byte {offset}", code="segment_corrupt")


REPAIR = "`batchmill ledger rebuild` of its job keeps the valid results; resuming the job then runs the other rows"


def read_ref(source: SegmentSource, ref: SegmentRef) -> list[Block]:
    """The blocks of a committed range. Raises: LedgerBroken if they differ from what was committed."""
    end = ref.offset + ref.length
    try:
        blocks = list(scan(source, ref.segment, ref.offset, end))
    except FileNotFoundError:
        raise LedgerBroken(
            f"the segment {source.where(ref.segment)} is missing: {REPAIR}", code="segment_missing"
        ) from None
    if sum(block.length for block in blocks) != ref.length:
        raise LedgerBroken(
            f"{source.where(ref.segment)} is damaged between bytes {ref.offset} and {end}, checksums do not match: "
            f"{REPAIR}",
            code="segment_corrupt",
        )
    return blocks


def read_outcomes(source: SegmentSource, ref: SegmentRef) -> list[Block]:
    """As `read_ref`, without the blocks that hold no row."""
    return [block for block in read_ref(source, ref) if block.n]


def read_payload(source: SegmentSource, block: Block) -> bytes:
    """The lines of a block, or its Arrow stream. Raises: LedgerBroken if the segment has become shorter."""
    return block.restored(read_exactly(source, block.segment, block.payload_offset, block.payload_bytes))


def read_exactly(source: SegmentSource, name: str, offset: int, length: int) -> bytes:
    """Read exactly these bytes. Raises: LedgerBroken if the segment has become shorter."""
    data = source.read(name, offset, length)
    if len(data) < length:
        raise LedgerBroken(
            f"{source.where(name)} ends before byte {offset + length}, which is committed", code="segment_corrupt"
        )
    return data


def read_head(source: SegmentSource, name: str) -> SegmentHead | None:
    """The owner of a segment; None if its head is incomplete or damaged."""
    return _read_segment_head(source, name)[0]


def head_bytes(head: SegmentHead) -> bytes:
    """What a segment begins with."""
    data = msgspec.json.encode(head)
    return _FILE.pack(FILE_MAGIC, len(data), checksum(data)) + data


def where(source: SegmentSource, block: Block) -> str:
    """The place of a block, for people."""
    return f"{source.where(block.segment)} at byte {block.offset}"


def _read_segment_head(source: SegmentSource, name: str) -> tuple[SegmentHead | None, int]:
    """Whose segment this is and where its blocks begin; (None, 0) where that cannot be read."""
    head = source.read(name, 0, _FILE.size)
    if len(head) < _FILE.size:
        return None, 0
    magic, length, stored = _FILE.unpack(head)
    if magic != FILE_MAGIC or length > FILE_HEAD_BYTES_MAX:
        return None, 0
    data = source.read(name, _FILE.size, length)
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


def _parse_header(head: bytes) -> _Header | None:
    if len(head) < HEADER_BYTES or head[:4] != BLOCK_MAGIC or _CHECKSUM.unpack(head[-4:])[0] != checksum(head[:-4]):
        return None
    header = _Header._make(_HEAD.unpack(head[:-4]))
    return header if header.version == VERSION else None


def _next_header(source: SegmentSource, name: str, offset: int, end: int) -> int:
    """The offset of the next valid header, or `end`."""
    while offset < end:
        chunk = source.read(name, offset, min(SEARCH_BYTES, end - offset))
        at = chunk.find(BLOCK_MAGIC)
        while at >= 0:
            head = chunk[at : at + HEADER_BYTES]
            if len(head) < HEADER_BYTES:
                head = source.read(name, offset + at, HEADER_BYTES)
            if _parse_header(head) is not None:
                return offset + at
            at = chunk.find(BLOCK_MAGIC, at + 1)
        if len(chunk) < len(BLOCK_MAGIC):
            return end
        offset += len(chunk) - len(BLOCK_MAGIC) + 1
    return end


def _read_block(source: SegmentSource, name: str, offset: int, end: int) -> Block | None:
    header = _parse_header(source.read(name, offset, HEADER_BYTES))
    if header is None or offset + header.length > end:
        return None
    size = header.length - HEADER_BYTES
    body = source.read(name, offset + HEADER_BYTES, size)
    if len(body) < size or checksum(body) != header.checksum:
        return None
    table, meta = header.table, header.meta
    return Block(
        segment=name, offset=offset, length=header.length, generation=header.generation, shard=header.shard,
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
        samples.setdefault(error.code, error.message[:SAMPLE_CHARS_MAX])
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


def gaps_of(source: SegmentSource, name: str, spans: Iterable[Span]) -> Iterator[Span]:
    """The gaps before, between and after merged spans. The first gap includes the head of the segment."""
    size, reached = source.size(name), 0
    for start, end in spans:
        if start > reached:
            yield reached, start
        reached = end
    if size > reached:
        yield reached, size
