"""Reads rows of a sealed dataset, and verifies every byte against the checksums of the seal.

Workers use it: it imports nothing heavy.
"""

from __future__ import annotations

import io
import mmap
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from msgspec import Struct, structs

from batchmill.checksums import CHECKSUM_BYTES, checksum
from batchmill.datasets import layout
from batchmill.datasets.folders import Folder, Home, folder_of
from batchmill.datasets.layout import CHUNK_FIELDS, ChunkRecord, damaged, faults
from batchmill.datasets.sources import Access, Source, open_source
from batchmill.errors import InputChanged, InvalidDataset
from batchmill.types import Seal

CACHE_BYTES_MAX = 32 * 1024 * 1024  # verified blocks kept for scattered reads
OFFSET_BYTES = 8


def load_seal(home: Home) -> Seal:
    """The seal in `home`. Raises: InvalidDataset where there is none, DatasetDamaged."""
    folder = folder_of(home)
    try:
        data = folder.read(layout.SEAL)
    except FileNotFoundError:
        raise InvalidDataset(f"{folder.path} holds no sealed dataset", code="not_sealed") from None
    try:
        return msgspec.json.decode(data, type=Seal)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise damaged(home, [f"{layout.SEAL} cannot be read"]) from None


def moved(seal: Seal, places: Mapping[str, str]) -> Seal:
    """The seal of a dataset whose files lie elsewhere by now. Args: places: of files or folders -> where they are."""

    def place(path: str) -> str:
        for before, now in places.items():
            if path == before or path.startswith(f"{before}/"):
                return now + path.removeprefix(before)
        return path

    return structs.replace(seal, files=[structs.replace(each, path=place(each.path)) for each in seal.files])


class DatasetRows(Protocol):
    """The rows of a sealed dataset by number, as JSON objects.

    All methods but `close` raise InputChanged; where it lies in an object store also AuthRefused and StorageFailed.
    Concurrency: one thread at a time.
    """

    rows: int
    is_remote: bool  # it lies in an object store: reads may take long

    def read(self, first: int, last: int) -> list[bytes]:
        """Rows first <= n < last."""

    def read_lines(self, first: int, last: int, until: int | None = None) -> bytes:
        """Rows first <= n < last, each on a line of its own that ends with a newline.

        Args: until: the next reads go on to this row and no further. None: nobody knows.
        """

    def read_many(self, numbers: Sequence[int]) -> list[bytes]:
        """Rows in any order."""

    def close(self) -> None:
        """Release files and memory; safe to call twice."""


@runtime_checkable
class ColumnDataset(DatasetRows, Protocol):
    """A dataset that holds columns."""

    columns: list[str]  # the names, in order

    def read_columns(self, numbers: Sequence[int], names: tuple[str, ...] | None) -> tuple[memoryview, int]:
        """(an Arrow stream of the first of these rows, their number); `names` None: all columns."""

    @staticmethod
    def cut_columns(data: bytes | memoryview, first: int, last: int) -> memoryview:
        """Rows first <= n < last of what `read_columns` returned, as such a stream. Reads nothing."""


class VerifiedRows(Struct, gc=False):
    """Verified bytes of whole rows. `starts` has one entry more than there are rows: the end of the last."""

    first: int
    last: int  # the number after the last row
    data: bytes
    starts: array[int]  # offsets in all files; `data` starts at starts[0]

    def row(self, number: int) -> bytes:
        at, base = number - self.first, self.starts[0]
        return self.data[self.starts[at] - base : self.starts[at + 1] - base].strip()

    def slice(self, first: int, last: int) -> list[bytes]:
        at, count, base = first - self.first, last - first, self.starts[0]
        text = self.data[self.starts[at] - base : self.starts[at + count] - base]
        lines = io.BytesIO(text).readlines()
        if len(lines) == count:  # every row has at least one line: so each has one
            return list(map(bytes.strip, lines))
        return [self.row(number) for number in range(first, last)]  # there are blank lines between

    def lines(self, first: int, last: int, *, has_blank_lines: bool) -> bytes:
        """Rows first <= n < last, each on a line of its own that ends with a newline."""
        if has_blank_lines:
            return b"".join([self.row(number) + b"\n" for number in range(first, last)])
        at, end, base = first - self.first, last - self.first, self.starts[0]
        text = self.data[self.starts[at] - base : self.starts[end] - base]
        return text if text.endswith(b"\n") else text + b"\n"


