"""A bug of the server that ends its dispatcher: it says so, ends, and its jobs go on at the next start, but once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx2
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


def failing(folder: Path) -> tuple[RunningServer, Path]:
    """A server whose dispatcher fails over every row, and the file of the bug."""
    write_project(folder)
    bug = folder / "bug" / "sitecustomize.py"
    bug.parent.mkdir()
    bug.write_text(BUG)
    return RunningServer(folder, env={"PYTHONPATH": ":".join([str(bug.parent), *filter(None, sys.path)])}), bug


def test_a_dispatcher_that_fails_ends_the_server(tmp_path: Path):
    """The traceback is in the log, the exit code makes a supervisor start the server again, and that resumes jobs."""
    server, bug = failing(tmp_path)
    with server, OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=9) as client:
        batch = submit(client, [row("r0", "text"), row("r1", "more")])
        assert server.wait() == 1
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        (failure,) = [line for line in lines if "the dispatcher has failed" in line.get("message", "")]
        assert failure["level"] == "critical" and "in _dispatch" in failure["trace"]
        assert failure["trace"].endswith("ValueError")
        (tmp_path / "log").unlink()
        bug.write_text("")
        server.start()
        done = ended(client, batch)
        assert done.request_counts.completed == 2


def test_a_job_that_fails_every_server_is_resumed_once(tmp_path: Path):
    """After the second end the server stays, without that job, whose message has the bug; a person resumes it."""
    server, bug = failing(tmp_path)
    with server, OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=9) as client:
        batch = submit(client, [row("r0", "text")])
        assert server.wait() == 1
        server.start()
        assert server.wait() == 1
        server.start()
        job = f"{server.url}/batchmill/v1/jobs/{batch.id.replace('batch_', 'job_')}"
        view = httpx2.get(job, timeout=60).json()
        assert (view["state"], view["reason"]) == ("paused", "internal_error")
        assert "ValueError: a bug of the dispatcher (sitecustomize.py, line 8, in fail); " in view["message"]
        assert server.stop() == 0
        (tmp_path / "log").unlink()
        bug.write_text("")
        server.start()
        assert httpx2.get(job, timeout=60).json()["state"] == "paused"
        assert httpx2.post(f"{job}/resume", timeout=60).status_code == 200
        assert ended(client, batch).request_counts.completed == 1
