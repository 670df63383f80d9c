"""How deep JSON nests, counted and not left to a decoder."""

import json

import msgspec
import pytest

from batchmill.dialects.modelbit.dialect import read_request
from batchmill.dialects.open_inference.dialect import _members
from batchmill.dialects.predibase.serving import read_body
from batchmill.engines.provider_batch import anthropic, bedrock, cohere, gemini, openai, sagemaker
from batchmill.engines.provider_batch.provider import ProviderReply, TryAgain
from batchmill.errors import BatchmillError
from batchmill.types import RemoteJob
from batchmill.wire import json_bytes
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep, shallow
from batchmill.wire.rows.json_templates import is_json

DEEP = b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1)  # which the decoders of every Python can read


def test_as_many_levels_as_may_be_and_one_more():
    """Objects and lists count alike; as deep as may be is read, one level more is refused with the limit."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'{"a":[', b"]}")):
        times = DEPTH_MAX // (opening.count(b"[") + opening.count(b"{"))
        text = opening * times + b"1" + closing * times
        assert shallow(text) is text
        with pytest.raises(msgspec.DecodeError, match=f"deeper than {DEPTH_MAX} levels"):
            shallow(b"[" + text + b"]")
        assert is_too_deep(memoryview(b"[" + text + b"]"))


def test_brackets_in_strings_are_no_levels(monkeypatch):
    """What stands in a string nests nothing, whatever it escapes, and wherever a piece of the text is cut."""
    for piece in (1, 2, 3, 5, 1024):
        monkeypatch.setattr(json_bytes, "PIECE_BYTES", piece)
        for text in ('[[["', '"]]]', '\\"[[[', "\\", "\\\\", '\\\\"[[', "a" * 9):
            data = json.dumps({text: [text, {"a": [text]}]}).encode()
            assert not is_too_deep(data, 4) and is_too_deep(data, 3)


def test_siblings_are_no_levels():
    """A thousand lists beside one another are as deep as one of them."""
    assert not is_too_deep(json.dumps([[[1, {"a": 2}]]] * 1000).encode(), 4)
    assert is_too_deep(json.dumps([[[1, {"a": 2}]]] * 1000).encode(), 3)


def test_nobody_reads_what_is_too_deep():
    """Bodies, templates' values, replies and lines of providers are refused by their levels, under every Python."""
    assert not is_json(DEEP)
    body = b'{"data":1,"response_format":' + DEEP + b"}"
    assert read_request(body).body == body  # the form refuses it
    for read in (lambda: _members(b'{"a":' + DEEP + b"}", "it"), lambda: read_body(b'{"prompt":' + DEEP + b"}")):
        with pytest.raises(BatchmillError, match=f"deeper than {DEPTH_MAX}"):
            read()
    line = b'{"custom_id":"r7","recordId":"r7","result":{"type":"succeeded","message":' + DEEP + b"}}"
    for _, reply in (openai.read_line(line), anthropic._read(line, "mark", 0), bedrock._read(line, 0)):
        assert reply.is_garbled and f"deeper than {DEPTH_MAX}" in reply.error.message
    job, line = RemoteJob("tag", "gemini", "ended"), b'{"key":"c7","response":' + DEEP + b"}"
    number, reply = gemini._read(line, job, "m")
    assert number == 7 and reply.is_garbled and f"deeper than {DEPTH_MAX}" in reply.error.message
    assert json.loads(sagemaker._reply(DEEP).body) == {"response": DEEP.decode()}
    with pytest.raises(TryAgain):
        ProviderReply({}, DEEP).json()
    with pytest.raises(TryAgain):
        cohere._take(cohere._json_lines([b'{"a":' + DEEP + b"}"]))
