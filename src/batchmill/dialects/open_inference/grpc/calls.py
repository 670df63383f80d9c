"""A gRPC request as the call that it would have been over HTTP, so that one handler answers both."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request

from batchmill.server.operations import Call
from batchmill.types import Caller


def call_of(caller: Caller, *, body: Struct | None = None, sent: Any = None, **path: str) -> Call:
    """Args: body: of an operation with a struct; sent: of one that reads JSON itself; path: its parameters."""
    raw = b"" if sent is None else msgspec.json.encode(sent)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [], "path_params": path}
    return Call(Request(scope, receive), caller, "", body=body, raw=raw)
