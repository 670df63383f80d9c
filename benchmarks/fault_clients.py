"""Clients of `cluster_faults.py`: they create batches of five rows while faults strike.

A client repeats each request until a server answers it. It reads the results of a batch as soon as that has ended;
`check` compares what it has seen with what is there after the fault.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

TIMEOUT_S, LOOK_S = 90.0, 0.1
REPLY_S, POLL_S = 5.0, 0.25  # a reply that takes longer is taken for lost; between two looks at a batch
ROWS = 5
ENDED = ("completed", "failed", "expired", "cancelled")
BAD_REPLY = (httpx2.HTTPError, LookupError, ValueError)  # an error, or not the JSON that is due
GONE = (404, 410)  # a file that was removed: an upload, a result
SHORT = "short"  # begins the texts of their rows
# How a client marks a create that it repeats, and what else it does with a batch.
REPEATS = ("Idempotency-Key", "x-stainless-retry-count", "")
USES = ("read", "remove", "read", "cancel")

Ask = Callable[..., httpx2.Response]  # (method, path, **arguments): returns any answer that is no fault of the server's


class NoAnswer(Exception):
    """No server answered for `TIMEOUT_S`."""


class NotEnded(Exception):
    """A batch did not end within `TIMEOUT_S`."""


def answered(
    send: Callable[[int], httpx2.Response], is_given_up: Callable[[], bool] = lambda: False
) -> httpx2.Response:
    """Send a request until a server answers it; `send` gets how often it was sent. Raises: NoAnswer."""
    deadline = time.monotonic() + TIMEOUT_S
    for tries in itertools.count():
        try:
            reply = send(tries)
            if reply.status_code < 500:
                return reply
            problem = f"{reply.status_code} {reply.text[:300]}"
        except httpx2.TransportError as error:
            problem = repr(error)
        if time.monotonic() > deadline or is_given_up():
            raise NoAnswer(problem)
        time.sleep(LOOK_S)
    raise AssertionError("unreachable")


def row(text: str) -> dict[str, Any]:
    body = {"model": "steady", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answer_of(line: dict[str, Any]) -> str:
    return line["response"]["body"]["choices"][0]["message"]["content"] if line.get("response") else ""


def upload_of(texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of the request that uploads a row for each text."""
    lines = "".join(json.dumps(row(text)) + "\n" for text in texts)
    return {"files": {"file": ("rows.jsonl", lines)}, "data": {"purpose": "batch"}}


def order_of(file: str) -> dict[str, str]:
    return {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}


@dataclass
class ShortBatch:
    """A batch, and what its client knows of it."""

    texts: list[str]
    repeat: str
    use: str
    input: str = ""
    id: str = ""  # empty: no reply to its create came
    end: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)  # by id of a result file
    removed: list[str] = field(default_factory=list)  # files

    def headers(self, tries: int) -> dict[str, str]:
        """Of its create, sent so often before."""
        if self.repeat == "Idempotency-Key":
            return {self.repeat: self.texts[0]}
        return {self.repeat: str(tries)} if self.repeat and tries else {}


