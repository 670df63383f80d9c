"""A web server of files on loopback, with the faults that downloads meet."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENDLESS_BYTES = 64 * 1024 * 1024  # after which an endless body gives up


@dataclass
class WebFile:
    """What a path answers.

    Args:
        cuts: after how many bytes each of the next replies ends early.
        ignores_if_range: it sends a part whatever it is a part of.
        is_endless: the body has no length and no end.
        has_length: where not, the end of the connection is that of the body.
        failures: the statuses of the next replies, which have no content.
        claimed_bytes: the length that is claimed; the body ends where it does.
        gate: the reply waits for it.
    """

    body: bytes = b""
    etag: str = '"1"'
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    has_ranges: bool = True
    ignores_if_range: bool = False
    cuts: list[int] = field(default_factory=list)
    is_endless: bool = False
    has_length: bool = True
    failures: list[int] = field(default_factory=list)
    claimed_bytes: int | None = None
    gate: threading.Event | None = None


class WebFiles:
    def __init__(self) -> None:
        self.files: dict[str, WebFile] = {}
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.url = self.host = ""
        self._arrived = threading.Condition()

    def note(self, path: str, wanted: str | None) -> None:
        with self._arrived:
            self.requests.append((path, wanted))
            self._arrived.notify_all()

    def wait_for_paths(self, count: int) -> bool:
        """Wait until so many paths were asked for."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len({path for path, _ in self.requests}) >= count, 60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: WebFiles

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        web, wanted = self.web, self.headers.get("Range")
        web.note(self.path, wanted)
        file = web.files.get(self.path, WebFile(b"nothing here", status=404))
        if file.gate is not None:
            file.gate.wait(60)
        if file.failures:
            self.send_response(file.failures.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if file.etag and self.headers.get("If-None-Match") == file.etag and file.status == 200:
            self.send_response(304)
            self.end_headers()
            return
        start, status = 0, file.status
        found = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        is_same = file.ignores_if_range or self.headers.get("If-Range", file.etag) == file.etag
        if found and file.has_ranges and is_same:
            start, status = int(found[1]), 206
            if start >= len(file.body):
                start, status = len(file.body), 416
        body = file.body[start:]
        self.send_response(status)
        if file.etag:
            self.send_header("ETag", file.etag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(file.body) - 1}/{len(file.body)}")
        for name, value in file.headers.items():
            self.send_header(name, value)
        if file.is_endless:
            self._send_endless()
            return
        if file.has_length:
            self.send_header("Content-Length", str(file.claimed_bytes or len(body)))
            self.close_connection = self.close_connection or file.claimed_bytes is not None
        else:
            self.close_connection = True
        self.end_headers()
        if file.cuts:
            body = body[: file.cuts.pop(0)]
            self.close_connection = True
        with suppress(OSError):  # the client may have had enough
            self.wfile.write(body)

    def _send_endless(self) -> None:
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        line = b'{"n": 1}\n' * 8192
        self.close_connection = True
        with suppress(OSError):
            for _ in range(ENDLESS_BYTES // len(line)):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


@contextmanager
def web_files() -> Iterator[WebFiles]:
    web = WebFiles()
    handler = type("Handler", (_Handler,), {"web": web})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    web.host, web.url = "127.0.0.1", f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
