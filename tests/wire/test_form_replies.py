"""What forms read out of replies, whatever shape those have."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.engines.retry import read_reply
from batchmill.types import Outcome, Row, Usage
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.rows.forms import RESPONSES, TOKENS_MAX, TableForm, usage_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("details", ["text", [1], 7, True, {"cached_tokens": "3"}, {"cached_tokens": True}, {}, None])
def test_odd_details_are_no_cached_tokens(details):
    """Details of another shape than OpenAI's count as none."""
    assert usage_of({"usage": {"prompt_tokens": 5, "prompt_tokens_details": details}}) == Usage(5, 0, 0)


@pytest.mark.parametrize(
    ("claimed", "counts"), [(TOKENS_MAX, TOKENS_MAX), (TOKENS_MAX + 1, TOKENS_MAX), (2**70, TOKENS_MAX), (-1, 0)]
)
def test_counts_have_a_maximum(claimed, counts):
    """A count that no ledger could hold is the largest that it can, however the reply was read."""
    usage = {"prompt_tokens": claimed, "completion_tokens": claimed, "prompt_tokens_details": {"cached_tokens": 2**80}}
    expected = Usage(counts, counts, counts)
    assert usage_of({"usage": usage}) == expected
    assert read_reply(200, msgspec.json.encode({"usage": usage})).usage == expected


@given(st.dictionaries(st.sampled_from(["prompt_tokens", "input_tokens_details", "prompt_tokens_details"]), JSON))
def test_any_usage_is_read(usage):
    """Whatever a service calls its usage, it is read without an error, and no more is cached than came in."""
    found = usage_of({"usage": usage})
    assert found is not None and 0 <= found.cached_tokens <= found.input_tokens <= TOKENS_MAX


def written(body: bytes, **form) -> bytes:
    table = TableForm(prompt="{a}", **form)
    return table.write(Outcome(Row(0, 0, b'{"a":1}', table), body))


@given(JSON)
def test_any_response_has_an_output(output):
    """A reply of /v1/responses becomes a row whatever its items are."""
    body = msgspec.json.encode({"output": [output, {"content": output}, {"content": [output]}]})
    assert msgspec.json.decode(written(body, url=RESPONSES))["error"] is None


def test_odd_parts_of_a_response_are_no_text():
    """Only parts that are output text, with a text, are joined."""
    parts = [{"type": "output_text"}, {"type": "output_text", "text": 3}, {"type": "output_text", "text": "yes"}, 7]
    body = msgspec.json.encode({"output": [{"content": parts}, {"content": 5}, 6]})
    assert msgspec.json.decode(written(body, url=RESPONSES))["output"] == "yes"


def test_a_reply_too_deep_to_look_into_is_its_own_output():
    """A reply that cannot be taken apart goes through as it is."""
    body = b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"
    assert written(body) == b'{"a":1,"output":' + body + b',"error":null}\n'


@pytest.mark.parametrize(("levels", "is_kept"), [(DEPTH_MAX, True), (DEPTH_MAX + 1, False)])
def test_a_reply_has_a_largest_depth(levels, is_kept):
    """A reply that nests deeper than what every reader of the results can read is no reply."""
    body = b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    assert (read_reply(200, body).body == body) is is_kept
