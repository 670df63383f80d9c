"""The validator process: reads orders from stdin and writes results to stdout, until stdin ends.

It imports little, to start fast. `fan_out` starts it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from batchmill.children.frames import FRAME, frame, read_exactly, run, write_all
from batchmill.datasets.checking.inspection import Inspector
from batchmill.datasets.orders import READ_ERRORS, ByteRange, RangeEnd, RangeFailed, SealOrder, ValidatedChunk

CHUNK_FRAME, END_FRAME, FAILED_FRAME = range(3)


def serve(orders: int, results: int) -> None:
    """Check ranges until `orders` ends. The first frame is the SealOrder, every other one a ByteRange.

    Args: orders, results: file descriptors.
    """
    decode = msgspec.msgpack.Decoder(ByteRange).decode
    order = _receive(orders)
    if not order:
        return
    inspector = Inspector(msgspec.msgpack.decode(order, type=SealOrder))
    while payload := _receive(orders):
        for kind, message in _check(inspector, decode(payload)):
            write_all(results, frame(kind, message))


def _receive(fd: int) -> bytes:
    head = read_exactly(fd, FRAME.size)
    if len(head) < FRAME.size:
        return b""
    size, _ = FRAME.unpack(head)
    payload = read_exactly(fd, size)
    return payload if len(payload) == size else b""


def _check(inspector: Inspector, range_: ByteRange) -> Iterator[tuple[int, ValidatedChunk | RangeEnd | RangeFailed]]:
    try:
        for result in inspector.inspect(range_):
            yield (CHUNK_FRAME if isinstance(result, ValidatedChunk) else END_FRAME), result
    except tuple(READ_ERRORS.values()) as error:
        yield FAILED_FRAME, RangeFailed(type(error).__name__, error.code, error.message)


if __name__ == "__main__":
    run(serve)
