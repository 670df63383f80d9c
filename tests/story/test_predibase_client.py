"""The published predibase package against a real server: the documentation's own story, and every call of it.

The language model is the stand-in of the tests; adapters answer in capitals, or backwards.
"""

from __future__ import annotations

import json
import sys

import pytest
from engines.llm_support import FakeVllm
from fakes.lora_files import write_lora
from fakes.running_server import running_server
from story.client_envs import client_python
from story.deployed_functions import run_script

CONFIG = """
[server]
worker_environment = ["FAKE_*"]

[models.mistral-7b-instruct-v0-2]
engine = "vllm"
source = "{model}"
python = "{python}"
adapters = {{ upper = "{upper}", reverse = "{reverse}" }}
price = 0.5
"""
BEGIN = """
import os
os.environ["PREDIBASE_GATEWAY"] = gateway
os.environ["PREDIBASE_API_TOKEN"] = "pb_test"
import time, uuid
import pandas as pd
import requests
from predibase import Predibase
from predibase.beta.config import BatchInferenceServerConfig


def over(job):
    while True:
        job = pb.beta.batch_inference.get(job)
        if job.status not in ("queued", "running"):
            return job
        time.sleep(0.1)


def write(name, rows):
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)
    return path


def row(number, text, model=""):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1000}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def said(path):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["message"]["content"]) for each in lines]


def failed(call, *args, **named):
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


pb = Predibase()
config = BatchInferenceServerConfig(
    base_model="mistral-7b-instruct-v0-2",
    lorax_image_tag=None,
    hf_token=None,
    quantization=None,
)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predibase")
    fake = FakeVllm(folder / "fake")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    adapters = {name: str(write_lora(folder / name)) for name in ("upper", "reverse")}
    config = CONFIG.format(model=model, python=sys.executable, **adapters)
    env = {name: fake.env[name] for name in ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S")}
    with running_server(folder, config, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def run(server):
    python = client_python("predibase")

    def run(script, gateway="{url}", **fields):
        place = server.folder / "client"
        place.mkdir(exist_ok=True)
        return run_script(python, BEGIN + script, gateway=gateway.format(url=server.url), folder=str(place), **fields)

    return run


@pytest.mark.timeout(300)
def test_the_documentations_own_story(run):
    """Upload a dataset, run it on a base model with adapters per row, follow it, list jobs, download the results."""
    found = run(
        """
rows = [row(1, "one"), row(2, "two", "upper"), row(3, "three", "reverse"), row(4, "four")]
dataset = pb.datasets.from_file(write("story.jsonl", rows), name="my_inference_dataset")
found["dataset"] = [dataset.name, dataset.status, dataset.connection_name, dataset.connection_type]
job = pb.beta.batch_inference.create(dataset="my_inference_dataset", server_config=config)
found["status"] = [pb.beta.batch_inference.get(job).status, pb.beta.batch_inference.get(job.uuid).status]
ended = over(job)
found["ended"] = [ended.status, ended.error, ended.original_request]
found["listed"] = [each.uuid for each in pb.beta.batch_inference.list()].index(job.uuid)
dest = os.path.join(folder, "my_output.jsonl")
pb.beta.batch_inference.download_results(job, dest=dest)
found["said"] = said(dest)
pb.beta.batch_inference.download_results(job.uuid, dest=dest)
found["again"] = said(dest)
found["cancel"] = failed(pb.beta.batch_inference.cancel, job)
"""
    )
    assert found["dataset"] == ["my_inference_dataset", "connected", "file_uploads", "file"]
    assert set(found["status"]) <= {"queued", "running", "completed"}
    sent = {"customArgs": None, "hfToken": None, "loraxImageTag": None, "baseModel": "mistral-7b-instruct-v0-2",
            "quantization": None, "backend": None}  # fmt: skip
    assert found["ended"] == ["completed", None, {"dataset": "my_inference_dataset", "serverConfig": sent}]
    assert found["listed"] == 0
    assert found["said"] == [["1", "one"], ["2", "TWO"], ["3", "eerht"], ["4", "four"]] == found["again"]
    assert "status code 409" in found["cancel"]


def test_datasets(run):
    """Every call of `datasets`: by a Dataset, by its name, with its connection; wrong rows are told by their lines."""
    found = run(
        """
path = write("sets.jsonl", [row(1, "one"), row(2, "two")])
first = pb.datasets.from_file(path)
found["default"] = first.name
found["same"] = [pb.datasets.get(each).uuid == first.uuid for each in (first, "sets", "file_uploads/sets")]
found["twice"] = pb.datasets.from_file(path).uuid == first.uuid
found["taken"] = failed(pb.datasets.from_file, write("other.jsonl", [row(9, "nine")]), name="sets")
found["wrong"] = failed(pb.datasets.from_file, write("wrong.jsonl", [row(1, "a"), row(1, "b")]))
found["number"] = failed(pb.datasets.from_file, write("number.jsonl", [row(1, "a") | {"custom_id": 1}]))
mended = pb.datasets.from_file(write("wrong.jsonl", [row(1, "a"), row(2, "b")]))
found["mended"] = mended.status
for each in (first, first.uuid):
    pb.datasets.download(each, dest=os.path.join(folder, "down"))
    found[f"down {type(each).__name__}"] = open(os.path.join(folder, "down.jsonl")).read() == open(path).read()
