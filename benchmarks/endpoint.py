"""An OpenAI-style endpoint that answers after a fixed delay, and can write down every call it answered.

    python benchmarks/endpoint.py --port 8000 --delay-ms 20 --count-file calls.txt

Prints "listening on HOST:PORT". Each call whose caller was still there adds `KEY ARRIVED REPLIED` to the count file,
the times in seconds since the epoch. KEY is the body's `x`, else its `user`, else the last message, prompt or input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import deque
from typing import Any

import msgspec
from msgspec import Struct

BODY_BYTES_MAX = 64 * 1024 * 1024
HEAD_BYTES_MAX = 64 * 1024


class Message(Struct, gc=False):
    role: str = ""
    content: Any = ""


class Body(Struct, gc=False):
    x: str | int | None = None
    user: str | None = None
    model: str = ""
    messages: list[Message] = []
    prompt: Any = None
    input: Any = None

    def text(self) -> str:
        content = self.messages[-1].content if self.messages else self.prompt or self.input or ""
        return content if isinstance(content, str) else msgspec.json.encode(content).decode()

    def key(self) -> str:
        key = self.x if self.x is not None else self.user
        return "_".join((self.text() if key is None else str(key)).split()) or "-"


_body = msgspec.json.Decoder(Body)


class Due(Struct, gc=False):
    at: float
    arrived: float
    key: str
    reply: bytes
    connection: Connection


class Endpoint:
    """Holds replies until they are due. All wait equally long, so one timer for the oldest will do."""

    def __init__(self, delay_s: float, count_file: int | None) -> None:
        self.served = 0
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._count_file = count_file
        self._lines: list[str] = []
        self._due: deque[Due] = deque()

    def arrived(self, connection: Connection, path: str, data: bytes) -> None:
        try:
            body = _body.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            connection.send(b"400 Bad Request", {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        reply = encode_reply(b"200 OK", answer(path, body, self.served))
        self.served += 1
        due = Due(self._loop.time() + self._delay_s, time.time(), body.key(), reply, connection)
        self._due.append(due)
        if len(self._due) == 1:
            self._loop.call_at(due.at, self._reply)

    def _reply(self) -> None:
        # A tick of grace: replies due within the next half millisecond go now, as a timer would round them.
        now = self._loop.time() + 0.0005
        while self._due and self._due[0].at <= now:
            due = self._due.popleft()
            if due.connection.reply(due.reply) and self._count_file is not None:
                self._lines.append(f"{due.key} {due.arrived:.6f} {time.time():.6f}\n")
        if self._due:
            self._loop.call_at(self._due[0].at, self._reply)
        self.flush()

    def flush(self) -> None:
        if self._lines and self._count_file is not None:
            os.write(self._count_file, "".join(self._lines).encode())
            self._lines.clear()


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and a Content-Length; nothing else is spoken here."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            size = content_length(head)
            if size is None or size > BODY_BYTES_MAX:
                self.send(b"411 Length Required", {"error": {"message": "send a Content-Length"}})
                self._transport.close()
                return
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._request(head, body)
        if len(self._buffer) > HEAD_BYTES_MAX and b"\r\n\r\n" not in self._buffer:
            self._transport.close()

    def _request(self, head: bytes, body: bytes) -> None:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].decode("latin-1")
        if method == b"POST":
            self._endpoint.arrived(self, path, body)
        elif path.endswith("/models"):
            self.send(b"200 OK", {"object": "list", "data": [{"id": "fixed", "object": "model"}]})
        else:
            self.send(b"200 OK", {"served": self._endpoint.served})

    def send(self, status: bytes, body: dict[str, Any]) -> None:
        self.reply(encode_reply(status, body))

    def reply(self, data: bytes) -> bool:
        """Write a reply; False when the caller has gone."""
        if self._transport.is_closing():
            return False
        self._transport.write(data)
        return True


def content_length(head: bytes) -> int | None:
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    if at < 0:
        return 0 if lower.startswith(b"get ") else None
    value = lower[at + 17 :].partition(b"\r\n")[0].strip()
    return int(value) if value.isdigit() else None


def encode_reply(status: bytes, body: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


def answer(path: str, body: Body, number: int) -> dict[str, Any]:
    text = body.text()
    words = len(text) // 4 + 1
    usage = {"prompt_tokens": words, "completion_tokens": 8, "total_tokens": words + 8}
    head = {"id": f"reply-{number}", "created": 0, "model": body.model, "usage": usage}
    if path.endswith("/embeddings"):
        return head | {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]}
    if path.endswith("/chat/completions"):
        message = {"role": "assistant", "content": text[:64]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return head | {"object": "chat.completion", "choices": [choice]}
    choice = {"index": 0, "text": text[:64], "finish_reason": "stop", "logprobs": None}
    return head | {"object": "text_completion", "choices": [choice]}


async def serve(host: str, port: int, delay_s: float, count_file: int | None) -> None:
    loop = asyncio.get_running_loop()
    endpoint = Endpoint(delay_s, count_file)
    server = await loop.create_server(lambda: Connection(endpoint), host, port, backlog=4096)
    print(f"listening on {host}:{server.sockets[0].getsockname()[1]}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    server.close()
    endpoint.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--count-file", help="append a line for every call answered")
    options = parser.parse_args()
    count_file = None
    if options.count_file:
        count_file = os.open(options.count_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    asyncio.run(serve(options.host, options.port, options.delay_ms / 1000, count_file))


if __name__ == "__main__":
    main()
