"""Ranges that other machines check: what one gets at a time, what comes back, and whether that can be right.

A machine returns objects, each with the results of several whole ranges. Whatever runs there may have made them: a
range whose results cannot be right is checked here, and one range of each dataset is checked twice and compared.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby, islice, pairwise
from operator import lt

import msgspec
from blake3 import blake3
from msgspec import Struct

from batchmill.datasets.checking.fan_out import InlineValidator, RangeResult, ValidatorPool, validators
from batchmill.datasets.checking.inspection import (
    BLOCK_ROWS_MAX,
    LEVEL_BITS,
    LEVELS,
    TAIL_BYTES,
    Inspector,
    ranges,
)
from batchmill.datasets.layout import BLOCK_BYTES, BOM, RANGE_BYTES
from batchmill.datasets.orders import ByteRange, RangeEnd, RefusedRow, SealOrder, SourcePart, ValidatedChunk
from batchmill.datasets.request_digests import DIGEST_BYTES, FOLD_BYTES
from batchmill.datasets.validation import ADAPTERS_MAX, HubPatterns
from batchmill.errors import BatchmillError, InvalidDataset
from batchmill.types import SealedFile
from batchmill.wire.rows.forms import OpenAIForm

SPAN_BYTES = 8 * RANGE_BYTES  # of the rows that a machine checks at a time
SPAN_RANGES_MAX = 512  # and their number: files may be small
PIECE_BYTES = 8 * 1024 * 1024  # of results in an object, and those of one range more
RESULT_BYTES_MAX = 128 * 1024 * 1024  # of the results of one range: its rows have 3 bytes at least
PIECE_BYTES_MAX = PIECE_BYTES + RESULT_BYTES_MAX
AHEAD = 2  # objects that are fetched while one is used
FAULTY_MAX = 3  # ranges that are not what they should be; then all others are checked here
CODE_CHARS_MAX, TEXT_CHARS_MAX = 256, 10_000  # of an error code; of a message, or a name
LINE_TOO_LONG = "line_too_long"
DIFFERS = "checked_differently"
_DIGEST = re.compile("[0-9a-f]{64}")
_KEY_BYTES = (2, 8, 4, FOLD_BYTES)  # a row of each column
_PREFIX_END = 1 << LEVEL_BITS * len(LEVELS)

Result = tuple[list[ValidatedChunk], RangeEnd]  # of one range
_encode = msgspec.msgpack.Encoder().encode
_results = msgspec.msgpack.Decoder(list[Result]).decode


class SpanOrder(Struct, frozen=True):
    """What one machine checks at a time. `prefix`: what the names of its objects begin with."""

    seal: SealOrder
    ranges: list[ByteRange]
    prefix: str


class Piece(Struct, frozen=True):
    """An object with the results of ranges."""

    ranges: int
    bytes: int
    digest: str  # BLAKE3


class CheckedSpan(Struct, frozen=True):
    prefix: str
    pieces: list[Piece]
    rows: int


class Checks(Struct, frozen=True):
    """What other machines have found out about the rows of a dataset."""

    files: list[SealedFile]  # as `SealOrder.files` was for them
    id_seed: int
    spans: list[CheckedSpan | None]  # of the first spans; None: nobody has checked it


def spans(parts: Sequence[SourcePart]) -> Iterator[list[ByteRange]]:
    """Consecutive ranges of SPAN_BYTES together, in order."""
    span: list[ByteRange] = []
    size = 0
    for range_ in ranges(parts):
        length = range_.end - range_.start
        if span and (size + length > SPAN_BYTES or len(span) == SPAN_RANGES_MAX):
            yield span
            span, size = [], 0
        span.append(range_)
        size += length
    if span:
        yield span


def check_span(order: SpanOrder, put: Callable[[str, bytes], None]) -> CheckedSpan:
    """Check the rows of a span, and put the results. Raises: InputChanged, InvalidDataset, and what `put` raises."""
    inspector = Inspector(order.seal)
    pieces: list[Piece] = []
    held: list[bytes] = []
    rows = 0

    def put_held() -> None:
        data = _joined(held)
        put(name_of(order.prefix, len(pieces)), data)
        pieces.append(Piece(len(held), len(data), blake3(data).hexdigest()))
        held.clear()

    try:
        for range_ in order.ranges:
            result = _inspect(inspector, range_)
            rows += sum(chunk.rows for chunk in result[0])
            held.append(_encode(result))
            if len(held[-1]) > RESULT_BYTES_MAX:
                raise InvalidDataset(
                    f"bytes {range_.start}-{range_.end} of {range_.part.source} have too many rows for one object"
                )
            if sum(map(len, held)) >= PIECE_BYTES:
                put_held()
        if held:
            put_held()
    finally:
        inspector.close()
    return CheckedSpan(order.prefix, pieces, rows)


def _inspect(inspector: Inspector, range_: ByteRange) -> Result:
    *chunks, end = inspector.inspect(range_)
    return chunks, end  # type: ignore[return-value]  # the end comes last, and nothing but chunks before it


def _joined(results: list[bytes]) -> bytes:
    """A packed list of packed values."""
    head = bytearray()
    msgspec.msgpack.Encoder().encode_into([None] * len(results), head)
    return bytes(head[: len(head) - len(results)]) + b"".join(results)


def name_of(prefix: str, number: int) -> str:
    return f"{prefix}{number:04d}"


def describes(checked: CheckedSpan, order: SpanOrder) -> bool:
    """Whether this can be what a machine says of its work."""
    return (
        checked.prefix == order.prefix
        and checked.rows >= 0
        and all(each.ranges > 0 for each in checked.pieces)
        and sum(each.ranges for each in checked.pieces) == len(order.ranges)
        and all(0 < each.bytes <= PIECE_BYTES_MAX and _DIGEST.fullmatch(each.digest) for each in checked.pieces)
    )


class SpanReader:
    """Reads what other machines have found out, and checks here what they have not, or not as they should.

    Args: get: the bytes of an object. Raises: StorageFailed.
    """

    def __init__(self, order: SealOrder, checks: Checks, get: Callable[[str], bytes]) -> None:
        self._order, self._spans, self._get = order, checks.spans, get
        checked = [at for at, span in enumerate(checks.spans) if span is not None]
        self._sample = checked[_any_of(len(checked))] if checked else -1
        self.flaws: list[str] = []  # of ranges that were checked here, though another machine had done so

    def check(self, parts: list[SourcePart]) -> Iterator[RangeResult]:
        """As `ValidatorPool.check`. Raises also: InvalidDataset (`checked_differently`)."""
        lines = _Lines(self._order)
        with ExitStack() as stack:
            local: InlineValidator | ValidatorPool | None = None

            def here(wanted: Iterator[ByteRange]) -> Iterator[RangeResult]:
                nonlocal local
                if local is None:
                    local = stack.enter_context(validators(self._order, sum(part.end - part.start for part in parts)))
                chunks: list[ValidatedChunk] = []
                for range_, result in local.check_ranges(wanted):
                    if isinstance(result, ValidatedChunk):
                        chunks = [result]  # the last one is enough
                    else:
                        lines.follow(range_, chunks)
                        chunks = []
                    yield range_, result

            waiting: tuple[ByteRange, Result] | None = None  # it counts once the next one begins where it ends

            def unsure() -> Iterator[ByteRange]:
                nonlocal waiting
                if waiting is not None:
                    yield waiting[0]
                    waiting = None

            for is_checked, group in groupby(self._found(parts, stack), lambda each: each[1] is not None):
                if not is_checked:
                    yield from here(chain(unsure(), (range_ for range_, _ in group)))
                    continue
                for range_, result in group:
                    assert result is not None, "of a checked range"
                    if range_.start == range_.part.start:
                        yield from here(unsure())
                    if not self._may_be(lines, range_, result):
                        yield from here(chain(unsure(), [range_]))
                        continue
                    if waiting is not None:
                        yield from _each(*waiting)
                    lines.follow(range_, result[0])
                    waiting = range_, result
                    if lines.are_at_end(range_):
                        yield from _each(*waiting)
                        waiting = None
            yield from here(unsure())

    def _may_be(self, lines: _Lines, range_: ByteRange, result: Result) -> bool:
        """Whether these can be the results of the next range."""
        if lines.are_unknown(range_, result[0]) or len(self.flaws) >= FAULTY_MAX:
            return False
        if flaw := lines.flaw(range_, *result):
            self._note(range_, flaw)
        return not flaw

    def _note(self, range_: ByteRange, flaw: str) -> None:
        self.flaws.append(f"bytes {range_.start}-{range_.end} of {range_.part.source}: {flaw}")

    def _found(self, parts: list[SourcePart], stack: ExitStack) -> Iterator[tuple[ByteRange, Result | None]]:
        """Every range, with its results if they are whole."""
        for span_ranges, piece, fetched in self._ahead(parts, stack):
            results = None
            if fetched is not None and piece is not None:
                try:
                    data = fetched.result()
                    results = _decoded(data, piece) if len(self.flaws) < FAULTY_MAX else None
                except BatchmillError as error:
                    self._note(span_ranges[0], error.message)
            yield from zip(span_ranges, results or [None] * len(span_ranges), strict=True)

    def _ahead(
        self, parts: list[SourcePart], stack: ExitStack
    ) -> Iterator[tuple[list[ByteRange], Piece | None, Future[bytes] | None]]:
        """The ranges of each object, which is being fetched; AHEAD of them before they are used."""
        threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="checked")
        stack.callback(threads.shutdown, cancel_futures=True)
        waiting: deque[tuple[list[ByteRange], Piece | None, Future[bytes] | None]] = deque()
        for at, span in enumerate(spans(parts)):
            checked = self._spans[at] if at < len(self._spans) and len(self.flaws) < FAULTY_MAX else None
            if checked is None:
                waiting.append((span, None, None))
            else:
                if at == self._sample:
                    self._compare(span, checked)
                ranges_left = iter(span)
                for number, piece in enumerate(checked.pieces):
                    wanted = list(islice(ranges_left, piece.ranges))
                    waiting.append((wanted, piece, threads.submit(self._get, name_of(checked.prefix, number))))
            while len(waiting) > AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _compare(self, span: list[ByteRange], checked: CheckedSpan) -> None:
        """Check one range here, too: other versions of libraries, say, could find something else.

        Raises: InvalidDataset.
        """
        at = _any_of(len(span))
        first = 0
        for number, piece in enumerate(checked.pieces):
            if at < first + piece.ranges:
                try:
                    found = _decoded(self._get(name_of(checked.prefix, number)), piece)[at - first]
                except BatchmillError:
                    return  # the next process that reads it says so
                inspector = Inspector(self._order)
                try:
                    chunks, end = _inspect(inspector, span[at])
                finally:
                    inspector.close()
                # Each validator reports a name once, in the range where it met it first.
                if (chunks, end.digest) != (found[0], found[1].digest):
                    raise InvalidDataset(
                        f"another machine found something else in bytes {span[at].start}-{span[at].end} of "
                        f"{span[at].part.source} than this one",
                        code=DIFFERS,
                    )
                return
            first += piece.ranges


def _each(range_: ByteRange, result: Result) -> Iterator[RangeResult]:
    for each in (*result[0], result[1]):
        yield range_, each


def _any_of(count: int) -> int:
    """A number below `count`, which nobody can foresee."""
    return int.from_bytes(os.urandom(4)) % count


def _decoded(data: bytes, piece: Piece) -> list[Result]:
    """Raises: BatchmillError."""
    if len(data) != piece.bytes or blake3(data).hexdigest() != piece.digest:
        raise BatchmillError("the object is not what was put")
    try:
        results = _results(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchmillError(f"the object holds something else: {error}") from None
    if len(results) != piece.ranges:
        raise BatchmillError(f"the object holds {len(results)} ranges, not {piece.ranges}")
    return results


class _Lines:
    """Where the lines end that the ranges so far have, and whether the results of the next one can be right."""

    def __init__(self, order: SealOrder) -> None:
        self._order = order
        self._end = 0  # in all files together
        self._is_cut = False  # the last line is too long, and goes on for nobody knows how long
        self._has_ids = isinstance(order.form, OpenAIForm)
        self._patterns = HubPatterns(order.patterns)
        named = [*order.targets.values(), *([] if order.default is None else [order.default])]
        self._targets = {0, *(target for _, target in named), *(target for _, _, target in order.patterns)}

    def follow(self, range_: ByteRange, chunks: Sequence[ValidatedChunk]) -> None:
        """Go on behind a range. Args: chunks: its last one, at least."""
        if chunks:
            last = chunks[-1]
            self._end = last.end
            refused = last.refused[-1] if last.refused else None
            self._is_cut = refused is not None and (refused.row, refused.code) == (last.rows - 1, LINE_TOO_LONG)
        elif range_.start == range_.part.start:
            self._end, self._is_cut = range_.part.base + range_.end, False

    def are_unknown(self, range_: ByteRange, chunks: Sequence[ValidatedChunk]) -> bool:
        """Whether only who reads the next range knows where its first line begins, or that it has none."""
        if range_.start == range_.part.start:
            return not chunks and range_.end - range_.start == len(BOM)
        return self._is_cut or (not chunks and self._end >= range_.part.base + range_.end)

    def are_at_end(self, range_: ByteRange) -> bool:
        """Whether these are all lines of a file, of which this is the last range."""
        return range_.end == range_.part.end and self._end == range_.part.base + range_.part.end

    def flaw(self, range_: ByteRange, chunks: list[ValidatedChunk], end: RangeEnd) -> str:
        """Why these cannot be the results of the next range; empty: they can."""
        high = range_.part.base + range_.end
        if not self._is_end(end):
            return "its end is none"
        if not chunks:
            return "its lines are missing"
        if not self._may_begin(range_, chunks[0].start):
            return f"its lines begin at byte {chunks[0].start}"
        if any(before.end != after.start for before, after in pairwise(chunks)):
            return "lines are missing, or there twice"
        longest = self._order.dataset.line_bytes_max + len(b"\r\n") + TAIL_BYTES
        if not high <= chunks[-1].end <= min(high + longest, range_.part.base + range_.part.end):
            return f"its lines end at byte {chunks[-1].end}"
        if not all(self._is_sound(chunk, high) for chunk in chunks):
            return "its columns do not fit its lines"
        return ""

    def _may_begin(self, range_: ByteRange, start: int) -> bool:
        low, high = range_.part.base + range_.start, range_.part.base + range_.end
        if range_.start == range_.part.start:
            return start in (low, low + len(BOM))
        return low <= start < high and start == self._end

    def _is_end(self, end: RangeEnd) -> bool:
        columns_max, names = self._order.columns_max, end.names
        names_max = 0 if columns_max is None else columns_max + 1
        return (
            len(end.digest) == blake3().digest_size
            and len(names) <= names_max
            and len(end.adapters) <= ADAPTERS_MAX + 1
            and all(self._patterns.base_of(name) is not None for name in end.adapters)
        )

    def _is_sound(self, chunk: ValidatedChunk, high: int) -> bool:
        rows, size = chunk.rows, chunk.end - chunk.start
        if not 0 <= rows <= chunk.lines <= size or size <= 0:
            return False
        block_rows = max(1, min(BLOCK_ROWS_MAX, rows * BLOCK_BYTES // size))
        keys = _KEY_BYTES if self._order.keys else (0, 0, 0, 0)
        return (
            chunk.block_rows == block_rows
            and len(chunk.offsets) == 8 * rows
            and len(chunk.checksums) == 4 * -(-rows // block_rows)
            and len(chunk.ids) == (8 * rows if self._has_ids else 0)
            and all(len(column) == width * rows for column, width in zip(chunk.keys, keys, strict=True))
            and len(chunk.requests) == (DIGEST_BYTES * rows if self._order.requests else 0)
            and self._are_offsets(array("Q", chunk.offsets), chunk, high)
            and self._targets.issuperset(array("H", chunk.keys[0]))
            and max(array("Q", chunk.keys[1]), default=0) < _PREFIX_END
            and _are_refused(chunk.refused, chunk)
        )

    @staticmethod
    def _are_offsets(offsets: array[int], chunk: ValidatedChunk, high: int) -> bool:
        if not offsets:
            return True
        is_within = chunk.start <= offsets[0] and offsets[-1] < min(chunk.end, high)
        return is_within and all(map(lt, offsets, offsets[1:]))


def _are_refused(refused: list[RefusedRow], chunk: ValidatedChunk) -> bool:
    return (
        all(before.row < after.row and before.line < after.line for before, after in pairwise(refused))
        and all(0 <= each.row < chunk.rows and 0 <= each.line < chunk.lines for each in refused)
        and all(len(each.code) <= CODE_CHARS_MAX and len(each.message) <= TEXT_CHARS_MAX for each in refused)
    )
