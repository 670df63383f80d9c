"""The fast path of calls that want nothing but an answer. See `server.fast_path.FastHandler`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.dialects.modelbit.requests import is_plain
from batchmill.dialects.modelbit.urls import branch_of
from batchmill.errors import BatchmillError
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.types import Caller
from batchmill.wire.call_forms import ROWS

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls
    from batchmill.wire.messages import Answer

_JSON = [(b"content-type", b"application/json")]


class FastRows:
    def __init__(self, functions: FunctionCalls) -> None:
        self._functions = functions

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """As `FastHandler.begin`: whatever is wrong with a request is told by its handler."""
        if not is_plain(body):
            return None
        for name, _ in headers:
            if name == b"content-encoding":
                return None
        try:
            target = self._functions.find(caller, path["deployment"], branch_of(path), path["version"])
        except BatchmillError:
            return None
        if target.interface.streams:
            return None

        def hear(answered: Answer) -> None:
            if answered.raised is None:
                reply(200, _JSON, answered.body)
            else:
                reply.refuse(answered.raised.error())

        return self._functions.ask_now(caller, target, ROWS, body, b"", hear)
