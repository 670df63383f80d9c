"""The openai and predibase packages against one server with a real LLM and adapters, run by the real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest
from client_envs import client_python
from deployed_functions import run_script
from openai import OpenAI
from openai_story import ended, result_lines, row, submit, texts
from predibase_package import Package
from running_server import RunningServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_S = 300.0  # of vLLM on a busy machine, and the first rows
TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
PYTHON = Path(__file__).parents[1] / "fakes" / "forking_vllm" / "python.sh"
CONFIG = f"""
[models.tiny]
engine = "vllm"
source = "{TINY}"
python = "{PYTHON}"
adapters = {{ upper = "{TINY}/adapters/upper", reverse = "{TINY}/adapters/reverse" }}
engine_args = {{ max-model-len = 2048 }}
price = {{ input = 0.50, cached = 0.25, output = 0.50 }}

[models.shout]
engine = "function"
source = "app.py:shout"
"""
CODE = """
def shout(messages, model=None, **rest):
    message = {"role": "assistant", "content": messages[-1]["content"] + "!"}
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message}], "model": model}
"""
SAID = {"tiny": "hello world", "upper": "HELLO WORLD", "reverse": "dlrow olleh", "shout": "Say: hello world!"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real-vllm")
    (folder / "app.py").write_text(CODE)
    (folder / "batchmill.toml").write_text(CONFIG)
    with RunningServer(folder, env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}) as running:
        yield running


def ask(client: OpenAI, model: str, **fields):
    messages = [{"role": "user", "content": "Say: hello world"}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48, **fields)


def test_one_file_for_a_model_its_adapters_and_a_function(client):
    """Rows of a base model, two adapters and a function share a file, and each answers as it does; tokens are paid."""
    models = list(SAID) * 5
    rows = [row(f"r{n}", "Say: hello world", model) for n, model in enumerate(models)]
    for each in rows:
        each["body"] |= {"temperature": 0, "max_tokens": 48}
    done = ended(client, submit(client, rows), START_S)
    assert done.status == "completed" and done.usage and done.model is None
    said = texts(result_lines(client, done.output_file_id))
    assert said == {f"r{n}": SAID[model] for n, model in enumerate(models)}
    assert done.usage.input_tokens > 0 and done.usage.output_tokens > 0


@pytest.mark.parametrize("model", list(SAID))
def test_live_on_the_same_models(client, model):
    """Each name answers a live request too."""
    assert ask(client, model).choices[0].message.content == SAID[model]


@pytest.mark.parametrize("model", ["tiny", "upper"])
def test_live_streams(client, model):
    """A stream of vLLM's comes through chunk by chunk, its usage at the end."""
    chunks = list(ask(client, model, stream=True, stream_options={"include_usage": True}))
    words = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(words) == SAID[model] and len(words) > 2
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens > 0


def test_a_text_and_a_response(client):
    """Completions and the Responses API are answered by the same model."""
    assert client.completions.create(model="tiny", prompt="Say: a", max_tokens=4).usage.completion_tokens > 0
    assert client.responses.create(
        model="tiny", input="Say: hello world", temperature=0, max_output_tokens=48
    ).output_text


def test_a_response_that_was_cut_off_says_so(client):
    """A stream of the Responses API ends with the event that its response is, as at OpenAI."""
    for tokens, name in ((2, "incomplete"), (48, "completed")):
        body = {"model": "tiny", "input": "Say: hello world", "temperature": 0, "max_output_tokens": tokens}
        events = list(client.responses.create(stream=True, **body))
        assert events[-1].type == f"response.{name}" and events[-1].response.status == name
        assert not [each for each in events[:-1] if each.type in ("response.completed", "response.incomplete")]


def test_openais_defaults_are_taken(client):
    """Fields that ask for what OpenAI does anyway do no harm; what a text model cannot do is refused by name."""
    plain = {"modalities": ["text"], "verbosity": "medium", "store": True, "metadata": {"a": "b"}}
    assert ask(client, "tiny", **plain).choices[0].message.content == SAID["tiny"]
    for name, value in (("modalities", ["text", "audio"]), ("verbosity", "low")):
        with pytest.raises(openai.BadRequestError, match=name):
            ask(client, "tiny", **{name: value})
    with client.responses.stream(model="tiny", input="Say: hello world", temperature=0, store=False) as stream:
        assert stream.get_final_response().output_text


