"""The published predibase package in its environment: it evaluates expressions at one server."""

from __future__ import annotations

import json
import os
import subprocess

from client_envs import client_python
from running_server import RunningServer

SCRIPT_S = 540.0  # the real engine takes its time to start
# Reads Python expressions as JSON texts, and prints what became of each; `pb` is the package's client.
SCRIPT = """
import asyncio, contextlib, io, json, os, sys
from predibase import DeploymentConfig, Predibase, UpdateDeploymentConfig
from predibase.beta.config import BatchInferenceServerConfig
from predibase.config import ClassificationDeploymentConfig
from openai import OpenAI

URL = os.environ["PREDIBASE_GATEWAY"]
pb = Predibase(api_token="pb_test")

def client(name):
    return pb.deployments.client(name, serving_url_override=URL, force_bare_client=True)

def openai(name):
    base = pb.deployments.openai_compatible_endpoint(name, serving_url=URL)
    return OpenAI(api_key="pb_test", base_url=base, max_retries=0)

def plain(value):
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

for line in sys.stdin:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            told = {"result": plain(eval(json.loads(line)))}
    except Exception as error:
        told = {"error": str(error), "kind": type(error).__name__}
    print("@" + json.dumps(told | {"said": said.getvalue()}), flush=True)
"""


class Package:
    """The package, at one server."""

    def __init__(self, server: RunningServer) -> None:
        self._url, self._python = server.url, client_python("predibase")

    def ask(self, *expressions: str) -> list[dict]:
        """What became of each, in this order, in one process of the package."""
        environ = {**os.environ, "PREDIBASE_GATEWAY": self._url, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [self._python, "-W", "ignore", "-c", SCRIPT], input="\n".join(map(json.dumps, expressions)),
            capture_output=True, text=True, timeout=SCRIPT_S, env=environ,
        )  # fmt: skip
        output = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
        assert len(output) == len(expressions), done.stdout + done.stderr
        return output

    def results(self, *expressions: str) -> list:
        """Of expressions that all succeed."""
        reply = self.ask(*expressions)
        assert all("result" in each for each in reply), reply
        return [each["result"] for each in reply]
