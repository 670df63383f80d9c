"""What every executor promises: subclass ExecutorSuite and give it an executor."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal
from batchmill.ports import Executor, WorkerHandle
from batchmill.store.segments import read_ref
from batchmill.types import DatasetSpec, Lease, ModelSpec
from batchmill.wire.forms import OpenAIForm
from batchmill.wire.messages import (
    Ack,
    Drain,
    Failed,
    Grant,
    Heartbeat,
    Open,
    Ready,
    Record,
    Released,
    Revoke,
    Start,
    Want,
)

ROWS = 50


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
        worker.send(Open("job_1", "same", OpenAIForm(), str(tmp_path / "dataset"), str(tmp_path / "segments")))

    @staticmethod
    async def hear(worker: WorkerHandle, kind: type) -> object:
        """The next message of a kind; others before it are passed over."""
        async for message in worker.messages():
            if isinstance(message, kind):
                return message
            assert isinstance(message, Heartbeat | Want | Ready | Record | Released), message
        raise AssertionError(f"the worker ended before it said {kind.__name__}")

    async def test_a_grant_becomes_a_durable_commit(self, executor, start, tmp_path):
        """Granted rows come back as one commit whose segment holds their outcomes; drained, the worker exits with 0."""
        worker = await executor.start(start)
        ready = await self.hear(worker, Ready)
        assert ready.pid == worker.pid
        self.open_job(worker, tmp_path)
        lease = Lease("job_1", 0, 0, 1)
        worker.send(Grant(lease, 0, 0, ROWS))
        record = await self.hear(worker, Record)
        commit = record.commit
        assert (commit.lease, commit.rows_ok, commit.rows_failed) == (lease, ROWS, 0)
        assert [row for block in read_ref(tmp_path / "segments", commit.ref) for row in block.rows()] == list(
            range(ROWS)
        )
        worker.send(Ack(lease, commit.seq, True))
        worker.send(Drain())
        assert [message async for message in worker.messages() if isinstance(message, Failed)] == []
        assert await worker.wait() == 0

    async def test_a_revoked_job_is_released(self, executor, start, tmp_path):
        """After a Revoke the worker says when nothing of the job is in its hands any more."""
        worker = await executor.start(start)
        await self.hear(worker, Ready)
        self.open_job(worker, tmp_path)
        worker.send(Grant(Lease("job_1", 0, 0, 1), 0, 0, ROWS))
        worker.send(Revoke("job_1"))
        released = await self.hear(worker, Released)
        assert released.job == "job_1"
        worker.kill()
        await worker.wait()

    async def test_a_model_that_cannot_start_is_told(self, executor, start, tmp_path):
        """A worker whose model cannot be loaded says why, and ends."""
        broken = Start("w2", ModelSpec("gone", "function", f"{tmp_path / 'app.py'}:gone"), str(tmp_path / "home"))
        worker = await executor.start(broken)
        failed = await self.hear(worker, Failed)
        assert "gone" in failed.message and failed.job is None
        assert await worker.wait() != 0

    async def test_a_killed_worker_is_noticed(self, executor, start):
        """The messages of a worker that was killed end, and its end is told as the signal's."""
        worker = await executor.start(start)
        await self.hear(worker, Ready)
        worker.kill()
        async for _ in worker.messages():
            pass
        assert await worker.wait() == -signal.SIGKILL

    async def test_a_stopped_worker_is_frozen(self, executor, start):
        """A worker that a signal stopped is told apart from one that is only slow."""
        worker = await executor.start(start)
        await self.hear(worker, Ready)
        assert not worker.is_frozen()
        os.kill(worker.pid, signal.SIGSTOP)
        while not worker.is_frozen():
            pass
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL

    async def test_what_a_dead_owner_left_is_swept(self, executor, start):
        """Sweeping ends the workers that are still there."""
        worker = await executor.start(start)
        await self.hear(worker, Ready)
        executor.sweep()
        assert await worker.wait() == -signal.SIGKILL
