"""A connection of a client that may be slow, broken or hostile: uvicorn's protocol with limits on time and size."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 * 1024
PIPELINED_MAX = 64  # requests sent before the first of them was answered


class Connection(HttpToolsProtocol):
    head_s = 15.0  # from the first byte of a request, or the connection, to the end of its headers
    linger_s = 30.0  # how long a client may go on sending a body that was refused

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        self._within(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._within(self.head_s)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.send_400_response("The headers are too long.")
        elif len(self.pipeline) > PIPELINED_MAX:
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._within(self.head_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body changes nothing that was checked before it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._within(None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        is_answered = self.cycle.response_complete  # then nobody else waits for the next request
        self._within(self.timeout_keep_alive if is_answered else None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._within(self.linger_s)  # its body goes on although it was answered

    def _unsupported_upgrade_warning(self) -> None:
        """A client that offers another protocol is answered in this one; that is nothing to warn of."""

    def timeout_keep_alive_handler(self) -> None:
        if self._in_head:
            super().timeout_keep_alive_handler()

    def _within(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
