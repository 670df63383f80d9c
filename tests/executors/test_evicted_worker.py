"""A worker whose node is going away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from fakes.openai_service import OpenAIService
from msgspec import Struct

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal
from batchmill.executors.worker import Worker
from batchmill.types import DatasetSpec, Lease, ModelSpec, SegmentPlace
from batchmill.wire import messages
from batchmill.wire.messages import Ack, Failed, Grant, Open, Ready, Record, Start, ToWorker
from batchmill.wire.rows.forms import OpenAIForm

ROWS, HELD = 20, 8
PATIENCE_S = 60.0


class Channel:
    """Keeps what the worker sends, and gives it what the test says."""

    heartbeat_s = idle_heartbeat_s = commit_pace_s = fast_commit_pace_s = ahead_s = 0.0
    grants_max = 1

    def __init__(self) -> None:
        self.sent: list[Struct] = []
        self.to_worker: asyncio.Queue[Struct] = asyncio.Queue()

    def send(self, message: Struct) -> None:
        self.sent.append(message)
        if isinstance(message, Record):
            commit = message.commit
            self.to_worker.put_nowait(Ack(commit.lease, commit.seq, True, commit.ref))

    def complete(self, message: ToWorker) -> ToWorker:
        return message

    async def read(self) -> list[memoryview]:
        return [memoryview(messages.encode(await self.to_worker.get()))]

    async def drain(self) -> None:
        """It is never full."""

    def of(self, kind: type) -> list:
        return [each for each in self.sent if isinstance(each, kind)]


def sealed(folder: Path, *, is_small: bool = False) -> Open:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": f"text {n}"}]} for n in range(ROWS)]
    lines = [{"custom_id": f"r{n}", "url": "/v1/chat/completions", "body": body} for n, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("dataset", "segments"):
        (folder / name).mkdir()
    seal(SealOrder(DatasetSpec([str(folder / "in.jsonl")])), folder / "dataset", lambda _: None)
    place = SegmentPlace(str(folder / "segments"))
    return Open("job_1", "same", OpenAIForm(), str(folder / "dataset"), place, is_small)


async def evicted(opened: Open, folder: Path) -> Channel:
    """What a worker sent that was evicted in the middle of its rows, whose commits are acknowledged."""
    (folder / "home").mkdir()
    async with OpenAIService() as service, asyncio.timeout(PATIENCE_S):
        service.held = {f"text {n}" for n in range(ROWS - HELD, ROWS)}
        channel = Channel()
        model = ModelSpec("m", "http", "remote", base_url=service.base_url)
        worker = Worker(Start("w1", model, str(folder / "home")), channel)
        running = asyncio.create_task(worker.run())
        while not channel.of(Ready):
            await asyncio.sleep(0)
        for message in (opened, Grant(Lease("job_1", 0, 0, 1), 0, 0, ROWS)):
            channel.to_worker.put_nowait(message)
        recorder = worker._recorder
        while service.waiting < HELD or not (recorder._buffered or recorder._written or channel.of(Record)):
            await asyncio.sleep(0)
        worker.evict()
        assert await running == 0
    assert channel.of(Failed) == []
    return channel


async def test_what_is_finished_is_committed(tmp_path: Path) -> None:
    """Every outcome that an evicted worker has written is in a commit."""
    channel = await evicted(sealed(tmp_path), tmp_path)
    commits = [each.commit for each in channel.of(Record)]
    assert 0 < sum(each.rows_ok for each in commits) <= ROWS - HELD
    (segment,) = (tmp_path / "segments").iterdir()
    assert max(each.ref.offset + each.ref.length for each in commits) == segment.stat().st_size


async def test_commits_of_a_small_job_carry_what_is_finished(tmp_path: Path) -> None:
    """The blocks of an evicted worker's commits travel with them: none names a file."""
    channel = await evicted(sealed(tmp_path, is_small=True), tmp_path)
    commits = [each.commit for each in channel.of(Record)]
    assert 0 < sum(each.rows_ok for each in commits) <= ROWS - HELD
    assert all(len(each.blocks) == each.ref.length for each in commits)
    assert list((tmp_path / "segments").iterdir()) == []
