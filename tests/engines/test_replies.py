"""What replies of model servers turn into."""

import pytest

from batchmill.engines.replies import MESSAGE_CHARS_MAX, BadReply, read_reply
from batchmill.types import Row, Usage
from batchmill.wire.forms import OpenAIForm

ROW = Row(0, 0, b"{}", OpenAIForm())


def test_ok_keeps_the_exact_bytes_and_counts_tokens():
    """A good reply's bytes go through untouched, and its usage is read."""
    usage = b'{"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}'
    data = b'{"x": 1.10, "usage": %s}' % usage
    outcome = read_reply(ROW, 200, data, request_id="r1")
    assert outcome.body == data
    assert outcome.usage == Usage(7, 4, 3)
    assert (outcome.error, outcome.status, outcome.request_id) == (None, 200, "r1")


def test_a_reply_over_many_lines_becomes_one_line_with_its_digits():
    """A pretty-printed reply is put on one line without touching its numbers."""
    assert read_reply(ROW, 200, b'{\n  "x": 1.10,\r\n "y": [1e5]}\n').body.split() == [b'{"x":1.10,"y":[1e5]}']


@pytest.mark.parametrize("data", [b"", b"<html>", b'{"a": 1', b"[1]", b'"x"', b"[" * 100_000, b'{"a":"\xff"}'])
def test_a_200_without_a_json_object_is_a_bad_reply(data):
    """A 200 that holds no JSON object is never taken for a result."""
    with pytest.raises(BadReply):
        read_reply(ROW, 200, data)


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b'{"error":{"message":"too long","type":"BadRequestError","code":400}}', "bad_request", "too long"),
        (b'{"error":{"message":"m","type":"invalid_request_error","code":null}}', "invalid_request_error", "m"),
        (b'{"error":{"message":"m","type":"x","code":"context_length_exceeded"}}', "context_length_exceeded", "m"),
        (b'{"detail":"Not Found"}', "http_404", "HTTP 404: Not Found"),
        (b'{"error":"plain"}', "http_404", "HTTP 404: plain"),
        (b"oops", "http_404", "HTTP 404: oops"),
        (b"", "http_404", "HTTP 404: an empty reply"),
    ],
)
def test_an_error_reply_gives_a_code_and_the_servers_sentence(data, code, message):
    """Every form of error reply yields a stable code and what the server said."""
    outcome = read_reply(ROW, 404, data)
    assert (outcome.error.code, outcome.error.message) == (code, message)
    assert outcome.status == 404
    assert outcome.body == (data if data.startswith(b"{") else None)


def test_an_error_envelope_under_200_is_an_error():
    """Some services send an error with status 200; it is no result."""
    assert read_reply(ROW, 200, b'{"error":{"message":"m","code":"overloaded"}}').error.code == "overloaded"


def test_a_message_is_cut_at_its_limit():
    """A huge error message is kept up to its limit and no further."""
    at_limit = b'{"error":{"message":"%s"}}' % (b"m" * MESSAGE_CHARS_MAX)
    beyond = b'{"error":{"message":"%s"}}' % (b"m" * (MESSAGE_CHARS_MAX + 1))
    assert read_reply(ROW, 400, at_limit).error == read_reply(ROW, 400, beyond).error
