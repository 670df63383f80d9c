"""Two servers on one PostgreSQL database and one folder of jobs: the second one takes over, and the first writes no
more."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from fakes.databases import POSTGRESQL, databases
from openai import OpenAI
from story.openai_story import ended, result_lines, row, submit, texts, until, write_project
from story.running_server import RunningServer

from batchmill.services.data_dirs.databases import EXIT_REPLACED

ROWS, SHORT_JOBS = 500, 12
STEADY = """

def steady(messages, model=None):
    time.sleep(0.01)
    return chat(messages, model)
"""
CONFIG = """
[models.steady]
engine = "function"
source = "app.py:steady"

[database]
url = "{url}"
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a configuration of an empty PostgreSQL database."""
    databases.begin(POSTGRESQL)
    write_project(tmp_path, CONFIG.format(url=databases.url(tmp_path)))
    (tmp_path / "app.py").write_text("import time\n" + (tmp_path / "app.py").read_text() + STEADY)
    yield tmp_path
    databases.end()


def free_url() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def verify(project: Path, batch: str) -> dict:
    """What `batchmill ledger verify` says."""
    words = ["--json", "ledger", "verify", batch.replace("batch_", "job_"), "--data-dir", "data"]
    done = subprocess.run(
        [sys.executable, "-m", "batchmill", *words], cwd=project, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["report"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_takes_over(project: Path, end: signal.Signals):
    """While one server owns the database, the other answers 503. When the first is killed, or stopped, the second one
    finishes its batch, and the short ones that were just ending: no row is lost or doubled. The first, when it goes on,
    ends itself, and leaves the results as the second one has published them.
    """
    other = project / "other"
    other.mkdir()
    flags = ("--data-dir", str(project / "data"), "--config", str(project / "batchmill.toml"))
    with RunningServer(project) as first, ThreadPoolExecutor(1) as pool:
        client = OpenAI(api_key="x", base_url=f"{first.url}/v1", max_retries=5)
        batch = submit(client, [row(f"r{n}", f"text {n}", "steady") for n in range(ROWS)])
        second = RunningServer(other, *flags)
        second.url = url = free_url()
        starting = pool.submit(second.start)
        try:
            until(lambda: (other / "log").exists() and "standing by" in second.log)
            reply = httpx2.get(f"{url}/v1/batches")
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
            assert first.url not in reply.text
            until(lambda: client.batches.retrieve(batch.id), lambda seen: seen.request_counts.completed >= ROWS // 10)
            short = [submit(client, [row("r", f"text {n}")]) for n in range(SHORT_JOBS)]
            first.signal(end)
            starting.result()
            with OpenAI(api_key="x", base_url=f"{second.url}/v1", max_retries=5) as successor:
                done = ended(successor, batch)
                outputs = [ended(successor, each).output_file_id for each in short]
                first.signal(signal.SIGCONT)
                assert first.wait() == (EXIT_REPLACED if end is signal.SIGSTOP else -signal.SIGKILL)
                results = result_lines(successor, done.output_file_id)
                assert [texts(result_lines(successor, each)) for each in outputs] == [
                    {"r": f"TEXT {n}"} for n in range(SHORT_JOBS)
                ]
            assert [each["custom_id"] for each in results] == [f"r{n}" for n in range(ROWS)]
            assert texts(results) == {f"r{n}": f"TEXT {n}" for n in range(ROWS)}
            if end is signal.SIGSTOP:
                assert "another process has become the owner of the database" in first.log
            assert verify(project, batch.id)["rows_done"] == ROWS
        finally:
            first.signal(signal.SIGCONT)
            second.stop()
            client.close()


def test_a_standby_ends_at_a_signal(project: Path):
    """As a rollout ends it, which kills it after a while."""
    words = [sys.executable, "-m", "batchmill", "serve", "--data-dir", "data", "--port", "0"]
    with (
        RunningServer(project),
        subprocess.Popen(words, cwd=project, stderr=subprocess.PIPE, text=True) as standby,
    ):
        assert standby.stderr is not None
        while "standing by" not in (line := standby.stderr.readline()):
            assert line, "it has ended"
        standby.terminate()
        said = standby.stderr.read()
    assert standby.returncode == 0 and "stopped before it served" in said and "is killed" not in said
