"""Reads a file and decompresses gzip or zstd, in blocks of bounded size.

A file may have several members or frames, as `cat a.gz b.gz` writes them. A truncated file is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from batchmill.datasets import readers
from batchmill.datasets.sources import open_file
from batchmill.errors import InvalidDataset

BLOCK_BYTES = 1024 * 1024

Advance = Callable[[int], None]  # called with the number of bytes read from the file


def blocks(path: str, codec: str | None, advance: Advance) -> Iterator[bytes]:
    """Yield the contents of a file. Raises: InvalidDataset (`invalid_gzip`, `invalid_zstd`)."""
    with open_file(path) as file:
        raw = _raw(file.read, advance)
        match codec:
            case "gzip":
                yield from _gzip(path, raw)
            case "zstd":
                yield from readers.load("zstd").frames(path, raw)
            case _:
                yield from raw


def _raw(read: Callable[[int], bytes], advance: Advance) -> Iterator[bytes]:
    while block := read(BLOCK_BYTES):
        advance(len(block))
        yield block


def _gzip(path: str, raw: Iterator[bytes]) -> Iterator[bytes]:
    member, within = zlib.decompressobj(wbits=31), False
    for data in raw:
        while data:
            if not within and not data.strip(b"\0"):
                break  # zeros between and after members are padding, as tapes write it
            within = True
            try:
                block = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise InvalidDataset(f"{path} is damaged: {error}", code="invalid_gzip") from None
            if block:
                yield block
            data = member.unconsumed_tail
            if member.eof:
                data, member, within = member.unused_data, zlib.decompressobj(wbits=31), False
    if within:
        rest = member.flush()  # what no block had room for
        if not member.eof:
            raise InvalidDataset(f"{path} ends in the middle of its gzip data", code="invalid_gzip")
        yield rest
