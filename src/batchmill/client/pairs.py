"""Where the asyncio and the blocking client differ: the blocking one is generated with the second of each pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from typing import Any, BinaryIO, ParamSpec, TypeVar

from batchmill.client.messages import PIECE_BYTES

P = ParamSpec("P")
T = TypeVar("T")


def load_transport(name: str) -> Any:
    """The module of a transport over httpx2, which a client that sends otherwise does not import."""
    return import_module(f"batchmill.client.{name}")


async_sleep, sleep = asyncio.sleep, time.sleep


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function beside the event loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


def run_here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function."""
    return function(*args, **kwargs)


async def async_pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """Read the rest of a file beside the event loop."""
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Read the rest of a file."""
    while piece := file.read(PIECE_BYTES):
        yield piece