frame = pb.datasets.from_pandas_dataframe(pd.DataFrame({"prompt": ["a"], "completion": ["b"]}), name="frame")
found["frame"] = frame.status
found["table"] = failed(pb.beta.batch_inference.create, dataset=frame, server_config=config)
found["missing"] = failed(pb.datasets.get, "nobody")
found["connection"] = failed(pb.datasets.get, "warehouse/rows")
found["region"] = failed(pb.datasets.from_file, path, name="far", region="us-west")
"""
    )
    assert (found["default"], found["same"], found["twice"]) == ("sets", [True] * 3, True)
    assert "status code 409" in found["taken"] and "another name" in found["taken"]
    assert found["wrong"].startswith("ValueError: Dataset connection failed: line 2") and "line 1" in found["wrong"]
    assert "line 1: custom_id is 1" in found["number"] and found["mended"] == "connected"
    assert found["down Dataset"] and found["down str"]
    assert found["frame"] == "connected" and "status code 400" in found["table"] and "custom_id" in found["table"]
    assert "status code 404" in found["missing"] and "file_uploads" in found["connection"]
    assert "us-west" in found["region"]


def test_batch_jobs(run):
    """Every call of `beta.batch_inference`, and what its refusals say."""
    found = run(
        """
dataset = pb.datasets.from_file(write("jobs.jsonl", [row(1, "one"), row(2, "hangs")]), name="jobs")
hf = BatchInferenceServerConfig(base_model="mistral-7b-instruct-v0-2", hf_token="hf_not_a_real_one")
job = pb.beta.batch_inference.create(dataset=dataset, server_config=hf)
found["hidden"] = job.original_request["serverConfig"]["hfToken"]
dest = os.path.join(folder, "early.jsonl")
found["early"] = failed(pb.beta.batch_inference.download_results, job, dest=dest)
pb.beta.batch_inference.cancel(job)
pb.beta.batch_inference.cancel(job)
found["cancelled"] = over(job).status
found["limit"] = [len(pb.beta.batch_inference.list(limit=each)) for each in (1, 2)]
found["missing"] = failed(pb.beta.batch_inference.get, str(uuid.uuid4()))
for name, value in [("lorax_image_tag", "main"), ("quantization", "eetq"), ("backend", "v2"), ("speed", "high")]:
    wrong = BatchInferenceServerConfig(base_model="mistral-7b-instruct-v0-2", **{name: value})
    found[name] = failed(pb.beta.batch_inference.create, dataset=dataset, server_config=wrong)
unknown = BatchInferenceServerConfig(base_model="nobody")
found["nobody"] = failed(pb.beta.batch_inference.create, dataset=dataset, server_config=unknown)
"""
    )
    assert found["hidden"] == "***" and "status code 409" in found["early"]
    assert found["cancelled"] == "cancelled" and found["limit"] == [1, 2]
    assert "status code 404" in found["missing"]
    for name, case in [("lorax_image_tag", "loraxImageTag"), ("quantization", "eetq"), ("backend", "backend"),
                       ("speed", "speed"), ("nobody", "nobody")]:  # fmt: skip
        assert case in found[name] and "status code 40" in found[name]


def test_signed_addresses(run):
    """An address that was altered or used before opens nothing, and says so."""
    found = run(
        """
dataset = pb.datasets.from_file(write("signed.jsonl", [row(1, "one")]), name="signed")
upload = pb.http_post("/v2/datasets/upload", json={"fileName": "a.jsonl", "mimeType": "text/plain"})["presignedUrl"]
down = pb.http_get(f"/v2/datasets/{dataset.uuid}/download-link")["url"]


def altered(url):
    return url[:-1] + ("A" if url[-1] != "A" else "B")


def told(reply):
    return [reply.status_code, reply.json().get("error", "") if reply.status_code >= 400 else ""]


found["altered"] = [told(requests.put(altered(upload), data=b"{}")), told(requests.get(altered(down)))]
found["good"] = [told(requests.put(upload, data=b"{}")), told(requests.get(down))]
found["used"] = [told(requests.put(upload, data=b"{}")), told(requests.get(down))]
"""
    )
    assert [status for status, _ in found["altered"]] == [403, 403] and "altered" in found["altered"][0][1]
    assert [status for status, _ in found["good"]] == [200, 200]
    assert [status for status, _ in found["used"]] == [410, 410] and "works only once" in found["used"][1][1]


@pytest.mark.parametrize("gateway", ["{url}/", "{url}/v1", "{url}/v2"])
def test_gateways(run, gateway):
    """However its address ends, the server is the same."""
    found = run('found["jobs"] = len(pb.beta.batch_inference.list())', gateway=gateway)
    assert found["jobs"] >= 0
