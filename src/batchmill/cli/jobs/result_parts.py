"""Reads the results of a job that are parts in a folder, in the order of their rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from batchmill.errors import InvalidInput
from batchmill.jobs.ledger.files import MANIFEST_NAME
from batchmill.jobs.results.parts.output_folders import Part, read_manifest
from batchmill.object_store.urls import is_object_url, open_store

PIECE_BYTES = 256 * 1024


async def open_parts(output: str, *, errors: bool) -> tuple[str, AsyncIterator[bytes]]:
    """(a name that says the format, the bytes of all parts). Raises: InvalidInput if there is no manifest."""
    manifest = await asyncio.to_thread(read_manifest, output)
    if manifest is None:
        raise InvalidInput(f"{output}{MANIFEST_NAME} is not there: the results are gone", code="no_file")
    parts = manifest.errors if errors else manifest.parts
    kind = parts[0].name.rpartition(".")[2] if parts else "jsonl"
    if kind == "parquet":
        raise InvalidInput(
            f"the results are {len(parts):,} Parquet files in {output}: read those that {MANIFEST_NAME} names",
            code="no_file",
        )
    return f"{output}{'errors' if errors else 'part'}.{kind}", _pieces(output, parts, has_headers=kind == "csv")


async def _pieces(output: str, parts: list[Part], *, has_headers: bool) -> AsyncIterator[bytes]:
    header, is_whole = b"", not has_headers  # of the first part; those of the others are left out
    for number, part in enumerate(parts):
        left, skipped = part.bytes, 0
        pieces = _object_pieces(output, part) if is_object_url(output) else _file_pieces(output, part)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            left -= len(piece)
            if number == 0 and not is_whole:
                header += piece
                end = _header_end(header)
                header, is_whole = (header[:end], True) if end else (header, False)
            elif number and skipped < len(header):
                skip = min(len(piece), len(header) - skipped)
                piece, skipped = piece[skip:], skipped + skip
            yield piece
        if left:
            raise InvalidInput(
                f"{output}{part.name} does not have the {part.bytes:,} bytes of the manifest", code="no_file"
            )


def _header_end(data: bytes) -> int:
    """Where the first record of CSV ends; 0: not in these bytes. A line end in quotes does not end it."""
    at = -1
    while (at := data.find(b"\n", at + 1)) >= 0:
        if data.count(b'"', 0, at) % 2 == 0:
            return at + 1
    return 0


def _object_pieces(output: str, part: Part) -> Iterator[bytes]:
    store = open_store(output)
    for piece in store.read(store.head(part.name)):
        yield bytes(piece)


def _file_pieces(output: str, part: Part) -> Iterator[bytes]:
    try:
        file = open(Path(output, part.name), "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InvalidInput(f"{output}{part.name} cannot be read: {error.strerror}", code="no_file") from None
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece
