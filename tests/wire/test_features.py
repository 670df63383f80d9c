"""What bodies may ask of a service besides an answer."""

from __future__ import annotations

import json

import pytest

from batchmill.datasets import bodies
from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import ModelSpec
from batchmill.wire.features import FEATURES, check_features, features_of
from batchmill.wire.rows.forms import CHAT, EMBEDDINGS, MESSAGES, RESPONSES

SAID = [{"role": "user", "content": "hi"}]
NONE: frozenset[str] = frozenset()
ASKING = [
    ("background", RESPONSES, {"input": "a", "background": True}),
    ("stored", RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    ("stored", RESPONSES, {"input": "a", "conversation": {"id": "conv_1"}}),
    ("stored", RESPONSES, {"input": "a", "prompt": {"id": "pmpt_1"}}),
    ("stored", RESPONSES, {"input": [{"type": "item_reference", "id": "rs_1"}]}),
    ("stored", RESPONSES, {"input": [{"id": "rs_1"}]}),
    ("stored", RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]}),
    ("stored", CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]}),
    ("stored", MESSAGES, {"messages": SAID, "container": "container_1"}),
    ("stored", MESSAGES, {"messages": [{"role": "user", "content": [{"source": {"type": "file", "file_id": "f"}}]}]}),
    ("hosted_tools", RESPONSES, {"input": "a", "tools": [{"type": "mcp", "server_url": "http://10.0.0.1/"}]}),
    ("hosted_tools", RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}),
    ("hosted_tools", RESPONSES, {"input": "a", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}),
    ("hosted_tools", MESSAGES, {"messages": SAID, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("hosted_tools", MESSAGES, {"messages": SAID, "mcp_servers": [{"url": "http://10.0.0.1"}]}),
    ("hosted_tools", CHAT, {"messages": SAID, "tools": [{"google_search": {}}]}),
    ("hosted_tools", CHAT, {"messages": SAID, "tools": {"type": "web_search"}}),
    ("hosted_tools", CHAT, {"messages": SAID, "tools": [{"type": ["function"]}]}),
    ("hosted_tools", CHAT, {"messages": SAID, "web_search_options": {"search_context_size": "high"}}),
    ("hosted_tools", CHAT, {"messages": SAID, "plugins": [{"id": "web"}]}),
    ("hosted_tools", CHAT, {"messages": SAID, "data_sources": [{"type": "azure_search"}]}),
    ("priority_tier", CHAT, {"messages": SAID, "service_tier": "priority"}),
    ("priority_tier", EMBEDDINGS, {"input": "a", "service_tier": ["default"]}),
    ("other_models", CHAT, {"messages": SAID, "models": ["dearer"]}),
    ("other_models", "/v1/own", {"fallbacks": ["dearer"]}),
]
FINE = [
    (CHAT, {"messages": SAID, "service_tier": "flex", "tools": None, "models": [], "plugins": []}),
    (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "custom"}]}),
    (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": {"parameters": {"file_id": "an example"}}}]}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 'say "file_id": and \\u005f'}], "store": True, "background": False},
    ),
    (MESSAGES, {"messages": SAID, "tools": [{"name": "f", "input_schema": {"properties": {"file_id": {}}}}]}),
    (MESSAGES, {"messages": SAID, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"file_id": "x"}}]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": "a"}, {"id": "rs_1", "type": "message", "content": []}]}),
]


@pytest.mark.parametrize(("feature", "url", "body"), ASKING)
def test_each_is_closed_until_it_is_named(feature, url, body):
    """A body that asks for a feature is refused with the way out, and passes where it is named or nobody bounds."""
    data = json.dumps(body).encode()
    with pytest.raises(InvalidRow, match=f"models.NAME.features = .'{feature}'") as caught:
        bodies.check(url, data, features=NONE)
    assert caught.value.code == "parameter_not_allowed"
    with pytest.raises(InvalidRow):
        bodies.check(url, data, features=frozenset(FEATURES) - {feature})
    bodies.check(url, data, features=frozenset(FEATURES))
    bodies.check(url, data)


@pytest.mark.parametrize(("url", "body"), FINE)
def test_what_only_answers_is_taken(url, body):
    """Tools of the caller, tiers that cost no more, empty members, and words that only look alike pass."""
    bodies.check(url, json.dumps(body).encode(), features=NONE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user"}],"b\\u0061ckground":true,"background":false}',
        b'{"messages":[{"role":"user"}],"service_tier":"priority","service_tier":"default"}',
        b'{"messages":[{"role":"user"}],"tools":[{"type":"web_search","type":"function"}]}',
        b'{"messages":[{"role":"user","content":[{"f\\u0069le_id":"x","file_id":""}]}]}',
    ],
)
def test_no_member_hides_behind_another(body):
    """Where a guarded member stands, none may stand twice: a service may read the one that was not looked at."""
    with pytest.raises(InvalidRow, match="twice|is not allowed"):
        bodies.check(CHAT, body, features=NONE)


def test_which_features_a_model_has():
    """Those of its configuration; of routes what all ways have; an engine of ours has no prices and tools to close."""
    own = ModelSpec("m", "http", "s", features=["background", "stored"])
    assert features_of(own) == {"background", "stored"}
    assert features_of(ModelSpec("v", "llm", "s")) == {"hosted_tools", "priority_tier", "other_models"}
    ways = [own, ModelSpec("n", "http", "s", features=["stored"])]
    assert features_of(ModelSpec("r", "routes", "r", routes=ways)) == {"stored"}
    with pytest.raises(InvalidInput, match="'web' is unknown; there are background"):
        check_features(["web"])
