"""Errors of services are read alike, whichever envelope they come in."""

from batchmill.wire.error_statuses import UpstreamError, decode_error

CASES = {
    "OpenAI": (
        b'{"error":{"message":"no","type":"invalid_request_error","param":"n","code":"too_long"}}',
        UpstreamError("no", "too_long", "invalid_request_error", "n", has_envelope=True),
    ),
    "vLLM": (
        b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}',
        UpstreamError("no", "", "BadRequestError", status=400, has_envelope=True),
    ),
    "older vLLM": (b'{"object":"error","message":"no","code":"404"}', UpstreamError("no", status=404)),
    "FastAPI": (b'{"detail":[{"loc":["body"]}]}', UpstreamError('[{"loc":["body"]}]')),
    "LoRAX": (b'{"error":"no","error_type":"generation"}', UpstreamError("no", has_envelope=True)),
    "Anthropic": (
        b'{"type":"error","error":{"type":"api_error","message":"no"},"request_id":"req_1"}',
        UpstreamError("no", "", "api_error", request_id="req_1", has_envelope=True),
    ),
    "AWS": (b'{"__type":"com.amazon#SlowDown:http://x","Message":"no"}', UpstreamError("no", "SlowDown")),
    "a proxy": (b'{"error":{"message":"no","status":"503"}}', UpstreamError("no", status=503, has_envelope=True)),
    "no envelope": (b'{"a":1}', UpstreamError()),
    "no object": (b"[]", UpstreamError()),
    "a page": (b"<html>", UpstreamError()),
    "no text": (b"\xff" + b"[" * 100_000, UpstreamError()),
    "too deep": (b"[" * 100_000, UpstreamError()),
}


def test_envelopes():
    """Message, code, type, parameter, status and request id are found where each kind of service puts them."""
    assert {sender: decode_error(data) for sender, (data, _) in CASES.items()} == {
        sender: error for sender, (_, error) in CASES.items()
    }
