"""Calls of deployed functions through a real worker process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from batchmill.executors.live_calls import REPLY_BYTES_MAX, Calling
from batchmill.executors.local import LocalExecutor, LocalWorker
from batchmill.types import CallStats, FunctionRequest, FunctionSpec, ModelSpec
from batchmill.wire.messages import Abandon, Answers, Drain, Failed, FunctionReply, FunctionRequests, Ready, Start

PATIENCE_S = 60.0


def deployed(tmp_path: Path, text: str) -> ModelSpec:
    (tmp_path / "app.py").write_text(text)
    function = FunctionSpec(version="main/1", folder=str(tmp_path), digest="0")
    return ModelSpec("f", "function_process", "app.py:f", function=function)


@asynccontextmanager
async def worker_of(model: ModelSpec, tmp_path: Path) -> AsyncIterator[LocalWorker]:
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w1", model, str(tmp_path / "home")))
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for message in worker.messages():
                if isinstance(message, Ready):
                    break
            yield worker
    finally:
        worker.kill()
        await worker.wait()


async def answers_of(worker: LocalWorker, count: int) -> tuple[dict[int, FunctionReply], CallStats, int]:
    """So many answers by id, the sums that came with them, and in how many messages they came."""
    found: dict[int, FunctionReply] = {}
    sums, messages = CallStats(), 0
    async for message in worker.messages():
        if isinstance(message, Answers):
            messages += bool(message.answers)
            found |= {answer.id: answer for answer in message.answers}
            sums += message.stats or CallStats()
        if len(found) >= count:
            return found, sums, messages
    raise AssertionError(f"the worker ended after {len(found)} of {count} answers")


async def test_many_asks_in_one_message(tmp_path: Path) -> None:
    """Asks that came together are answered each once, in far fewer messages, with what was counted."""
    async with worker_of(deployed(tmp_path, "def f(n):\n    return 2 * n"), tmp_path) as worker:
        worker.send(FunctionRequests([FunctionRequest(n, "arguments", b'{"n": %d}' % n) for n in range(1, 201)]))
        found, sums, messages = await answers_of(worker, 200)
        assert {id_: json.loads(answer.body) for id_, answer in found.items()} == {n: 2 * n for n in range(1, 201)}
        assert messages < 100
        assert sums.succeeded == 200


async def test_draining_answers_first(tmp_path: Path) -> None:
    """A worker that is told to drain answers what it was asked before, then ends."""
    async with worker_of(deployed(tmp_path, "def f(n):\n    return n"), tmp_path) as worker:
        worker.send(FunctionRequests([FunctionRequest(n, "arguments", b'{"n": 1}') for n in range(50)]))
        worker.send(Drain())
        found, _, _ = await answers_of(worker, 50)
        assert len(found) == 50
        assert await worker.wait() == 0


async def test_an_abandoned_ask_has_no_answer(tmp_path: Path) -> None:
    """Nothing is said of an Ask that nobody waits for any more, and those behind it are answered."""
    text = "def f(waits):\n    if waits: open('begun', 'w').close(); open('go').read()\n    return 1"
    for name in ("begun", "go"):
        os.mkfifo(tmp_path / name)
    async with worker_of(deployed(tmp_path, text), tmp_path) as worker:
        worker.send(
            FunctionRequests(
                [
                    FunctionRequest(1, "arguments", b'{"waits": true}'),
                    FunctionRequest(2, "arguments", b'{"waits": false}'),
                ]
            )
        )
        await asyncio.to_thread((tmp_path / "begun").read_text)
        worker.send(Abandon(1))
        worker.send(FunctionRequests([FunctionRequest(3, "arguments", b"no JSON")]))
        found, _, _ = await answers_of(worker, 1)  # refused by the worker itself, after it heard the one before
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        worker.send(Drain())
        async for message in worker.messages():
            if isinstance(message, Answers):
                found |= {answer.id: answer for answer in message.answers}
        assert set(found) == {2, 3}


async def test_another_kind_of_engine_refuses(tmp_path: Path) -> None:
    """An engine that takes no such calls refuses them by name."""
    async with worker_of(ModelSpec("f", "http", "m", base_url="http://127.0.0.1:9"), tmp_path) as worker:
        worker.send(FunctionRequests([FunctionRequest(1, "arguments", b'{"n": 1}')]))
        found, _, _ = await answers_of(worker, 1)
        assert found[1].raised is not None
        assert (found[1].raised.kind, found[1].raised.code) == ("InvalidInput", "not_a_function")


async def test_a_function_that_cannot_start_again_ends_the_worker(tmp_path: Path) -> None:
    """Who waits is answered before the worker says that it has failed."""
    text = """
import os
if os.path.exists("gone"): raise RuntimeError("no more")
def f(n): open("gone", "w").close(); os._exit(1)
"""
    async with worker_of(deployed(tmp_path, text), tmp_path) as worker:
        worker.send(
            FunctionRequests(
                [FunctionRequest(1, "arguments", b'{"n": 1}'), FunctionRequest(2, "arguments", b'{"n": 1}')]
            )
        )
        codes, failed = {}, None
        async for message in worker.messages():
            if isinstance(message, Answers):
                codes |= {answer.id: answer.raised.code for answer in message.answers if answer.raised}
            elif isinstance(message, Failed):
                failed = message
                break
        assert codes == {1: "worker_crashed", 2: "model_failed"}
        assert failed is not None and "no more" in failed.message


class _Engine:
    """Answers nothing by itself."""

    def __init__(self) -> None:
        self.asked: list[FunctionRequest] = []

    def call(self, request: FunctionRequest, answering: object) -> None:
        self.asked.append(request)

    def take_stats(self) -> CallStats | None:
        return None


async def test_a_reply_that_no_message_holds() -> None:
    """A reply of more bytes than can be sent is an error of that call; one of exactly so many is sent alone."""
    sent: list[Answers] = []
    calling = Calling(_Engine(), sent.append)  # type: ignore[arg-type]
    calling.begin(
        [
            FunctionRequest(1, "arguments", b"{}"),
            FunctionRequest(2, "arguments", b"{}"),
            FunctionRequest(3, "arguments", b"{}"),
        ]
    )
    calling.put(FunctionReply(1, bytes(REPLY_BYTES_MAX)))
    calling.put(FunctionReply(2, bytes(REPLY_BYTES_MAX + 1)))
    calling.put(FunctionReply(3, b"{}"))
    calling.flush()
    [first, second] = [[answer.id for answer in message.answers] for message in sent]
    refused = sent[0].answers[1].raised if len(first) > 1 else sent[1].answers[0].raised
    assert sorted(first + second) == [1, 2, 3]
    assert refused is not None and refused.code == "bad_return"
