"""A real vLLM under `--executor ray`, on three nodes of which one is lost; and rows to a service from there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.openai_service import OpenAIService
from ray_support import ray_nodes, ray_python

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
FORKING = Path(__file__).parents[1] / "fakes" / "forking_vllm" / "python.sh"
ROWS = 300
LOOK_S = 0.05
BLOCK_BYTES = 2048  # a segment with a block is longer
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
CONFIG = """
data_dir = "data"
[cluster]
address = "{address}"
python = "{python}"
trusted_network = true
[models.tiny]
engine = "vllm"
source = "{source}"
python = "{engine_python}"
workers = 2
engine_args = {{ max-model-len = 2048, enforce-eager = true }}
adapters = {{ upper = "{source}/adapters/upper" }}
"""


class Commands:
    """`batchmill` in a folder whose configuration names a cluster."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        config = CONFIG.format(address=address, python=ray_python(), source=TINY, engine_python=FORKING)
        (folder / "batchmill.toml").write_text(config)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "batchmill", *words], cwd=self._folder, env={**os.environ, **VARIABLES},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def prints(self, *words: str) -> str:
        process = self.start(*words)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def job(self) -> dict:
        return json.loads(self.prints("jobs", "--json").splitlines()[0])["job"]

    def writing(self) -> int:
        """How many workers have written outcomes."""
        segments = self._folder.glob("data/jobs/*/segments/*.seg")
        return sum(each.stat().st_size > BLOCK_BYTES for each in segments)

    def results(self) -> list[dict]:
        """The results, by the numbers of their rows. The ledger is sound."""
        self.prints("ledger", "verify", self.job()["id"])
        results = [json.loads(line) for line in (self._folder / "out.jsonl").read_text().splitlines()]
        return sorted(results, key=lambda each: int(each["custom_id"]))


def write_rows(path: Path, model: str, count: int, **fields: object) -> None:
    with path.open("w") as file:
        for number in range(count):
            content = f"Say: word {number}"
            body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def texts(results: list[dict]) -> list[str]:
    return [each["response"]["body"]["choices"][0]["message"]["content"] for each in results]


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_a_node_of_three_is_lost(tmp_path):
    """A vLLM job whose node is removed in its middle has exactly one right result a row."""
    write_rows(tmp_path / "in.jsonl", "upper", ROWS, max_tokens=64, ignore_eos=True)
    with ray_nodes(0, 1, 1) as nodes:
        commands = Commands(tmp_path, nodes.address)
        job = commands.start("run", "in.jsonl", "--model", "tiny", "--executor", "ray", "--output", "out.jsonl")
        while commands.writing() < 2 and job.poll() is None:
            time.sleep(LOOK_S)
        nodes.does("remove 1")
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
        results = commands.results()
    assert [each["custom_id"] for each in results] == [str(number) for number in range(ROWS)]
    for number, text in enumerate(texts(results)):
        assert text.startswith(f"WORD {number}"), (number, text)


async def test_rows_to_a_service(tmp_path):
    """Rows of a remote service run on the cluster: each is answered once."""
    write_rows(tmp_path / "in.jsonl", "m", ROWS)
    async with OpenAIService() as service:
        run = ["run", "in.jsonl", "--model", "openai:m", "--base-url", service.base_url, "--executor", "ray",
               "--output", "out.jsonl"]  # fmt: skip
        results = await asyncio.to_thread(run_on_cluster, tmp_path, run)
        assert sorted(service.count().values()) == [1] * ROWS
    assert len(results) == ROWS and all(each["response"]["status_code"] == 200 for each in results)


def run_on_cluster(folder: Path, words: list[str]) -> list[dict]:
    with ray_nodes(1) as nodes:
        commands = Commands(folder, nodes.address)
        commands.prints(*words)
        return commands.results()
