"""Calls of deployments: LoRAX's and OpenAI's, through a whole server to an engine in vLLM's place."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio
from dialects.predibase.llm_server import TENANT, WINDOW, open_llms

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory):
    async with open_llms(tmp_path_factory.mktemp("serving")) as found:
        yield found


@pytest.fixture
def http(opened):
    return opened[1]


def place(name: str = "tiny", tenant: str = TENANT) -> str:
    return f"/{tenant}/deployments/v2/llms/{name}"


async def generate(
    http, inputs: str = "abc", *, status: int = 200, stream: bool = False, name: str = "tiny", **expected
):
    """The JSON of a reply to a generate call."""
    body = {"inputs": inputs, "parameters": expected, "stream": stream}
    reply = await http.post(place(name), json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_generate(http):
    """The reply is a list of one, without details unless they are asked for."""
    assert await generate(http) == [{"generated_text": "abc"}]
    assert await generate(http, return_full_text=True) == [{"generated_text": "abcabc"}]
    assert await generate(http, "abc", adapter_id="upper", adapter_source="pbase") == [{"generated_text": "ABC"}]
    assert await generate(http, "abc", adapter_id="reverse", max_new_tokens=2) == [{"generated_text": "cb"}]
    assert await generate(http, "abc", adapter_id="") == [{"generated_text": "abc"}]


async def test_details(http):
    """Tokens with their ids and log-probabilities, the prompt's too, and what else each might have been."""
    (result,) = await generate(http, "ab", decoder_input_details=True, return_k_alternatives=2, seed=4)
    details = result["details"]
    assert (details["finish_reason"], details["prompt_tokens"], details["generated_tokens"]) == ("eos_token", 3, 3)
    assert details["seed"] == 4
    assert [(each["id"], each["text"], each["logprob"]) for each in details["prefill"]] == [
        (1, "<s>", None), (97, "a", -0.5), (98, "b", -0.5),
    ]  # fmt: skip
    assert [(each["id"], each["text"], each["special"]) for each in details["tokens"]] == [
        (97, "a", False), (98, "b", False), (2, "</s>", True),
    ]  # fmt: skip
    others = details["tokens"][0]["alternative_tokens"]
    assert [(each["id"], each["text"]) for each in others] == [(97, "a"), (65, "A")]
    (result,) = await generate(http, "ab", details=True, stop=["b"])
    assert (result["generated_text"], result["details"]["finish_reason"]) == ("ab", "stop_sequence")
    (result,) = await generate(http, "ab", details=True, best_of=2, do_sample=True)
    assert len(result["details"]["best_of_sequences"]) == 1


async def test_no_limit_means_the_window(opened):
    """Without max_new_tokens an answer may fill the engine's window, not the sixteen tokens of vLLM's default."""
    _, http, fake = opened
    (result,) = await generate(http, "x" * 40)
    assert result == {"generated_text": "x" * 40}
    request = [each["body"] for each in fake.calls() if each["url"] == "/v1/completions"]
    assert request[-1]["max_tokens"] == WINDOW


async def test_streams(http):
    """An event for each token; the last one has the text and its details."""
    async with http.stream(
        "POST", place(), json={"inputs": "abc", "parameters": {"details": True}, "stream": True}
    ) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data:")) async for line in reply.aiter_lines() if line]
    assert [each["token"]["text"] for each in events] == ["a", "b", "c", "</s>"]
    assert events[-1]["generated_text"] == "abc"
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "prompt_tokens": 4,
        "generated_tokens": 4,
        "seed": None,
    }


