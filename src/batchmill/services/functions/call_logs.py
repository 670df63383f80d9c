"""What calls of a version printed and raised, read for those who may: from a cursor on, or the last of it.

A cursor is "GENERATION-OFFSET": how often the file had been kept as the older one, and the byte to go on from.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from batchmill.errors import InvalidInput
from batchmill.models.call_log import FILE, OLDER, Entry, generation_of
from batchmill.models.redaction import mask_known
from batchmill.wire.native_logs import LogEntry, LogPage, LogQuery

PIECE_BYTES_MAX = 8 * 1024 * 1024  # looked at for one page that goes on from a cursor
START = "start"
_CURSOR = re.compile(r"([0-9]{1,9})-([0-9]{1,12})")
_entry = msgspec.json.Decoder(Entry).decode


def read(folder: Path, query: LogQuery, project: str | None) -> LogPage:
    """A page of what is kept in a version's folder. Blocks.

    Args:
        project: whose calls are shown, with what was printed before any call; None: everybody's.
    Raises: InvalidInput (`invalid_cursor`).
    """
    generation = generation_of(folder / OLDER)
    if query.after is None:
        return _last(folder, query, project, generation)
    match = _CURSOR.fullmatch(query.after)
    if match is None:
        raise InvalidInput(f"{query.after[:40]!r} is no cursor: give `next` of the page before", code="invalid_cursor")
    at, offset = int(match[1]), int(match[2])
    is_lost = at < generation - 1  # what stood there was kept, and kept no longer
    if at < generation:
        at, offset = generation - 1, 0 if is_lost else offset
        page, offset, is_whole = _from(folder / OLDER, query, project, offset)
        if not is_whole:
            return LogPage(page, f"{at}-{offset}", is_lost)
        more, offset, _ = _from(folder / FILE, query, project, 0, len(page))
        return LogPage(page + more, f"{generation}-{offset}", is_lost)
    page, offset, _ = _from(folder / FILE, query, project, offset)
    return LogPage(page, f"{generation}-{offset}", is_lost)


def _last(folder: Path, query: LogQuery, project: str | None, generation: int) -> LogPage:
    kept: deque[LogEntry] = deque(maxlen=query.limit)
    offset = 0
    for name in (OLDER, FILE):
        offset = 0
        for line in _lines(folder / name, 0):
            offset += len(line)
            if (entry := _seen(line, query, project)) is not None:
                kept.append(entry)
    return LogPage(list(kept), f"{generation}-{offset}")


def _from(
    path: Path, query: LogQuery, project: str | None, offset: int, had: int = 0
) -> tuple[list[LogEntry], int, bool]:
    """Entries from an offset on, the offset behind them, and whether the file was read to its end.

    Offsets in the older file do not count its first line: they are those that the file had before.
    """
    found: list[LogEntry] = []
    begun = offset
    for line in _lines(path, offset):
        if had + len(found) >= query.limit or offset - begun >= PIECE_BYTES_MAX:
            return found, offset, False
        offset += len(line)
        if (entry := _seen(line, query, project)) is not None:
            found.append(entry)
    return found, offset, True


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    """Whole lines from an offset on; one that is being written comes the next time."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if path.name == OLDER:
            offset += len(file.readline(1024))
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def _seen(line: bytes, query: LogQuery, project: str | None) -> LogEntry | None:
    """The entry of a line, if it was asked for and is the caller's to see."""
    wanted = query.request
    if wanted is not None and wanted.encode() not in line:
        return None
    try:
        entry = _entry(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # torn, when the disk was full
    if wanted is not None and not any(each == wanted or each.startswith(f"{wanted} ") for each in entry.requests):
        return None
    if project is not None and entry.project != project and not (entry.stage == START and not entry.requests):
        return None
    return LogEntry(entry.at, entry.stream, mask_known(entry.text), entry.stage, entry.project, entry.requests)
