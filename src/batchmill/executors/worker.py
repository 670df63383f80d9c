"""One process that hosts one engine: `python -m batchmill.executors.worker FD`, FD a socket to the owner.

It holds leases, feeds their rows to the engine and records the outcomes. When the owner goes, so does the worker, with
every finished outcome handed to the kernel first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from batchmill.datasets.sealed import SealedRows
from batchmill.engines import load_engine
from batchmill.errors import BatchmillError, InputChanged, JobPaused, to_storage_error
from batchmill.executors.channel import Channel, open_channel
from batchmill.executors.feed import GrantFeed
from batchmill.executors.leases import OVER, PAUSE, REFUSED, Allowance, Held, NoteClient, OpenJob
from batchmill.executors.live_calls import AnswerSink, Calling
from batchmill.executors.recorder import NO_USAGE, Recorder, empty_rows
from batchmill.models import redaction, secrets
from batchmill.ports import Engine, MortalEngine, PatientEngine
from batchmill.states import PauseReason
from batchmill.store.segments import SegmentFile, SegmentHead
from batchmill.types import Commit, Outcome, Row, RowError
from batchmill.wire import messages
from batchmill.wire.messages import (
    Abandon,
    Ack,
    Allow,
    AnswerLive,
    Drain,
    Failed,
    FailRows,
    FlowCredit,
    FunctionRequests,
    Grant,
    Heartbeat,
    Learn,
    LeaseReleased,
    Noted,
    Open,
    Provide,
    Ready,
    Record,
    Released,
    RequestRows,
    Revoke,
    SetShare,
    Start,
    StorageBroken,
    ToWorker,
)

KEPT_BYTES = 32 * 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_memory() -> None:
    """Give free memory back to the kernel only beyond KEPT_BYTES. Does nothing where the C library is not glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


HEARTBEAT_S = 0.5
STEP_BACK = 5  # of niceness
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED_FOR_ALL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)  # for every writer there
STOP_S = 10.0  # an engine has so long to stop once its owner is gone


