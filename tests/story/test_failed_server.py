"""A bug of the server that ends its dispatcher: it says so, ends, and its jobs go on at the next start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from openai import OpenAI
from story.openai_story import ended, row, submit, write_project
from story.running_server import RunningServer

BUG = """
import sys

if "serve" in sys.orig_argv:
    from batchmill.jobs.pools.dispatcher import Dispatcher

    def fail(*_):
        raise ValueError("a bug of the dispatcher")

    Dispatcher._match = fail
"""


def test_a_dispatcher_that_fails_ends_the_server(tmp_path: Path):
    """The traceback is in the log, the exit code makes a supervisor start the server again, and that resumes jobs."""
    write_project(tmp_path)
    bug = tmp_path / "bug"
    bug.mkdir()
    (bug / "sitecustomize.py").write_text(BUG)
    path = ":".join([str(bug), *filter(None, sys.path)])
    server = RunningServer(tmp_path, env={"PYTHONPATH": path})
    with server, OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=9) as client:
        batch = submit(client, [row("r0", "text"), row("r1", "more")])
        assert server.wait() == 1
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        (failure,) = [line for line in lines if "the dispatcher has failed" in line.get("message", "")]
        assert failure["level"] == "critical" and "in _dispatch" in failure["trace"]
        assert failure["trace"].endswith("ValueError")
        (tmp_path / "log").unlink()
        (bug / "sitecustomize.py").write_text("")
        server.start()
        done = ended(client, batch)
        assert done.request_counts.completed == 2
