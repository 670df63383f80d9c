"""How a function's process and its worker speak: frames of a little JSON and the bytes that go with it.

A frame is: magic (4 bytes), length of the JSON (u32), number of buffers (u32), crc32 of the JSON (u32), the length of
each buffer (u64 each), the JSON (an object whose "kind" says what it is), the buffers. Little-endian.

To the function: `start`, `ask`, `abandon`, `open`, `next`, `close`, `stop`. To the worker: `ready`, `failed`,
`results`, `piece`. What stands in each is said where it is made: `main` and `models.function_child`.
"""

from __future__ import annotations

import json
import struct
import zlib

MAGIC = b"bmf1"
HEAD = struct.Struct("<4sIII")
BUFFERS_MAX = 1 << 20
BYTES_MAX = 1 << 31


class BrokenFrame(Exception):
    """The other side does not speak this protocol, or somebody else wrote into its socket."""


def pack(meta, buffers=()):
    """The pieces of a frame, to be written one after another; large buffers are not copied."""
    text = json.dumps(meta, separators=(",", ":")).encode()
    head = HEAD.pack(MAGIC, len(text), len(buffers), zlib.crc32(text))
    sizes = struct.pack(f"<{len(buffers)}Q", *[len(each) for each in buffers])
    return [head + sizes + text, *buffers]


class Reader:
    """Frames out of bytes that come in pieces."""

    def __init__(self):
        self._data = bytearray()
        self._at = 0

    def feed(self, data):
        """The frames that are whole now, as (meta, buffers). Raises: BrokenFrame."""
        self._data += data
        frames = []
        while True:
            frame = self._next()
            if frame is None:
                break
            frames.append(frame)
        if self._at:
            del self._data[: self._at]
            self._at = 0
        return frames

    def _next(self):
        data, at = self._data, self._at
        if len(data) - at < HEAD.size:
            return None
        magic, text_size, count, crc = HEAD.unpack_from(data, at)
        if magic != MAGIC or count > BUFFERS_MAX:
            raise BrokenFrame("what came is no frame")
        begin = at + HEAD.size + 8 * count
        if len(data) < begin + text_size:
            return None
        sizes = struct.unpack_from(f"<{count}Q", data, at + HEAD.size)
        end = begin + text_size + sum(sizes)
        if end - at > BYTES_MAX:
            raise BrokenFrame(f"a frame of {end - at} bytes")
        if len(data) < end:
            return None
        text = bytes(data[begin : begin + text_size])
        if zlib.crc32(text) != crc:
            raise BrokenFrame("a frame whose checksum is wrong")
        buffers, place = [], begin + text_size
        for size in sizes:
            buffers.append(bytes(data[place : place + size]))
            place += size
        self._at = end
        return json.loads(text), buffers
