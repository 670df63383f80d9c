"""Avro as Cohere writes it. The only file that knows fastavro."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from fastavro import reader


def read(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The records of a file, one after the other."""
    yield from reader(file)  # type: ignore[misc]  # records of a dataset are objects
