"""The openai package against a server whose model is a real LLM with adapters, run by the real vLLM."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai_story import ended, result_lines, row, submit, texts
from running_server import RunningServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
CONFIG = f"""
[models.tiny]
engine = "vllm"
source = "{TINY}"
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
    folder = tmp_path_factory.mktemp("openai-vllm")
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
    done = ended(client, submit(client, rows))
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
