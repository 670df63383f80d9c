"""The published predibase package against a server whose model is a real LLM with adapters, run by the real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.running_server import running_server
from story.client_envs import client_python
from story.deployed_functions import run_script

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
CONFIG = f"""
[models.tiny]
engine = "vllm"
source = "{TINY}"
adapters = {{ reverse = "{TINY}/adapters/reverse" }}
engine_args = {{ max-model-len = 512 }}
price = 0.5
"""
STORY = """
import os
os.environ["PREDIBASE_GATEWAY"] = gateway
import time
from predibase import DeploymentConfig, Predibase
from predibase.beta.config import BatchInferenceServerConfig

pb = Predibase(api_token="pb_test")

def row(number, model):
    body = {"model": model, "messages": [{"role": "user", "content": "Say: red fox"}], "max_tokens": 16}
    body["temperature"] = 0
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

def ended(job):
    while pb.beta.batch_inference.get(job).status in ("queued", "running"):
        time.sleep(0.2)
    return pb.beta.batch_inference.get(job.uuid)

def results(job):
    dest = os.path.join(folder, "out.jsonl")
    pb.beta.batch_inference.download_results(job, dest=dest)
    lines = [json.loads(line) for line in open(dest)]
    said = []
    for line in lines:
        answered = (line["response"] or {}).get("body", {}).get("choices")
        said.append([line["custom_id"], answered[0]["message"]["content"] if answered else line["error"]["code"]])
    return said

path = os.path.join(folder, "in.jsonl")
with open(path, "w") as file:
    file.writelines(json.dumps(row(n, model)) + "\\n" for n, model in enumerate(models))
dataset = pb.datasets.from_file(path, name="my_inference_dataset")
job = pb.beta.batch_inference.create(
    dataset="my_inference_dataset", server_config=BatchInferenceServerConfig(base_model="tiny")
)
found["status"] = ended(job).status
found["listed"] = [each.uuid for each in pb.beta.batch_inference.list()] == [job.uuid]
found["said"] = results(job)

made = pb.deployments.create(name="mine", config=DeploymentConfig(base_model="tiny", min_replicas=0, max_replicas=1))
found["made"] = [made.name, made.status]
again = BatchInferenceServerConfig.from_deployment(pb.deployments.get("mine"))
second = pb.beta.batch_inference.create(dataset=dataset, server_config=again)
found["second"] = [ended(second).status, results(second) == found["said"]]
# A client that is not bare asks twice for a stream: it hands the second one on behind the first.
client = pb.deployments.client("mine", serving_url_override=gateway, force_bare_client=True)
prompt = "<|user|>Say: red fox<|end|><|assistant|>"
found["live"] = [
    client.generate(prompt).generated_text, client.generate(prompt, adapter_id="upper").generated_text,
    "".join(each.token.text for each in client.generate_stream(prompt, adapter_id="upper/1") if not each.token.special),
]
pb.deployments.delete("mine")
found["left"] = [each.name for each in pb.deployments.list()]
"""
SAID = {"": "red fox", "tiny": "red fox", "upper": "RED FOX", "upper/1": "RED FOX", "reverse": "xof der"}


def test_the_story_with_a_real_model(tmp_path):
    """Rows of a base model and of adapters, configured and registered: each answers as its weights were trained to."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running_server(tmp_path, CONFIG, env=env) as running:
        add = [sys.executable, "-m", "batchmill", "adapters", "add", "upper", str(TINY / "adapters" / "upper")]
        beside = [*add, "--base", "tiny", "--data-dir", str(running.data_dir)]
        subprocess.run(beside, check=True, capture_output=True, timeout=120, cwd=tmp_path)
        models = ["upper", "", "reverse", "tiny", "upper/1"] * 8
        fields = {"gateway": running.url, "folder": str(tmp_path), "models": models}
        found = run_script(client_python("predibase"), STORY, within_s=500, **fields)
    assert found["status"] == "completed" and found["listed"]
    assert found["said"] == [[str(n), SAID[model]] for n, model in enumerate(models)]
    assert found["made"] == ["mine", "ready"]
    assert found["second"] == ["completed", True]
    assert found["live"] == ["red fox", "RED FOX", "RED FOX"]
    assert found["left"] == ["tiny"]
