"""What a server's jobs have at a provider: seen and settled by the SDK and by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.batch_provider import BatchProvider
from fakes.beside import beside
from story.running_server import RunningServer

from batchmill import Client
from batchmill.errors import InvalidInput, InvalidTransition, UnknownName

ROWS = 6
CONFIG = """
[models.m]
engine = "openai-batch"
source = "gpt"
base_url = "{url}"
api_key = "env:FAR_KEY"
engine_args = {{ poll_s = 0.02, poll_max_s = 0.05, cancel_wait_s = 5 }}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[BatchProvider]:
    with beside(BatchProvider(looks=100_000)) as running:
        yield running


@pytest.fixture(scope="module")
def server(provider, tmp_path_factory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("remote-jobs")
    (folder / "batchmill.toml").write_text(CONFIG.format(url=provider.base_url))
    rows = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": f"text {n}"}]},
        }
        for n in range(ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunningServer(folder, env={"FAR_KEY": "k"}) as running:
        yield running


def command(server: RunningServer, *words: str) -> tuple[int, str]:
    words = (*words, "--server", server.url)
    done = subprocess.run([sys.executable, "-m", "batchmill", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_submission_is_adopted_at_a_server(server, provider):
    """A server's caller sees what a provider has of a job, and says under which id it goes on there."""
    with Client(server.url) as client:
        job = client.submit(server.folder / "in.jsonl", model="m")
        for _ in job.watch(0.1):
            if provider.calls["look"] > 2:
                break
        (remote,) = job.remote()
        assert (remote.state, remote.provider, remote.rows) == ("submitted", "openai", ROWS)
        with pytest.raises(InvalidTransition, match="while the job is paused"):
            job.settle_remote(remote.tag, None)
        hidden = provider.batches.pop(remote.id)
        view = job.wait(60)
        assert (view.state, view.reason) == ("paused", "submit_unknown")
        with pytest.raises(UnknownName):
            job.settle_remote("no-such-tag", "x")
        with pytest.raises(InvalidInput):
            job.settle_remote(remote.tag, "")
        code, text = command(server, "remote", job.id)
        assert code == 0 and "unknown" in text and remote.id in text
        provider.batches[remote.id] = hidden
        hidden.looks = 1
        code, text = command(server, "remote", "adopt", job.id, remote.tag, remote.id)
        assert code == 0 and "batchmill resume" in text
        code, text = command(server, "remote", "forget", job.id, remote.tag)
        assert code != 0 and "only one that is unknown" in text
        job.resume()
        view = job.wait(60)
        assert (view.state, view.rows_ok) == ("completed", ROWS)
        assert [each.state for each in job.remote()] == ["collected"]
        assert set(provider.billed.values()) == {1} and len(provider.billed) == ROWS
        code, text = command(server, "remote", job.id, "--json")
        assert code == 0 and json.loads(text.splitlines()[0])["remote_job"]["id"] == remote.id
