"""Orders that arrive twice: by a key of the caller's, blindly, over a broken connection, and across a killed server."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import signal
import socket
import sqlite3
import struct
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from openai import OpenAI
from openai_story import TIMEOUT_S, ended, lines, row, write_project
from running_server import RunningServer

ORDER = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai-repeats")
    write_project(folder)
    with RunningServer(folder) as running:
        yield running


@pytest.fixture
def order(server) -> dict:
    """A batch that was not ordered yet."""
    return {**ORDER, "input_file_id": upload(server.url)}


def upload(url: str) -> str:
    """The id of a file with one row."""
    with OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        return client.files.create(file=("a.jsonl", lines([row("a", "x")])), purpose="batch").id


def ids(client: OpenAI) -> list[str]:
    return [each.id for each in client.batches.list(limit=100)]


def send(url: str, order: dict) -> socket.socket:
    """A connection on which a whole order was sent, to the byte as `post` sends it."""
    parts = urlsplit(url)
    body = json.dumps(order).encode()
    head = f"POST /v1/batches HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S)
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def leave_unanswered(server: RunningServer, order: dict, *, with_reset: bool) -> str:
    """Order, and leave between the moment the job is stored, where the server stops itself, and its reply."""
    request = hashlib.sha256(json.dumps(order).encode()).hexdigest()
    with send(server.url, order) as sock:
        server.wait_until_held()
        with contextlib.closing(sqlite3.connect(server.folder / "data" / "batchmill.db")) as database:
            query = "SELECT job FROM submissions WHERE fingerprint = ?"
            [(job,)] = database.execute(query, (request,)).fetchall()
        if with_reset:  # the kernel drops what is unsent or unread, and says so to the other side
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1, socket.MSG_PEEK)
    server.signal(signal.SIGCONT)
    return job


def post(url: str, order: dict, **headers: str) -> httpx2.Response:
    """Order, and wait for the reply."""
    content = json.dumps(order).encode()
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(f"{url}/v1/batches", content=content, headers=headers)


def test_the_same_order_twice_is_two_batches(client, order):
    """Who has had a reply and asks again wants another batch."""
    assert client.batches.create(**order).id != client.batches.create(**order).id


def test_a_key_makes_one_batch_of_many_orders(client, order):
    """With an Idempotency-Key an order is carried out once, whatever was delivered; another order has no use for it."""
    fields = {"Idempotency-Key": f"key of {order['input_file_id']}"}
    first = client.batches.create(**order, extra_headers=fields)
    assert client.batches.create(**order, extra_headers=fields).id == first.id
    ended(client, first)
    again = client.batches.create(**order, extra_headers=fields)
    assert (again.id, again.status) == (first.id, "completed") and again.output_file_id
    with pytest.raises(openai.ConflictError) as reused:
        client.batches.create(**order, metadata={"another": "order"}, extra_headers=fields)
    assert reused.value.code == "idempotency_key_reused"
    assert reused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.batches.create(**order, extra_headers={"Idempotency-Key": "k" * 256})
    assert wrong.value.code == "invalid_idempotency_key"


def test_a_key_outlives_its_file(client, order):
    """An order that is known by its key is its batch still when the file that it names is gone."""
    fields = {"Idempotency-Key": "outlives"}
    first = ended(client, client.batches.create(**order, extra_headers=fields))
    client.files.delete(order["input_file_id"])
    assert client.batches.create(**order, extra_headers=fields).id == first.id
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**order)


def test_a_repeat_costs_nothing(tmp_path):
    """A batch that is stored is never hidden behind a key's rate; another order is held up by it."""
    write_project(tmp_path, "[server]\nrequests_per_minute = 2")
    with RunningServer(tmp_path) as server:
        order = {**ORDER, "input_file_id": upload(server.url)}
        first = post(server.url, order, idempotency_key="one")
        assert first.status_code == 200
        for _ in range(5):
            again = post(server.url, order, idempotency_key="one")
            assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        other = post(server.url, order, idempotency_key="two")
        assert other.status_code == 429 and int(other.headers["retry-after"]) > 0


def test_a_retry_of_the_package_is_the_first_order(server, order):
    """`x-stainless-retry-count` tells that the client never saw the reply which we believe it has."""
    first = post(server.url, order, x_stainless_retry_count="0").json()["id"]
    assert post(server.url, order, x_stainless_retry_count="1").json()["id"] == first
    assert post(server.url, order, x_stainless_retry_count="2").json()["id"] == first


@pytest.mark.parametrize("with_reset", [False, True], ids=["closed", "reset"])
def test_a_reply_that_found_nobody_leaves_the_order_open(tmp_path, with_reset):
    """Whoever left before the reply gets the same batch when they ask again without any key, and only once."""
    write_project(tmp_path)
    fault = {"BATCHMILL_FAULT": f"after_create:1:{tmp_path / 'held'}", "BATCHMILL_FAULT_SIGNAL": "SIGSTOP"}
    with RunningServer(tmp_path, env=fault) as server:
        order = {**ORDER, "input_file_id": upload(server.url)}
        job = leave_unanswered(server, order, with_reset=with_reset)
        first = post(server.url, order).json()["id"]
        assert first.removeprefix("batch_") == job.removeprefix("job_")
        assert post(server.url, order).json()["id"] != first


def test_many_at_once_are_one_batch(server, order):
    """Orders that arrive while the first of them is unanswered are the first."""
    server.signal(signal.SIGSTOP)  # so that all are there before one is looked at
    socks = [send(server.url, order) for _ in range(20)]
    server.signal(signal.SIGCONT)
    made = set()
    for sock in socks:
        with sock, http.client.HTTPResponse(sock) as reply:
            reply.begin()
            made.add(json.loads(reply.read())["id"])
    assert len(made) == 1


@pytest.mark.parametrize("expected", [{}, {"idempotency_key": "k"}], ids=["blind", "by a key"])
def test_an_order_whose_reply_was_lost_with_the_server(tmp_path, expected):
    """A server that was killed once the job was stored knows the order again when it is back."""
    write_project(tmp_path)
    fault = f"after_create:1:{tmp_path / 'died'}"
    with RunningServer(tmp_path, env={"BATCHMILL_FAULT": fault}) as server:
        order = {**ORDER, "input_file_id": upload(server.url)}
        with pytest.raises(httpx2.RemoteProtocolError):
            post(server.url, order, **expected)
        assert server.wait() == -signal.SIGKILL
        server.start()
        with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            [stored] = ids(client)
            first = post(server.url, order, **expected).json()["id"]
            assert first == stored
            done = ended(client, client.batches.retrieve(first))
            assert done.status == "completed" and done.request_counts and done.request_counts.completed == 1
        again = post(server.url, order, **expected).json()["id"]
        assert (again == first) == bool(expected)
