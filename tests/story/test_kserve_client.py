"""The published KServe client over REST, against a real server."""

import pytest
from story.client_envs import client_python
from story.deployed_functions import run_script, server_of

FUNCTIONS = '''
from typing import Annotated

import numpy as np

from batchmill import tensor


def scale(x: Annotated[np.ndarray, tensor("FP32", [-1, 3])], names: list[str]):
    """Ten times as much."""
    return {"y": 10 * x, "first": names[0], "count": len(names)}


def halves(x: Annotated[np.ndarray, tensor("FP16", [-1])]):
    return {"y": x}
'''
BEGIN = """
import asyncio

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


def given(name, array, datatype, binary):
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


async def main(client):
"""
END = """

async def begin():
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        await main(client)


asyncio.run(begin())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kserve")
    deployments = [(f"functions.py:{name}", "--name", name) for name in ("scale", "halves")]
    with server_of(folder, FUNCTIONS, deployments) as running:
        yield running


@pytest.fixture(scope="module")
def run(server):
    python = client_python("kserve")

    def run(script, **fields):
        body = "".join(f"    {line}\n" if line else "\n" for line in script.strip().splitlines())
        return run_script(python, BEGIN + body + END, url=server.url, **fields)

    return run


@pytest.mark.parametrize("binary", [True, False])
def test_the_client_infers(run, binary):
    """Arrays and text in binary or JSON; outputs come back with their names, datatypes and shapes."""
    found = run(
        """
x = np.arange(6, dtype=np.float32).reshape(2, 3)
names = np.array(["zwölf", "b"], dtype=np.object_)
inputs = [given("x", x, "FP32", binary), given("names", names, "BYTES", binary)]
request = InferRequest("scale", inputs, request_id="7")
answer = await client.infer(url, request, model_name="scale")
found["id"], found["model"] = answer.id, answer.model_name
found["outputs"] = {each.name: [each.datatype, list(each.shape)] for each in answer.outputs}
by_name = {each.name: each for each in answer.outputs}
found["y"] = by_name["y"].as_numpy().tolist()
found["count"] = by_name["count"].as_numpy().tolist()
""",
        binary=binary,
    )
    assert (found["id"], found["model"]) == ("7", "scale")
    assert found["outputs"] == {"y": ["FP32", [2, 3]], "first": ["BYTES", [1]], "count": ["INT64", [1]]}
    assert found["y"] == [[0, 10, 20], [30, 40, 50]] and found["count"] == [2]


def test_the_client_gets_half_precision(run):
    """FP16 goes in binary, the only way that this client sends it."""
    found = run(
        """
x = np.array([0.5, -2, 1024], dtype=np.float16)
request = InferRequest("halves", [given("x", x, "FP16", True)])
answer = await client.infer(url, request, model_name="halves")
found["answer"] = answer.outputs[0].as_numpy().tolist()
"""
    )
    assert found == {"answer": [0.5, -2, 1024]}


def test_the_client_asks_how_the_server_is(run):
    """Liveness and readiness of the server and of its functions, and what is unknown."""
    found = run(
        """
found["live"], found["ready"] = await client.is_server_live(url), await client.is_server_ready(url)
found["models"] = [await client.is_model_ready(url, name) for name in ("scale", "nobody")]
try:
    await client.infer(url, {"inputs": []}, model_name="nobody")
except httpx.HTTPStatusError as error:
    found["error"] = [error.response.status_code, str(error)]
"""
    )
    assert (found["live"], found["ready"], found["models"]) == (True, True, [True, False])
    assert found["error"][0] == 404 and "nobody" in found["error"][1]
