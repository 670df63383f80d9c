"""The parts of a dataset as they are downloaded: JSON lines or Avro, told by their first bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from itertools import islice
from typing import IO, Any

import msgspec

from batchmill.engines.provider_batch.provider import TryAgain
from batchmill.errors import RouteFailed
from batchmill.wire.json_bytes import shallow

READERS = {"avro": "batchmill.engines.provider_batch.cohere_avro:read"}
AVRO = b"Obj\x01"
RECORDS_MAX = 200  # handed on at a time; one may be a vector of thousands of numbers
PART_BYTES_MAX = 16 * 1024**3

_object = msgspec.json.Decoder(dict[str, Any])
Records = Iterator[dict[str, Any]]


async def records(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[dict[str, Any]]]:
    """The records of a part, some hundreds at a time. The part lies on disk meanwhile, not in memory.

    Raises: TryAgain for a part that cannot be read; RouteFailed where it is Avro and fastavro is not installed.
    """
    with tempfile.TemporaryFile() as file:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > PART_BYTES_MAX:
                raise RouteFailed(f"a part of the results is larger than {PART_BYTES_MAX // 2**30} GiB")
            await asyncio.to_thread(file.write, piece)
        file.seek(0)
        is_avro = file.read(len(AVRO)) == AVRO
        file.seek(0)
        found = load_reader("avro")(file) if is_avro else _json_lines(file)
        while some := await asyncio.to_thread(_take, found):
            yield some


def load_reader(kind: str) -> Callable[[IO[bytes]], Records]:
    """Raises: RouteFailed where what it needs is not installed."""
    module, _, name = READERS[kind].partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "fastavro":
            raise
        raise RouteFailed("Cohere's results are Avro, which needs fastavro: pip install 'batchmill[cohere]'") from None


def _take(found: Records) -> list[dict[str, Any]]:
    try:
        return list(islice(found, RECORDS_MAX))
    except (ValueError, EOFError, IndexError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise TryAgain(f"a part of the results cannot be read: {error or type(error).__name__}") from None


def _json_lines(file: IO[bytes]) -> Records:
    for line in file:
        if line.strip():
            yield _object.decode(shallow(line))
