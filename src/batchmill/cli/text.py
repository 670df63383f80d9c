"""Formats figures and text for people. Text from a model or a file is printed only through `clean`."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import msgspec

CHARS_MAX = 500
# Escape sequences of terminals: whole CSI and OSC sequences, so that no "[31m" is left of them.
_SEQUENCE = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?")
# Control characters of ASCII and Latin-1, marks that change the direction of text, line and paragraph separators, and
# lone surrogates: none of them may reach a terminal.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_CONTROL_BUT_LINES = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def clean(text: str, chars_max: int = CHARS_MAX, *, lines: bool = False) -> str:
    """`text` without control characters, cut to `chars_max`; on one line unless `lines` is set."""
    pattern, gap = (_CONTROL_BUT_LINES, "") if lines else (_CONTROL, " ")
    text = pattern.sub(gap, _SEQUENCE.sub("", text)).strip()
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def json_line(value: Any) -> str:
    """One line of JSON in ASCII, which any terminal shows unchanged."""
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=True, separators=(",", ":"))


def count(number: int, noun: str = "") -> str:
    """1234567 -> "1,234,567"; with a noun "1 row", "2 rows"."""
    plural = "" if not noun else f" {noun}" if number == 1 else f" {noun}s"
    return f"{number:,}{plural}"


def short(number: float) -> str:
    """About three digits: 0.53, 7.1, 512, 40.2k, 1.3M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / ({'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]):.1f}{unit}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def size(size_bytes: int) -> str:
    """12 bytes, 3.4 kB, 1.2 GB."""
    for limit, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.1f} {unit}"
    return count(size_bytes, "byte")


def money(usd: float) -> str:
    """Dollars with two decimals; with four if less than a dollar, with six if less than a hundredth of a cent."""
    if usd >= 1 or usd == 0:
        return f"${usd:,.2f}"
    decimals = 4 if usd >= 0.0001 else 6
    return f"${usd:.{decimals}f}" if usd >= 0.000001 else "under $0.000001"


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3:05 min, 2:03:00 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def moment(epoch_s: float) -> str:
    """A point in time, in the time zone of this machine."""
    return datetime.fromtimestamp(epoch_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def brief(epoch_s: float) -> str:
    """A point in time in five characters: today its time, this year its day, otherwise its year."""
    time, now = datetime.fromtimestamp(epoch_s).astimezone(), datetime.now().astimezone()
    if time.date() == now.date():
        return time.strftime("%H:%M")
    return time.strftime("%m-%d" if time.year == now.year else "%Y")


def percent(part: float, whole: float) -> str:
    """A share that is never rounded up to 100 %, nor down to 0 %."""
    share = 100 * part / whole if whole else 0.0
    if 99 < share < 100:
        return "99 %"
    return f"{share:.0f} %" if share >= 1 or share == 0 else "under 1 %"


def table(rows: list[list[str]]) -> list[str]:
    """Lines with the columns of `rows` aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
