"""Replies and failures are sorted by what a further call can do about them."""

from __future__ import annotations

import json

import pytest
from multidict import CIMultiDict

from batchmill.engines.retry import (
    BACKOFF_MAX_S,
    MESSAGE_BYTES_MAX,
    FaultKind,
    RetryBudget,
    backoff_s,
    is_result,
    judge,
    read_reply,
    requested_wait_s,
)

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


def envelope(code: object = None, type_: str | None = None, message: str = "no") -> bytes:
    return json.dumps({"error": {"message": message, "type": type_, "code": code}}).encode()


def kind_of(status: int, data: bytes, **headers: str) -> FaultKind:
    return judge(read_reply(status, data), CIMultiDict(headers), NOW).kind


@pytest.mark.parametrize(
    ("status", "data", "kind"),
    [
        (400, envelope("bad_request"), FaultKind.PERMANENT),
        (404, envelope("model_not_found"), FaultKind.PERMANENT),
        (422, b'{"detail":[{"msg":"x"}]}', FaultKind.PERMANENT),
        (401, envelope("invalid_api_key"), FaultKind.AUTH),
        (403, b"", FaultKind.AUTH),
        (403, envelope(403, message="Your input was flagged by moderation"), FaultKind.PERMANENT),
        (402, b"", FaultKind.QUOTA),
        (429, envelope("insufficient_quota"), FaultKind.QUOTA),
        (429, envelope("billing_hard_limit_reached"), FaultKind.QUOTA),
        (400, envelope("billing_hard_limit_reached"), FaultKind.QUOTA),
        (429, envelope("rate_limit_exceeded"), FaultKind.THROTTLED),
        (429, b"<html>", FaultKind.THROTTLED),
        (529, b"", FaultKind.THROTTLED),
        (503, b"", FaultKind.TRANSIENT),
        (500, b"oops", FaultKind.TRANSIENT),
        (502, b"", FaultKind.TRANSIENT),
        (408, b"", FaultKind.TRANSIENT),
        (409, b"", FaultKind.TRANSIENT),
        (425, b"", FaultKind.TRANSIENT),
        (307, b"", FaultKind.PERMANENT),
        (200, b'{"a":', FaultKind.TRANSIENT),
        (200, b"[1]", FaultKind.TRANSIENT),
        (200, b'{"a":"\xff"}', FaultKind.TRANSIENT),
        (200, rb'{"a":"\ud83d"}', FaultKind.GARBLED),
        (200, rb'{"a":"\uDE00 x","b":1}', FaultKind.GARBLED),
        (200, rb'{"a":"\ud83d', FaultKind.TRANSIENT),
        (200, rb'["\ud83d"]', FaultKind.TRANSIENT),
        (200, rb'{"a":"\ud83d","b":NaN}', FaultKind.TRANSIENT),
        (502, rb'{"a":"\ud83d"}', FaultKind.TRANSIENT),
        (204, b"{}", FaultKind.TRANSIENT),
        (200, envelope(429), FaultKind.THROTTLED),
        (200, envelope("502"), FaultKind.TRANSIENT),
        (200, envelope("insufficient_quota"), FaultKind.QUOTA),
        (200, envelope("invalid_api_key"), FaultKind.AUTH),
        (200, envelope(None, "invalid_request_error"), FaultKind.PERMANENT),
        (200, envelope("whatever"), FaultKind.TRANSIENT),
    ],
)
def test_kinds(status: int, data: bytes, kind: FaultKind) -> None:
    """Each reply that is not a result is of the kind that says what may follow."""
    assert not is_result(read_reply(status, data))
    assert kind_of(status, data) is kind


def test_unavailable_with_a_time_is_a_throttle() -> None:
    """A 503 that says when to come back asks for rest; it is not a failed attempt."""
    assert kind_of(503, b"", **{"Retry-After": "5"}) is FaultKind.THROTTLED


def test_results() -> None:
    """A 200 with a JSON object is a result, also when its `error` is there and null."""
    assert is_result(read_reply(200, b'{"error":null,"a":1}'))


@pytest.mark.parametrize(
    ("headers", "rest"),
    [
        ({"Retry-After": "12"}, 12.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"Retry-After": "Tue, 14 Nov 2023 22:00:00 GMT"}, None),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "Retry-After": "9"}, 0.25),
        ({"retry-after-ms": "x", "Retry-After": "9"}, 9.0),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "1e300"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "86400"}, 86400.0),
        ({}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0.5s"}, 360.5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-requests": "7", "x-ratelimit-reset-requests": "6m"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "later"}, None),
        ({"x-ratelimit-remaining-requests": "0"}, None),
    ],
)
def test_requested_wait_s(headers: dict[str, str], rest: float | None) -> None:
    """Every form of the headers is read, and what cannot be meant is ignored."""
    found = requested_wait_s(CIMultiDict(headers), NOW)
    assert found == (None if rest is None else pytest.approx(rest))


def test_backoff_has_full_jitter() -> None:
    """A retry waits any time from nothing to a span that doubles from 0.5 s and ends at 30 s."""
    assert [backoff_s(n, lambda: 1.0) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff_s(5, lambda: 0.0) == 0
    assert backoff_s(5, lambda: 0.25) == 2.0
    assert backoff_s(10_000, lambda: 1.0) == BACKOFF_MAX_S


def test_budget() -> None:
    """Retries have 32 to spare and a tenth of the successes, and no more."""
    budget = RetryBudget()
    assert [budget.spend() for _ in range(33)] == [True] * 32 + [False]
    for _ in range(25):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_budget_is_of_recent_successes() -> None:
    """Old successes do not pile up into a storm of retries."""
    budget = RetryBudget()
    for _ in range(100_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) <= 65


def test_codes_of_what_was_retried_are_stable() -> None:
    """Errors that ran out of retries have the same few codes for every service."""
    codes = {
        status: judge(read_reply(status, envelope("their_code")), {}, NOW).error.code
        for status in (400, 408, 409, 429, 500, 503)
    }
    assert codes == {
        400: "their_code",
        408: "timeout",
        409: "http_409",
        429: "rate_limited",
        500: "server_error",
        503: "server_error",
    }


def test_refusals_without_a_code_are_named_by_status() -> None:
    """An error without a code of its own is `http_STATUS`."""
    assert judge(read_reply(418, b"short and stout"), {}, NOW).error.code == "http_418"
    assert judge(read_reply(418, b"short and stout"), {}, NOW).error.message == "short and stout"


def test_redirects_name_their_target() -> None:
    """A redirect says where to, without the query, which may hold a key."""
    fault = judge(read_reply(302, b""), CIMultiDict({"Location": "http://elsewhere/v1?key=s3cret"}), NOW)
    assert fault.error.code == "redirected"
    assert "http://elsewhere/v1" in fault.error.message
    assert "s3cret" not in fault.error.message


def test_messages_are_short_and_without_keys() -> None:
    """What looks like a key is starred, and 2 KiB is the most that is kept."""
    message = judge(
        read_reply(400, envelope("x", message="Bad sk-abcdef0123456789 " + "é" * 9000)), {}, NOW
    ).error.message
    assert "sk-abcdef" not in message
    assert message.startswith("Bad ***")
    assert MESSAGE_BYTES_MAX - 3 <= len(message.encode()) <= MESSAGE_BYTES_MAX


def test_error_in_a_200_never_looks_like_a_result() -> None:
    """A reply of status 200 that holds an error keeps its body under the status it stands for."""
    fault = judge(read_reply(200, envelope("whatever")), {}, NOW)
    assert fault.reply is not None
    assert (fault.reply.status, fault.reply.body) == (500, envelope("whatever"))
