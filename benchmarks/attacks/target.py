"""What an attack is told of the server, and how it counts what it got back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

READ_BYTES = 1 << 16
REPLY_S = 60.0  # an attacker waits no longer for a reply


@dataclass(frozen=True)
class Target:
    """A server with two projects: `tenant` attacks, `other` is left alone."""

    host: str
    port: int
    grpc: str  # "HOST:PORT", empty where it is not served
    tenant: str  # a key of the scope admin
    upstream: int  # the port of a service that answers with what it was sent
    model: str  # the language model, empty where there is none

    @property
    def host_header(self) -> str:
        return f"{self.host}:{self.port}"

    def head(self, method: str, path: str, length: int, *, key: str = "", media: str = "application/json") -> bytes:
        """The head of a request with a body of `length` bytes."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host_header}", f"Content-Length: {length}"]
        lines += [f"Content-Type: {media}"] if media else []
        lines += [f"Authorization: Bearer {key}"] if key else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Tally:
    """How often each status came, or a connection ended without one."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str) -> None:
        self.counts[what] += 1

    def reply(self, data: bytes) -> str:
        """Count the reply that `data` begins with; returns its status."""
        status = data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.") else "no reply"
        self.add(status)
        return status


def say(word: str) -> None:
    """A line to the benchmark that started this process."""
    print(word, flush=True)


async def ask(
    target: Target, tally: Tally, method: str, path: str, body: bytes | dict, *, key: str = "", source: str = "",
    media: str = "application/json",
) -> tuple[str, bytes]:  # fmt: skip
    """One request on a connection of its own: its status, and the body of its reply. Never raises for the network."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    writer = None
    try:
        async with asyncio.timeout(REPLY_S):
            local = (source, 0) if source else None
            reader, writer = await asyncio.open_connection(target.host, target.port, local_addr=local)
            head = target.head(method, path, len(data), key=key, media=media)
            writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            writer.write(data)
            received = b""
            while piece := await reader.read(READ_BYTES):
                received += piece
    except TimeoutError:
        tally.add(f"none in {REPLY_S:.0f} s")
        return "", b""
    except OSError:
        tally.add("cut off")
        return "", b""
    finally:
        if writer is not None:
            writer.transport.abort()
    return tally.reply(received), received.partition(b"\r\n\r\n")[2]
