"""What every line must be before it is read as JSON: not too long, UTF-8, not nested too deep."""

from __future__ import annotations

from batchmill.types import RowError
from batchmill.wire.json_bytes import is_too_deep, openings

GROUP_LINES = 16  # lines whose brackets are counted at once


def is_harmless(text: bytes, lines: list[bytes], lengths: list[int], *, length_max: int, depth_max: int) -> bool:
    """Whether every line passes for sure. False: some line needs `flaw`."""
    longest = max(lengths, default=0)
    if longest > length_max or not (text.isascii() or is_utf8(text)):
        return False
    if longest <= 2 * depth_max:  # each level takes two brackets
        return True
    groups = range(0, len(lines), GROUP_LINES)
    return all(_is_shallow(lines[first : first + GROUP_LINES], depth_max) for first in groups)


def flaw(line: bytes, *, length_max: int, depth_max: int) -> RowError | None:
    """What is wrong with a line as text: `line_too_long`, `invalid_encoding`, `nesting_too_deep`."""
    if len(line) > length_max and len(line.rstrip(b"\r\n")) > length_max:
        return RowError("line_too_long", f"the line is longer than {length_max} bytes")
    if not (line.isascii() or is_utf8(line)):
        return RowError("invalid_encoding", f"the line is not UTF-8{_encoding_hint(line)}")
    if is_too_deep(line, depth_max):
        return RowError("nesting_too_deep", f"the JSON is nested deeper than {depth_max} levels")
    return None


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_shallow(lines: list[bytes], depth_max: int) -> bool:
    if openings(b"".join(lines)) <= depth_max:
        return True
    return not any(is_too_deep(line, depth_max) for line in lines)


def _encoding_hint(line: bytes) -> str:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        return "; it looks like UTF-16: convert the file with `iconv -f UTF-16 -t UTF-8`"
    return ""
