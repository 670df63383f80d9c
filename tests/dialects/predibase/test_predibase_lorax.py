"""LoRAX's generate call as a completion of vLLM's, and back, without any server."""

from __future__ import annotations

import json

import msgspec
import pytest

from batchmill.dialects.predibase.lorax import (
    WHOLE_WINDOW,
    Answer,
    Choice,
    Generate,
    body_of,
    check,
    finish_of,
    generated,
    read_answer,
    tokens_of,
)
from batchmill.dialects.predibase.serving import events_of
from batchmill.errors import BatchmillError, InvalidInput

ALWAYS = {
    "prompt": "hi", "max_tokens": WHOLE_WINDOW, "repetition_penalty": 1.0, "ignore_eos": False, "temperature": 0.0,
    "return_token_ids": True,
}  # fmt: skip
SENT_BY_CLIENT = {
    "adapter_id": None, "adapter_source": None, "merged_adapters": None, "api_token": None, "do_sample": False,
    "max_new_tokens": None, "ignore_eos_token": False, "repetition_penalty": None, "return_full_text": False,
    "stop": [],
    "seed": None, "temperature": None, "top_k": None, "top_p": None, "truncate": None, "typical_p": None,
    "best_of": None, "watermark": False, "details": False, "decoder_input_details": False,
    "return_k_alternatives": None, "response_format": None,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def call(inputs: str = "hi", *, stream: bool = False, **parameters) -> Generate:
    return msgspec.convert({"inputs": inputs, "parameters": SENT_BY_CLIENT | parameters, "stream": stream}, Generate)


def asked(**expected) -> dict:
    """What a completion has beyond what all have."""
    found = call(**expected)
    body = body_of(found, check(found), None)
    return {name: value for name, value in body.items() if ALWAYS.get(name) != value}


@pytest.mark.parametrize(
    ("expected", "added"),
    [
        ({}, {}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"do_sample": True}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 4}, {"temperature": 0.5, "top_p": 0.9, "top_k": 4}),
        ({"temperature": 0.0, "do_sample": True}, {}),
        ({"top_k": 3}, {"temperature": 1.0, "top_p": 1.0, "top_k": 3}),
        ({"repetition_penalty": 1.2, "seed": 7}, {"repetition_penalty": 1.2, "seed": 7}),
        ({"stop": ["x"]}, {"stop": ["x"], "include_stop_str_in_output": True}),
        ({"ignore_eos_token": True}, {"ignore_eos": True}),
        ({"truncate": 9}, {"truncate_prompt_tokens": 9, "truncation_side": "left"}),
        ({"details": True}, {"logprobs": 0}),
        ({"decoder_input_details": True}, {"logprobs": 0, "echo": True}),
        ({"best_of": 2, "do_sample": True}, {"n": 2, "logprobs": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        ({"best_of": 1}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 0}),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": SCHEMA}}},
        ),
        ({"api_token": ""}, {}),
    ],
)
def test_bodies(expected, added):
    """Each parameter becomes vLLM's; without sampling, the likeliest token is taken, whatever defaults a model has."""
    assert asked(**expected) == added


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"best_of": 0}, "`best_of` must be > 0"),
        ({"best_of": 17, "do_sample": True}, "<= 16. Given: 17"),
        ({"best_of": 2}, "must use sampling"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set"),
        ({"best_of": 2, "do_sample": True, "stream": True}, "`best_of` != 1 is not supported"),
        ({"temperature": -1.0}, "`temperature`"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k`"),
        ({"max_new_tokens": 0}, "`max_new_tokens`"),
        ({"truncate": 0}, "`truncate`"),
        ({"return_k_alternatives": 0}, "`return_k_alternatives`"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 2**63}, "`seed`"),
        ({"decoder_input_details": True, "stream": True}, "`decoder_input_details` == true is not supported"),
        ({"return_k_alternatives": 1, "stream": True}, "`return_k_alternatives` is not supported"),
        ({"typical_p": 0.5}, "`typical_p` has no counterpart"),
        ({"watermark": True}, "`watermark` has no counterpart"),
        ({"merged_adapters": {"ids": ["a"], "weights": [1.0]}}, "`merged_adapters` has no counterpart"),
        ({"api_token": "hf_secret"}, "`api_token` is not supported"),
        ({"response_format": {"type": "grammar"}}, "'grammar'"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "must be an object"),
        ({"response_format": {"type": "json_object", "strict": True}}, "field 'strict'"),
    ],
)
def test_what_is_refused(expected, words):
    """What cannot be, and what vLLM has not, is refused by its name; a token is not repeated."""
    with pytest.raises(InvalidInput) as refused:
        asked(**expected)
    assert words in refused.value.message and "hf_secret" not in refused.value.message


def piece(
    text: str, *tokens: tuple[int, str], finish: str | None = None, stop: int | str | None = None, **more
) -> dict:
    """A choice of vLLM's."""
    logprobs = {"tokens": [each for _, each in tokens], "token_logprobs": [-0.5] * len(tokens)}
    ids = [token for token, _ in tokens]
    fields = {"text": text, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
    return {"index": 0} | fields | more


def choice(*expected, **more) -> Choice:
    return msgspec.convert(piece(*expected, **more), Choice)


@pytest.mark.parametrize(
    ("expected", "texts"),
    [
        (choice("ab", (1, "a"), (2, "b")), [("a", False), ("b", False)]),
        (choice("a", (1, "a"), (2, "</s>"), finish="stop"), [("a", False), ("</s>", True)]),
        (choice("a", (1, "a"), (2, "<|eot|>"), finish="stop", stop=2), [("a", False), ("<|eot|>", True)]),
        (choice("ab", (1, "a"), (2, "b"), finish="stop", stop="b"), [("a", False), ("b", False)]),
        (choice("a b", (1, "a"), (9, "<pad>"), (2, " b")), [("a", False), ("<pad>", True), (" b", False)]),
        (choice("<b>", (1, "<b>")), [("<b>", False)]),
        (choice("aé", (1, "a"), (2, "\ufffd"), (3, "\ufffd")), [("a", False), ("", False), ("é", False)]),
        (choice("", (1, "\ufffd")), [("", False)]),
        (choice(""), []),
    ],
)
def test_tokens(expected, texts):
    """The texts of tokens that are not special make up the text, also where a character spans several."""
    tokens = tokens_of(expected)
    assert [(token.text, token.special) for token in tokens] == texts
    assert "".join(token.text for token in tokens if not token.special) == expected.text


@pytest.mark.parametrize(
    ("finish", "stop", "word"),
    [("length", None, "length"), ("stop", None, "eos_token"), ("stop", 5, "eos_token"), ("stop", "x", "stop_sequence")],
)
def test_endings(finish, stop, word):
    assert finish_of(choice("a", (1, "a"), finish=finish, stop=stop)) == word


@pytest.mark.parametrize("finish", ["abort", "error", None])
def test_an_answer_that_was_broken_off(finish):
    """It is no answer."""
    with pytest.raises(BatchmillError, match="ended the answer early"):
        finish_of(choice("a", (1, "a"), finish=finish))


def test_the_best_of_several():
    """The answer whose tokens are likeliest on average comes first, the others beside it, the prompt before all."""
    likely = piece("yes", (1, "yes"), finish="length") | {"logprobs": {"tokens": ["yes"], "token_logprobs": [-0.1]}}
    answer = msgspec.convert({"choices": [piece("no", (2, "no"), finish="length"), likely]}, Answer)
    found = call(best_of=2, do_sample=True, details=True, return_full_text=True)
    result = generated(found, check(found), answer)
    assert result.generated_text == "hiyes" and result.details is not None
    assert [each.generated_text for each in result.details.best_of_sequences or ()] == ["hino"]
    plain = call(best_of=2, do_sample=True)
    assert msgspec.json.encode(generated(plain, check(plain), answer)) == b'{"generated_text":"yes"}'


async def stream(events: list[bytes], found: Generate) -> list[dict]:
    async def pieces():
        for event in events:
            yield event

    text = b"".join([each async for each in events_of(found, check(found), pieces())])
    lines = text.decode().split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data:{") for line in lines)
    return [json.loads(line.removeprefix("data:")) for line in lines]


def event(*choices: dict, **more) -> bytes:
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


STREAM = b"".join([
    event(piece("a", (7, "a"), prompt_token_ids=[1, 2, 3])), event(piece("bc", (8, "b"), (9, "c"))),
    event(piece("", (2, "</s>"), finish="stop")), event(usage={"prompt_tokens": 3}), b"data: [DONE]\n\n",
])  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_streams(size):
    """Each token is an event, however the engine's bytes are cut; the last has the text and why it ended."""
    cut = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    reply = await stream(cut, call(stream=True, details=True, seed=3))
    assert [each["token"]["text"] for each in reply] == ["a", "b", "c", "</s>"]
    assert [each["token"]["special"] for each in reply] == [False, False, False, True]
    assert [each["generated_text"] for each in reply] == [None, None, None, "abc"]
    details = {"finish_reason": "eos_token", "prompt_tokens": 3, "generated_tokens": 4, "seed": 3}
    assert reply[-1]["details"] == details and reply[0]["details"] is None
    assert (await stream(cut, call(stream=True)))[-1]["details"] is None


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event(piece("a", (7, "a")))], "ended its stream before"),
        ([event(error={"message": "out of memory"})], "out of memory"),
        ([event(piece("a", (7, "a"), finish="abort"))], "ended the answer early"),
        ([b"data: {nonsense\n\n"], "cannot be read"),
    ],
)
async def test_streams_that_end_early(events, words):
    """What the engine did not finish is an error, never a shorter answer."""
    with pytest.raises(BatchmillError, match=words):
        await stream(events, call(stream=True))


def test_an_answer_without_a_stream_is_read():
    """An engine's reply may have fields that mean nothing here."""
    body = json.dumps({"id": "x", "choices": [piece("a", (1, "a"), finish="length", routed=None)], "usage": None})
    assert read_answer(body.encode()).choices[0].text == "a"
