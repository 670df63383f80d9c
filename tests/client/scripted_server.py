"""A server on loopback that does with each connection what a test wrote down, byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

HEAD_END = b"\r\n\r\n"


@dataclass
class Asked:
    """One request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes


def reply(body: bytes = b"{}", status: str = "200 OK", **headers: str) -> bytes:
    """A whole reply. Underscores in names of headers stand for hyphens."""
    received = {"content-type": "application/json", "content-length": str(len(body))}
    received |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in received.items()), "connection: close"]
    return "\r\n".join(lines).encode() + HEAD_END + body


Answer = bytes | Callable[[Asked], bytes]


@dataclass
class ScriptedServer:
    """Answers the n-th connection with the n-th answer, and hangs up. An empty answer hangs up without a word."""

    answers: Sequence[Answer]
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        for answer in self.answers:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # the test ended before it had asked for everything
            with connection:
                asked = _read(connection)
                self.asked.append(asked)
                connection.sendall(answer(asked) if callable(answer) else answer)


def _read(connection: socket.socket) -> Asked:
    data = b""
    while HEAD_END not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(HEAD_END)
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    while headers.get("transfer-encoding") == "chunked" and not body.endswith(b"0\r\n\r\n"):
        body += connection.recv(65536)
    return Asked(first, headers, body)
