"""How much a body of JSON holds, before anybody reads it on the loop: reading takes its time by values, not by bytes.

A body that holds too much is refused. What might is counted in a child process; the others cost a look at their bytes.
Some numbers take a thousand times as long to read as others: those with exponents of hundreds, and very long ones.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from batchmill.children.bounds import MIB, ResourceLimits
from batchmill.children.programs import Programs
from batchmill.errors import TooComplex

UNSEEN_BYTES_MAX = 4 * 1024  # of a body that is read without a look
INLINE_BYTES_MAX = 256 * 1024  # of a body whose numbers are looked at in place
VALUES_MAX = 50_000  # of a body whose every value the handler reads
HANDED_ON_VALUES_MAX = 1_000_000  # of one that goes on as bytes, of which a few members are read
PIECE_BYTES = MIB  # looked at before others have their turn
BOUNDS = ResourceLimits(cpu_s=10.0, wall_s=30.0, memory_bytes=512 * MIB)
_strings = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_WHOLE = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)  # up to a string that has no end
_MARKS = (b",", b"[", b"{")
LONG_DIGITS = 64
SLOW_VALUES = 100  # what a number that is slow to read counts for: it takes 10 µs, and others 10 to 50 ns
_SLOW = re.compile(rb"[0-9.][eE][+-]?0*[1-9][0-9]{2}|[0-9]{%d}[0-9.]*" % LONG_DIGITS)

Progress = Callable[[float], None]


async def inspect(raw: bytes, values_max: int, programs: Programs, who: str) -> None:
    """Raises: TooComplex for JSON of more values than `values_max`; RateLimited."""
    if len(raw) <= UNSEEN_BYTES_MAX or await _is_short(raw, values_max):
        return
    answer = await programs.run(f"{__name__}:count", raw, who=who, work="reading the body", bounds=BOUNDS)
    if int(answer) > values_max:
        raise TooComplex(
            f"the body's JSON holds more than {values_max:,} values, of which a number with an exponent of three "
            f"digits, or of {LONG_DIGITS} or more, counts for {SLOW_VALUES}: send less at once, or upload it as a file"
        )


async def _is_short(raw: bytes, values_max: int) -> bool:
    """It holds no more values than this, even if all of its text were values."""
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
    """In the child: how many values the JSON holds; beyond those that any body may have it counts no further."""
    values, at, size = 1, 0, PIECE_BYTES
    while at < len(order) and values <= HANDED_ON_VALUES_MAX:
        piece = order[at : at + size]
        end = len(piece) if at + size >= len(order) else _end_outside(piece)
        bare = _strings.sub(b"", piece[:end])
        values += sum(bare.count(mark) for mark in _MARKS) + SLOW_VALUES * len(_SLOW.findall(bare))
        at, size = at + end, PIECE_BYTES if end else 2 * size  # a string that is longer than a piece
    return b"%d" % values


def _end_outside(piece: bytes) -> int:
    """Where the last string of a piece begins that does not end in it; its length where there is none."""
    found = _WHOLE.match(piece)
    return found.end() if found else 0
