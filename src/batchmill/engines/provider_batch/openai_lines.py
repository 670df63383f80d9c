"""The lines of a batch's output and error files, read as replies. Bytes in, replies out; 200,000 a job, so it is lean.

Source: OpenAI's API reference, "The request output object".
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from batchmill.engines.provider_batch.provider import RowReply, row_number
from batchmill.engines.replies import Reply, read_reply, redact
from batchmill.engines.retry import is_result
from batchmill.types import RowError
from batchmill.wire.json_bytes import shallow

UNDONE = frozenset({"batch_expired", "batch_cancelled", "batch_canceled"})


class _Response(Struct, gc=False):
    status_code: int = 0
    request_id: str | None = None
    body: Raw = Raw(b"null")


class _Error(Struct, gc=False):
    code: str | None = None
    message: str | None = None


class _Line(Struct, gc=False):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_line = msgspec.json.Decoder(_Line)
_named = re.compile(rb'"custom_id"\s*:\s*"(r\d{1,11})"')


def read_line(line: bytes) -> tuple[int, RowReply]:
    """(the row's number, its reply); -1 for a line that names none of ours."""
    try:
        found = _line.decode(shallow(line))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        match = _named.search(line[:4096])
        number = row_number(match[1].decode()) if match else -1
        return number, _garbled(f"the provider's line for this row is not readable: {error}")
    number = row_number(found.custom_id)
    response, error = found.response, found.error
    if response is not None and response.status_code:
        return number, _answered(response)
    if error is None:
        return number, _garbled("the provider's line for this row has neither a response nor an error")
    code = error.code or "provider_error"
    if code in UNDONE:
        return number, RowReply(0, None, RowError(code, error.message or code), is_undone=True)
    return number, RowReply(0, None, RowError(code[:100], redact(error.message or "the provider gives no reason")))


def _answered(response: _Response) -> RowReply:
    status = response.status_code
    reply = read_reply(status, bytes(response.body))
    if is_result(reply):
        return RowReply(status, reply.body, None, reply.usage, response.request_id)
    if status >= 400:
        is_undone = status == 429 or status >= 500  # the same row may not meet that again, and nothing was paid
        error = reply.row_error()
        return RowReply(status, reply.body, error, reply.usage, response.request_id, is_undone=is_undone)
    return _unusable(reply, response.request_id)


def _unusable(reply: Reply, request_id: str | None) -> RowReply:
    """A reply that says it is a result and is none."""
    if reply.error is not None and reply.body is not None:
        return RowReply(500, reply.body, reply.row_error(), reply.usage, request_id)
    error = RowError("bad_response", f"the provider's reply is not one JSON object: it begins {reply.text[:100]!r}")
    return RowReply(0, None, error, None, request_id)


def _garbled(message: str) -> RowReply:
    return RowReply(0, None, RowError("bad_response", message), is_garbled=True)
