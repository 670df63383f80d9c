"""Chat completions written as Messages, and replies read back."""

import json
from typing import Any

import pytest

from batchmill.engines.provider_batch.anthropic_chat import to_completion, to_messages, usage_of
from batchmill.errors import InvalidRow
from batchmill.types import Usage

USER = {"role": "user", "content": "hi"}
HI = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
TOOL_THERE = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


TURNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a text": ([USER], {"messages": [HI]}),
    "parts": (
        [{"role": "user", "content": [text("a"), text("b")]}],
        {"messages": [{**HI, "content": [text("a"), text("b")]}]},
    ),
    "an empty part": ([{"role": "user", "content": [text(""), text("hi")]}], {"messages": [HI]}),
    "system": ([{"role": "system", "content": "be brief"}, USER], {"messages": [HI], "system": [text("be brief")]}),
    "developer, and system later": (
        [{"role": "developer", "content": "a"}, USER, {"role": "system", "content": [text("b")]}],
        {"messages": [HI], "system": [text("a"), text("b")]},
    ),
    "two turns of one role": (
        [USER, {"role": "user", "content": "again"}],
        {"messages": [{"role": "user", "content": [text("hi"), text("again")]}]},
    ),
    "an answer": (
        [USER, {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}, USER],
        {"messages": [HI, {"role": "assistant", "content": [text("yes")]}, HI]},
    ),
    "a refusal": (
        [USER, {"role": "assistant", "content": None, "refusal": "no"}, USER],
        {"messages": [HI, {"role": "assistant", "content": [text("no")]}, HI]},
    ),
    "a tool's call and result": (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            USER,
        ],
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": [text("sunny")]},
                        text("hi"),
                    ],
                },
            ]
        },
    ),
    "an image by its address": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}],
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}],
                }
            ]
        },
    ),
    "an image itself": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}}
                ],
            }
        ],
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ]
        },
    ),
    "a document": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}}
                ],
            }
        ],
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
                            "title": "a.pdf",
                        }
                    ],
                }
            ]
        },
    ),
}

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no limit": ({}, {"max_tokens": 4096}),
    "max_tokens": ({"max_tokens": 5}, {"max_tokens": 5}),
    "the newer name wins": ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
    "stop": ({"stop": "END"}, {"stop_sequences": ["END"]}),
    "stops": ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
    "numbers": ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
    "thinking": ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
    "user": ({"user": "u1"}, {"metadata": {"user_id": "u1"}}),
    "tools": ({"tools": [TOOL]}, {"tools": [TOOL_THERE]}),
    "a bare tool": (
        {"tools": [{"type": "function", "function": {"name": "now", "strict": False}}]},
        {"tools": [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]},
    ),
    "tool_choice auto": ({"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}),
    "tool_choice none": ({"tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
    "tool_choice required": ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
    "tool_choice by name": (
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": {"type": "tool", "name": "weather"}},
    ),
    "one tool at a time": (
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [TOOL_THERE], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "what asks for nothing": (
        {
            "n": 1,
            "stream": False,
            "logprobs": False,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "seed": None,
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "store": False,
            "tools": [],
        },
        {},
    ),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "`n`"),
    "n as a truth": ({"n": True}, "`n`"),
    "logprobs": ({"logprobs": True}, "`logprobs`"),
    "top_logprobs": ({"top_logprobs": 3}, "`top_logprobs`"),
    "seed": ({"seed": 1}, "`seed`"),
    "penalty": ({"frequency_penalty": 0.5}, "`frequency_penalty`"),
    "response_format": ({"response_format": {"type": "json_object"}}, "`response_format`"),
    "stream": ({"stream": True}, "`stream`"),
    "unheard of": ({"min_p": 0.1}, "`min_p`"),
    "temperature": ({"temperature": 1.5}, "`temperature`"),
    "strict": ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "`strict`"),
    "custom tool": ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "'custom'"),
    "tool_choice": ({"tool_choice": {"type": "allowed_tools"}}, "`tool_choice`"),
    "stop": ({"stop": 5}, "`stop`"),
    "no messages": ({"messages": []}, "`messages`"),
    "a message that is none": ({"messages": ["hi"]}, "`messages[0]`"),
    "a strange role": ({"messages": [{"role": "function", "content": "x"}]}, "'function'"),
    "a name": ({"messages": [{**USER, "name": "Ada"}]}, "`name`"),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio'"),
    "a picture in the system prompt": (
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "https://a.b"}}]}]},
        "'image_url'",
    ),
    "a strange picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:text/html,a"}}]}]},
        "data:text/html",
    ),
    "little detail": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a", "detail": "low"}}]}
            ]
        },
        "`detail`",
    ),
    "arguments that are no JSON": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "'f'",
    ),
    "calls that are no list": ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "`tool_calls`"),
    "a file by its id": (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        "'file'",
    ),
}

FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "some_day": "stop",
}


@pytest.mark.parametrize("name", TURNS)
def test_conversations(name: str) -> None:
    """Messages become turns of blocks, the system prompt goes apart, and tools keep their ids."""
    messages, expected = TURNS[name]
    assert to_messages({"messages": messages}) == {"max_tokens": 4096, **expected}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    """Every field that has a counterpart is asked for by it, and no other is."""
    fields, expected = FIELDS[name]
    params = to_messages({"model": "m", "messages": [USER], **fields})
    assert params == {"model": "m", "max_tokens": 4096, "messages": [HI]} | expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """What cannot be asked for is refused by its name, never left out."""
    fields, values = REFUSED[name]
    with pytest.raises(InvalidRow) as caught:
        to_messages({"messages": [USER], **fields})
    assert values in caught.value.message
    assert caught.value.code in ("unsupported_parameter", "invalid_row")


def reply(**fields: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 3,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
        "server_tool_use": None,
    }
    values = {"id": "msg_1", "model": "claude", "role": "assistant", "type": "message", "stop_reason": "end_turn"}
    return {**values, "content": [text("a"), text("b")], "usage": usage, **fields}


def test_a_reply() -> None:
    """A reply keeps its id and model; its texts are one content, its tokens are counted with those of the cache."""
    completion = to_completion(reply(), created=7)
    assert completion == {
        "id": "msg_1",
        "object": "chat.completion",
        "created": 7,
        "model": "claude",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 17,
            "completion_tokens": 5,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert usage_of(reply()) == Usage(17, 4, 5)


@pytest.mark.parametrize("reason", FINISHES)
def test_why_it_ended(reason: str) -> None:
    """Each reason to stop has its counterpart."""
    completion = to_completion(reply(stop_reason=reason), created=0)
    assert completion["choices"][0]["finish_reason"] == FINISHES[reason]


def test_a_reply_with_calls() -> None:
    """Calls of tools come with their arguments as JSON text; without a text the content is null."""
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
    ]
    message = to_completion(reply(content=content, stop_reason="tool_use"), created=0)["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    [call] = message["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("toolu_1", "function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


def test_the_stop_sequence_is_told() -> None:
    """Which sequence ended the reply is told beside the reason."""
    completion = to_completion(reply(stop_reason="stop_sequence", stop_sequence="END"), created=0)
    assert completion["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("content", [None, 7, True, "text", {"type": "text"}, [None, 3, {"type": "text"}]])
def test_content_that_is_none(content: object) -> None:
    """A reply whose content is not a list of blocks is an empty answer, and nothing that stops the engine."""
    choice = to_completion({"id": "m", "content": content}, created=1)["choices"][0]
    assert choice["message"]["content"] == ""


def test_usage_that_is_none() -> None:
    """A reply without counts, or with strange ones, is no error."""
    assert usage_of(reply(usage=None)) is None
    assert usage_of(reply(usage={"input_tokens": "many", "output_tokens": True})) == Usage(0, 0, 0)
    assert to_completion(reply(usage=None), created=0)["usage"] is None


SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def test_a_schema_is_the_tool_that_must_be_called():
    """The model is told in Anthropic's way, and what it gives the tool is the text of the answer."""
    body = to_messages({"model": "m", "messages": [USER], "response_format": FORMAT})
    (tool,) = body["tools"]
    assert tool["input_schema"] == SCHEMA and body["tool_choice"] == {"type": "tool", "name": tool["name"]}
    used = {"type": "tool_use", "id": "t", "name": tool["name"], "input": {"label": "good"}}
    reply = to_completion({"content": [text("Sure"), used], "stop_reason": "tool_use"}, created=1)
    (choice,) = reply["choices"]
    assert json.loads(choice["message"]["content"]) == {"label": "good"} and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    cut = to_completion({"content": [used], "stop_reason": "max_tokens"}, created=1)
    assert cut["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": FORMAT, "tools": [TOOL]}, "beside `tools`"),
        ({"tools": [TOOL], "tool_choice": "auto", "response_format": FORMAT}, "beside `tools`"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}}, "type object"),
    ],
)
def test_schemas_that_no_tool_can_hold(fields: dict[str, Any], message: str):
    """They are refused, and the way out is named."""
    with pytest.raises(InvalidRow, match=message):
        to_messages({"model": "m", "messages": [USER], **fields})
