"""Vectors in the encoding that was asked for, both ways exact."""

import base64
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.dialects.openai.dialect import encoding_of, with_encoding

SINGLES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=20)


def reply_of(*vectors) -> bytes:
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return msgspec.json.encode({"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 1}})


def vectors_of(reply: bytes) -> list:
    return [item["embedding"] for item in msgspec.json.decode(reply)["data"]]


@given(SINGLES)
def test_single_precision_survives_both_ways(vector):
    """Numbers to base64 and back are the same numbers, to the bit."""
    packed = with_encoding(reply_of(vector), "base64")
    assert vectors_of(packed) == [base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()]
    assert vectors_of(with_encoding(packed, "float")) == [vector]


def test_what_fits_already_is_not_touched():
    """A reply in the encoding that was asked for is handed on as the bytes it is."""
    floats, packed = reply_of([0.5, 1.0]), reply_of("AAAAPw==")
    assert with_encoding(floats, "float") is floats
    assert with_encoding(packed, "base64") is packed


def test_the_rest_of_the_reply_keeps_its_digits():
    """Only vectors change: every other member stays as the engine wrote it."""
    reply = b'{"data":[{"embedding":[1.0],"index":0}],"usage":{"cost":1.10000000000000000001}}'
    assert b'"usage":{"cost":1.10000000000000000001}' in with_encoding(reply, "base64")


@pytest.mark.parametrize(
    "reply",
    [b"", b"[]", b"nonsense", b'{"data":1}', b'{"data":[{}]}', b'{"data":[{"embedding":["x"]}]}', b'{"vectors":[]}',
     b'{"data":[{"embedding":null}]}'],
)  # fmt: skip
def test_a_reply_of_another_shape_is_handed_on(reply):
    """What is not a list of vectors is the model's own affair."""
    assert with_encoding(reply, "base64") is reply


def test_text_that_is_no_vector_is_handed_on():
    """A string that is not base64 of whole numbers is not made into some."""
    for text in ("é", "AAA", "AAA="):
        reply = reply_of(text)
        assert with_encoding(reply, "float") is reply


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b'{"input":"x"}', "float"),
        (b'{"encoding_format":null}', "float"),
        (b'{"encoding_format":"float"}', "float"),
        (b'{"encoding_format":"base64"}', "base64"),
        (b'{"encoding_format":"bytes"}', None),
        (b'{"encoding_format":1}', None),
    ],
)
def test_numbers_are_asked_for_by_default(body, encoding):
    """OpenAI's default is float; an encoding of the engine's own is left to the engine."""
    assert encoding_of(body) == encoding
