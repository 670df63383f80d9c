"""Chat completions written for Gemini, and replies read back."""

import json
from typing import Any

import pytest

from batchmill.engines.provider_batch.gemini_chat import to_content_request
from batchmill.engines.provider_batch.gemini_replies import to_completion, usage_of
from batchmill.errors import InvalidRow
from batchmill.types import Usage
from batchmill.wire.replies import flaws_of

USER = {"role": "user", "content": "hi"}
HI = {"role": "user", "parts": [{"text": "hi"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}
TOOL_THERE = {"name": "weather", "description": "of a city", "parametersJsonSchema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(url: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **fields}}]}]


TURNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a text": ([USER], {"contents": [HI]}),
    "parts": (
        [{"role": "user", "content": [text("a"), text(""), text("b")]}],
        {"contents": [said("user", {"text": "a"}, {"text": "b"})]},
    ),
    "system": (
        [{"role": "system", "content": "be brief"}, USER],
        {"contents": [HI], "systemInstruction": {"parts": [{"text": "be brief"}]}},
    ),
    "developer, and system later": (
        [{"role": "developer", "content": "a"}, USER, {"role": "system", "content": [text("b")]}],
        {"contents": [HI], "systemInstruction": {"parts": [{"text": "a"}, {"text": "b"}]}},
    ),
    "two turns of one role": (
        [USER, {"role": "user", "content": "again"}],
        {"contents": [said("user", {"text": "hi"}, {"text": "again"})]},
    ),
    "an answer": (
        [USER, {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}, USER],
        {"contents": [HI, said("model", {"text": "yes"}), HI]},
    ),
    "an empty answer": (
        [USER, {"role": "assistant", "content": ""}, USER],
        {"contents": [said("user", *HI["parts"] * 2)]},
    ),
    "a refusal": (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": "no"}, USER],
        {"contents": [HI, said("model", {"text": "no"}, {"text": "no"}), HI]},
    ),
    "a tool's call and result": (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": [text("sun"), text("ny")]},
            USER,
        ],
        {
            "contents": [
                HI,
                said("model", {"functionCall": {"id": "call_1", "name": "weather", "args": {"city": "Bern"}}}),
                said(
                    "user",
                    {"functionResponse": {"id": "call_1", "name": "weather", "response": {"output": "sunny"}}},
                ),
                HI,
            ]
        },
    ),
    "two calls at once": (
        [
            USER,
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a"},
            {"role": "tool", "tool_call_id": "call_2", "content": "b"},
        ],
        {
            "contents": [
                HI,
                said(
                    "model",
                    {"functionCall": {"id": "call_1", "name": "weather", "args": {"city": "Bern"}}},
                    {"functionCall": {"id": "call_2", "name": "weather", "args": {"city": "Bern"}}},
                ),
                said(
                    "user",
                    {"functionResponse": {"id": "call_1", "name": "weather", "response": {"output": "a"}}},
                    {"functionResponse": {"id": "call_2", "name": "weather", "response": {"output": "b"}}},
                ),
            ]
        },
    ),
    "a call with its signature": (
        [
            USER,
            {"role": "assistant", "tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "s"}}}]},
        ],
        {
            "contents": [
                HI,
                said(
                    "model",
                    {
                        "functionCall": {"id": "call_1", "name": "weather", "args": {"city": "Bern"}},
                        "thoughtSignature": "s",
                    },
                ),
            ]
        },
    ),
    "an image by its address": (
        image("https://example.org/a.PNG?size=2", detail="auto"),
        {
            "contents": [
                said("user", {"fileData": {"fileUri": "https://example.org/a.PNG?size=2", "mimeType": "image/png"}})
            ]
        },
    ),
    "an image whose address tells no type": (
        image("https://example.org/a"),
        {"contents": [said("user", {"fileData": {"fileUri": "https://example.org/a"}})]},
    ),
    "an image itself": (
        image("data:image/PNG;base64,AAAA"),
        {"contents": [said("user", {"inlineData": {"mimeType": "image/png", "data": "AAAA"}})]},
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
        {"contents": [said("user", {"inlineData": {"mimeType": "application/pdf", "data": "AAAA"}})]},
    ),
    "sound": (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}]}],
        {"contents": [said("user", {"inlineData": {"mimeType": "audio/mp3", "data": "AAAA"}})]},
    ),
}


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no limit": ({}, {}),
    "max_tokens": ({"max_tokens": 5}, config(maxOutputTokens=5)),
    "the newer name wins": ({"max_tokens": 5, "max_completion_tokens": 6}, config(maxOutputTokens=6)),
    "stop": ({"stop": "END"}, config(stopSequences=["END"])),
    "stops": ({"stop": ["a", "b"]}, config(stopSequences=["a", "b"])),
    "numbers": (
        {"temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 7, "n": 2, "frequency_penalty": -1, "presence_penalty": 0},
        config(temperature=0.5, topP=1, topK=3, seed=7, candidateCount=2, frequencyPenalty=-1, presencePenalty=0),
    ),
    "log probabilities": ({"logprobs": True, "top_logprobs": 3}, config(responseLogprobs=True, logprobs=3)),
    "log probabilities alone": ({"logprobs": True}, config(responseLogprobs=True)),
    "a JSON object": ({"response_format": {"type": "json_object"}}, config(responseMimeType="application/json")),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        config(responseMimeType="application/json", responseJsonSchema=SCHEMA),
    ),
    "a schema that is described": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "d", "schema": {}}}},
        config(responseMimeType="application/json", responseJsonSchema={"description": "d"}),
    ),
    "thinking": (
        {"thinking_config": {"thinking_budget": 0, "includeThoughts": True, "thinking_level": "low"}},
        config(thinkingConfig={"thinkingBudget": 0, "includeThoughts": True, "thinkingLevel": "LOW"}),
    ),
    "safety": (
        {"safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]},
        {"safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]},
    ),
    "tools": ({"tools": [TOOL]}, {"tools": [{"functionDeclarations": [TOOL_THERE]}]}),
    "a bare tool": (
        {"tools": [{"type": "function", "function": {"name": "now", "strict": False}}]},
        {"tools": [{"functionDeclarations": [{"name": "now"}]}]},
    ),
    "a strict tool": (
        {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}], "tool_choice": "auto"},
        {
            "tools": [{"functionDeclarations": [{"name": "now"}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}},
        },
    ),
    "tool_choice auto": ({"tool_choice": "auto"}, {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}),
    "tool_choice none": ({"tool_choice": "none"}, {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}),
    "tool_choice required": ({"tool_choice": "required"}, {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}),
    "tool_choice by name": (
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}}},
    ),
    "what asks for nothing": (
        {
            "n": 1,
            "stream": False,
            "logprobs": False,
            "top_logprobs": 0,
            "logit_bias": {},
            "seed": None,
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "store": False,
            "parallel_tool_calls": True,
            "tools": [],
            "stop": [],
            "thinking_config": {},
            "reasoning_effort": None,
        },
        {},
    ),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n as a truth": ({"n": True}, "`n`"),
    "n as a text": ({"n": "2"}, "`n`"),
    "a fraction": ({"top_k": 1.5}, "`top_k`"),
    "a large number": ({"seed": 2**31}, "`seed`"),
    "a temperature that is none": ({"temperature": "hot"}, "`temperature`"),
    "max_tokens": ({"max_tokens": "many"}, "`max_tokens`"),
    "logprobs as a number": ({"logprobs": 1}, "`logprobs`"),
    "top_logprobs alone": ({"top_logprobs": 3}, "`top_logprobs`"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "`logit_bias`"),
    "effort": ({"reasoning_effort": "low"}, "`thinking_config`"),
    "thinking of another kind": ({"thinking_config": {"budget": 1}}, "`thinking_config`"),
    "thinking with a truth as a number": ({"thinking_config": {"thinking_budget": True}}, "`thinking_config`"),
    "a level that is none": ({"thinking_config": {"thinking_level": "deep"}}, "MINIMAL"),
    "a large budget": ({"thinking_config": {"thinking_budget": 2**40}}, "`thinking_config`"),
    "thinking that is none": ({"thinking_config": 5}, "`thinking_config`"),
    "safety": ({"safety_settings": [{"category": "a", "threshold": "b", "method": "c"}]}, "`safety_settings`"),
    "a threshold that is none": (
        {"safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "SOME"}]},
        "BLOCK_NONE",
    ),
    "safety that is none": ({"safety_settings": 5}, "`safety_settings`"),
    "response_format": ({"response_format": {"type": "grammar"}}, "`response_format`"),
    "a schema that is none": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "`response_format`"),
    "stream": ({"stream": True}, "`stream`"),
    "one tool at a time": ({"parallel_tool_calls": False}, "`parallel_tool_calls`"),
    "user": ({"user": "u1"}, "`user`"),
    "stored content of the account": ({"cached_content": "cachedContents/x"}, "`cached_content`"),
    "unheard of": ({"min_p": 0.1}, "`min_p`"),
    "tools that are none": ({"tools": {"a": 1}}, "`tools`"),
    "a tool that is none": ({"tools": [5]}, "`tools[0]`"),
    "a hosted tool": ({"tools": [{"type": "google_search"}]}, "'google_search'"),
    "a tool with more": ({"tools": [{"type": "function", "function": {"name": "a", "cost": 1}}]}, "`cost`"),
    "a tool's words": ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}, "`description`"),
    "a tool's schema": ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "`parameters`"),
    "tool_choice": ({"tool_choice": {"type": "allowed_tools"}}, "`tool_choice`"),
    "stop": ({"stop": 5}, "`stop`"),
    "no messages": ({"messages": []}, "`messages`"),
    "messages of the system alone": ({"messages": [{"role": "system", "content": "a"}]}, "`messages`"),
    "a message without content": ({"messages": [{"role": "user", "content": ""}]}, "`messages`"),
    "a message that is none": ({"messages": ["hi"]}, "`messages[0]`"),
    "content that is none": ({"messages": [{"role": "user", "content": 5}]}, "`content`"),
    "a part that is none": ({"messages": [{"role": "user", "content": [5]}]}, "a part"),
    "a strange role": ({"messages": [{"role": "function", "content": "x"}]}, "'function'"),
    "a name": ({"messages": [{**USER, "name": "Ada"}]}, "`name`"),
    "a refusal that is none": ({"messages": [{"role": "assistant", "refusal": 5}]}, "`refusal`"),
    "calls that are no list": ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "`tool_calls`"),
    "a call that is none": ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "a tool call"),
    "the result of no call": ({"messages": [USER, {"role": "tool", "tool_call_id": "x"}]}, "`tool_call_id`"),
    "arguments that are no JSON": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
        "'f'",
    ),
    "video": ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "'video_url'"),
    "sound of another kind": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "x"}}]}
            ]
        },
        "'x'",
    ),
    "a picture in the system prompt": (
        {"messages": [{"role": "system", "content": image("https://a.b/c.png")[0]["content"]}]},
        "'image_url'",
    ),
    "a strange picture": ({"messages": image("data:text/html;base64,a")}, "data:text/html"),
    "a picture that is no base64": ({"messages": image("data:image/png;base64,A-A")}, "base64"),
    "a picture at an odd host": (
        {"messages": image("https://generativelanguage%2Egoogleapis.com/files/a")},
        "https://",
    ),
    "a picture at a host in other letters": (
        {"messages": image("https://generativelanguage\u3002googleapis.com/files/a")},
        "https://",
    ),
    "a file of the account by another host": (
        {"messages": image("https://eu-generativelanguage.googleapis.com/v1beta/files/abc")},
        "all callers share",
    ),
    "a picture over plain HTTP": ({"messages": image("http://example.org/a.png")}, "https://"),
    "a picture in a bucket": ({"messages": image("gs://bucket/a.png")}, "https://"),
    "a picture nowhere": ({"messages": image("https:///a.png")}, "https://"),
    "an address that is none": ({"messages": image("https://[a/b.png")}, "https://"),
    "a file of the account": (
        {"messages": image("https://GenerativeLanguage.googleapis.com./v1beta/files/abc")},
        "all callers share",
    ),
    "little detail": ({"messages": image("https://a.b/c.png", detail="low")}, "`detail`"),
    "a file by its id": (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        "'file'",
    ),
}

