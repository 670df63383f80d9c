"""Callers that send a request every so often, whatever became of the one before it, and how long each waited.

A request is timed from the moment at which it was due: one that could not be sent since the server held up the one
before it has waited as well.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field

REPLY_S = 20.0
CATCH_UP_S = 25.0  # after the end of a phase, for requests that were due before it
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Kind:
    """What a caller sends, and what it must get."""

    name: str
    method: str
    path: str
    body: bytes
    answer: bytes  # what the reply must hold
    every_s: float
    is_kept: bool = True  # over one connection; otherwise a new one each time


@dataclass
class Heard:
    """What a caller got in one phase: milliseconds of the answered requests, and what became of the others."""

    took: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def p99(self) -> float:
        ordered = sorted(self.took)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else float("inf")


class Caller:
    """One client of the server, from an address of its own on the loopback."""

    def __init__(self, kind: Kind, host: str, port: int, key: str, source: str) -> None:
        self._kind, self._host, self._port, self._source = kind, host, port, source
        self._headers = {**(JSON if kind.body else {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        self._connection: http.client.HTTPConnection | None = None

    def once(self) -> str:
        """One request; empty where it was answered as it should be, else what became of it."""
        kind = self._kind
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                self._host, self._port, timeout=REPLY_S, source_address=(self._source, 0)
            )
        problem = ""
        try:
            self._connection.request(kind.method, kind.path, kind.body or None, self._headers)
            reply = self._connection.getresponse()
            data = reply.read()
            if reply.status != 200 or kind.answer not in data:
                problem = f"{reply.status} {_code(data)}"
        except (OSError, http.client.HTTPException) as error:
            problem = type(error).__name__
        if problem or not kind.is_kept:
            self._connection.close()
            self._connection = None
        return problem

    def steadily(self, seconds: float, heard: Heard) -> None:
        """A request every so often for so long; those that cannot be sent in time are counted as lost."""
        began = due = time.perf_counter()
        while due < began + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            if time.perf_counter() > began + seconds + CATCH_UP_S:
                heard.lost += ["never sent"] * int((began + seconds - due) / self._kind.every_s)
                return
            problem = self.once()
            if problem:
                heard.lost.append(problem)
            else:
                heard.took.append((time.perf_counter() - due) * 1000)
            due += self._kind.every_s


def _code(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return data[:60].decode(errors="replace")


def all_steadily(callers: dict[str, Caller], seconds: float) -> dict[str, Heard]:
    """Every caller at once for so long, each in a thread."""
    heard = {name: Heard() for name in callers}
    threads = [
        threading.Thread(target=caller.steadily, args=(seconds, heard[name])) for name, caller in callers.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard
