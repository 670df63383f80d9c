"""What lies in the environment of a server is found in none of its children, but what they are meant to have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
from dialects.predibase.llm_server import config_of
from engines.llm_support import FakeVllm
from fakes.echoing_service import EchoingService
from fakes.running_server import RunningServer
from story.deployed_functions import deploy

CODE = """
import os
import time


def seen(name):
    return os.environ.get(name, "")


def held(until, messages=None, model=None):
    while not os.path.exists(until):
        time.sleep(0.01)
    return until
"""
CONFIG = """
[models.far]
engine = "openai"
source = "remote"
base_url = "SERVICE/v1"
api_key = "env:FAR_KEY"

[models.held]
engine = "function"
source = "functions.py:held"

[models.seen]
engine = "function"
source = "functions.py:seen"
"""
CANARY, KEY, OWN = "canary-of-the-owner", "canary-of-a-model", "canary-of-a-function"


def environ_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text("latin-1")
    except OSError:  # it has ended
        return ""


def children_of(pid: int) -> dict[str, str]:
    """Every process below one, by its number -> its environment."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[stat.parent.name] = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    found: list[str] = [str(pid)]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return {each: environ_of(each) for each in found[1:]}


async def until_running(client: httpx2.AsyncClient, job: str) -> None:
    async with asyncio.timeout(60):
        while (await client.get(f"/batchmill/v1/jobs/{job}")).json()["state"] != "running":
            await asyncio.sleep(0.05)


async def test_no_child_has_what_is_not_its_own(tmp_path: Path) -> None:
    """While a deployed function, a function, a remote service, a language model and a job run, the environment of no
    process of the server has a variable that its engine does not heed; each model has its own key, and no other's."""
    fake = FakeVllm(tmp_path / "fake")
    (tmp_path / "functions.py").write_text(CODE)
    more = {name: fake.env[name] for name in ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S")}
    more |= {"CANARY": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY, "BATCHMILL_API_KEY": CANARY, "OPENAI_API_KEY": CANARY}
    async with EchoingService() as service:
        config = config_of(fake, CONFIG.replace("SERVICE", service.url))
        server = RunningServer(tmp_path, config, env={**more, "FAR_KEY": KEY, "OWN_SECRET": OWN})
        await asyncio.to_thread(server.start)
        try:
            words = ("functions.py:seen", "--name", "deployed", "--secret", "OWN=env:OWN_SECRET")
            await asyncio.to_thread(deploy, tmp_path, *words)
            async with httpx2.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:

                async def ask(name: str) -> object:
                    return (await client.post("/v1/deployed/latest", json={"data": name})).json()["data"]

                assert [await ask(name) for name in ("CANARY", "OWN", "OWN_SECRET", "FAR_KEY")] == ["", OWN, "", ""]
                for model in ("far", "tiny"):
                    body = {"model": model, "messages": [{"role": "user", "content": "answer"}]}
                    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                assert service.seen[-1]["Authorization"] == f"Bearer {KEY}"
                rows = json.dumps({"until": str(tmp_path / "done")}) + "\n" + json.dumps({"until": "/"}) + "\n"
                fields = {"params": {"filename": "in.jsonl"}, "headers": {"content-type": "application/octet-stream"}}
                sent = await client.post("/batchmill/v1/files", content=rows, **fields)
                order = {"files": [sent.json()["id"]], "models": ["held"]}
                job = (await client.post("/batchmill/v1/jobs", json=order)).json()
                await until_running(client, job.get("id") or job["job"]["id"])
                children = await asyncio.to_thread(children_of, server.pid)
                (tmp_path / "done").touch()
        finally:
            await asyncio.to_thread(server.close)
    assert len(children) >= 7, "four workers, a function's process, a guard and its engine"
    assert [pid for pid, environ in children.items() if CANARY in environ or KEY in environ] == []
    assert len([pid for pid, environ in children.items() if OWN in environ]) == 1