FINISHES = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "LANGUAGE": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "OTHER": "stop",
    "MALFORMED_FUNCTION_CALL": "stop",
    "SOME_DAY": "stop",
}


@pytest.mark.parametrize("name", TURNS)
def test_conversations(name: str) -> None:
    """Messages become turns of parts, the system prompt goes apart, and tools keep their ids."""
    messages, expected = TURNS[name]
    assert to_content_request({"model": "m", "messages": messages}) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    """Every field that has a counterpart is asked for by it, and no other is."""
    fields, expected = FIELDS[name]
    assert to_content_request({"model": "m", "messages": [USER], **fields}) == {"contents": [HI]} | expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """What cannot be asked for is refused by its name, never left out."""
    fields, values = REFUSED[name]
    with pytest.raises(InvalidRow) as caught:
        to_content_request({"messages": [USER], **fields})
    assert values in caught.value.message
    assert caught.value.code in ("unsupported_parameter", "invalid_row")


def reply(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": list(parts)}, "finishReason": "STOP", "index": 0}
    usage = {
        "promptTokenCount": 10,
        "toolUsePromptTokenCount": 1,
        "cachedContentTokenCount": 4,
        "candidatesTokenCount": 5,
        "thoughtsTokenCount": 3,
        "totalTokenCount": 19,
    }
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "g-1", "responseId": "r1", **fields}