def test_adapters_are_models_with_a_parent(client):
    """Adapters are listed beside their model, and say whose they are."""
    listed = {each.id: each.model_extra["parent"] for each in client.models.list()}
    assert listed == {"tiny": None, "upper": "tiny", "reverse": "tiny", "shout": None}


def test_what_the_model_cannot_do(client):
    """A field that would be ignored, a path the model lacks and a prompt too long are errors of the caller."""
    with pytest.raises(openai.BadRequestError, match="temprature"):
        ask(client, "tiny", extra_body={"temprature": 1})
    with pytest.raises(openai.APIStatusError) as no_vectors:
        client.embeddings.create(model="tiny", input="x")
    assert no_vectors.value.status_code in (400, 404)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt="x" * 5000)
    assert too_long.value.type and too_long.value.message


PROMPT = "<|user|>Say: red fox<|end|><|assistant|>"


def test_tokens_and_streams_of_predibase(server):
    """The tiny model's one right answer, its adapters', its tokens and a stream of them, as vLLM has them."""
    result, loud, streamed, limited, shaped = Package(server).results(
        f"client('tiny').generate({PROMPT!r}, decoder_input_details=True, return_k_alternatives=3)",
        f"client('tiny').generate({PROMPT!r}, adapter_id='upper', details=False).generated_text",
        f"list(client('tiny').generate_stream({PROMPT!r}, adapter_id='reverse'))",
        f"client('tiny').generate({PROMPT!r}, stop_sequences=['ed'], do_sample=True, top_k=1, best_of=2)",
        f"client('tiny').generate({PROMPT!r}, max_new_tokens=3, return_full_text=True).generated_text",
    )
    details = result["details"]
    assert result["generated_text"] == "red fox" and details["finish_reason"] == "eos_token"
    assert "".join(each["text"] for each in details["tokens"] if not each["special"]) == "red fox"
    assert len(details["prefill"]) == details["prompt_tokens"] > 10
    assert all(each["logprob"] is not None for each in details["prefill"][1:])
    assert all(len(each["alternative_tokens"]) == 3 for each in details["tokens"])
    assert all(each["alternative_tokens"][0]["id"] == each["id"] for each in details["tokens"])
    assert loud == "RED FOX"
    assert "".join(each["token"]["text"] for each in streamed if not each["token"]["special"]) == "xof der"
    assert streamed[-1]["generated_text"] == "xof der"
    assert limited["generated_text"] == "red" and limited["details"]["finish_reason"] == "stop_sequence"
    assert len(limited["details"]["best_of_sequences"]) == 1
    assert shaped == f"{PROMPT}red"


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
    client.generate(prompt).generated_text, client.generate(prompt, adapter_id="loud").generated_text,
    "".join(each.token.text for each in client.generate_stream(prompt, adapter_id="loud/1") if not each.token.special),
]
pb.deployments.delete("mine")
found["left"] = [each.name for each in pb.deployments.list()]
"""
FOX = {"": "red fox", "tiny": "red fox", "loud": "RED FOX", "loud/1": "RED FOX", "reverse": "xof der"}


def test_jobs_and_a_deployment_of_predibase(server, tmp_path):
    """Rows of a base model and of adapters, configured and registered: each answers as its weights were trained to."""
    add = [sys.executable, "-m", "batchmill", "adapters", "add", "loud", str(TINY / "adapters" / "upper")]
    beside = [*add, "--base", "tiny", "--data-dir", str(server.folder / "data")]
    subprocess.run(beside, check=True, capture_output=True, timeout=120, cwd=tmp_path)
    models = ["loud", "", "reverse", "tiny", "loud/1"] * 8
    fields = {"gateway": server.url, "folder": str(tmp_path), "models": models}
    found = run_script(client_python("predibase"), STORY, within_s=500, **fields)
    assert found["status"] == "completed" and found["listed"]
    assert found["said"] == [[str(n), FOX[model]] for n, model in enumerate(models)]
    assert found["made"] == ["mine", "ready"]
    assert found["second"] == ["completed", True]
    assert found["live"] == ["red fox", "RED FOX", "RED FOX"]
    assert found["left"] == ["tiny"]
