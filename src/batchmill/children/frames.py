"""Frames between a process and its parent, on pipes: u32 length and u8 kind, then msgpack."""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Callable

import msgspec

FRAME = struct.Struct("<IB")

_encoder = msgspec.msgpack.Encoder()


def read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes; fewer only if the other end was closed."""
    pieces = []
    while size > 0:
        piece = os.read(fd, size)
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def frame(kind: int, message: object) -> bytes:
    payload = _encoder.encode(message)
    return FRAME.pack(len(payload), kind) + payload


def run(serve: Callable[[int, int], None]) -> None:
    """Serve the parent process with stdin and stdout, until it ends.

    Args: serve: gets their file descriptors.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command; this process ends when stdin ends
    try:
        serve(sys.stdin.fileno(), sys.stdout.fileno())
    except BrokenPipeError:
        os._exit(0)  # the parent process has ended
