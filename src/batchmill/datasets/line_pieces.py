"""Converted rows in pieces of whole lines, so that something can be added to each."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from batchmill.datasets.conversion import Converted
from batchmill.datasets.layout import BOM

CHUNK_BYTES = 256 * 1024
CHUNK_ROWS = 256
# What is added to a row at most: a prompt of 1 MiB, whose characters may take six bytes each, and places of media.
ADDED_BYTES_MAX = 6 * 1024 * 1024 + 256 * 1024


def whole_lines(blocks: Iterator[Converted], line_bytes_max: int) -> Iterator[Converted]:
    """Cut blocks of a file at the ends of lines. A line that is much too long is passed on in pieces."""
    rest, is_first, is_too_long = b"", True, False
    for block in blocks:
        data = rest + block.data
        if is_first:
            data, is_first = data.removeprefix(BOM), False
        if is_too_long:
            end = data.find(b"\n") + 1
            yield Converted(data[:end] if end else data)
            data, is_too_long = data[end:] if end else b"", not end
        end = data.rfind(b"\n") + 1
        if end:
            yield Converted(data[:end])
        rest = data[end:]
        if len(rest) > line_bytes_max + ADDED_BYTES_MAX:
            yield Converted(rest)
            rest, is_too_long = b"", True
    if rest:
        yield Converted(rest)


def chunks_of(piece: Converted) -> Iterator[Converted]:
    """Cut a piece into what is looked at together; what it says of its rows stays with the first."""
    at, first = 0, piece
    while at < len(piece.data):
        end, rows = at, 0
        while rows < CHUNK_ROWS and end < len(piece.data) and end - at < CHUNK_BYTES:
            end = piece.data.find(b"\n", end) + 1 or len(piece.data)
            rows += 1
        yield msgspec.structs.replace(first, data=piece.data[at:end])
        at, first = end, Converted(b"")
