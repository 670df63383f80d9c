"""What rows may cost at most, and what becomes of it."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest
from contract.engine_suite import chat_row

from batchmill.executors.leases import OUTPUT_GUESS, Allowance
from batchmill.types import MediaColumn, ModelSpec, Outcome, Price, Row, RowError, Usage
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.messages import Spending
from batchmill.wire.rows.forms import OpenAIForm, TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, with_media

MEDIA = MediaTokens(ModelSpec("m", "http", "m"))

PRICE = Price(1.0, cached=0.5, output=10.0)  # USD per million tokens
USD = 1e-6


def allowance(free: float, received: list[Spending], **more) -> Allowance:
    made = Allowance("job", PRICE, has_requests=True, media=MEDIA, send=received.append, **more)
    made.add(free, is_lean=False)
    return made


def most(row: Row) -> float:
    """What is reserved for a row, in millionths of a dollar."""
    made = allowance(1.0, [])
    assert made.reserve([row]) == 1
    return (1.0 - made.free) / USD


def body_bytes(row: Row) -> int:
    return len(json.dumps(json.loads(row.raw)["body"]))


def test_media_of_a_row() -> None:
    """Their base64 is no text: they count as their model counts them, also where they are not loaded yet."""
    data = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\2\0\0\0\2\0" + b"x" * 900_000).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    row = chat_row(0, [part], max_tokens=0)
    assert most(row) == pytest.approx(body_bytes(row) - len(data) + 85 + 170)
    form = TableForm("{q}", media=[MediaColumn("image", "img")], params={"max_tokens": 0})
    sealed = MediaPart("image", "image/png", 9, "d" * 64, "/p", width=512, height=512)
    for each, tokens in ((sealed, 85 + 170), (MediaPart("image", url="https://x/y"), 85 + 8 * 170)):
        row = Row(0, 0, with_media(b'{"q":"?"}', [each]), form)
        assert most(row) == pytest.approx(len(form.request(row).body) + tokens)


def test_most_of_a_row() -> None:
    """The prompt's bytes and the largest bound of what is written, for each answer that is asked for."""
    cases = [
        ({"max_tokens": 100}, 100),
        ({"max_completion_tokens": 50, "max_tokens": 100}, 100),
        ({"max_output_tokens": 7}, OUTPUT_GUESS),  # no word of this path's
        ({"max_tokens": -1}, OUTPUT_GUESS),
        ({"max_tokens": "7"}, OUTPUT_GUESS),  # a service may take it all the same
        ({"max_tokens": 7, "best_of": 2.5}, OUTPUT_GUESS),
        ({"max_tokens": 100, "n": 3}, 300),
        ({"max_tokens": 100, "n": 2, "best_of": 4}, 400),
        ({}, OUTPUT_GUESS),
    ]
    for fields, tokens in cases:
        row = chat_row(0, "hello", **fields)
        assert most(row) == pytest.approx(body_bytes(row) + 10 * tokens), fields


def test_most_by_the_path() -> None:
    """What bounds a row is what its path knows; each prompt of a list is answered, and embeddings write nothing."""
    cases = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 5}, 5),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 5}, 15),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2}, 20),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5}, 5),
        ("/v1/completions", {"prompt": [], "max_tokens": 5}, 5),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 0),
        ("/v1/responses", {"input": "a", "max_output_tokens": 5, "max_tokens": 1}, 5),
        ("/v1/responses", {"input": "a", "max_tokens": 1}, OUTPUT_GUESS),
        ("/v1/embeddings", {"input": "a"}, 0),
    ]
    for url, body, tokens in cases:
        line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
        row = Row(0, 0, line.encode(), OpenAIForm())
        assert most(row) == pytest.approx(body_bytes(row) + 10 * tokens), (url, body)


def test_a_row_goes_only_while_its_most_is_there() -> None:
    """Rows go from the first on while there is enough; the next says what it needs, and gives back the rest."""
    results: list[Spending] = []
    rows = [chat_row(n, "hello", max_tokens=100) for n in range(5)]
    each = most(rows[0]) * USD
    made = allowance(2.5 * each, results)
    assert made.reserve(rows) == 2
    assert made.reserve(rows[2:]) == 0
    assert (results[-1].needs, results[-1].returned, results[-1].reserved) == pytest.approx((each, 0.5 * each, 2))
    assert made.free == 0
    assert made.settle([Outcome(rows[0], b"{}", usage=Usage(10, 0, 50))]) is False
    assert made.free == pytest.approx(each - 510 * USD)
    assert made.settle([Outcome(rows[1], None, RowError("e", "failed"), 500)]) is True


def test_what_is_usual_is_learned() -> None:
    """Rows without a bound are reckoned at what nine of ten before them wrote, and the rest is told."""
    results: list[Spending] = []
    rows = [chat_row(n, "hello") for n in range(22)]
    made = allowance(100.0, results)
    assert made.reserve(rows[:20]) == 20
    for n, row in enumerate(rows[:20]):
        tokens = 1000 if n == 19 else 10 * (n + 1)
        made.settle([Outcome(row, b"{}", usage=Usage(body_bytes(row), 0, tokens))])
    before = made.free
    assert made.reserve(rows[20:]) == 2
    assert before - made.free == pytest.approx(2 * (body_bytes(rows[20]) + 10 * 190) * USD)
    made.report()
    assert results[-1].beyond == pytest.approx(2 * 10 * (1000 - 190) * USD)


def test_a_long_prompt_hides_nothing_of_what_is_written() -> None:
    """That a prompt has fewer tokens than bytes says nothing of what the next row writes."""
    rows = [chat_row(n, "word " * 2000) for n in range(40)]
    made = allowance(100.0, [])
    for n in range(20):
        assert made.reserve([rows[n]]) == 1
        made.settle([Outcome(rows[n], b"{}", usage=Usage(2000, 0, 200))])
        before = made.free
        made.reserve([rows[20 + n]])
        assert (before - made.free) / USD >= body_bytes(rows[20 + n]) + 10 * 200 - 0.001


def test_less_is_allowed_than_before() -> None:
    """Told a second time that the budget is nearly spent, a worker gives back what no row has reserved; what it had to
    reserve beyond what it had, the owner hears of at once."""
    results: list[Spending] = []
    made = allowance(1.0, results)
    made.add(0.0, is_lean=True)
    assert results[-1].returned == 1.0
    made.add(0.5, is_lean=True)
    assert made.free == 0.5  # for the row that it asked for
    made.add(0.0, is_lean=True)
    assert (results[-1].returned, made.free) == (0.5, 0.0)
    row = chat_row(0, "hello", max_tokens=100)
    assert made.reserve([row], at_any_price=True) == 1
    assert (results[-1].returned, made.free) == (pytest.approx(-most(row) * USD), 0.0)
