"""What an engine or a service answers when it refuses a live request, as this API says it."""

from __future__ import annotations

import pytest

from batchmill.dialects.openai.errors import Detail, upstream_envelope

INVALID, SERVER = "invalid_request_error", "server_error"


@pytest.mark.parametrize(
    ("status", "answer", "detail"),
    [
        (
            400,
            b'{"error":{"message":"too long","type":"BadRequestError","param":"messages","code":400}}',
            Detail("too long", INVALID, "messages", None),
        ),
        (
            404,
            b'{"error":{"message":"no model","type":"invalid_request_error","param":null,"code":"model_not_found"}}',
            Detail("no model", INVALID, None, "model_not_found"),
        ),
        (
            429,
            b'{"error":{"message":"spent","type":"insufficient_quota","code":"insufficient_quota"}}',
            Detail("spent", "insufficient_quota", None, "insufficient_quota"),
        ),
        (500, b'{"error":{"message":"broken","type":"InternalServerError"}}', Detail("broken", SERVER, None, None)),
        (404, b'{"detail":"Not Found"}', Detail("Not Found", INVALID, None, None)),
        (400, b'{"error":"plain text"}', Detail("plain text", INVALID, None, None)),
        (429, b'{"message":"slow down"}', Detail("slow down", "requests", None, None)),
        (502, b"<html>Bad Gateway</html>", Detail("the model answered with status 502", SERVER, None, None)),
        (
            400,
            b'{"error":{"message":7,"code":"400"}}',
            Detail("7", INVALID, None, None),
        ),
        (500, b"\xff" + b"[" * 100_000, Detail("the model answered with status 500", SERVER, None, None)),
    ],
)  # fmt: skip
def test_every_error_has_this_apis_form(status, answer, detail):
    """Whoever made the error, its message is kept, and type, param and code are what the openai package expects."""
    assert upstream_envelope(status, answer).error == detail