class Client:
    """One client, with the addresses of some servers: it asks the next one if one does not answer."""

    def __init__(self, clients: Clients, urls: Sequence[str], seed: int) -> None:
        self._clients, self._urls, self._chance = clients, urls, random.Random(seed)
        self._http = httpx2.Client(timeout=REPLY_S, verify=False)
        self._url = self._chance.choice(urls)

    def run(self) -> None:
        """Create batches, one after the other, until the end."""
        with self._http:
            while not self._clients.is_over.is_set():
                batch = self._clients.new_batch()
                try:
                    self._use(batch)
                except (NoAnswer, NotEnded, *BAD_REPLY) as error:
                    self._clients.flaws.append(f"a client of {batch}: {error!r}")
                    return
                self._clients.is_over.wait(self._clients.pause_s * self._chance.uniform(0.5, 1.5))

    def _use(self, batch: ShortBatch) -> None:
        batch.input = self._ask("POST", "/v1/files", **upload_of(batch.texts)).raise_for_status().json()["id"]
        order = order_of(batch.input)
        reply = self._ask("POST", "/v1/batches", headers_of=batch.headers, json=order)
        batch.id = reply.raise_for_status().json()["id"]
        if batch.use == "cancel":
            reply = self._ask("POST", f"/v1/batches/{batch.id}/cancel")
            if reply.status_code != 409:  # it has ended
                reply.raise_for_status()
        batch.end = self._wait(batch)
        for file in result_files(batch.end):
            batch.contents[file] = self._ask("GET", f"/v1/files/{file}/content").raise_for_status().text
        if batch.use == "remove":
            for file in (batch.input, *batch.contents):
                batch.removed.append(file)
                reply = self._ask("DELETE", f"/v1/files/{file}")
                if reply.status_code not in GONE:  # the reply to an earlier try was lost
                    reply.raise_for_status()

    def _wait(self, batch: ShortBatch) -> dict[str, Any]:
        """Return the batch once it has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = self._ask("GET", f"/v1/batches/{batch.id}").raise_for_status().json()
            if found["status"] in ENDED:
                return found
            if time.monotonic() > deadline:
                raise NotEnded(str(found))
            time.sleep(POLL_S)

    def _ask(
        self, method: str, path: str, headers_of: Callable[[int], dict[str, str]] = lambda _: {}, **arguments: Any
    ) -> httpx2.Response:
        """Send a request until a server answers it. Args: headers_of: its headers, by how often it was sent before."""

        def send(tries: int) -> httpx2.Response:
            if tries:
                self._url = self._chance.choice(self._urls)
            return self._http.request(method, f"{self._url}{path}", headers=headers_of(tries), **arguments)

        return answered(send, self._clients.is_given_up.is_set)


class Clients:
    """Clients that run at the same time, and their batches."""

    def __init__(self, count: int, pause_s: float) -> None:
        self._count, self.pause_s = count, pause_s
        self._numbers = itertools.count()
        self.is_over, self.is_given_up = threading.Event(), threading.Event()
        self.batches: list[ShortBatch] = []
        self.flaws: list[str] = []

    def new_batch(self) -> ShortBatch:
        number = next(self._numbers)
        texts = [f"{SHORT} {number} {n}" for n in range(ROWS)]
        batch = ShortBatch(texts, REPEATS[number % len(REPEATS)], USES[number % len(USES)])
        self.batches.append(batch)
        return batch

    @contextmanager
    def running(self, urls: Sequence[str], seed: int) -> Iterator[None]:
        """Meanwhile they create batches; at the end, each has seen the end of those that it created."""
        self.batches, self.flaws = [], []
        self.is_over.clear()
        self.is_given_up.clear()
        threads = [threading.Thread(target=Client(self, urls, seed + n).run) for n in range(self._count)]
        for each in threads:
            each.start()
        try:
            yield
        except BaseException:
            self.is_given_up.set()
            raise
        finally:
            self.is_over.set()
            for each in threads:
                each.join()


def result_files(batch: dict[str, Any]) -> list[str]:
    return [file for file in (batch.get("output_file_id"), batch.get("error_file_id")) if file]


def check(batch: ShortBatch, ask: Ask) -> Iterator[str]:
    """Compare what is there after a fault with what the client of a batch has seen. Returns: what differs."""
    found = ask("GET", f"/v1/batches/{batch.id}").json()
    for name in ("status", "output_file_id", "error_file_id", "request_counts"):
        if found.get(name) != batch.end[name]:
            yield f"{batch.id} ended with {name} {batch.end[name]} and has {found.get(name)}"
    if batch.end["status"] != "completed" and not (batch.use == "cancel" and batch.end["status"] == "cancelled"):
        yield f"{batch.id} ended as {batch.end['status']}: {batch.end.get('errors')}"
    files = {batch.input: upload_of(batch.texts)["files"]["file"][1], **batch.contents}
    for file, content in files.items():
        reply = ask("GET", f"/v1/files/{file}/content")
        if file in batch.removed:
            if reply.status_code not in GONE:
                yield f"{file} of {batch.id} was removed: {reply.status_code}"
        elif reply.status_code != 200 or reply.text != content:
            yield f"{file} of {batch.id} was {content!r} and is {reply.status_code} {reply.text!r}"
    if batch.repeat == "Idempotency-Key":
        again = ask("POST", "/v1/batches", headers=batch.headers(1), json=order_of(batch.input)).json()
        if again.get("id") != batch.id:
            yield f"the create of {batch.id} was repeated: {again}"


def created_since(moment: float, ask: Ask) -> Counter[str]:
    """How many batches there are for each input file, of those created since a moment (seconds since the epoch)."""
    counts, after = Counter[str](), {}
    while True:
        page = ask("GET", "/v1/batches", params={"limit": 100, **after}).json()
        counts.update(each["input_file_id"] for each in page["data"] if each["created_at"] >= moment)
        if not page["has_more"] or page["data"][-1]["created_at"] < moment:
            return counts
        after = {"after": page["last_id"]}
