"""A cluster whose nodes see nothing of the data directory: with `[storage]`, all goes through an object store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.echoing_service import EchoingService
from fakes.running_server import running_server
from fakes.s3_server import bucket_client, s3_environment, s3_server
from fakes.web_files import WebFile, web_files
from ray_support import Nodes, ray_nodes, ray_python
from story.deployed_functions import batchmill as run_command
from story.deployed_functions import deploy

BUCKET = "nodes"
ROWS = 400
APP = """
import os
from base64 import b64encode
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def double(n):
    with CALLS.open("a") as calls:
        calls.write(f"{os.getppid()} {n}\\n")
    return 2 * n
"""


class Stage:
    """A cluster, an object store, and a folder that only the owner sees."""

    def __init__(self, folder: Path, url: str, client: Any) -> None:
        self.hidden, self.cache, self.url, self.client = folder / "hidden", folder / "cache", url, client
        self.hidden.mkdir()
        self.fault = folder / "fault"  # exists once the first worker that was to put an object has been killed
        self.nodes: Nodes

    def config(self, name: str) -> str:
        return (
            f'data_dir = "{self.hidden / name}"\n'
            f'[cluster]\nexecutor = "ray"\naddress = "{self.nodes.address}"\npython = "{ray_python()}"\n'
            f'cache = "{self.cache}"\n'
            f'[storage]\nobjects = "s3://{BUCKET}/{name}"\n'
            f'[secrets]\nkey_file = "{self.hidden / name.replace("/", "-")}.keys"\n'
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with s3_server() as url, bucket_client(url, BUCKET) as client:
        made = Stage(tmp_path_factory.mktemp("nodes"), url, client)
        environ = {**s3_environment(url), "BATCHMILL_FAULT": f"before_put:1:{made.fault}"}
        with ray_nodes(0, 1, 1, environ=environ, hidden=made.hidden) as made.nodes:
            yield made


def batchmill(folder: Path, url: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "batchmill", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **s3_environment(url)},
    )  # fmt: skip


def says(folder: Path, url: str, *words: str) -> str:
    """What a command prints. It ends with 0."""
    process = batchmill(folder, url, *words)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


def called(folder: Path) -> dict[int, set[int]]:
    """The rows that each worker called the function with, the first worker first."""
    found: dict[int, set[int]] = {}
    for line in (folder / "calls").read_text().splitlines():
        pid, row = map(int, line.split())
        found.setdefault(pid, set()).add(row)
    return found


@pytest.mark.timeout(180)
def test_a_worker_dies_before_its_rows_are_in_the_store(stage: Stage, tmp_path: Path) -> None:
    """What a killed worker had written to its node's disk counts, and is not run again."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "batchmill.toml").write_text(stage.config("job"))
    rows = stage.hidden / "in.jsonl"
    rows.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
    says(tmp_path, stage.url, "run", str(rows), "--model", "function:app.py:double", "-o", "out.jsonl")
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["output"] for each in results] == [2 * n for n in range(ROWS)]
    assert stage.fault.exists(), "no worker was killed"
    first, *others = called(tmp_path).values()
    assert first - set().union(*others), "every row ran again"
    shown = json.loads(says(tmp_path, stage.url, "jobs", "--json").splitlines()[0])["job"]
    says(tmp_path, stage.url, "ledger", "verify", shown["id"])
    found = batchmill(tmp_path, stage.url, "doctor", "--json").communicate(timeout=100)[0]
    assert f"every node reads and writes s3://{BUCKET}/job" in found, found


