"""LoRAX's fields of a body become the engine's, or are refused by their names."""

from __future__ import annotations

import json

import pytest

from batchmill.errors import InvalidRow
from batchmill.wire.fields import REFUSED, translate_body

SCHEMA = {"type": "object"}


def words(**members) -> dict:
    return json.loads(translate_body(json.dumps({"model": "m"} | members).encode()))


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        ({"ignore_eos_token": True}, {"ignore_eos": True}),
        ({"ignore_eos_token": None}, {}),
        ({"api_token": "", "adapter_id": None, "adapter_source": None, "merged_adapters": None}, {}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": SCHEMA}}},
        ),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"response_format": None}, {"response_format": None}),
        ({"response_format": 7}, {"response_format": 7}),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            {"response_format": {"type": "json_object", "schema": None}},
        ),
    ],
)
def test_fields_that_mean_something(members, wanted):
    """Those that the engine has under another name get that; null says nothing."""
    assert words(**members) == {"model": "m"} | wanted


def test_others_stay_as_they_are():
    """A body without such fields keeps its exact bytes, whatever its texts say."""
    body = b'{"model": "m", "messages": [{"content": "an \\"adapter_id\\" "}], "seed": 1.50}'
    assert translate_body(body) is body
    named = b'{"note": {"adapter_id":1},  "seed": 1.50}'
    assert translate_body(named) is named


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(name):
    with pytest.raises(InvalidRow, match=f"body.{name} is not supported") as refused:
        words(**{name: "hf_secret"})
    assert "hf_secret" not in refused.value.message


@pytest.mark.parametrize(
    "members",
    [
        {"ignore_eos_token": True, "ignore_eos": True},
        {"response_format": {"type": "text", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": {}}},
    ],
)
def test_fields_that_contradict(members):
    with pytest.raises(InvalidRow):
        words(**members)
