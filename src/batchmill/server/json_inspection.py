"""Limit the number of values in a JSON body before it is decoded: decoding time depends on values, not on bytes.

A body with too many values is refused. A quick scan of the bytes accepts most bodies; a child process counts the rest.
Some numbers take a thousand times as long to decode as others: very long ones, and those with three-digit exponents.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable

from batchmill.children.bounds import MIB, ResourceLimits
from batchmill.children.programs import Programs
from batchmill.errors import TooComplex

UNSEEN_BYTES_MAX = 4 * 1024  # a body up to this size is not scanned
INLINE_BYTES_MAX = 256 * 1024  # the numbers of a body up to this size are scanned in this process
VALUES_MAX = 50_000  # of a body that the handler decodes whole
HANDED_ON_VALUES_MAX = 1_000_000  # of a body that is forwarded as bytes, and of which a few members are decoded
PIECE_BYTES = MIB  # scanned before other tasks get their turn
BOUNDS = ResourceLimits(cpu_s=10.0, wall_s=30.0, memory_bytes=512 * MIB)
# A possessive repetition of alternatives that may fail midway matches too little before Python 3.11.5.
_strings = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)
_MARKS = (b",", b"[", b"{")
LONG_DIGITS = 64
SLOW_VALUES = 100  # a slow number counts as this many values: it takes 10 µs, other values 10 to 50 ns
_SLOW = re.compile(rb"[0-9.][eE][+-]?0*[1-9][0-9]{2}|[0-9]{%d}[0-9.]*" % LONG_DIGITS)

Progress = Callable[[float], None]


async def inspect(raw: bytes, values_max: int, programs: Programs, who: str) -> None:
    """Check the number of values. Raises: TooComplex for more than `values_max`; RateLimited."""
    if len(raw) <= UNSEEN_BYTES_MAX or await _is_short(raw, values_max):
        return
    answer = await programs.run(f"{__name__}:count", raw, who=who, work="reading the body", bounds=BOUNDS)
    if int(answer) > values_max:
        raise TooComplex(
            f"the body's JSON has more than {values_max:,} values (a number with {LONG_DIGITS} or more digits, or with "
            f"a three-digit exponent, counts as {SLOW_VALUES} values): send less at once, or upload it as a file"
        )


async def _is_short(raw: bytes, values_max: int) -> bool:
    """Whether the JSON certainly has fewer values, even if all brackets and commas in its strings were values."""
    marks, exponents, view = 0, 0, memoryview(raw)
    for at in range(0, len(raw), PIECE_BYTES):
        piece = bytes(view[at : at + PIECE_BYTES])
        marks += sum(piece.count(mark) for mark in _MARKS)
        exponents += piece.count(b"e") + piece.count(b"E")
        if marks >= values_max:
            return False
        if at + PIECE_BYTES < len(raw):
            await asyncio.sleep(0)
    slow = min(marks, exponents + len(raw) // LONG_DIGITS)  # at most
    if marks + slow * SLOW_VALUES >= values_max and len(raw) <= INLINE_BYTES_MAX:
        slow = len(_SLOW.findall(raw))
    return marks + slow * SLOW_VALUES < values_max


def count(order: bytes, progress: Progress) -> bytes:
    """Count the values of JSON, in the child process. It stops counting above the largest limit."""
    values, at, size = 1, 0, PIECE_BYTES
    while at < len(order) and values <= HANDED_ON_VALUES_MAX:
        piece = order[at : at + size]
        end = len(piece) if at + size >= len(order) else _end_outside(piece)
        bare = _strings.sub(b"", piece[:end])
        values += sum(bare.count(mark) for mark in _MARKS) + SLOW_VALUES * len(_SLOW.findall(bare))
        at, size = at + end, PIECE_BYTES if end else 2 * size  # a string may be longer than a piece
    return b"%d" % values


def _end_outside(piece: bytes) -> int:
    """Return where an unterminated string begins at the end of a piece; without one, the length of the piece."""
    for last in deque(_strings.finditer(piece), maxlen=1):
        return len(piece) if last[1] else last.start()
    return len(piece)