def completion(answer: dict[str, Any]) -> dict[str, Any]:
    translated = to_completion(answer, model="m", id="own", created=7)
    assert translated is not None
    return translated


def test_a_reply() -> None:
    """A reply keeps its id and model; its texts are one content; thoughts count as output."""
    assert completion(reply({"text": "a"}, {"text": "b"})) == {
        "id": "r1",
        "object": "chat.completion",
        "created": 7,
        "model": "g-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "native_finish_reason": "STOP",
            }
        ],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 8,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }
    assert usage_of(reply()) == Usage(11, 4, 8)


@pytest.mark.parametrize("reason", FINISHES)
def test_why_it_ended(reason: str) -> None:
    """Each reason to stop has its counterpart, and is told itself."""
    choice = completion({"candidates": [{"finishReason": reason}]})["choices"][0]
    assert (choice["finish_reason"], choice["native_finish_reason"]) == (FINISHES[reason], reason)
    assert choice["message"]["content"] == ""


def test_several_answers() -> None:
    """Each candidate is a choice."""
    candidates = [{"content": {"parts": [{"text": text}]}} for text in "ab"]
    choices = completion({"candidates": candidates})["choices"]
    assert [(each["index"], each["message"]["content"]) for each in choices] == [(0, "a"), (1, "b")]


