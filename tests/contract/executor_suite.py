"""What every executor promises: subclass ExecutorSuite and give it an executor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal
from batchmill.ports.executors import Executor, WorkerHandle
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.segments.format import read_ref
from batchmill.types import DatasetSpec, Lease, LiveRequest, ModelSpec, SegmentPlace
from batchmill.wire.messages import (
    LIVE_AHEAD_BYTES,
    Abandon,
    Ack,
    Answered,
    AnswerLive,
    Answers,
    Drain,
    Failed,
    FlowCredit,
    Grant,
    Head,
    Heartbeat,
    Open,
    Ready,
    Record,
    Released,
    ReplyChunk,
    RequestRows,
    Revoke,
    Start,
)
from batchmill.wire.rows.forms import OpenAIForm

ROWS = 50
# A library may fork without calling Python's hooks.
FORKS = """
import ctypes, os, time
from pathlib import Path

pid = ctypes.CDLL(None).fork()
if pid == 0:
    time.sleep(600)
    os._exit(0)
Path(__file__).with_name("forked").write_text(str(pid))

def double(n):
    return 2 * n
"""


def is_there(pid: int) -> bool:
    """The process lives: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class ExecutorSuite:
    @pytest.fixture
    def executor(self, tmp_path: Path) -> Executor:
        """The executor under test."""
        raise AssertionError("a suite gives its own executor")

    @pytest.fixture
    def start(self, tmp_path: Path) -> Start:
        """A worker over a function that doubles, and a sealed dataset for it in tmp_path."""
        (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
        rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for folder in ("dataset", "segments"):
            (tmp_path / folder).mkdir()
        seal(SealOrder(DatasetSpec([str(tmp_path / "in.jsonl")])), tmp_path / "dataset", lambda _: None)
        return Start("w1", ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double"), str(tmp_path / "home"))

    @staticmethod
    def open_job(worker: WorkerHandle, tmp_path: Path) -> None:
        segments = SegmentPlace(str(tmp_path / "segments"))
        worker.send(Open("job_1", "same", OpenAIForm(), str(tmp_path / "dataset"), segments))

    @staticmethod
    async def expect(worker: WorkerHandle, kind: type) -> object:
        """The next message of a kind; others before it are passed over."""
        async for message in worker.messages():
            if isinstance(message, kind):
                return message
            assert isinstance(message, Heartbeat | RequestRows | Ready | Record | Released | Answers), message
        raise AssertionError(f"the worker ended before it said {kind.__name__}")

    @staticmethod
    async def until(worker: WorkerHandle, kind: type) -> AsyncIterator[object]:
        """What a worker says of live requests, up to the first message of a kind."""
        async for message in worker.messages():
            if isinstance(message, Head | ReplyChunk | Answered):
                yield message
            if isinstance(message, kind):
                return

    async def expect_live(self, worker: WorkerHandle, kind: type = ReplyChunk) -> object:
        """The next message of a kind among those about live requests."""
        return [message async for message in self.until(worker, kind)][-1]

    async def test_a_grant_becomes_a_durable_commit(self, executor, start, tmp_path):
        """Granted rows come back as one commit whose segment holds their outcomes; drained, the worker exits with 0."""
        worker = await executor.start(start)
        ready = await self.expect(worker, Ready)
        assert ready.pid == worker.pid
        self.open_job(worker, tmp_path)
        lease = Lease("job_1", 0, 0, 1)
        worker.send(Grant(lease, 0, 0, ROWS))
        record = await self.expect(worker, Record)
        commit = record.commit
        assert (commit.lease, commit.rows_ok, commit.rows_failed) == (lease, ROWS, 0)
        assert [
            row for block in read_ref(SegmentFolder(tmp_path / "segments"), commit.ref) for row in block.rows()
        ] == list(range(ROWS))
        worker.send(Ack(lease, commit.seq, True, commit.ref))
        worker.send(Drain())
        assert [message async for message in worker.messages() if isinstance(message, Failed)] == []
        assert await worker.wait() == 0

    async def test_a_revoked_job_is_released(self, executor, start, tmp_path):
        """After a Revoke the worker says when nothing of the job is in its hands any more."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        self.open_job(worker, tmp_path)
        worker.send(Grant(Lease("job_1", 0, 0, 1), 0, 0, ROWS))
        worker.send(Revoke("job_1"))
        released = await self.expect(worker, Released)
        assert released.job == "job_1"
        worker.kill()
        await worker.wait()

    async def test_live_requests_are_answered_beside_rows(self, executor, start, tmp_path):
        """A live request is answered by a worker that runs rows: a head, the body, the end, under the number it has."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        self.open_job(worker, tmp_path)
        worker.send(Grant(Lease("job_1", 0, 0, 1), 0, 0, ROWS))
        worker.send(AnswerLive(7, LiveRequest("/v1/x", b'{"n": 21}')))
        said = [message async for message in self.until(worker, Answered)]
        heads = [message for message in said if isinstance(message, Head)]
        assert [(each.id, each.head.status) for each in heads] == [(7, 200)]
        assert b"".join(message.data for message in said if isinstance(message, ReplyChunk)) == b"42"
        assert said[-1] == Answered(7)
        worker.kill()
        await worker.wait()

    async def test_a_live_request_that_fails_says_why(self, executor, start):
        """What the engine raised comes back with its code, and the worker answers the next one."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        worker.send(AnswerLive(1, LiveRequest("/v1/x", b'{"m": 21}')))
        failed = [message async for message in self.until(worker, Answered)][-1]
        assert failed.raised is not None and failed.raised.code == "missing_argument"
        worker.send(AnswerLive(2, LiveRequest("/v1/x", b'{"n": 1}')))
        assert [message async for message in self.until(worker, Answered)][-1] == Answered(2)
        worker.kill()
        await worker.wait()

    async def test_an_answer_waits_for_its_reader(self, executor, start, tmp_path):
        """A worker runs no further ahead of its reader than agreed; what was abandoned is answered no more."""
        (tmp_path / "app.py").write_text("def double(n):\n    return 'x' * n\n")
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        size = 3 * LIVE_AHEAD_BYTES
        worker.send(AnswerLive(1, LiveRequest("/v1/x", b'{"n": %d}' % size)))
        worker.send(AnswerLive(2, LiveRequest("/v1/x", b'{"n": 1}')))
        said = [message async for message in self.until(worker, Answered)]
        assert said[-1] == Answered(2)  # the first cannot end
        received = sum(len(message.data) for message in said if isinstance(message, ReplyChunk) and message.id == 1)
        worker.send(FlowCredit(1, received))
        while received < size:
            chunk = await self.expect_live(worker)
            received += len(chunk.data)
            worker.send(FlowCredit(1, len(chunk.data)))
        worker.send(AnswerLive(3, LiveRequest("/v1/x", b'{"n": %d}' % size)))
        await self.expect_live(worker, Head)
        worker.send(Abandon(3))
        worker.send(AnswerLive(4, LiveRequest("/v1/x", b'{"n": 1}')))
        assert 3 not in {message.id async for message in self.until(worker, Answered) if isinstance(message, Answered)}
        worker.kill()
        await worker.wait()

    async def test_a_model_that_cannot_start_is_told(self, executor, start, tmp_path):
        """A worker whose model cannot be loaded says why, and ends."""
        broken = Start("w2", ModelSpec("gone", "function", f"{tmp_path / 'app.py'}:gone"), str(tmp_path / "home"))
        worker = await executor.start(broken)
        failed = await self.expect(worker, Failed)
        assert "gone" in failed.message and failed.job is None
        assert await worker.wait() != 0

    async def test_a_killed_worker_is_noticed(self, executor, start):
        """The messages of a worker that was killed end, and its end is told as the signal's."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        worker.kill()
        async for _ in worker.messages():
            pass
        assert await worker.wait() == -signal.SIGKILL

    async def test_what_a_worker_forked_keeps_nobody_waiting(self, executor, start, tmp_path):
        """A worker that dies while a process it forked holds its socket has gone, and what it forked goes with it."""
        (tmp_path / "app.py").write_text(FORKS)
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        os.kill(worker.pid, signal.SIGKILL)
        async for _ in worker.messages():
            pass
        assert await worker.wait() == -signal.SIGKILL
        forked = int((tmp_path / "forked").read_text())
        while is_there(forked):
            await asyncio.sleep(0.001)

    async def test_a_stopped_worker_is_frozen(self, executor, start):
        """A worker that a signal stopped is told apart from one that is only slow."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        assert not worker.is_frozen()
        os.kill(worker.pid, signal.SIGSTOP)
        while not worker.is_frozen():
            await asyncio.sleep(0.001)
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL

    async def test_what_a_dead_owner_left_is_swept(self, executor, start):
        """Sweeping ends the workers that are still there."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        executor.sweep()
        assert await worker.wait() == -signal.SIGKILL
