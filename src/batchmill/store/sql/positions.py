"""Plan positions as the ledger stores them: runs of consecutive ones."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence


def pack_positions(positions: Sequence[int], base: int) -> bytes:
    """Positions as runs (start - base, count) of u32 pairs, sorted."""
    return pack_parts([positions], base)


def pack_parts(parts: Iterable[Sequence[int]], base: int) -> bytes:
    """As `pack_positions`, for positions in several parts. Ranges cost nothing for each position."""
    runs = array("I")
    start = end = -1
    for first, last in sorted(span for part in parts for span in _spans_of(part)):
        if first == end:
            end = last
            continue
        if end >= 0:
            runs.extend((start - base, end - start))
        start, end = first, last
    if end >= 0:
        runs.extend((start - base, end - start))
    return runs.tobytes()


def _spans_of(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where positions run on; a position that comes twice is in two spans."""
    if isinstance(positions, range) and positions.step == 1:
        if len(positions):
            yield positions.start, positions.stop
        return
    start = end = -1
    for position in sorted(positions):
        if position != end:
            if end >= 0:
                yield start, end
            start = position
        end = position + 1
    if end >= 0:
        yield start, end


def unpack_positions(runs: bytes) -> Iterator[tuple[int, int]]:
    """The (start - base, count) pairs of `pack_positions`."""
    numbers = array("I")
    numbers.frombytes(runs)
    return zip(numbers[::2], numbers[1::2], strict=True)
