"""Log requests, one JSON line each, and all other messages to standard error. No line has bodies, keys or values."""

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

FLUSH_DELAY_S = 0.1  # a line waits at most this long until it is written
LINES_MAX = 1000  # lines that wait to be written
REFUSED_MAX = 100  # lines a second for refused requests without a key; one more line counts the rest
LEVELS = ("debug", "info", "warning", "error")
access = logging.getLogger("batchmill.access")
_encode = msgspec.json.Encoder().encode


class RequestRecord(Struct):
    """The record of one request. It is filled while the request is served, and handed to watchers at its end."""

    id: str
    method: str
    route: str = ""  # the template of its path; empty: no route matched
    status: int = 0  # 499: the client left before its reply began
    started: float = 0.0  # monotonic seconds
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    project: str | None = None
    key: str | None = None
    code: str | None = None  # the error's code


def write(served: RequestRecord) -> None:
    """Log one line for a request. Lines that come close together are written together."""
    if access.isEnabledFor(logging.INFO):
        for handler in access.handlers:
            if isinstance(handler, RequestLogHandler):
                handler.add(served)


class _Line(Struct, omit_defaults=True):
    """The line of one request."""

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
    bytes_in: int = -1  # the default is not a size, so the field is always written
    bytes_out: int = -1
    code: str | None = None


class RequestLogHandler(logging.Handler):
    """Writes the lines of requests. There may be thousands a second; a log message for each would cost more than the
    request itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second, self._date = 0, ""
        self._refused_second, self._refused = 0, 0

    def add(self, served: RequestRecord) -> None:
        if served.key is None and served.code is not None and self._is_over_limit():
            return
        self._lines.append(self._line(served))
        if len(self._lines) >= LINES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_DELAY_S, self.flush)

    def _is_over_limit(self) -> bool:
        """Limit the lines of requests without a key, so that they cannot fill the disk."""
        second = int(time.monotonic())
        if second != self._refused_second:
            omitted = max(0, self._refused - REFUSED_MAX)
            self._refused_second, self._refused = second, 0
            if omitted:
                logging.getLogger("batchmill.server").warning(
                    "%d more requests without a key were refused within one second; they have no lines of their own",
                    omitted,
                )
        self._refused += 1
        return self._refused > REFUSED_MAX

    def _line(self, served: RequestRecord) -> bytes:
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
        """Write all waiting lines. `logging.shutdown` also calls this at the end of the process."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            with contextlib.suppress(OSError):  # the reader of standard error has closed it
                sys.stderr.buffer.write(b"\n".join(lines) + b"\n")
                sys.stderr.flush()


class _MessageHandler(logging.StreamHandler):
    """Writes all other messages, after the lines of earlier requests."""

    def __init__(self, requests: RequestLogHandler) -> None:
        super().__init__(sys.stderr)
        self._requests = requests

    def emit(self, record: logging.LogRecord) -> None:
        self._requests.flush()
        super().emit(record)


class _JsonFormatter(logging.Formatter):
    """Formats messages as JSON lines. Control characters in a message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "from": record.name}
        line["message"] = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["trace"] = "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
            if logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
                line["trace"] += f": {redaction.mask(str(error))}"  # the text may hold what a client sent
        return _encode(line).decode()


def configure(level: str) -> None:
    """Set up logging for the whole process. Call it once. uvicorn's own request lines are off."""
    requests = RequestLogHandler()
    handler = _MessageHandler(requests)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    access.handlers[:] = [requests]
    logging.getLogger("batchmill").setLevel(level.upper())
    redaction.guard_logs()