class Worker:
    def __init__(self, start: Start, channel: Channel, first: Sequence[memoryview] = ()) -> None:
        """`first`: messages that arrived with `start`."""
        self._name, self._home = start.worker, Path(start.home)
        self._channel, self._first = channel, first
        self._model = start.model
        secrets.take(start.provision)
        self._jobs: dict[str, OpenJob] = {}
        self._rolls: dict[str, int] = {}  # job -> its segments that this worker has written
        self._held: dict[tuple[str, int, int], Held] = {}
        self._engine: Engine = load_engine(start.model, self._home)
        if isinstance(self._engine, MortalEngine):
            self._engine.report_deaths(self._send)
            self._engine.learn(start.poison)
        self._feed = GrantFeed(
            want=lambda job: self._send(RequestRows(job)),
            changed=self._input_changed,
            broken=self._storage_failed,
            suspect=self._home / f"{self._name}.suspect",
        )
        self._recorder = Recorder(
            commit=self._record, settled=self._feed.settled, spent=self._settled, broken=self._storage_failed
        )
        self._answering = AnswerSink(self._engine, self._send, channel.drain)
        self._calling = Calling(self._engine, self._send)
        self._notes = NoteClient(self._send)
        self._owner_gone = asyncio.Event()
        self._failed = False

    async def run(self) -> int:
        """Host the engine until the owner drains or leaves. Returns the exit code."""
        working = asyncio.create_task(self._work())
        background = {asyncio.create_task(each) for each in (self._listen(), self._recorder.run(), self._beat())}
        gone = asyncio.create_task(self._owner_gone.wait())
        await asyncio.wait({working, gone, *background}, return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if not task.done() or (error := task.exception()) is None:
                continue
            if isinstance(error, OSError):
                self._storage_failed(error)
            else:
                self._fail(_failure(error, "the worker"), PauseReason.ENGINE_FAILED)
        if not working.done():
            # The owner died, or this worker cannot go on: what is finished goes to the kernel, where it is found again.
            self._recorder.flush()
            working.cancel()
        self._answering.end()
        for task in (gone, *background):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.stop(), STOP_S)
        return 1 if self._failed else 0

    async def _work(self) -> None:
        try:
            await self._engine.start()
            self._send(Ready(os.getpid()))
            await self._engine.run(self._feed, self._recorder)
            await self._answering.finish()
            await self._calling.finish()
            self._send(Heartbeat(self._engine.stats()))  # what it has counted since the last one
        except JobPaused as error:
            self._fail(error, error.reason)
        except BatchmillError as error:
            self._fail(error, PauseReason.ENGINE_FAILED)
        except Exception as error:  # an engine's own bug: the owner must hear of it before this process ends
            failure = _failure(error, f"the {self._model.engine} engine")
            self._fail(failure, failure.reason if isinstance(failure, JobPaused) else PauseReason.ENGINE_FAILED)
        self._recorder.flush()
        await self._recorder.sync()
        try:
            for job in self._jobs.values():
                job.segment.close()
                job.rows.close()
        except OSError as error:
            self._storage_failed(error)
        with contextlib.suppress(ConnectionError):
            await self._channel.drain()

    def _fail(self, error: BatchmillError, reason: PauseReason) -> None:
        self._failed = True
        self._calling.flush()
        self._send(Failed(error.code, redaction.mask(error.message), reason))

    # -- messages of the owner -----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        decode, receive = messages.to_worker.decode, self._receive
        for data in self._first:
            receive(decode(data))
        while found := await self._channel.read():
            for data in found:
                receive(decode(data))
        self._owner_gone.set()

    def _receive(self, message: ToWorker) -> None:
        match message:
            case FunctionRequests(asks):
                self._calling.begin(asks)
            case Abandon(id_):
                self._answering.abandon(id_)
                self._calling.abandon(id_)
            case Open():
                self._open(message)
            case Grant():
                self._grant(message)
            case Ack(lease, counted=counted):
                if not counted:
                    self._drop_stale(lease.job, lease.generation, lease.shard, lease.epoch)
            case SetShare(job, priority, share, row_cost):
                self._feed.weigh(job, priority=priority, share=share, row_cost=row_cost)
            case Allow(job, usd, is_lean):
                self._allow(job, usd, is_lean=is_lean)
            case FailRows(job):
                if isinstance(self._engine, PatientEngine):
                    self._engine.fail_rows(job)
            case Revoke(job, is_over):
                self._revoke(job, OVER if is_over else PAUSE)
            case Noted():
                self._notes.receive(message)
            case Provide(provision):
                secrets.take(provision)
            case Learn(poison):
                if isinstance(self._engine, MortalEngine):
                    self._engine.learn(poison)
            case AnswerLive():
                self._answering.begin(message)
            case FlowCredit(id_, size):
                self._answering.taken(id_, size)
            case Drain():
                self._feed.end()
            case Start():
                raise AssertionError("a worker is started once")

    def _open(self, message: Open) -> None:
        if message.job in self._jobs:
            known = self._jobs[message.job]
            known.revoked, known.ending, known.allowance = False, "", None
            return
        head = SegmentHead(message.job, message.identity, self._name)
        segment = SegmentFile(Path(message.segments), head, self._rolls.get(message.job, 0))
        self._jobs[message.job] = OpenJob(
            message.job, message.form, SealedRows(Path(message.dataset)), segment, adapters=message.adapters,
            project=message.project,
        )  # fmt: skip

    def _allow(self, job_id: str, usd: float, *, is_lean: bool) -> None:
        """A job has a budget, or more of it for this worker."""
        job, price = self._jobs.get(job_id), self._model.price
        if job is None or price is None:
            return
        if job.allowance is None:
            job.allowance = Allowance(
                job.id, price, has_requests=not self._model.takes_columns, takes_all=self._model.is_handed_over,
                send=self._send,
            )  # fmt: skip
        job.allowance.add(usd, is_lean=is_lean)
        self._feed.unblock(job.id)

    def _settled(self, held: Held, outcomes: list[Outcome]) -> None:
        """Rows of a job with a budget are done."""
        allowance = held.job.allowance
        assert allowance is not None
        if allowance.settle(outcomes):
            self._feed.unblock(held.job.id)

    def _grant(self, grant: Grant) -> None:
        lease = grant.lease
        job = self._jobs[lease.job]
        held = Held(
            lease=lease, job=job, seq=grant.seq, base=grant.base, key=f"{lease.job}-{lease.generation}", undone=grant.n,
            isolated=grant.isolated, ok=empty_rows(), failed=empty_rows(), ok_usage=NO_USAGE, failed_usage=NO_USAGE,
            failures=[], unsent=[], rows=grant.n, noted=dict(grant.notes), lease_host=self,
            ending=OVER if grant.is_over else job.ending,
        )  # fmt: skip
        self._held[lease.job, lease.generation, lease.shard] = held
        if grant.quarantined:
            try:
                grant = self._record_condemned(held, grant)
            except InputChanged as error:
                self._input_changed(job.id, error)
                return
        self._feed.grant(held, grant)
        if job.revoked:
            self._feed.drop(job.id)

    def _record_condemned(self, held: Held, grant: Grant) -> Grant:
        """Rows that killed one worker after another get their error without being run again."""
        positions, numbers = messages.unpack_u32(grant.positions), messages.unpack_u32(grant.rows)
        quarantined = set(grant.quarantined)
        error = RowError("worker_crashed", "the worker died every time it ran this row, and it was given up")
        pairs = list(zip(positions, numbers, strict=True))
        rows = [Row(p, n, held.job.rows.read_many([n])[0], held.job.form, held) for p, n in pairs if p in quarantined]
        self._recorder.put([Outcome(row, error=error, status=0) for row in rows])
        kept = [(p, n) for p, n in pairs if p not in quarantined]
        return messages.replace_rows(grant, kept)

    def _drop_stale(self, job: str, generation: int, shard: int, epoch: int) -> None:
        held = self._held.get((job, generation, shard))
        if held is not None and held.lease.epoch == epoch:
            held.stale = True
            self._feed.drop_lease(held)
            held.end(PAUSE)

    def _revoke(self, job_id: str, how: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            job.revoked, job.ending = True, how
            self._feed.drop(job_id)
            for held in [held for held in self._held.values() if held.job is job]:
                held.end(how)
        self._release_revoked()

    def _release_revoked(self) -> None:
        """Tell the owner of every revoked job of which nothing is in flight any more."""
        for job in [job for job in self._jobs.values() if job.revoked]:
            mine = [held for held in self._held.values() if held.job is job]
            if any(held.undone > 0 and not held.stale and not held.is_left for held in mine):
                continue
            for held in mine:
                self._recorder.flush_lease(held)
            if not all(self._recorder.is_done_with(held) for held in mine):
                continue
            for held in mine:
                del self._held[held.lease.job, held.lease.generation, held.lease.shard]
            self._rolls[job.id] = job.segment.roll
            job.segment.close()
            job.rows.close()
            del self._jobs[job.id]
            if isinstance(self._engine, PatientEngine):
                self._engine.forget(job.id)
            self._send(Released(job.id))

    # -- what engines ask of a lease: executors.held.Desk -------------------------------------------------------------

    async def note(self, held: Held, key: str, data: bytes) -> Noted:
        await self._recorder.settle(held)
        return REFUSED if held.stale else await self._notes.send(held.lease, key, data)

    def leave(self, held: Held) -> None:
        self._feed.drop_lease(held)
        asyncio.get_running_loop().call_soon(self._let_go)

    def fail(self, held: Held, error: JobPaused) -> None:
        self._send(Failed(error.code, redaction.mask(error.message), error.reason, held.lease.job))

    def _let_go(self) -> None:
        """Tell the owner of every lease that was left, once its outcomes have been sent."""
        for place, held in [(place, held) for place, held in self._held.items() if held.is_left]:
            self._recorder.flush_lease(held)
            if self._recorder.is_done_with(held):
                del self._held[place]
                self._send(LeaseReleased(held.lease))
        self._release_revoked()

    # -- what the worker says -----------------------------------------------------------------------------------------

    def _send(self, message: Struct) -> None:
        self._channel.send(message)

    def _record(self, commit: Commit) -> None:
        self._send(Record(commit))
        lease = commit.lease
        held = self._held.get((lease.job, lease.generation, lease.shard))
        if held is not None and held.is_cut and held.undone == 0:
            held.is_left = True  # its other rows go back to the owner
        elif held is not None and held.undone == 0 and not held.unsent and not held.job.revoked:
            del self._held[lease.job, lease.generation, lease.shard]
        if held is not None and (held.job.revoked or held.is_left):
            asyncio.get_running_loop().call_soon(self._let_go)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(
                HEARTBEAT_S if not any(job.revoked for job in self._jobs.values()) else HEARTBEAT_S / 10
            )
            self._send(Heartbeat(self._engine.stats()))
            for job in self._jobs.values():
                if job.allowance is not None:
                    job.allowance.look()
            self._calling.beat()
            self._let_go()

    def _input_changed(self, job_id: str, error: InputChanged) -> None:
        self._send(Failed(error.code, error.message, error.reason, job_id))

    def _storage_failed(self, error: OSError) -> None:
        """No byte after a failed write or sync is ever referenced: say so and end at once.

        Another worker has another segment: only where that would fail in the same way the model's jobs stop.
        """
        detail = f"the files of a job cannot be read or written: {error}"
        if error.errno in FULL:
            self._send(Failed("storage_full", detail, PauseReason.STORAGE_FULL))
        elif error.errno in REFUSED_FOR_ALL:
            self._send(Failed("storage_failed", detail, PauseReason.STORAGE_FAILED))
        else:
            self._send(StorageBroken(detail))
        self._failed = True
        self._feed.end()
        self._owner_gone.set()


def _failure(error: BaseException, who: str) -> BatchmillError:
    """Our own bug as an error for the owner; the traceback goes to the worker's log."""
    redaction.print_exception(error)
    if isinstance(error, OSError) and (of_machine := to_storage_error(error)) is not None:
        return of_machine
    return BatchmillError(f"{who} failed: {type(error).__name__}: {error}", code="engine_bug")


def _step_back() -> None:
    """Rows may wait a moment for the owner and its callers: it decides and commits for all.

    Where the kernel groups processes by session, as most desktops do, it is the group's place that counts.
    """
    os.nice(STEP_BACK)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(STEP_BACK))


