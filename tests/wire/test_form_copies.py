"""What stays of results for later jobs is all that their rows take over, and no more."""

from __future__ import annotations

import json

import pytest

from batchmill.types import MediaColumn, OutputSchema
from batchmill.wire.rows.forms import OpenAIForm, TableForm

SCHEMA = OutputSchema('{"type":"object","properties":{"label":{"type":"string"}}}')
REPLY = {"status_code": 200, "request_id": "req_1", "body": {"text": "fine", "usage": {"total_tokens": 9}}}
RESULTS = {
    "openai": (OpenAIForm(), {"id": "1", "custom_id": "secret", "response": REPLY, "error": None}),
    "prompt": (TableForm("say {word}"), {"word": "secret", "output": "fine", "error": None}),
    "schema": (TableForm("say {word}", schema=SCHEMA), {"word": "secret", "label": "fine", "error": None}),
    "media": (
        TableForm("what is it", media=[MediaColumn("word", "image")]),
        {"word": "secret", "output": "fine", "error": None, "fetched": '[["digest","etag",""]]'},
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_rows_take_the_same_over_of_a_copy(name):
    form, result = RESULTS[name]
    line = json.dumps(result).encode() + b"\n"
    (copy,) = form.cut_down([line])
    assert copy.endswith(b"\n") and copy.count(b"\n") == 1 and b"secret" not in copy
    row = json.dumps({"custom_id": "row", "word": "mine"}).encode()
    if name == "media":
        row = json.dumps({"word": "mine", "_media": []}).encode()
    taken = [form.take_over([each], [row], [7], [b'"job_1/2"']) for each in (line, copy)]
    assert taken[0] == taken[1] and b"fine" in taken[0][0] and b"secret" not in taken[0][0]
    assert ("fetched" in json.loads(taken[0][0])) == (name == "media")