class SealedRows:
    """The rows of a sealed dataset by number.

    Raises: DatasetDamaged where its own files are not what was written.
    Concurrency: one thread at a time.
    """

    def __init__(self, home: Home, seal: Seal | None = None, access: Access | None = None) -> None:
        """Args: access: as in `sources.open_source`."""
        self._folder, self._access = folder_of(home), access
        self._seal = load_seal(self._folder) if seal is None else seal
        self.rows, self.is_remote = self._seal.rows, self._seal.is_remote
        self._index = ExitStack()
        try:
            self._open_index(self._folder)
        except (OSError, ValueError, TypeError) as error:
            self._index.close()
            raise damaged(self._folder, faults(self._folder) or [str(error)]) from None
        self._chunk_numbers = range(len(self._chunks) // CHUNK_FIELDS)
        self._bases = [0]
        for file in self._seal.files:
            self._bases.append(self._bases[-1] + file.size_bytes)
        self._files: dict[int, Source] = {}  # by their numbers
        self._cache: OrderedDict[int, VerifiedRows] = OrderedDict()
        self._cache_bytes = 0

    def _open_index(self, folder: Folder) -> None:
        self._offsets = self._index.enter_context(closing(folder.source(layout.OFFSETS)))
        self._checksums = self._index.enter_context(closing(folder.source(layout.CHECKSUMS)))
        view = folder.view(layout.CHUNKS)
        if isinstance(view, mmap.mmap):
            self._index.enter_context(closing(view))
        self._chunks = self._index.enter_context(memoryview(view).cast("Q"))
        if self._offsets.size_bytes != (self.rows + 1) * OFFSET_BYTES:
            raise ValueError(f"{layout.OFFSETS} does not fit {self.rows} rows")

    def read(self, first: int, last: int) -> list[bytes]:
        """Rows first <= n < last: JSON objects without BOM and line end. Raises: InputChanged."""
        lines: list[bytes] = []
        for _, verified, begin, end in self._ranges(first, last):
            lines += verified.slice(begin, end)
        return lines

    def read_lines(self, first: int, last: int, until: int | None = None) -> bytes:
        """See `DatasetRows`. Raises: InputChanged."""
        limit = None if until is None or not self.is_remote else self._end_of_block(until - 1)
        return b"".join(
            [
                verified.lines(begin, end, has_blank_lines=chunk.lines != chunk.rows)
                for chunk, verified, begin, end in self._ranges(first, last, limit)
            ]
        )

    def _end_of_block(self, row: int) -> int:
        """The byte after the block that holds a row, counted in all files."""
        chunk = self.chunk_of(row)
        rows = ((row - chunk.first_row) // chunk.block_rows + 1) * chunk.block_rows
        if rows >= chunk.rows:
            return chunk.end
        return self._u64(chunk.first_row + rows, chunk.first_row + rows + 1)[0]

    def _ranges(
        self, first: int, last: int, limit: int | None = None
    ) -> Iterator[tuple[ChunkRecord, VerifiedRows, int, int]]:
        """Verified rows for first <= n < last, and the range of each that belongs to it."""
        assert 0 <= first <= last <= self.rows, (first, last, self.rows)
        while first < last:
            chunk = self.chunk_of(first)
            end = min(last, chunk.first_row + chunk.rows)
            from_block = (first - chunk.first_row) // chunk.block_rows
            to_block = (end - 1 - chunk.first_row) // chunk.block_rows + 1
            yield chunk, self._verified(chunk, from_block, to_block, limit), first, end
            first = end

    def read_many(self, numbers: Sequence[int]) -> list[bytes]:
        """Rows in any order. Verified blocks are cached for later calls. Raises: InputChanged."""
        lines = []
        block: VerifiedRows | None = None
        for number in numbers:
            if block is None or not block.first <= number < block.last:
                block = self._block_of(number)
            lines.append(block.row(number))
        return lines

    def chunk_of(self, row: int) -> ChunkRecord:
        """The chunk that contains a row."""
        assert 0 <= row < self.rows, (row, self.rows)
        chunks = self._chunks
        number = bisect_right(self._chunk_numbers, row, key=lambda n: chunks[n * CHUNK_FIELDS]) - 1
        chunk = ChunkRecord(*chunks[number * CHUNK_FIELDS : (number + 1) * CHUNK_FIELDS])
        if number < 0 or not chunk.first_row <= row < chunk.first_row + chunk.rows or chunk.block_rows == 0:
            raise damaged(self._folder, faults(self._folder) or [f"{layout.CHUNKS} does not hold row {row}"])
        return chunk

    def line_of(self, row: int) -> int:
        """The 1-based line of a row in the file that is read."""
        chunk = self.chunk_of(row)
        if chunk.lines == chunk.rows:
            return chunk.first_line + row - chunk.first_row
        start = self._u64(row, row + 1)[0]
        before = self._pread(chunk.start, start, row, row + 1)
        return chunk.first_line + before.count(b"\n")

    def close(self) -> None:
        """Release files and memory; safe to call twice."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._cache.clear()
        self._index.close()

    def _block_of(self, row: int) -> VerifiedRows:
        chunk = self.chunk_of(row)
        block = (row - chunk.first_row) // chunk.block_rows
        number = chunk.first_block + block
        verified = self._cache.get(number)
        if verified is not None:
            self._cache.move_to_end(number)
            return verified
        verified = self._verified(chunk, block, block + 1)
        self._cache[number] = verified
        self._cache_bytes += len(verified.data)
        while self._cache_bytes > CACHE_BYTES_MAX and len(self._cache) > 1:
            self._cache_bytes -= len(self._cache.popitem(last=False)[1].data)
        return verified

    def _verified(
        self, chunk: ChunkRecord, from_block: int, to_block: int, limit: int | None = None
    ) -> VerifiedRows:  # fmt: skip
        """The rows of blocks from_block <= b < to_block of a chunk, read and checked. `limit`: see `_pread`."""
        first = chunk.first_row + from_block * chunk.block_rows
        rows_left = chunk.rows - from_block * chunk.block_rows
        rows = min((to_block - from_block) * chunk.block_rows, rows_left)
        starts = self._u64(first, first + rows + 1)
        if rows == rows_left:
            starts[-1] = chunk.end  # the next row may follow blank lines, or be in the next file
        base = starts[0]
        if not chunk.start <= base <= starts[-1] <= chunk.end:
            raise self._changed(0, first, first + rows)
        data = self._pread(base, starts[-1], first, first + rows, limit)
        checksums = self._u32(chunk.first_block + from_block, chunk.first_block + to_block)
        view = memoryview(data)
        edges = [*(start - base for start in starts[: -1 : chunk.block_rows]), len(data)]
        for number, stored in enumerate(checksums):
            if checksum(view[edges[number] : edges[number + 1]]) != stored:
                at = first + number * chunk.block_rows
                raise self._changed(base, at, min(at + chunk.block_rows, first + rows))
        return VerifiedRows(first, first + rows, data, starts)

    def _pread(self, start: int, end: int, first: int, last: int, limit: int | None = None) -> bytes:
        """Bytes start..end, counted in all files; they are in one file. The next reads go on to `limit`, if set."""
        number = bisect_right(self._bases, start) - 1
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = self._open(number, first, last)
        base = self._bases[number]
        data = file.read_at(start - base, end - base, None if limit is None else limit - base)
        if len(data) != end - start:
            raise self._changed(start, first, last)
        return data

    def _open(self, number: int, first: int, last: int) -> Source:
        """Open a file that still has its size. Its time and inode may differ: the checksums decide."""
        sealed = self._seal.files[number]
        try:
            file = open_source(sealed, self._access)
        except OSError:
            raise self._changed(self._bases[number], first, last) from None
        if file.size_bytes != sealed.size_bytes:
            file.close()
            raise self._changed(self._bases[number], first, last)
        return file

    def _changed(self, start: int, first: int, last: int) -> InputChanged:
        index_faults = faults(self._folder)
        if index_faults:
            return damaged(self._folder, index_faults)
        path = self._seal.files[bisect_right(self._bases, start) - 1].path
        if Path(path).parent == self._folder.path:
            return damaged(self._folder, [f"{Path(path).name} was changed or damaged"])
        return InputChanged(
            f"{path} changed since it was sealed (rows {first} to {last - 1} differ); "
            "restore it, or start over with --restart"
        )

    def _u64(self, first: int, last: int) -> array[int]:
        offsets = array("Q")
        offsets.frombytes(self._offsets.read_at(first * OFFSET_BYTES, last * OFFSET_BYTES))
        return offsets

    def _u32(self, first: int, last: int) -> array[int]:
        checksums = array("I")
        checksums.frombytes(self._checksums.read_at(first * CHECKSUM_BYTES, last * CHECKSUM_BYTES))
        return checksums
