"""Reads Cohere's Avro files. The only module that imports fastavro."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from fastavro import reader


def read(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a file."""
    yield from reader(file)  # type: ignore[misc]  # records of a dataset are objects