@pytest.mark.timeout(180)
async def test_a_server_whose_nodes_see_no_file_of_it(stage: Stage) -> None:
    """A deployed function answers calls and runs a job; a job of an uploaded file asks a remote service."""
    folder = stage.hidden / "server"
    folder.mkdir()
    (folder / "functions.py").write_text("def triple(n):\n    return 3 * n\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
    async with EchoingService() as service:
        config = stage.config("server/data") + (
            f'[models.remote]\nengine = "openai"\nsource = "remote"\nbase_url = "{service.url}/v1"\n'
            '[functions]\nisolate = "bubblewrap"\n'
        )
        with running_server(folder, config, env=s3_environment(stage.url)) as server:
            await asyncio.to_thread(deploy, folder, "functions.py:triple", "--example", '{"n": 1}')
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
                call = await client.post("/v1/triple/latest", json={"data": [[1, 14]]})
                assert call.json() == {"data": [[1, 42]]}
                done = await asyncio.to_thread(
                    run_command, folder, "run", "rows.jsonl", "--model", "triple", "-o", "out.jsonl"
                )
                assert done.returncode == 0, done.stdout + done.stderr
                outputs = [json.loads(line)["output"] for line in (folder / "out.jsonl").read_text().splitlines()]
                assert outputs == [3 * n for n in range(ROWS)]
                assert await batch_of(client, 40) == 40


@pytest.mark.timeout(180)
async def test_a_class_that_validates_on_a_node(stage: Stage) -> None:
    """Its code comes with the job, and runs isolated on the node that asks the service."""
    folder = stage.hidden / "classes"
    folder.mkdir()
    (folder / "answers.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Review:\n    score: float\n"
        "    def __post_init__(self):\n        if self.score > 1:\n            raise ValueError('above 1')\n"
    )
    (folder / "rows.jsonl").write_text('{"text": "3"}\n{"text": "0.5"}\n')

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        first, *others = body["messages"]
        return choice(json.dumps({"score": 0.1 if "above 1" in str(others) else float(first["content"])}))

    async with AnsweringService(answer) as service:
        config = stage.config("classes/data") + (
            f'[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "{service.url}"\n'
            f'[functions]\nisolate = "bubblewrap"\nreadable = {[str(Path(msgspec.__file__).parents[1])]}\n'
        )
        with running_server(folder, config, env=s3_environment(stage.url)):
            await asyncio.to_thread(deploy, folder, "answers.py:Review", "--schema", "--name", "review")
            words = ("run", "rows.jsonl", "--model", "m", "--prompt", "{text}", "--validator", "review")
            done = await asyncio.to_thread(run_command, folder, *words, "-o", "out.jsonl")
            assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line)["score"] for line in (folder / "out.jsonl").read_text().splitlines()]
    assert found == [0.1, 0.5] and len(service.bodies) == 3


async def test_images_that_nodes_fetch(stage: Stage) -> None:
    """URLs are fetched by the node that runs the row, by the owner's rules; bytes come with it; files as objects."""
    folder = stage.hidden / "images"
    folder.mkdir()
    image = b"\x89PNG\r\n\x1a\npixels"
    inline = f"data:image/png;base64,{b64encode(image).decode()}"
    with web_files() as web:
        web.files["/a.png"] = WebFile(image, failures=[503])
        cells = [f"{web.url}/a.png", inline, "a.png"]
        (folder / "rows.jsonl").write_text("".join(json.dumps({"img": cell}) + "\n" for cell in cells))
        (folder / "a.png").write_bytes(image)
        async with AnsweringService(lambda _: choice("fine")) as service:
            (folder / "batchmill.toml").write_text(
                stage.config("pictures") + f'[server]\nprivate_hosts = ["{web.host}"]\n'
                f'[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "{service.url}"\n'
            )
            command = ("run", "rows.jsonl", "--model", "m", "--prompt", "?", "--image", "img", "-o", "out.jsonl")
            process = batchmill(folder, stage.url, *command)
            text, _ = await asyncio.to_thread(process.communicate, timeout=120)
            assert process.returncode == 0, text
        outputs = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        assert [each["output"] for each in outputs] == ["fine"] * 3, text
        sent = [body["messages"][0]["content"][0]["image_url"]["url"] for body in service.bodies]
        assert sent == [inline] * 3 and len(web.requests) == 2


async def batch_of(client: httpx2.AsyncClient, rows: int) -> int:
    """Upload a file and run it. Returns the rows that were answered."""
    body = {"model": "remote", "messages": [{"role": "user", "content": "answer"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    text = "".join(json.dumps({"custom_id": str(n), **line}) + "\n" for n in range(rows))
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)})
    order = {"input_file_id": sent.json()["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=order)).raise_for_status().json()
    while batch["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.01)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["status"] == "completed", batch
    return batch["request_counts"]["completed"]
