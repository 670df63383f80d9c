"""A reply's bytes become what may be kept of it."""

from __future__ import annotations

import pytest

from batchmill.engines.retry import read_reply, redact
from batchmill.types import Usage


def test_body_is_kept_as_it_came() -> None:
    """A body on one line is kept byte for byte, with every digit and space."""
    data = b'{"a": 1.00000000000000000001, "b": [ ]}'
    assert read_reply(200, data).body == data


def test_lines_are_joined() -> None:
    """A body over several lines becomes one line with the same numbers."""
    data = b'{\r\n  "a": 1.00000000000000000001,\n  "b": "x\\ny"\n}\n'
    assert read_reply(200, data).body == b'{"a":1.00000000000000000001,"b":"x\\ny"}'


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'{"a":1', b'{"a":1}x', b'{"a":NaN}', b'{"a":"\xff"}', b"\xef\xbb\xbf{}", b"[" * 100_000],
    ids=["empty", "null", "array", "cut", "more", "nan", "utf8", "bom", "deep"],
)
def test_what_is_no_object(data: bytes) -> None:
    """Bytes that are not strict JSON object are not a body."""
    assert read_reply(200, data).body is None


def test_whole_surrogate_pairs_are_text() -> None:
    """An escaped pair is a character like any other, and an escaped backslash before `u` is none."""
    for data in (rb'{"a":"\ud83d\ude00"}', rb'{"a":"\\ud83d"}'):
        assert read_reply(200, data).body == data


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}', Usage(7, 0, 3)),
        (b'{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}', Usage(7, 4, 0)),
        (b'{"input_tokens":7,"output_tokens":3,"input_tokens_details":{"cached_tokens":2}}', Usage(7, 2, 3)),
        (b'{"prompt_tokens":7,"prompt_tokens_details":null}', Usage(7, 0, 0)),
        (b'{"prompt_tokens":-7}', Usage(0, 0, 0)),
        (b'{"prompt_tokens":7.5,"completion_tokens":3}', Usage(0, 0, 3)),
        (b"null", None),
        (b"7", None),
    ],
)
def test_usage(usage: bytes, expected: Usage | None) -> None:
    """Usage is read in the forms of chat, embeddings and responses; an odd shape never loses the reply."""
    reply = read_reply(200, b'{"usage":%s}' % usage)
    assert reply.body is not None
    assert reply.usage == expected


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b'{"error":{"message":"m","type":"t","code":"c"}}', "c", "m"),
        (b'{"error":{"message":"m","type":"t","code":400}}', "t", "m"),
        (b'{"error":{"message":"m","type":null,"code":"400"}}', "http_400", "m"),
        (b'{"object":"error","message":"m","type":"NotFound","code":404}', "NotFound", "m"),
        (b'{"detail":[{"msg":"x"}]}', "http_400", '[{"msg":"x"}]'),
        (b'{"error":"plain"}', "http_400", "plain"),
        (b"plain text", "http_400", "plain text"),
        (b"", "http_400", "the service answered with HTTP status 400 and no reason"),
    ],
)
def test_error_forms(data: bytes, code: str, message: str) -> None:
    """Every common form of an error gives a code and a message."""
    error = read_reply(400, data).row_error()
    assert (error.code, error.message) == (code, message)


def test_redact_leaves_words_alone() -> None:
    """Only what looks like a key is starred."""
    assert redact("the key-value-database of sk-learn") == "the key-value-database of sk-learn"
    assert redact("Authorization: Bearer abc.def was refused") == "Authorization: Bearer *** was refused"
