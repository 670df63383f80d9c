"""The checksum of stored bytes, and the hash of names: they find damage and equal names, and prove nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_intdigest

CHECKSUM_BYTES = 4


def checksum(data: bytes | memoryview) -> int:
    """The low 32 bits of XXH3."""
    return xxh3_64_intdigest(data) & 0xFFFF_FFFF


def name_hashes(names: Iterable[str], seed: int) -> array[int]:
    """64 bits (u64) of each name, equal for equal names on every machine. Who does not know the seed cannot make those
    of other names equal.
    """
    return array("Q", [xxh3_64_intdigest(name.encode(), seed) for name in names])


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of pieces that follow each other."""
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest() & 0xFFFF_FFFF
