"""What a server's log says about why it died: the last telling exception, not two hundred lines."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 256 * 1024
LINES_MAX = 8
LINE_CHARS_MAX = 400

# "(EngineCore pid=12) ERROR 11-21 19:20:01 [core.py:1]", in any part, before what the program itself said
_PREFIX = re.compile(r"^(\([\w ]+pid=\d+\)\s?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?")
_TELLING = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)(:|$)|[\w.\- ]+: error: )")
# True, and no help: they only point at a cause that was logged before.
_EMPTY = re.compile(
    r"Engine core initialization failed|Engine core proc.*died|WorkerProc initialization failed"
    r"|^(SystemExit|KeyboardInterrupt|(asyncio\.\w+\.)?CancelledError)"
)


def read_tail(path: Path, offset: int = 0) -> str:
    """The end of a log, not further back than `offset` (a log shorter than that has been begun anew)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = offset if offset <= size else 0
            file.seek(max(begin, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def telling_lines(log: str) -> str:
    """The last exception of a log with what belongs to it, or its last lines where there is none."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    telling = [i for i, line in enumerate(lines) if _TELLING.match(line) and not _EMPTY.search(line)]
    if not telling:
        return _cut([line for line in lines if line][-5:])
    first = telling[-1]
    return _cut([lines[first], *_continuation(lines[first + 1 : first + LINES_MAX])])


def _continuation(lines: list[str]) -> list[str]:
    """Lines that go on with an exception's message: indented ones, up to the next frame or blank line."""
    kept = []
    for line in lines:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "For further information")):
            break
        kept.append(line.strip())
    return kept


def _cut(lines: list[str]) -> str:
    return "\n".join(line[:LINE_CHARS_MAX] for line in lines)
