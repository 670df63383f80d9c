"""Live inference, driven by the openai package as it is published, against a real server."""

from __future__ import annotations

import struct

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai_story import FUNCTIONS, TIMEOUT_S, until, write_project
from running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai-live")
    write_project(folder)
    with RunningServer(folder) as running:
        yield running


def say(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_a_conversation(client):
    """A chat completion is what the model returns."""
    reply = client.chat.completions.create(model="chat", messages=say("hello"))
    assert reply.choices[0].message.content == "HELLO" and reply.usage and reply.usage.prompt_tokens == 5


async def test_a_conversation_without_blocking(server):
    """The asynchronous client sees the same, in one piece and in many."""
    async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        reply = await client.chat.completions.create(model="chat", messages=say("hello"))
        assert reply.choices[0].message.content == "HELLO"
        stream = await client.chat.completions.create(model="words", messages=say("a b"), stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["a ", "b "]


def test_a_stream_comes_piece_by_piece(client, server):
    """The first words are there before the last has been made."""
    stream = client.chat.completions.create(model="words", messages=say("one two wait"), stream=True)
    first = [next(stream).choices[0].delta.content for _ in range(2)]
    assert first == ["one ", "two "]
    (server.folder / "words-ended").unlink(missing_ok=True)
    stream.close()
    until((server.folder / "words-ended").exists)


def test_a_stream_ends(client):
    """Every event arrives, and then the end."""
    stream = client.chat.completions.create(model="words", messages=say("to the end"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "to the end "


def test_a_stream_that_fails_says_so(client):
    """What goes wrong in the middle of a stream is an error there, not a quiet end."""
    stream = client.chat.completions.create(model="words", messages=say("one fail"), stream=True)
    assert next(stream).choices[0].delta.content == "one "
    with pytest.raises(openai.APIError, match="told to fail"):
        list(stream)


def test_a_client_that_leaves_ends_its_request(server):
    """A request whose client has gone is ended at the model."""
    marker = server.folder / "words-ended"
    marker.unlink(missing_ok=True)
    body = {"model": "words", "messages": say("wait"), "stream": True}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=httpx2.Timeout(10, read=0.5))
    until(marker.exists)


def test_a_text_goes_on(client):
    """Completions are answered."""
    assert client.completions.create(model="complete", prompt="abc").choices[0].text == "cba"


def test_a_response(client):
    """The Responses API is answered."""
    assert client.responses.create(model="respond", input="abc").output_text == "ABC"


def singles(*numbers: float) -> list[float]:
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))


def test_vectors_in_either_encoding(client):
    """The package asks for base64 by default; a model that knows numbers only answers both, exactly."""
    by_default = client.embeddings.create(model="embed", input=["a", "abcd"])
    assert [each.embedding for each in by_default.data] == [singles(1 / 3, -0.1, 1e-30), singles(4 / 3, -0.1, 1e-30)]
    floats = client.embeddings.create(model="embed", input="a", encoding_format="float")
    assert floats.data[0].embedding == [1 / 3, -0.1, 1e-30]
    packed = client.embeddings.with_raw_response.create(model="embed", input="a", encoding_format="base64")
    assert packed.http_response.json()["data"][0]["embedding"] == "q6qqPs3MzL1gQqIN"


def test_documents_are_ranked(server):
    """Rerank is answered, although the package has no call for it."""
    body = {"model": "rerank", "query": "a", "documents": ["b", "aa"]}
    reply = httpx2.post(f"{server.url}/v1/rerank", json=body, timeout=TIMEOUT_S)
    assert [each["index"] for each in reply.json()["results"]] == [1, 0]


def test_any_path_that_a_model_serves(client):
    """A function answers a path that OpenAI does not have."""
    assert client.post("/classify", body={"model": "classify", "text": "x"}, cast_to=object) == {"label": "short"}
    reply = client.post("/a/longer/path", body={"model": "classify", "text": "x"}, cast_to=object)
    assert reply == {"label": "short"}


def test_models_are_listed(client):
    """Every model of the configuration, and one by its name, slashes and all."""
    listed = {each.id: each for each in client.models.list()}
    assert set(listed) == {*FUNCTIONS, "org/named", "broken"}
    one = client.models.retrieve("org/named")
    assert (one.id, one.object, one.owned_by) == ("org/named", "model", "batchmill")
    assert one == listed["org/named"] and one.created > 0


def test_a_model_nobody_knows(client):
    """An unknown model is OpenAI's error, wherever it is named."""
    for ask in (
        lambda: client.chat.completions.create(model="chatt", messages=say("x")),
        lambda: client.models.retrieve("chatt"),
        lambda: client.post("/classify", body={"model": "chatt"}, cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            ask()
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        assert unknown.value.type == "invalid_request_error" and "chat" in unknown.value.message


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}]}', "missing_model"),
        ("/v1/chat/completions", b"{", None),
        ("/v1/chat/completions", b"[]", None),
        ("/v1/chat/completions", b"\xff\xfe", None),
        ("/v1/chat/completions", b'{"model":1}', "invalid_field"),
        ("/v1/chat/completions", b'{"model":"chat"}', "missing_argument"),
        ("/v1/chat/completions", b'{"model":"chat","messages":[{"role":"user","content":"x"}],"stream":true}',
         "streaming_not_supported"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(server, path, body, code):
    """What is wrong with a request is said in OpenAI's form."""
    reply = httpx2.post(
        f"{server.url}{path}", content=body, headers={"content-type": "application/json"}, timeout=TIMEOUT_S
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["code"] == code or code is None


def test_a_function_that_raises_is_an_error(client):
    """The caller hears what the function said, once: a repeat would say the same."""
    with pytest.raises(openai.InternalServerError, match="told to fail") as failed:
        client.chat.completions.create(model="chat", messages=say("fail"))
    assert failed.value.code == "function_error"
    assert failed.value.response.headers["x-should-retry"] == "false"


def test_a_model_that_cannot_start_is_an_error(client):
    """The caller hears what the model said when it was loaded."""
    with pytest.raises(openai.InternalServerError, match="no such weights: w.bin"):
        client.post("/x", body={"model": "broken", "x": 1}, cast_to=object)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("POST", "/v1/batches/b/c/d", 404), ("DELETE", "/v1/batches", 405),
     ("GET", "/v1/chat/completions", 405), ("POST", "/v1/batches/batch_1", 405)],
)  # fmt: skip
def test_paths_and_methods_nobody_has(server, method, path, status):
    """What is not there is said in OpenAI's form, and no model is asked for it."""
    reply = httpx2.request(method, f"{server.url}{path}", json={"model": "chat"} if method == "POST" else None)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
