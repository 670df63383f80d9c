"""A batchmill whose model is another batchmill's batch API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai_story import TIMEOUT_S, row, until, write_project
from running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("provider")
    write_project(folder)
    with RunningServer(folder) as running:
        yield running


class Customer:
    """`batchmill run` of some rows in a folder of its own, with the server as the provider of their model."""

    def __init__(self, folder: Path, server: RunningServer, model: str, texts: list[str]) -> None:
        self.folder, self._server, self._model = folder, server, model
        lines = [
            json.dumps({**row(f"r{n}", text), "body": {"messages": messages(text)}}) for n, text in enumerate(texts)
        ]
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "batchmill", "run", "in.jsonl", "--model", f"openai-batch:{self._model}"]
        words += ["--base-url", f"{self._server.url}/v1", "--api-key-env", "PROVIDER_KEY", "-o", "out.jsonl"]
        words += ["--engine-arg", "poll_s=0.05", "--engine-arg", "poll_max_s=0.2", "--data-dir", "data"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PROVIDER_KEY": "none"},
            )

    def texts(self) -> dict[str, str]:
        """What came back, by the rows' own names."""
        found = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in found}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def batches_of(client: OpenAI, before: set[str]) -> list[object]:
    """The provider's batches that were made since."""
    return [batch for batch in client.batches.list(limit=100) if batch.id not in before]


def test_rows_through_another_batchmill(server: RunningServer, client: OpenAI, tmp_path: Path) -> None:
    """A run whose rows go through another batchmill's batches has every result, and deletes what it uploaded."""
    before = {batch.id for batch in client.batches.list(limit=100)}
    customer = Customer(tmp_path, server, "chat", [f"text {n}" for n in range(300)] + ["fail"])
    assert customer.start().wait(TIMEOUT_S) == 3, customer.log  # a row has failed
    assert customer.texts() == {f"r{n}": f"TEXT {n}" for n in range(300)}
    (batch,) = batches_of(client, before)
    assert batch.metadata["batchmill"].startswith("batchmill-")
    assert batch.request_counts.total == 301
    assert batch.input_file_id not in [file.id for file in client.files.list(purpose="batch")]
    (error,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert error["custom_id"] == "r300"


def test_killed_while_the_other_runs(server: RunningServer, client: OpenAI, tmp_path: Path) -> None:
    """A run that is killed while the provider works finds its batch again: the provider runs every row once."""
    before = {batch.id for batch in client.batches.list(limit=100)}
    gate = server.folder / f"gate-{tmp_path.name}"
    customer = Customer(tmp_path, server, "gated", [gate.name] * 3)
    process = customer.start()
    until(lambda: any(batch.status == "in_progress" for batch in batches_of(client, before)))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gate.touch()
    assert customer.start().wait(TIMEOUT_S) == 0, customer.log
    assert customer.texts() == {f"r{n}": gate.name.upper() for n in range(3)}
    assert len(batches_of(client, before)) == 1
