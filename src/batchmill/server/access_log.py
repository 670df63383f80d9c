"""One line of JSON a request, and every other message of the process, on standard error: no bodies, keys or values."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, field

from batchmill.models import redaction

TOGETHER_S = 0.1  # a line is written so late at most
LINES_MAX = 1000  # that are kept for so long
REFUSED_MAX = 100  # lines a second of requests that were refused to nobody known; of the others it says how many
LEVELS = ("debug", "info", "warning", "error")
access = logging.getLogger("batchmill.access")
_encode = msgspec.json.Encoder().encode


class Served(Struct):
    """What became of a request: filled while it is served, told when it is over."""

    id: str
    method: str
    route: str = ""  # the template of its path; empty: there is none
    status: int = 0  # 499: the client left before its reply began
    started: float = 0.0  # monotonic seconds
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    project: str | None = None
    key: str | None = None
    code: str | None = None  # of the error


def write(served: Served) -> None:
    """One line for a request; lines that come close together are written together."""
    if access.isEnabledFor(logging.INFO):
        for handler in access.handlers:
            if isinstance(handler, Requests):
                handler.add(served)


class _Line(Struct, omit_defaults=True):
    """A request as it is written."""

    at: str
    level: str
    source: str = field(name="from")
    method: str
    route: str
    status: int
    ms: float
    project: str | None = None
    key: str | None = None
    request: str = ""
    bytes_in: int = -1  # no size: it is never left out
    bytes_out: int = -1
    code: str | None = None


class Requests(logging.Handler):
    """The lines of requests: thousands a second, which would cost more than the requests if each were a message."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second, self._date = 0, ""
        self._refused_second, self._refused = 0, 0

    def add(self, served: Served) -> None:
        if served.key is None and served.code is not None and self._is_one_too_many():
            return
        self._lines.append(self._line(served))
        if len(self._lines) >= LINES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)

    def _is_one_too_many(self) -> bool:
        """Whoever has no key fills no disk with lines."""
        second = int(time.monotonic())
        if second != self._refused_second:
            left_out = max(0, self._refused - REFUSED_MAX)
            self._refused_second, self._refused = second, 0
            if left_out:
                logging.getLogger("batchmill.server").warning(
                    "%d more requests without a key were refused in a second than have a line each", left_out
                )
        self._refused += 1
        return self._refused > REFUSED_MAX

    def _line(self, served: Served) -> bytes:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        line = _Line(
            f"{self._date}.{int((now - second) * 1000):03d}+00:00", "info", access.name, served.method[:16],
            served.route, served.status, round(served.seconds * 1000, 2), served.project, served.key, served.id,
            served.bytes_in, served.bytes_out, served.code,
        )  # fmt: skip
        return _encode(line)

    def flush(self) -> None:
        """Write what there is. Also at the end of the process, by `logging.shutdown`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            with contextlib.suppress(OSError):  # nobody reads them any more
                sys.stderr.buffer.write(b"\n".join(lines) + b"\n")
                sys.stderr.flush()


class _Messages(logging.StreamHandler):
    """All other messages: behind the lines of the requests before them."""

    def __init__(self, requests: Requests) -> None:
        super().__init__(sys.stderr)
        self._requests = requests

    def emit(self, record: logging.LogRecord) -> None:
        self._requests.flush()
        super().emit(record)


class _Lines(logging.Formatter):
    """JSON lines: whatever a message holds, control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "from": record.name}
        line["message"] = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["trace"] = "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
            if logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
                line["trace"] += f": {redaction.mask(str(error))}"  # which may hold what somebody sent
        return _encode(line).decode()


def configure(level: str) -> None:
    """Have the whole process log so, once. uvicorn's own lines of requests are off."""
    requests = Requests()
    handler = _Messages(requests)
    handler.setFormatter(_Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    access.handlers[:] = [requests]
    logging.getLogger("batchmill").setLevel(level.upper())
    redaction.guard_logs()
