"""The shards of a plan as a formula: a plan of a billion rows has a million of them, and stores none.

Imported by the owner and by workers: it is small.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import overload

from msgspec import Struct

from batchmill.types import Shard

LAST_SHARDS = 4  # a shard has at most this share of the rows that are left


class ShardSpan(Struct, frozen=True):
    """The positions lo <= p < hi of one model, cut into shards.

    `most`: rows of a shard. `last`: the shards become shorter towards the end, down to so many rows; None: they do not.
    """

    model: int
    first: int  # number of its first shard
    lo: int
    hi: int
    most: int
    last: int | None = None

    @property
    def end(self) -> int:
        """The number after its last shard."""
        return self.first + self._whole + len(self._edges) - 1

    def shard(self, number: int) -> Shard:
        at = number - self.first
        if at < self._whole:
            lo = self.lo + at * self.most
            return Shard(number, lo, lo + self.most, self.model)
        base = self.lo + self._whole * self.most
        at -= self._whole
        return Shard(number, base + self._edges[at], base + self._edges[at + 1], self.model)

    @property
    def _whole(self) -> int:
        """Leading shards of `most` rows."""
        rows = self.hi - self.lo
        if self.last is None or self.last >= self.most:
            return rows // self.most
        return max(0, rows // self.most - LAST_SHARDS + 1)

    @property
    def _edges(self) -> tuple[int, ...]:
        """Where the other shards begin, and where the last one ends, counted from the first of them."""
        return _edges(self.hi - self.lo - self._whole * self.most, self.most, self.last)


@lru_cache(maxsize=1024)
def _edges(rows: int, most: int, last: int | None) -> tuple[int, ...]:
    lengths, left = [], rows
    while left:
        longest = most if last is None else max(last, left // LAST_SHARDS)
        lengths.append(min(most, longest, left))
        left -= lengths[-1]
    return tuple(accumulate(lengths, initial=0))


class Shards(Sequence[Shard]):
    """All shards of a plan, by number; each is made when it is asked for. Together they cover all positions once."""

    def __init__(self, spans: Sequence[ShardSpan]) -> None:
        self.spans = spans
        self._firsts = [span.first for span in spans]

    def __len__(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @overload
    def __getitem__(self, number: int) -> Shard: ...

    @overload
    def __getitem__(self, number: slice) -> list[Shard]: ...

    def __getitem__(self, number: int | slice) -> Shard | list[Shard]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"shard {number} of {len(self)}")
        return self.spans[bisect_right(self._firsts, number) - 1].shard(number)

    def __iter__(self) -> Iterator[Shard]:
        for span in self.spans:
            yield from map(span.shard, range(span.first, span.end))
