"""What replies say of themselves: whole, cut off, filtered, refused, empty, or repeating."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.wire.replies import FLAWS, error_of, flaws_of, is_repeating

LOOP = "and so on, " * 40


def chat(content, finish="stop", **message):
    return {"choices": [{"index": 0, "message": {"content": content, **message}, "finish_reason": finish}]}


def completion(text, finish="stop"):
    return {"choices": [{"text": text, "finish_reason": finish, "stop_reason": None}]}


def response(*parts, reason=None, kind="message"):
    details = None if reason is None else {"reason": reason}
    return {"output": [{"type": "reasoning"}, {"type": kind, "content": list(parts)}], "incomplete_details": details}


def message(*parts, reason="end_turn"):
    return {"content": list(parts), "stop_reason": reason, "stop_sequence": None}


def part(text, kind="text"):
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (chat("yes"), ()),
        (chat("yes", "length"), ("truncated",)),
        (chat("", "length"), ("truncated", "empty")),
        (chat(LOOP, "length"), ("truncated", "repeating")),
        (chat(LOOP), ()),
        (chat("so", "content_filter"), ("filtered",)),
        (chat(None, "content_filter"), ("filtered",)),
        (chat(None, refusal="I cannot"), ("refused",)),
        (chat(None, refusal=None), ("empty",)),
        (chat(" \n"), ("empty",)),
        (chat(None, "tool_calls", tool_calls=[{"id": "a"}]), ()),
        (chat(None, "function_call", function_call={"name": "f"}), ()),
        (chat(None, function_call=None, tool_calls=None), ("empty",)),
        ({"choices": [chat("a")["choices"][0], chat("b", "length")["choices"][0]]}, ("truncated",)),
        (completion("a"), ()),
        (completion("a", "length"), ("truncated",)),
        (completion(""), ("empty",)),
        (response(part("a", "output_text")), ()),
        (response(part("a", "output_text"), reason="max_output_tokens"), ("truncated",)),
        (response(reason="content_filter"), ("filtered",)),
        (response({"type": "refusal", "refusal": "no"}), ("refused",)),
        (response(), ("empty",)),
        (response(kind="function_call"), ()),
        (message(part("a")), ()),
        (message(part("a"), reason="max_tokens"), ("truncated",)),
        (message(reason="refusal"), ("refused",)),
        (message(part("hm", "thinking")), ("empty",)),
        (message({"type": "tool_use", "id": "t"}, reason="tool_use"), ()),
        ({"data": [{"embedding": [1.0]}]}, ()),
        ({"finish_reason": 7, "choices": "none"}, ()),
    ],
)
def test_a_reply_tells_its_flaws(reply, expected):
    """Each flaw of each API's replies is found, and a whole reply has none."""
    assert flaws_of(msgspec.json.encode(reply)) == expected


@given(st.binary() | st.text().map(lambda text: b'{"finish_reason":%b}' % msgspec.json.encode(text)))
def test_any_bytes_are_read(body):
    """What is no reply of these APIs has no flaw."""
    assert flaws_of(body) == ()


def test_deep_nests_are_no_reply():
    """A reply that no parser takes raises nothing."""
    assert flaws_of(b'{"finish_reason":"length","choices":' + b"[" * 100_000) == ()


@given(st.text(min_size=1, max_size=100), st.text(max_size=50))
def test_what_repeats_is_found_behind_any_text(unit, before):
    """The end counts, wherever a repeated part begins."""
    assert is_repeating(before + unit * (1100 // len(unit) + 1))


@pytest.mark.parametrize("text", ["", "no " * 3, "".join(map(str, range(500))), "x" * 199])
def test_other_texts_do_not_repeat(text):
    """Short texts and counting ones are no loop."""
    assert not is_repeating(text)


def test_each_flaw_has_an_error():
    """A flaw that a job does not accept becomes an error that says what to do."""
    assert {error_of(name).code for name in FLAWS} == {f"reply_{name}" for name in FLAWS}
