"""Lines of JSON on standard error."""

import json
import subprocess
import sys

import pytest

CODE = """
import logging, sys
from batchmill.server import access_log
access_log.configure(sys.argv[1])
access_log.write(access_log.Served("req_1", "GET", "/x", 200, project="one", key="k"))
log = logging.getLogger("batchmill.server")
log.warning("two\\nlines \\x1b[31m %s", "and a \\r")
logging.getLogger("uvicorn.error").info("not wanted")
try:
    raise ValueError("what somebody sent")
except ValueError as error:
    log.error("failed", exc_info=error)
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


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("warning", 2), ("error", 1)])
def test_levels(level, count):
    """A higher level leaves out what is below it; only `debug` shows the words of an error."""
    told = lines(level)
    assert len(told) == count
    assert ("what somebody sent" in told[-1]["trace"]) is (level == "debug")
