"""What a body asks for besides an answer."""

from __future__ import annotations

import pytest

from batchmill.dialects.modelbit.dialect import GRACE_S, Request, is_batch, is_plain, read_request
from batchmill.errors import InvalidRow

HOOK = "https://example.com/hook"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"data":[[1,10]]}', Request(b'{"data":[[1,10]]}')),
        (b'{"data":1,"response_format":"links"}', Request(b'{"data":1}', as_link=True)),
        (b'{"data":1,"response_format":null}', Request(b'{"data":1}')),
        (
            b'{"response_webhook":"https://example.com/hook", "data": [ 1.50 ], "row_errors":true}',
            Request(b'{"data":[ 1.50 ],"row_errors":true}', webhook=HOOK),
        ),
        (
            b'{"data":1,"response_webhook":"https://example.com/hook","response_webhook_ignore_timeout":true}',
            Request(b'{"data":1}', webhook=HOOK, ignores_timeout=True),
        ),
        (b'{"data":1,"timeout_seconds":7}', Request(b'{"data":1,"timeout_seconds":7}', patience_s=7 + GRACE_S)),
        (b'{"data":"x","response\\u005fformat":"links"}', Request(b'{"data":"x"}', as_link=True)),
        (b'{"data":{"response_webhook":1}}', Request(b'{"data":{"response_webhook":1}}')),
        (b'{"data":1,"response_format"', Request(b'{"data":1,"response_format"')),
        (b'[1,"response_webhook"]', Request(b'[1,"response_webhook"]')),
        (b'{"data":1,"timeout_seconds":"soon"}', Request(b'{"data":1,"timeout_seconds":"soon"}')),
    ],
)
def test_what_is_wanted(body, wanted):
    """Where the answer goes is taken out of the body; the rest stays as it was written, and the form judges it."""
    assert read_request(body) == wanted


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"data":1,"response_format":"csv"}', "response_format"),
        (b'{"data":1,"response_format":["links"]}', "response_format"),
        (b'{"data":1,"response_webhook":7}', "response_webhook"),
        (b'{"data":1,"response_webhook_ignore_timeout":true}', "response_webhook parameter is required"),
        (
            b'{"data":1,"response_webhook":"https://x.org","response_webhook_ignore_timeout":"yes"}',
            "response_webhook_ignore_timeout",
        ),
    ],
)
def test_what_is_wrong_is_named(body, named):
    """A value that a field cannot have is refused by the field's name."""
    with pytest.raises(InvalidRow, match=named):
        read_request(body)


def test_a_plain_body_is_not_read():
    """Rows and ids alone take the short way; anything that may be more does not."""
    assert is_plain(b'{"data": [[1, "response"], [2, {"a": 1}]]}')
    assert not is_plain(b'{"data": 1, "timeout_seconds": 1}')


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"data":[[1,2]]}', True),
        (b'{"data": [ [1] ], "x": 1}', True),
        (b'{"data":[]}', False),
        (b'{"data":[{"a":1}]}', False),
        (b'{"data":"[["}', False),
        (b"{}", False),
        (b"no", False),
    ],
)
def test_batches_are_known_by_their_first_row(body, expected):
    """A list whose first item is a list is a batch, as the published client has it."""
    assert is_batch(body) is expected
