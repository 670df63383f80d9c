"""The records of an index: sorted digests of requests with the places of their results, in blocks with checksums.

A lookup reads only the blocks that may have what it looks for, and believes none whose checksum differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from batchmill.checksums import checksum
from batchmill.datasets.request_digests import DIGEST_BYTES
from batchmill.jobs.intake.reuse_orders import Section
from batchmill.part_files import PartFile

WORDS = DIGEST_BYTES // 8
PLACE_WORDS = 4  # offset; file << 32 | length; row << 32 | checksum; when it was made, in seconds since the epoch
RECORD_WORDS = WORDS + PLACE_WORDS
RECORD_BYTES = 8 * RECORD_WORDS
BLOCK_ROWS = 512  # of the records that share a checksum
BLOCK_BYTES = BLOCK_ROWS * RECORD_BYTES
TABLE_WORDS = 2  # of a block: the first word of its first digest, and its checksum
RUN_BLOCKS = 128  # read at once

Found = tuple[np.ndarray, np.ndarray]


class Damaged(Exception):
    """Bytes of an index are not those that were written."""


def records_path(home: Path, number: int) -> Path:
    return home / f"{number}.records"


def table_path(home: Path, number: int) -> Path:
    return home / f"{number}.table"


def write_section(home: Path, number: int, key: str, blocks: Iterable[np.ndarray]) -> Section:
    """Write the records [n, 8] of one target, which come in order. Of equal requests one result is enough."""
    rows = 0
    table = bytearray()
    with ExitStack() as open_:
        files = [open_.enter_context(PartFile(path(home, number), 0o600)) for path in (records_path, table_path)]
        for records in _in_blocks(_distinct(blocks)):
            data = records.tobytes()
            rows += len(records)
            files[0].write(data)
            table += data[:8] + checksum(data).to_bytes(8, "little")
        files[1].write(table)
        for file in files:
            file.publish()
    return Section(key, number, rows, checksum(table))


def _distinct(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The first of the records with equal digests."""
    last: np.ndarray | None = None
    for records in blocks:
        is_new = np.ones(len(records), bool)
        is_new[1:] = np.any(records[1:, :WORDS] != records[:-1, :WORDS], axis=1)
        is_new[0] = last is None or not np.array_equal(last, records[0, :WORDS])
        last = records[-1, :WORDS].copy()
        yield records[is_new]


def _in_blocks(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    left = np.empty((0, RECORD_WORDS), np.uint64)
    for piece in pieces:
        left = np.concatenate((left, piece))
        whole = len(left) - len(left) % BLOCK_ROWS
        for start in range(0, whole, BLOCK_ROWS):
            yield left[start : start + BLOCK_ROWS]
        left = left[whole:]
    if len(left):
        yield left


class SectionFiles:
    """The open files of a section: they stay what they are if the index is written anew meanwhile. Close it.

    Args: is_partial: blocks that are damaged are left out, and counted, instead of an error.
    Raises: OSError if they are gone; Damaged.
    """

    def __init__(self, home: Path, section: Section, *, is_partial: bool = False) -> None:
        self._section, self._is_partial = section, is_partial
        self.damaged = 0  # blocks that were left out
        data = table_path(home, section.number).read_bytes()
        blocks = -(-section.rows // BLOCK_ROWS)
        if len(data) != 8 * TABLE_WORDS * blocks or checksum(data) != section.table:
            raise Damaged
        table = np.frombuffer(data, np.uint64).reshape(-1, TABLE_WORDS)
        self._first, self._sums = np.ascontiguousarray(table[:, 0]), table[:, 1].tolist()
        self._file: BinaryIO = open(records_path(home, section.number), "rb", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._file.close()

    def find(self, digests: np.ndarray) -> Found:
        """Which of some digests [n, 4], in order of their first words, have a result, and its place [found, 4]."""
        lo, hi = self._blocks_of(np.ascontiguousarray(digests[:, 0]))
        at = int(np.searchsorted(hi, 1))  # those before are smaller than any of the index
        gaps = np.append(np.flatnonzero(lo[1:] > hi[:-1]) + 1, len(lo))
        found, places = [np.empty(0, np.int64)], [np.empty((0, PLACE_WORDS), np.uint64)]
        while at < len(lo):
            begin = int(lo[at])
            end = max(at + 1, int(np.searchsorted(hi, begin + RUN_BLOCKS, "right")))
            end = min(end, int(gaps[np.searchsorted(gaps, at, "right")]))
            some, some_places = _search(self._read(begin, int(hi[end - 1])), digests[at:end])
            found.append(some + at)
            places.append(some_places)
            at = end
        return np.concatenate(found), np.concatenate(places)

    def _blocks_of(self, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and one after the last block that may hold each digest. Several digests may begin alike."""
        lo = np.maximum(np.searchsorted(self._first, first), 1) - 1
        return lo, np.searchsorted(self._first, first, "right")

    def _read(self, begin: int, end: int) -> np.ndarray:
        """The records of the sound blocks of a range. Raises: Damaged if one is not, unless the index is partial."""
        size = min(end * BLOCK_BYTES, self._section.rows * RECORD_BYTES) - begin * BLOCK_BYTES
        data = os.pread(self._file.fileno(), size, begin * BLOCK_BYTES)
        pieces = [data[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
        is_sound = [checksum(piece) == total for piece, total in zip(pieces, self._sums[begin:end], strict=True)]
        if len(data) < size or not all(is_sound):
            if not self._is_partial:
                raise Damaged
            self.damaged += is_sound.count(False)
            data = b"".join([piece for piece, sound in zip(pieces, is_sound, strict=True) if sound])
        return np.frombuffer(data, np.uint64).reshape(-1, RECORD_WORDS)


def _search(records: np.ndarray, wanted: np.ndarray) -> Found:
    """Where wanted digests, in order of their first words, are among sorted records."""
    first = np.ascontiguousarray(records[:, 0])
    at = np.searchsorted(first, wanted[:, 0])
    number = np.flatnonzero(at < len(first))
    number = number[first[at[number]] == wanted[number, 0]]
    at = at[number]
    is_same = np.all(records[at, 1:WORDS] == wanted[number, 1:], axis=1)
    for each in np.flatnonzero(~is_same).tolist():  # another digest begins with the same 64 bits
        place = _next_equal(records, int(at[each]), wanted[number[each]])
        if place is not None:
            at[each], is_same[each] = place, True
    return number[is_same], records[at[is_same], WORDS:]


def _next_equal(records: np.ndarray, at: int, wanted: np.ndarray) -> int | None:
    """Where a digest is, from the first that begins like it on."""
    while at < len(records) and records[at, 0] == wanted[0]:
        if np.array_equal(records[at, :WORDS], wanted):
            return at
        at += 1
    return None