def test_a_blocked_prompt() -> None:
    """A prompt that was blocked is a filtered answer, as OpenAI would give it."""
    answer = completion({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 3}})
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("content_filter", None)
    assert (choice["message"]["refusal"], choice["native_finish_reason"]) == (None, "SAFETY")
    assert (answer["id"], answer["model"], answer["usage"]["prompt_tokens"]) == ("own", "m", 3)


def test_replies_that_are_not_what_they_seem() -> None:
    """What is wrong with an answer is found in its translation: cut off, filtered or empty; a picture is an answer."""
    seen = {
        ("truncated",): {"candidates": [{"content": {"parts": [{"text": "a"}]}, "finishReason": "MAX_TOKENS"}]},
        ("filtered",): {"candidates": [{"finishReason": "SAFETY"}]},
        ("empty",): {"candidates": [{"finishReason": "OTHER"}]},
        (): reply({"inlineData": {"mimeType": "image/png", "data": "AAAA"}}),
    }
    for flaws, answer in seen.items():
        assert flaws_of(json.dumps(completion(answer)).encode()) == flaws
    blocked = completion({"promptFeedback": {"blockReason": "SAFETY"}})
    assert flaws_of(json.dumps(blocked).encode()) == ("filtered",)


def test_no_answer_at_all() -> None:
    """A reply with neither a candidate nor a reason for none is no completion."""
    for answer in ({}, {"candidates": []}, {"candidates": None}, {"promptFeedback": {}}):
        assert to_completion(answer, model="m", id="own", created=0) is None


