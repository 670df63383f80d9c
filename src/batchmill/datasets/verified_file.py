"""A file whose every block is compared with its checksum when it is read."""

from __future__ import annotations

import io
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from blake3 import blake3

from batchmill.checksums import checksum
from batchmill.datasets.layout import RANGE_BYTES
from batchmill.datasets.sources import Source, open_source
from batchmill.errors import InputChanged
from batchmill.types import SealedFile

BLOCK_BYTES = 256 * 1024  # what one checksum covers; the last block of a file may be shorter
PIECE_BLOCKS = 4
BLOCKS_KEPT = 64  # verified ones: columns are read in turns, each from where it stopped


def checksum_blocks(file: SealedFile) -> Iterator[tuple[bytes, array[int]]]:
    """For every RANGE_BYTES of a file: their BLAKE3 digest, and the checksum of each block."""
    buffer = memoryview(bytearray(PIECE_BLOCKS * BLOCK_BYTES))  # new memory for each piece costs as much as the reading
    digest, checksums, size = blake3(), array("I"), 0
    with closing(open_source(file)) as source:
        while count := _fill(buffer, source, size):
            piece = buffer[:count]
            digest.update(piece)
            checksums.extend(checksum(piece[at : at + BLOCK_BYTES]) for at in range(0, count, BLOCK_BYTES))
            size += count
            if size % RANGE_BYTES == 0:
                yield digest.digest(), checksums
                digest, checksums = blake3(), array("I")
    if checksums:
        yield digest.digest(), checksums


def _fill(buffer: memoryview, source: Source, start: int) -> int:
    """Read from `start` on until the buffer is full or the file ends."""
    size = 0
    while size < len(buffer) and (count := source.read_into(buffer[size:], start + size)):
        size += count
    return size


def block_count(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


class VerifiedFile(io.RawIOBase):
    """
    Args:
        source: the file; closed with this object.
        checksums: of its blocks.
        changed: the error for a range of bytes that differs from what was sealed.
    """

    def __init__(self, source: Source, checksums: array[int], changed: Callable[[int, int], InputChanged]) -> None:
        self._source, self._checksums, self._changed = source, checksums, changed
        self._size_bytes = source.size_bytes
        self._at = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size_bytes

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from the current position on. Raises: InputChanged."""
        end = self._size_bytes if size is None or size < 0 else min(self._at + size, self._size_bytes)
        if end <= self._at:
            return b""
        first, last = self._at // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        data = self._verified(first, last + 1)
        skip, self._at = self._at - first * BLOCK_BYTES, end
        return data[skip : end - first * BLOCK_BYTES]

    def pieces(self, end: int) -> Iterator[memoryview]:
        """The bytes from the start to `end`, in pieces of PIECE_BLOCKS blocks; each is overwritten by the next.

        Raises: InputChanged.
        """
        buffer = memoryview(bytearray(PIECE_BLOCKS * BLOCK_BYTES))
        for start in range(0, end, len(buffer)):
            last = min(start + len(buffer), self._size_bytes)
            piece = buffer[: self._source.read_into(buffer[: last - start], start)]
            self._check(piece, start, last)
            yield piece[: end - start]

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def _verified(self, first: int, last: int) -> bytes:
        """Blocks first <= n < last; the one at either end is likely to be read again."""
        kept = self._blocks.get(first)
        begin = first if kept is None else first + 1
        pieces = [] if kept is None else [kept]
        if begin < last:
            pieces.append(self._read_blocks(begin, last))
            self._keep(last - 1, pieces[-1][(last - 1 - begin) * BLOCK_BYTES :])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_blocks(self, first: int, last: int) -> bytes:
        start, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._size_bytes)
        data = self._source.read_at(start, end)
        self._check(memoryview(data), start, end)
        return data

    def _check(self, data: memoryview, start: int, end: int) -> None:
        """Compare the bytes of whole blocks with their checksums."""
        first = start // BLOCK_BYTES
        for at in range(0, end - start, BLOCK_BYTES):
            found = checksum(data[at : at + BLOCK_BYTES])
            if found != self._checksums[first + at // BLOCK_BYTES] or len(data) != end - start:
                raise self._changed(start + at, min(start + at + BLOCK_BYTES, end))

    def _keep(self, number: int, data: bytes) -> None:
        self._blocks[number] = data
        self._blocks.move_to_end(number)
        if len(self._blocks) > BLOCKS_KEPT:
            self._blocks.popitem(last=False)
