"""Which bytes of a segment no commit names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

Span = tuple[int, int]  # first byte, and the one after the last


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same bytes, ascending, in as few spans as there can be."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def gaps_of(path: Path, spans: Iterable[Span]) -> Iterator[Span]:
    """What lies between merged spans, before and behind them; the first gap holds the head of the file."""
    size, reached = os.stat(path).st_size, 0
    for start, end in spans:
        if start > reached:
            yield reached, start
        reached = end
    if size > reached:
        yield reached, size
