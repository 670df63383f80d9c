"""A worker that was given a secret: it is used, changed while the worker runs, and told to nobody."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contract.engine_suite import chat_request
from fakes.openai_service import Answer, OpenAIService, refusal

from batchmill.executors.local import LocalExecutor, LocalWorker
from batchmill.types import LiveHead, ModelSpec, Provision
from batchmill.wire.messages import Answered, AnswerLive, Failed, Head, Provide, Ready, ReplyChunk, Start

KEY, NEXT = "canary-key-4711", "canary-key-0815"
PATIENCE_S = 60.0


@asynccontextmanager
async def worker_of(service: OpenAIService, folder: Path, provision: Provision) -> AsyncIterator[LocalWorker]:
    model = ModelSpec("m", "http", "remote", base_url=service.base_url, api_key="secret:service")
    worker = await LocalExecutor(folder / "workers").start(Start("w1", model, str(folder / "home"), 0, provision))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield worker
    finally:
        worker.kill()
        await worker.wait()


async def answer_to(worker: LocalWorker, text: str, *, stream: bool = False) -> tuple[LiveHead | None, bytes, str]:
    """Head, body and error of a live request."""
    worker.send(AnswerLive(1, chat_request(text, stream=stream)))
    head, body = None, b""
    async for message in worker.messages():
        match message:
            case Head(_, begun):
                head = begun
            case ReplyChunk(_, piece):
                body += piece
            case Answered(_, raised):
                return head, body, raised.message if raised else ""
    raise AssertionError("the worker ended")


async def until_ready(worker: LocalWorker) -> Failed | None:
    async for message in worker.messages():
        if isinstance(message, Ready):
            return None
        if isinstance(message, Failed):
            return message
    raise AssertionError("the worker ended")


async def test_a_changed_secret_reaches_a_running_worker(tmp_path: Path) -> None:
    """The next call after a change is made with the new secret, and the worker stays."""
    async with OpenAIService() as service, worker_of(service, tmp_path, Provision({"secret:service": KEY})) as worker:
        assert await until_ready(worker) is None
        await answer_to(worker, "a")
        worker.send(Provide(Provision({"secret:service": NEXT})))
        await answer_to(worker, "b")
        assert [call.headers["Authorization"] for call in service.calls] == [f"Bearer {KEY}", f"Bearer {NEXT}"]


async def test_a_worker_without_its_secret_says_so(tmp_path: Path) -> None:
    """A worker that was not given the secret its model names fails with its name and what sets it."""
    async with OpenAIService() as service, worker_of(service, tmp_path, Provision()) as worker:
        failed = await until_ready(worker)
        assert failed is not None and failed.code == "missing_secret"
        assert "batchmill secrets set service" in failed.message


async def test_a_service_that_repeats_a_secret_is_not_repeated(tmp_path: Path) -> None:
    """Whatever a service does with the key it was given, callers and logs do not see it: body, error, head, stream."""
    packed = base64.b64encode(f"user:{KEY}".encode()).decode()
    async with OpenAIService() as service, worker_of(service, tmp_path, Provision({"secret:service": KEY})) as worker:
        assert await until_ready(worker) is None
        service.script["told"] = [Answer(200, {"choices": [], "you": KEY, "packed": packed})]
        service.script["refused"] = [refusal(400, "bad", f"bad key {KEY}")]
        service.script["unknown"] = [refusal(401, "bad", f"wrong key {KEY}")]
        service.script["odd"] = [Answer(200, f"<html>{KEY}</html>".encode())]
        said = [await answer_to(worker, each) for each in ("told", "refused", "unknown", "odd")]
        said.append(await answer_to(worker, f"you sent {KEY}", stream=True))
    everything = repr(said) + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in everything and packed not in everything and packed[8:20] not in everything
    assert json.loads(said[0][1]) == {"choices": [], "you": "***", "packed": said[0][1].decode().split('"')[-2]}
    assert b"***" in said[1][1] and "***" in said[2][2] and b"***" in said[4][1]


async def test_an_engine_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """What is wrong with a model is told in its own words, not as a worker that died."""
    model = ModelSpec("m", "provider_batch", "gpt", base_url="http://127.0.0.1:9/v1", engine_args={"nonsense": 1})
    worker = await LocalExecutor(tmp_path / "workers").start(Start("w1", model, str(tmp_path / "home"), 0))
    async with asyncio.timeout(PATIENCE_S):
        failed = await until_ready(worker)
        assert await worker.wait() == 1
    assert failed is not None and failed.code == "unknown_argument" and "'nonsense'" in failed.message
