"""The checksum of stored bytes: it finds damage, and is not meant against an attacker."""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_intdigest

CHECKSUM_BYTES = 4


def checksum(data: bytes | memoryview) -> int:
    """The low 32 bits of XXH3."""
    return xxh3_64_intdigest(data) & 0xFFFF_FFFF


def checksum_of(pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of pieces that follow each other."""
    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest() & 0xFFFF_FFFF
