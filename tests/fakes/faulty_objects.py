"""A proxy before an S3 server that fails requests as S3, networks and credentials do: one fault for one request."""

from __future__ import annotations

import http.client
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>as ordered</Message></Error>'
ANSWERS = {
    "slow_down": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "changed": (412, "PreconditionFailed"),
    "other_region": (301, "PermanentRedirect"),
    "not_implemented": (501, "NotImplemented"),
}
# reset: the connection breaks before the request is served; lost_reply: after it was served. truncated: the body ends
# early; short: it is shorter than what was asked for, and says so.
FAULTS = (*ANSWERS, "reset", "lost_reply", "truncated", "short")
LOOK_S = 0.05  # between two looks at whether a request was released


class Hold:
    """Requests that wait before they are served: a client is in the middle of something."""

    def __init__(self, method: str, part: str) -> None:
        """Args: part: of the paths of the requests."""
        self._method, self._part = method, part
        self._changed = threading.Condition()
        self._released = False
        self.begun = self.gone = 0  # requests that were held, and those of them whose client has gone since

    def matches(self, method: str, path: str) -> bool:
        return method == self._method and self._part in path

    def wait(self, connection: socket.socket) -> bool:
        """Wait for `release`. Returns whether the client still waits, too."""
        with self._changed:
            self.begun += 1
            self._changed.notify_all()
        while not self._released:
            if select.select([connection], [], [], LOOK_S)[0]:  # it sends nothing before it has its reply
                with self._changed:
                    self.gone += 1
                    self._changed.notify_all()
                return False
        return True

    def until(self, is_reached: Callable[[Hold], bool], timeout_s: float | None = None) -> bool:
        """Returns: whether it did within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: is_reached(self), timeout_s)

    def release(self) -> None:
        self._released = True


class FaultyObjects:
    """Faults of the next requests by method; those without one are served."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults: deque[tuple[str, str]] = deque()  # (method, fault)
        self.always: dict[str, str] = {}  # method -> fault of each request
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        self.read_bytes = 0  # of bodies of GET
        self.url = ""
        self._hold: Hold | None = None
        self._served: dict[str, int] = {}  # method -> requests that `always` spares
        self._lock = threading.Lock()

    def fail(self, method: str, *faults: str) -> None:
        """The next requests of this method fail, one after the other."""
        assert set(faults) <= set(FAULTS), faults
        self.faults.extend((method, fault) for fault in faults)

    def serve(self, method: str, count: int) -> None:
        """The next `count` requests of this method are served whatever `always` says."""
        self._served[method] = count

    @contextmanager
    def holding(self, method: str, part: str) -> Iterator[Hold]:
        """Hold requests of a method with `part` in their path until it is released, or the context ends."""
        self._hold = hold = Hold(method, part)
        try:
            yield hold
        finally:
            self._hold = None
            hold.release()

    def may_serve(self, method: str, path: str, connection: socket.socket) -> bool:
        """Return once a request may be served; False: its client has gone."""
        hold = self._hold
        return hold is None or not hold.matches(method, path) or hold.wait(connection)

    def take(self, method: str, path: str, headers: dict[str, str]) -> str:
        with self._lock:
            self.requests.append((method, path, headers))
            for each in self.faults:
                if each[0] == method:
                    self.faults.remove(each)
                    return each[1]
            if self._served.get(method, 0):
                self._served[method] -= 1
                return ""
        return self.always.get(method, "")

    def count(self, method: str) -> int:
        return sum(each[0] == method for each in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plan: ClassVar[FaultyObjects]

    def serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if not self.plan.may_serve(self.command, self.path, self.connection):
            self.close_connection = True
            return
        fault = self.plan.take(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        if fault in ANSWERS:
            status, code = ANSWERS[fault]
            self.reply(status, [("Content-Type", "application/xml")], ERROR.format(code).encode())
        elif fault == "reset":
            self.reset()
        else:
            self.forward(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    def forward(self, body: bytes, fault: str) -> None:
        upstream = http.client.HTTPConnection(self.plan.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "host"):
                    upstream.putheader(name, value)
            upstream.putheader("Host", self.plan.upstream)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "lost_reply":
            self.reset()
            return
        if self.command == "GET":
            self.plan.read_bytes += len(data)
        dropped = ("content-length", "connection", "transfer-encoding", "date", "server")
        headers = [each for each in answer.getheaders() if each[0].lower() not in dropped]
        size = int(answer.getheader("Content-Length") or len(data)) if self.command == "HEAD" else len(data)
        if fault == "short":
            data = data[: len(data) // 2]
            size = len(data)
        if fault == "truncated":
            self.reply(answer.status, headers, data[: len(data) // 2], size)
            self.reset()
            return
        self.reply(answer.status, headers, data, size)

    def reply(self, status: int, headers: list[tuple[str, str]], data: bytes, size: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        if self.connection.fileno() >= 0:
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request: socket.socket) -> None:
        if request.fileno() >= 0:
            super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """A client that went away is no error of a test."""


@contextmanager
def faulty_objects(upstream: str) -> Iterator[FaultyObjects]:
    plan = FaultyObjects(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"plan": plan}))
    plan.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield plan
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