async def main(fd: int) -> int:
    """Speak to the owner on socket `fd` until it is over."""
    keep_memory()
    os.set_inheritable(fd, False)  # what user code starts does not hold it
    channel = await open_channel(socket.socket(fileno=fd))
    found = await channel.read()
    if not found:
        return 0
    start = messages.to_worker.decode(found[0])
    assert isinstance(start, Start)
    secrets.take(start.provision)
    redaction.guard_logs()
    os.environ["BATCHMILL_REPLICA"] = str(start.replica)  # engines split the machine's devices by it
    try:
        traits = start.model.traits
        if start.model.limits.memory_bytes is not None and not traits.limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (start.model.limits.memory_bytes,) * 2)
        if not traits.starts_process:
            _step_back()
        worker = Worker(start, channel, found[1:])
    except Exception as error:  # of an engine that cannot be made: the owner must hear why
        failure = error if isinstance(error, BatchmillError) else _failure(error, f"the {start.model.engine} engine")
        reason = failure.reason if isinstance(failure, JobPaused) else PauseReason.ENGINE_FAILED
        channel.send(Failed(failure.code, redaction.mask(failure.message), reason))
        await channel.drain()
        channel.close()
        return 1
    code = await worker.run()
    channel.close()
    return code


if __name__ == "__main__":
    exit_code = asyncio.run(main(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that still runs user code must not keep the process alive
