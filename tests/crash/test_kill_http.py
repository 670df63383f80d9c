"""SIGKILL of the server, over and over, while a batch runs and clients upload, order, look and ask for answers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from story.openai_story import ended, lines, result_lines, row, submit, texts, until, write_project
from story.running_server import RunningServer

ROWS, KILLS, SMALL_ORDERS = 2400, 5, 12
ORDER_TRIES_MAX = 500
STEADY = """

def steady(messages, model=None):
    time.sleep(0.004)
    return chat(messages, model)
"""
CONFIG = '[models.steady]\nengine = "function"\nsource = "app.py:steady"\n'


@dataclass
class Seen:
    """What clients got while the server was being killed."""

    kills: int = 0
    broken: Counter[str] = field(default_factory=Counter)  # requests that had no reply, by what they were
    refused: list[str] = field(default_factory=list)  # replies nobody should have had
    wrong: list[str] = field(default_factory=list)  # answers that are not what was asked for
    answers: int = 0
    orders: list[str] = field(default_factory=list)  # the id that each small order was told in the end


class Clients:
    """People at work beside the batch, until they are told to stop."""

    def __init__(self, url: str, batch: str, file: str) -> None:
        self._url, self._batch, self._file = url, batch, file
        self.seen = Seen()
        self.stop = threading.Event()
        works = (self._look, self._ask, self._order)
        self._threads = [threading.Thread(target=self._work, args=(work,)) for work in works]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, work: Callable[[httpx2.Client, int], None]) -> None:
        number = 0
        with httpx2.Client(base_url=self._url, timeout=60) as http:
            while not self.stop.is_set():
                work(http, number)
                number += 1
                self.stop.wait(0.01)

    def _send(self, what: str, send: Callable[[], httpx2.Response]) -> httpx2.Response | None:
        """The reply; None where there was none because the server was killed."""
        try:
            reply = send()
        except httpx2.TransportError:
            self.seen.broken[what] += 1
            return None
        if reply.status_code not in (200, 503):  # 503: a worker died under the request
            self.seen.refused.append(f"{what}: {reply.status_code} {reply.text[:300]}")
        return reply if reply.status_code == 200 else None

    def _look(self, http: httpx2.Client, _: int) -> None:
        reply = self._send("look", lambda: http.get(f"/v1/batches/{self._batch}"))
        if reply is not None and reply.json()["id"] != self._batch:
            self.seen.wrong.append(reply.text)

    def _ask(self, http: httpx2.Client, number: int) -> None:
        body = row("", f"live {number}", "steady")["body"]
        reply = self._send("ask", lambda: http.post("/v1/chat/completions", json=body))
        if reply is not None:
            self.seen.answers += 1
            if reply.json()["choices"][0]["message"]["content"] != f"LIVE {number}":
                self.seen.wrong.append(reply.text)

    def _order(self, http: httpx2.Client, number: int) -> None:
        """The same order, byte for byte, until there is a reply, as a client does that knows no better."""
        if len(self.seen.orders) == SMALL_ORDERS:
            return
        order = {"input_file_id": self._file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        content = json.dumps(order | {"metadata": {"order": str(len(self.seen.orders))}})
        for tries in range(ORDER_TRIES_MAX):
            fields = {"content-type": "application/json"}
            if number % 2:  # the openai package says so, others do not
                fields["x-stainless-retry-count"] = str(tries)
            reply = self._send("order", partial(http.post, "/v1/batches", content=content, headers=fields))
            if reply is not None:
                self.seen.orders.append(reply.json()["id"])
                break
            self.stop.wait(0.02)
        self.stop.wait(0.5)


@dataclass(frozen=True)
class Story:
    seen: Seen
    results: list[dict]
    errors: str | None
    counts: dict[str, int]
    small: list[tuple[str, str, int]]  # of each small batch: its order, status and rows that were answered
    log: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder: Path = tmp_path_factory.mktemp("kill-http")
    write_project(folder, CONFIG)
    (folder / "app.py").write_text("import time\n" + (folder / "app.py").read_text() + STEADY)
    with RunningServer(folder) as server, OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=5) as client:
        batch = submit(client, [row(f"r{n}", f"text {n}", "steady") for n in range(ROWS)])
        file = client.files.create(file=("small.jsonl", lines([row("a", "small")])), purpose="batch")
        with Clients(server.url, batch.id, file.id) as clients:
            for kill in range(KILLS):
                goal = ROWS * (kill + 1) // (KILLS + 2)
                until(lambda: client.batches.retrieve(batch.id), lambda seen: seen.request_counts.completed >= goal)  # noqa: B023
                server.kill()
                clients.seen.kills += 1
                server.start()
            done = ended(client, batch)
            until(lambda: len(clients.seen.orders) == SMALL_ORDERS)
        others = [each for each in client.batches.list(limit=100) if each.id != batch.id]
        small = [ended(client, each) for each in others]
        yield Story(
            clients.seen,
            result_lines(client, done.output_file_id),
            done.error_file_id,
            done.request_counts.model_dump(),
            [(each.metadata["order"], each.status, each.request_counts.completed) for each in small],
            server.log,
        )


def test_the_server_was_under_fire(story: Story):
    """The story was one of kills, and clients felt them."""
    assert story.seen.kills == KILLS
    assert sum(story.seen.broken.values()) >= KILLS and story.seen.answers > KILLS


def test_every_row_has_one_result(story: Story):
    """No row of the batch is lost, doubled, out of order, or failed for a kill's sake."""
    assert [each["custom_id"] for each in story.results] == [f"r{n}" for n in range(ROWS)]
    assert texts(story.results) == {f"r{n}": f"TEXT {n}" for n in range(ROWS)}
    assert story.errors is None
    assert story.counts == {"total": ROWS, "completed": ROWS, "failed": 0}


def test_every_order_is_one_batch(story: Story):
    """However often an order had to be repeated, it became one batch, and that one has run."""
    assert len(set(story.seen.orders)) == SMALL_ORDERS
    assert sorted(story.small) == sorted((str(n), "completed", 1) for n in range(SMALL_ORDERS))


def test_no_client_was_told_nonsense(story: Story):
    """Between two kills every reply was a good one."""
    assert story.seen.refused == [] and story.seen.wrong == []


def test_no_start_met_what_it_could_not_read(story: Story):
    """Each start found the data directory as a crash may leave it, and nothing that was a fault of its own."""
    assert '"trace":' not in story.log and "internal error" not in story.log
