"""What the service behind a connector replied: a result, or a fault that is sorted as those of other services are.

Pure: bytes and headers in. What the reply's content means is left to the connector's post-processing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.engines.replies import REPLY_BYTES_MAX, Reply, read_reply
from batchmill.engines.retry import Fault, Kind, judge
from batchmill.types import RowError, Usage
from batchmill.wire.forms import counted
from batchmill.wire.json_bytes import DEPTH_MAX, encode, is_too_deep
from batchmill.wire.json_oddities import oddity

_JSON = re.compile(r"application/(?:[\w.-]+\+)?json|text/json", re.IGNORECASE)
_PAGE = re.compile(r"text/(?:html|event-stream)|application/xhtml\+xml", re.IGNORECASE)  # most often a proxy's
_SILENT = ("", "application/octet-stream", "binary/octet-stream")  # types that say nothing of what it is
_AWS_THROTTLES = ("throttl", "toomanyrequests", "slowdown", "requestlimitexceeded", "provisionedthroughputexceeded")
_SHOWN_CHARS = 100
EMPTY = "Remote service returned empty response body"


class Answer(Struct, frozen=True, gc=False):
    """A call that was answered. `reply.body` is JSON on one line; `data` is the body as it came."""

    reply: Reply
    data: bytes
    request_id: str | None = None


def settle(
    status: int, headers: Mapping[str, str], data: bytes | None, now: float, *, is_predict: bool = False
) -> Answer | Fault:
    """Sort a reply that was received in full; `data` None: it was larger than may be.

    Args: `headers`, looked up by names in lower case; `now` in seconds since the epoch, for a header's date;
    `is_predict`: of a predict of ML Commons, which looks at no type: what is no JSON is text, whatever it is called.
    """
    request_id = headers.get("x-request-id") or headers.get("x-amzn-requestid")
    if data is None:
        text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
        return Fault(Kind.PERMANENT, RowError("reply_too_large", text), Reply(0), None, request_id)
    if not 200 <= status < 300:
        return _refusal(read_reply(status, data), headers, now, request_id)
    reply = _read_result(status, headers, data, is_predict)
    if isinstance(reply, RowError):
        return Fault(Kind.TRANSIENT, reply, None, None, request_id)
    if reply.error is not None or reply.body is None:
        return judge(reply, headers, now, request_id=request_id)
    if reply.usage is None:
        usage = _usage_told(headers)
        reply = reply if usage is None else replace(reply, usage=usage)
    return Answer(reply, data, request_id)


def _refusal(reply: Reply, headers: Mapping[str, str], now: float, request_id: str | None) -> Fault:
    """AWS says what went wrong in a header, and that it throttles with status 400 too."""
    name = headers.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2]
    if name:
        said = reply.row_error()
        code = said.code if not said.code.startswith("http_") else name
        reply = replace(reply, error=RowError(code, said.message))
    if reply.status == 400 and name.lower().startswith(_AWS_THROTTLES):
        reply = replace(reply, status=429)
    return judge(reply, headers, now, request_id=request_id)


def _read_result(status: int, headers: Mapping[str, str], data: bytes, is_predict: bool) -> Reply | RowError:
    """A reply of a 2xx status; an error where its bytes are not what it says that they are."""
    if not data.strip():
        return RowError("bad_response", EMPTY)
    kind = headers.get("content-type", "").partition(";")[0].strip()
    is_json = kind == "application/json" or kind.lower() in _SILENT or _JSON.fullmatch(kind) is not None
    if not is_predict and _PAGE.fullmatch(kind) is not None:
        text = f"the reply is {kind[:_SHOWN_CHARS]!r} and not JSON: it begins {_start(data)!r}"
        return RowError("bad_response", text)
    is_text = is_predict or not is_json
    if data.lstrip()[:1] == b"{":
        reply = read_reply(status, data)
        if reply.body is not None or not is_text:
            return reply
    return _read_value(status, data, is_text)


def _read_value(status: int, data: bytes, is_text: bool) -> Reply | RowError:
    """A reply that is no object. A list is itself; anything else is the one member `response`."""
    if not is_too_deep(data, DEPTH_MAX):
        try:
            value = msgspec.json.decode(data)
            if (odd := oddity(data)) is not None:
                return RowError("bad_response", f"the reply cannot be kept: {odd}")
            body = msgspec.json.format(data, indent=-1) if isinstance(value, list) else encode({"response": value})
            return Reply(status, body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # then it is text, or nothing
    if not is_text:
        return RowError("bad_response", f"the reply is not JSON: it begins {_start(data)!r}")
    try:
        return Reply(status, encode({"response": data.decode()}))
    except UnicodeDecodeError:
        return RowError("bad_response", f"the reply is no text of UTF-8: it begins {_start(data)!r}")


def _usage_told(headers: Mapping[str, str]) -> Usage | None:
    """The tokens that Bedrock counts in headers."""
    names = ("x-amzn-bedrock-input-token-count", "x-amzn-bedrock-output-token-count")
    counts = [headers.get(name, "") for name in names]
    if not any(count.isdecimal() for count in counts):
        return None
    used = [int(count[:15]) if count.isdecimal() else 0 for count in counts]
    return counted(used[0], 0, used[1])


def _start(data: bytes) -> str:
    return data[:_SHOWN_CHARS].decode(errors="replace").strip()
