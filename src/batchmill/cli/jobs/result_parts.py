"""Reads the results of a job that are parts in a folder, in the order of their rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from batchmill.errors import InvalidInput
from batchmill.jobs.ledger.files import MANIFEST_NAME
from batchmill.jobs.results.output_folders import Part, read_manifest
from batchmill.object_store.urls import is_object_url, open_store

PIECE_BYTES = 256 * 1024


async def open_parts(output: str, *, errors: bool) -> tuple[str, AsyncIterator[bytes]]:
    """(a name that says the format, the bytes of all parts). Raises: InvalidInput if there is no manifest."""
    manifest = await asyncio.to_thread(read_manifest, output)
    if manifest is None:
        raise InvalidInput(f"{output}{MANIFEST_NAME} is not there: the results are gone", code="no_file")
    return f"{output}{'errors' if errors else 'part'}.jsonl", _pieces(
        output, manifest.errors if errors else manifest.parts
    )


async def _pieces(output: str, parts: list[Part]) -> AsyncIterator[bytes]:
    for part in parts:
        left = part.bytes
        pieces = _object_pieces(output, part) if is_object_url(output) else _file_pieces(output, part)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            left -= len(piece)
            yield piece
        if left:
            raise InvalidInput(
                f"{output}{part.name} does not have the {part.bytes:,} bytes of the manifest", code="no_file"
            )


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
