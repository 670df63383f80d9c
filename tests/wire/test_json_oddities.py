"""JSON that a decoder takes and that its readers would not, or would read otherwise."""

import json

import pytest

from batchmill.wire.json_bytes import DIGITS_MAX, has_odd_numbers, oddity


def test_plain_json_is_not_odd():
    """Names that come again in other objects, long texts and large numbers that fit are nothing odd."""
    messages = [{"role": "user", "content": 'say "a": 1, "a": 2 '}] * 3
    for value in (
        {}, [], {"messages": messages}, {"a": {"a": {"a": 1}}}, {"n": 10**300}, {"x": 1.7e308}, {"text": "1e999 " * 90},
        {"text": "7" * 5000}, {"data": [{"i": n, "e": [0.5] * 9} for n in range(9)]}, {"é": "\u2019"},
    ):  # fmt: skip
        for written in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1)):
            assert oddity(written.encode()) is None, written[:80]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":1,"b":2,"a":3}', "'a' is used twice"),
        ('{"a":1, "\\u0061" : 3}', "'a' is used twice"),
        ('{"a":{"a":1},"x":[{"b":1,"b":1}]}', "'b' is used twice"),
        ('{"text":"\\":","a":1,"a":1}', "'a' is used twice"),
        ('{"a":1e400}', "1e400 is larger"),
        ('{"a":[-12.5E+0400]}', "larger"),
        ('{"a":' + "9" * 310 + ".5}", "larger"),
        ('{"a":' + "9" * (DIGITS_MAX + 1) + "}", "4,301 digits"),
    ],
)
def test_what_is_odd_is_named(text, words):
    """The name that is there twice, or the number that is too large."""
    assert words in oddity(text.encode())


def test_numbers_of_many_lines_are_looked_at_once():
    """Lines without such numbers are told apart from those with one, wherever it stands."""
    lines = [b'{"n":%d}\n' % n for n in range(1000)]
    assert not has_odd_numbers(b"".join(lines))
    for odd in (b'{"n":1e309}\n', b'{"n":%b}\n' % (b"1" * 400)):
        assert has_odd_numbers(b"".join([*lines, odd, *lines]))