@pytest.mark.parametrize(
    ("expected", "status", "word", "text"),
    [
        ({"inputs": ""}, 422, "validation", "`inputs` cannot be empty"),
        ({"parameters": {"typical_p": 0.4}}, 422, "validation", "`typical_p`"),
        ({"parameters": {"api_token": "hf_secret"}}, 422, "validation", "`api_token`"),
        ({"parameters": {"adapter_id": "nobody"}}, 404, "not_found", "'nobody'"),
        ({"parameters": {"adapter_id": "upper", "adapter_source": "s3"}}, 422, "validation", "'s3'"),
        ({"parameters": {"max_new_tokens": 5000}}, 422, "validation", f"max_model_len={WINDOW}"),
        ({"inputs": "fails: it"}, 424, "generation", "it always fails"),
    ],
)  # fmt: skip
async def test_errors(http, expected, status, word, text):
    """Each has LoRAX's form, in which its client finds the class of its exception; no token is repeated."""
    reply = await http.post(place(), json={"inputs": "abc"} | expected)
    assert (reply.status_code, set(reply.json())) == (status, {"error", "error_type"}), reply.text
    assert reply.json()["error_type"] == word and text in reply.json()["error"]
    assert "hf_secret" not in reply.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (place("nothing"), {"inputs": "a"}, 404),
        (place(tenant="others"), {"inputs": "a"}, 404),
        (place(), {"inputs": "a", "unknown": 1}, 400),
        (place(), {"inputs": "a", "parameters": {"temprature": 1}}, 400),
        (f"{place()}/classify", {"input": "a"}, 404),
    ],
)
async def test_what_is_not_there(http, path, body, status):
    """Deployments and tenants that are not the caller's, fields nobody knows, and what this engine cannot."""
    reply = await http.post(path, json=body)
    assert reply.status_code == status and reply.json()["error"], reply.text


async def test_classify_and_embed(http):
    """A model of that kind classifies one text or many, as the client asks with an empty token."""
    reply = await http.post(f"{place('sorter')}/classify", json={"api_token": "", "model": None, "input": ["A", "b"]})
    assert reply.status_code == 200, reply.text
    assert [each["label"] for each in reply.json()["data"]] == ["loud", "quiet"]
    assert reply.json()["data"][0] == {"index": 0, "label": "loud", "probs": [0.25, 0.75], "num_classes": 2}
    refused = await http.post(f"{place('sorter')}/classify", json={"api_token": "hf_secret", "input": "a"})
    assert refused.status_code == 422 and "hf_secret" not in refused.text
    reply = await http.post(f"{place('sorter')}/embed", json={"inputs": "a", "parameters": None, "stream": False})
    assert reply.json() == {"embeddings": [0.25, -1.5]}


MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"model": ""}, "abc"),
        ({"model": "tiny"}, "abc"),
        ({}, "abc"),
        ({"model": "upper"}, "ABC"),
        ({"model": "", "adapter_id": "reverse", "adapter_source": "pbase", "api_token": ""}, "cba"),
        ({"model": "", "ignore_eos_token": False}, "abc"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "abc"),
    ],
)
async def test_openai_base(opened, expected, text):
    """`model` is empty or an adapter's name; LoRAX's fields mean what they mean there."""
    _, http, fake = opened
    reply = await http.post(f"{place()}/v1/chat/completions", json={"messages": MESSAGES} | expected)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == text
    body = fake.calls()[-1]["body"]
    assert not {"adapter_id", "adapter_source", "api_token", "ignore_eos_token"} & set(body)
    if "response_format" in expected:
        assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("expected", "status", "text"),
    [
        ({"model": "nobody"}, 404, "'nobody'"),
        ({"model": "upper", "adapter_id": "reverse"}, 422, "name one adapter"),
        ({"merged_adapters": {"ids": ["a"]}}, 422, "merged_adapters"),
        ({"api_token": "hf_secret"}, 422, "api_token"),
        ({"typical_p": 0.5}, 422, "typical_p"),
        ({"messages": 7}, 422, "messages"),
        ({"model": 7}, 422, "model"),
        ({"ignore_eos": True, "ignore_eos_token": True}, 422, "ignore_eos_token"),
    ],
)
async def test_openai_base_refuses(http, expected, status, text):
    """What the engine would ignore is refused by its name."""
    reply = await http.post(f"{place()}/v1/chat/completions", json={"messages": MESSAGES} | expected)
    assert reply.status_code == status and text in reply.json()["error"]["message"], reply.text
    assert "hf_secret" not in reply.text


async def test_openai_streams(http):
    """A stream of the OpenAI base is the engine's own."""
    body = {"model": "upper", "messages": [{"role": "user", "content": "a b"}], "stream": True}
    async with http.stream("POST", f"{place()}/v1/chat/completions", json=body) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    words = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"] for line in lines[:-1]]
    assert words == ["A", "B"]


async def test_other_paths_of_the_openai_base(http):
    """Completions and embeddings are below it too."""
    reply = await http.post(f"{place()}/v1/completions", json={"model": "reverse", "prompt": "abc", "max_tokens": 9})
    assert reply.json()["choices"][0]["text"] == "cba"
    reply = await http.post(f"{place('sorter')}/v1/embeddings", json={"model": "", "input": "a"})
    assert reply.json()["data"][0]["embedding"] == [0.25, -1.5]
