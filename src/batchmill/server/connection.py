"""A connection of a client that may be slow, broken or hostile: uvicorn's protocol with limits on time and size.

Plain requests to express operations leave uvicorn's way here: see `lane`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from batchmill.errors import Unavailable
from batchmill.server.lane import Asked, Flight, Lane

HEAD_BYTES_MAX = 64 * 1024
LANE_BODY_S = 0.1  # on the lane, from the first read to the end of the body
PIPELINED_MAX = 64  # requests sent before the first of them was answered
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    head_s = 15.0  # from the first byte of a request, or the connection, to the end of its headers
    linger_s = 30.0  # how long a client may go on sending a body that was refused

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lane: Lane | None = self.config.lane  # type: ignore[attr-defined]
        self._deadline: float | None = None  # of the loop's time
        self._timer: asyncio.TimerHandle | None = None  # goes off at the deadline, or before it and looks again
        self._head_bytes = 0
        self._in_head = True  # what comes next belongs to the head of a request
        self._has_begun = self._is_timed = False  # a head that is not complete; its time runs
        self._asked: Asked | None = None  # its headers fit the lane, and its body comes
        self._body: list[bytes] = []
        self._leaving: asyncio.TimerHandle | None = None  # when a body that is still coming has to leave the lane
        self._flight: Flight | None = None  # under way on the lane
        self._unsent = 0  # bytes of replies that the client had not taken when that was looked at last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        self._within(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
        flight, self._flight = self._flight, None
        self._stay()
        if flight is not None:
            flight.drop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._within(self.head_s)
            if b"pgrade:" in data:
                data = _without_offer(data)
        super().data_received(data)
        if self._has_begun and not self._is_timed:
            self._is_timed = True
            self._within(self.head_s)
        if self._asked is not None and self._leaving is None and self.parser is not None:
            self._leaving = self.loop.call_later(LANE_BODY_S, self._leave_late)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.send_400_response("The headers are too long.")
        elif len(self.pipeline) > PIPELINED_MAX:
            self.transport.abort()

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = self._has_begun = True
        if self._lane is None:
            super().on_message_begin()
        else:  # which is done only for those that leave the lane
            self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body changes nothing that was checked before it
            name = name.lower()
            self.headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        self._in_head = self._has_begun = self._is_timed = False
        self._head_bytes = 0
        self._deadline = None
        if self._lane is None:
            super().on_headers_complete()
            return
        if self._is_free() and self.parser.get_method() == b"POST" and self.parser.get_http_version() == "1.1":
            self._asked = self._lane.look(self.url, self.headers)
        if self._asked is None:
            self._go_normally()

    def _is_free(self) -> bool:
        """Nothing else is under way here, or waits to be sent."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self.pipeline and not self.transport.get_write_buffer_size()

    def _go_normally(self) -> None:
        """Have uvicorn begin a request whose headers it has not seen."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope has this very list
        super().on_headers_complete()

    def _leave_late(self) -> None:
        """The body takes longer: it is read piece by piece, within its time."""
        self._leaving = None
        if self._asked is not None and not self.transport.is_closing():
            self._leave_lane(self._asked)

    def shutdown(self) -> None:
        if self._asked is not None:  # uvicorn knows only of requests that go its way
            self._leave_lane(self._asked)
        super().shutdown()

    def _stay(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _leave_lane(self, asked: Asked) -> None:
        """The normal way, with what has come of the body."""
        self._stay()
        self._asked = None
        self._go_normally()
        body, self._body = b"".join(self._body), []
        if body:
            super().on_body(body)

    def on_body(self, body: bytes) -> None:
        if self._asked is not None:
            self._body.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        asked = self._asked
        self._in_head = True
        if asked is not None and self._lane is not None:
            self._stay()
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            flight = None if self.transport.is_closing() else self._lane.begin(asked, body, self._answered)
            if flight is None:
                self._leave_lane(asked)
            else:
                self._asked, self._body = None, []
                if not flight.response_complete:
                    self.cycle = self._flight = flight  # type: ignore[assignment]
                return
        is_answered = self.cycle.response_complete  # then nobody else waits for the next request
        self._within(self.timeout_keep_alive if is_answered else None)
        super().on_message_complete()

    # -- what becomes of requests -------------------------------------------------------------------------------------

    def _answered(self, flight: Flight, data: bytes) -> None:
        """Send the reply of a request on the lane; then comes the next one."""
        self._flight = None
        if self.transport.is_closing():
            return
        self.transport.write(data)
        self.server_state.total_requests += 1
        if not flight.keep_alive:
            self.transport.close()
            self._within(self.timeout_keep_alive)
        elif self.pipeline:
            self.flow.resume_reading()
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._within(self.timeout_keep_alive if self._in_head and not self._head_bytes else self.head_s)

    def end_flight(self) -> None:
        """The time that requests had when the server stopped is over."""
        if self._flight is not None:
            self._flight.stop(Unavailable("the server is stopping; try again"))

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._within(self.linger_s)  # its body goes on although it was answered
        elif is_last and self.transport.get_write_buffer_size():
            self._within(self.timeout_keep_alive)

    def _unsupported_upgrade_warning(self) -> None:
        """A client that offers another protocol is answered in this one; that is nothing to warn of."""

    def timeout_keep_alive_handler(self) -> None:
        if self._in_head:
            super().timeout_keep_alive_handler()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _within(self, seconds: float | None) -> None:
        """Abort unless this is called again in time. A timer that goes off early is cheaper than one for each call."""
        if seconds is None:
            self._deadline = None
            return
        self._deadline = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._deadline, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._look_at_time)
        elif self._has_taken():
            self._within(self.timeout_keep_alive)
        else:
            self.transport.abort()

    def _has_taken(self) -> bool:
        """The client reads a long reply: there is less of it than when this was asked last."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        return self._unsent != before


def _without_offer(data: bytes) -> bytes:
    """A head whose offer of another protocol is no longer one: the parser would end with it, and lose the body.

    Java's client and `curl --http2` offer h2c with every request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"\r\nx-upgrade:", head) + end + rest
