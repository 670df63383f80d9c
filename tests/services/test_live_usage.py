"""Tokens that an answer reports, read on its way through."""

import pytest

from batchmill.services.live_calls import TAIL_BYTES, UsageReader
from batchmill.types import Usage

BODY = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'


def read(*pieces: bytes) -> Usage | None:
    reader = UsageReader()
    for piece in pieces:
        reader.read(piece)
    return reader.usage()


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_usage_is_found_however_the_answer_is_cut(size):
    """Pieces of any size give the same count."""
    assert read(*(BODY[i : i + size] for i in range(0, len(BODY), size))) == Usage(7, 2, 3)


def test_the_last_event_of_a_stream_counts():
    """A stream reports its usage in its last event but one; events without are passed over."""
    events = b'data: {"usage":null}\n\ndata: {"usage":{"input_tokens":4,"output_tokens":1}}\n\n'
    assert read(events, b'data: {"usage":null}\n\n', b"data: [DONE]\n\n") == Usage(4, 0, 1)


def test_usage_in_the_text_of_an_answer_is_no_usage():
    """What a model writes about usage is inside a string, and never counts."""
    assert read(rb'{"text":"\"usage\":{\"prompt_tokens\":9}"}') is None


@pytest.mark.parametrize("answer", [b"", b"null", b'{"usage":', b'{"usage":{"prompt_tokens"', b'{"usage":[1]}'])
def test_an_answer_without_usage_has_none(answer):
    """Nothing is made up where nothing is reported."""
    assert read(answer) is None


def test_a_long_answer_is_not_kept():
    """Only the end of an answer is held."""
    reader = UsageReader()
    for _ in range(10):
        reader.read(b"x" * TAIL_BYTES)
        assert len(reader._tail) <= 2 * TAIL_BYTES
    reader.read(BODY)
    assert reader.usage() == Usage(7, 2, 3)
