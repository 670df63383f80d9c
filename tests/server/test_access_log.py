"""Lines of JSON on standard error."""

import json
import subprocess
import sys

import pytest

from batchmill.server import access_log
from batchmill.server.access_log import RequestRecord

CODE = """
import asyncio, logging, sys
from batchmill.server import access_log
access_log.configure(sys.argv[1])
async def serve():
    access_log.write(access_log.RequestRecord("req_1", "GET", "/x", 200, project="one", key="k"))
asyncio.run(serve())
log = logging.getLogger("batchmill.server")
log.warning("two\\nlines \\x1b[31m %s", "and a \\r")
logging.getLogger("uvicorn.error").info("not wanted")
try:
    raise ValueError(" ".join(["what", "somebody", "sent"]))  # newer Pythons show this very line in a traceback
except ValueError as error:
    log.error("failed", exc_info=error)
"""


MANY = """
import asyncio, sys
from batchmill.server import access_log
access_log.configure("info")
access_log.FLUSH_DELAY_S = 0.0
async def serve():
    for number in range(access_log.LINES_MAX + 1):
        access_log.write(access_log.RequestRecord(f"req_{number}", "GET", "/x", 200))
    await asyncio.sleep(0.0)
    while access_log.access.handlers[0]._lines:
        await asyncio.sleep(0.0)
    print("all are written", file=sys.stderr, flush=True)
    access_log.write(access_log.RequestRecord("last", "GET", "/x", 200, code="unknown_url"))
asyncio.run(serve())
"""


def lines(level):
    done = subprocess.run([sys.executable, "-c", CODE, level], capture_output=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stderr.split(b"\n")[:-1]]


def test_every_message_is_one_line():
    """A request is a line of its own fields; control characters are escaped; others' chatter is left out."""
    request, warning, error = lines("info")
    assert {name: request[name] for name in ("route", "status", "project", "key", "request")} == {
        "route": "/x", "status": 200, "project": "one", "key": "k", "request": "req_1",
    }  # fmt: skip
    assert warning["message"] == "two\nlines \x1b[31m and a \r" and warning["level"] == "warning"
    assert error["trace"].endswith("ValueError") and "what somebody sent" not in error["trace"]


def test_lines_are_written_together_and_none_is_lost():
    """Lines wait for others for a moment, at most so many; the last are written at the end of the process."""
    output = subprocess.run([sys.executable, "-c", MANY], capture_output=True, check=True, timeout=60).stderr.split(
        b"\n"
    )
    assert [json.loads(line)["request"] for line in output[:1001]] == [f"req_{number}" for number in range(1001)]
    assert output[1001] == b"all are written"
    last = json.loads(output[1002])
    assert (last["request"], last["code"], last["level"]) == ("last", "unknown_url", "info") and "project" not in last


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("warning", 2), ("error", 1)])
def test_levels(level, count):
    """A higher level leaves out what is below it; only `debug` shows the words of an error."""
    result = lines(level)
    assert len(result) == count
    assert ("what somebody sent" in result[-1]["trace"]) is (level == "debug")


def test_strangers_fill_no_disk(capsys, caplog, monkeypatch):
    """Of requests without a key that were refused there are so many lines a second, and one that counts the others."""
    now = [100.0]
    monkeypatch.setattr(access_log.time, "monotonic", lambda: now[0])
    lines = access_log.RequestLogHandler()
    lines._timer = object()  # it is written when the test says so
    stranger = RequestRecord("r", "GET", status=401, code="invalid_api_key")
    for _ in range(access_log.REFUSED_MAX + 50):
        lines.add(stranger)
    lines.add(RequestRecord("r", "GET", status=403, code="forbidden", key="k1"))
    assert len(lines._lines) == access_log.REFUSED_MAX + 1
    now[0] += 1.0
    lines.add(stranger)
    assert len(lines._lines) == access_log.REFUSED_MAX + 2
    assert "50 more requests" in caplog.text
