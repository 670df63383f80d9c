"""One line of JSON a request, and every other message of the process, on standard error: no bodies, keys or values."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

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
    """One line for a request."""
    if access.isEnabledFor(logging.INFO):
        told = {
            "method": served.method[:16], "route": served.route, "status": served.status,
            "ms": round(served.seconds * 1000, 2), "project": served.project, "key": served.key, "request": served.id,
            "bytes_in": served.bytes_in, "bytes_out": served.bytes_out, "code": served.code,
        }  # fmt: skip
        access.info("request", extra={"fields": {name: value for name, value in told.items() if value is not None}})


class _Lines(logging.Formatter):
    """JSON lines: whatever a message holds, control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "from": record.name}
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["trace"] = "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
            if logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
                line["trace"] += f": {error}"  # which may hold what somebody sent
        return _encode(line).decode()


def configure(level: str) -> None:
    """Have the whole process log so, once. uvicorn's own lines of requests are off."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("batchmill").setLevel(level.upper())
