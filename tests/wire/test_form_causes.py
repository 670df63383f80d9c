"""Why a row failed can be read out of its line."""

import pytest

from batchmill.types import Outcome, Row, RowError
from batchmill.wire.rows.forms import OpenAIForm, TableForm

REFUSED = RowError("too_long", "the prompt: too long")


def row(form: OpenAIForm | TableForm, number: int = 0) -> Row:
    raw = b'{"custom_id":"c%d","url":"/v1/x","body":{}}' % number if isinstance(form, OpenAIForm) else b'{"a":1}'
    return Row(0, number, raw, form)


@pytest.mark.parametrize("form", [OpenAIForm(), TableForm()])
def test_an_error_comes_back(form):
    """The code and message of an error are read from the line of the row, and of the row that follows it."""
    line = form.write(Outcome(row(form), error=REFUSED, status=0))
    assert form.cause(line) == REFUSED
    assert form.cause(form.follow(row(form), line, row(form, 1))) == REFUSED


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b'{"error":{"code":"bad","type":"t","message":"m"}}', RowError("bad", "m")),
        (b'{"error":{"code":null,"type":"t","message":"m"}}', RowError("t", "m")),
        (b'{"error":{"code":400,"message":"m"}}', RowError("http_400", "m")),
        (b'{"error":{"code":"400","type":"t","message":"m"}}', RowError("t", "m")),
        (b'{"object":"error","message":"m","type":"t","code":400}', RowError("t", "m")),
        (b'{"detail":"m"}', RowError("http_400", "m")),
        (b'{"error":"m"}', RowError("http_400", "m")),
        (b'"m"', RowError("http_400", "m")),
        (b"{}", RowError("http_400", "status 400")),
        (b"null", RowError("http_400", "status 400")),
    ],
)
def test_a_reply_says_why(body, cause):
    """Of a service's error reply the code, the type or the status is the cause, whichever there is first."""
    form = OpenAIForm()
    assert form.cause(form.write(Outcome(row(form), body, REFUSED, 400))) == cause