def test_a_reply_with_calls() -> None:
    """Calls of tools come with their arguments as JSON text and the signature that the next turn needs."""
    parts = [
        {"text": "hm", "thought": True},
        {"functionCall": {"name": "weather", "args": {"city": "Bern"}}, "thoughtSignature": "s"},
        {"functionCall": {"id": "there-2", "name": "now"}},
    ]
    choice = completion(reply(*parts))["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message["reasoning_content"] == "hm"
    first, second = message["tool_calls"]
    assert (first["id"], first["function"]["name"]) == ("call_r1_0_0", "weather")
    assert json.loads(first["function"]["arguments"]) == {"city": "Bern"}
    assert first["extra_content"] == {"google": {"thought_signature": "s"}}
    assert (second["id"], second["function"]["arguments"]) == ("there-2", "{}")
    # and they go back as they came
    turns = [USER, message | {"reasoning_content": None}, {"role": "tool", "tool_call_id": first["id"], "content": "x"}]
    sent = to_content_request({"messages": turns})["contents"][1]["parts"][0]
    assert (sent["functionCall"]["name"], sent["thoughtSignature"]) == ("weather", "s")


def test_a_picture() -> None:
    """A picture that a model made is kept."""
    message = completion(reply({"inlineData": {"mimeType": "image/png", "data": "AAAA"}}))["choices"][0]["message"]
    assert message["images"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def test_log_probabilities() -> None:
    """Each token comes with its bytes and its alternatives; a number that Google leaves out is 0."""
    result = {
        "chosenCandidates": [{"token": "é", "tokenId": 5, "logProbability": -0.5}, {"token": "b"}],
        "topCandidates": [{"candidates": [{"token": "x", "logProbability": -1.5}]}],
    }
    answer = reply({"text": "éb"})
    answer["candidates"][0]["logprobsResult"] = result
    assert completion(answer)["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [{"token": "x", "logprob": -1.5, "bytes": [120]}],
            },
            {"token": "b", "logprob": 0.0, "bytes": [98], "top_logprobs": []},
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("content", [None, 7, True, "text", {"parts": 5}, {"parts": [None, 3, {"text": 5}]}])
def test_content_that_is_none(content: object) -> None:
    """A candidate whose content is not a list of parts is an empty answer, and nothing that stops the engine."""
    choice = completion({"candidates": [{"content": content, "logprobsResult": content, "finishReason": 5}]})[
        "choices"
    ][0]
    assert (choice["message"]["content"], choice["native_finish_reason"]) == ("", None)


def test_usage_that_is_none() -> None:
    """A reply without counts, or with strange ones, is no error; counts of 64 bits come as texts."""
    assert usage_of({}) is None
    assert usage_of({"usageMetadata": None}) is None
    strange = {"promptTokenCount": "many", "candidatesTokenCount": True, "thoughtsTokenCount": -5}
    assert usage_of({"usageMetadata": strange}) == Usage(0, 0, 0)
    assert usage_of({"usageMetadata": {"promptTokenCount": "12"}}) == Usage(12, 0, 0)
    assert completion({"candidates": [{}]})["usage"] is None
