"""One process that hosts one engine: `python -m batchmill.executors.worker ENGINE FD …`, FD a socket to the owner.

It holds leases, feeds their rows to the engine and records the outcomes. When the owner ends, the worker writes every
finished outcome to its segment and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from batchmill.datasets.folders import MemoryFolder
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import DatasetRows, load_seal, moved
from batchmill.engines import import_engine, load_engine
from batchmill.errors import BatchmillError, JobPaused
from batchmill.executors.channel import WorkerChannel, open_channel
from batchmill.executors.feed import GrantFeed
from batchmill.executors.leases import OVER, PAUSE, REFUSED, Allowance, Held, NoteClient, OpenJob, OwnerTerm
from batchmill.executors.live_calls import AnswerSink, Calling
from batchmill.executors.recorder import NO_USAGE, Recorder, empty_rows
from batchmill.executors.reply_checks import ReplyChecks
from batchmill.executors.validators.validators import Validators
from batchmill.executors.worker_process import as_failure, failed_start, lower_priority, set_up_memory, take_start
from batchmill.function_runtime.shared_memory import MemoryPair
from batchmill.models import redaction, secrets, worker_environment
from batchmill.object_store.credentials import has_credentials, joined
from batchmill.optional import require
from batchmill.owner_term import PrefixTerm, now_s
from batchmill.part_files import make_folder
from batchmill.ports.engines import CrashReportingEngine, Engine, Prepared, PreparingEngine, RetryingEngine
from batchmill.ports.storage import SegmentSink
from batchmill.states import PauseReason
from batchmill.store.segments.blocks import CarriedSegments
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import SegmentHead
from batchmill.types import Commit, Outcome, Row, RowError, Usage
from batchmill.types.connectors import Storage
from batchmill.types.engine_traits import traits_of
from batchmill.wire import messages
from batchmill.wire.media_tokens import MediaTokens
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
    Renewed,
    RequestRows,
    Revoke,
    SetShare,
    Start,
    StorageBroken,
    ToWorker,
)

if TYPE_CHECKING:
    from batchmill.store.segments.objects import ObjectSegments

COMMIT_PACE_S = 1.0  # of a worker that puts objects: a commit is an object, which costs money
HEARTBEAT_S = 0.5
SLOW_ROWS = 1024  # that end between two commits: rows that end faster are fast ones
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED_FOR_ALL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)  # a retry fails in the same way
ACKNOWLEDGE_S = 5.0  # for the owner to decide on the last commits; what it has not is written to a file
STOP_S = 10.0  # for an engine to stop once its owner has ended
EVICT_S = 10.0  # for a worker whose node goes away to commit what is finished


class Worker:
    def __init__(self, start: Start, channel: WorkerChannel, first: Sequence[memoryview] = ()) -> None:
        """`first`: messages that arrived with `start`."""
        self._name, self._home = start.worker, Path(start.home)
        self._channel, self._first = channel, first
        self._model = start.model
        secrets.take(start.provision)
        self._jobs: dict[str, OpenJob] = {}
        self._carried = CarriedSegments()
        self._rolls: dict[str, int] = {}  # job -> number of segments that this worker has written
        self._held: dict[tuple[str, int, int], Held] = {}
        self._engine: Engine = load_engine(start.model, self._home)
        if isinstance(self._engine, CrashReportingEngine):
            self._engine.report_deaths(self._send)
            self._engine.learn(start.poison)
        # One that must hear from its owner sends every heartbeat.
        is_limited = start.is_owned_for_a_time or start.is_stored_for_a_time
        self._heartbeat_s, self._idle_heartbeat_s = (
            (0.0, 0.0) if is_limited else (channel.heartbeat_s, channel.idle_heartbeat_s)
        )
        self._term = OwnerTerm(now_s, is_limited=start.is_owned_for_a_time)
        self._storage_term = PrefixTerm(self._term, 0.0 if start.is_stored_for_a_time else math.inf)
        self._validators = Validators(lambda jobs: self._feed.hold_answers(jobs))
        self._feed = GrantFeed(
            want=lambda job, grants: self._send(RequestRows(job, grants)),
            failed=self._input_failed,
            broken=self._storage_failed,
            suspect=self._home / f"{self._name}.suspect",
            may_begin=lambda: not self._term.is_over(),
            grants_max=1 if start.model.is_handed_over else channel.grants_max,
            ahead_s=0.0 if start.model.is_handed_over else channel.ahead_s,
        )
        self._objects = _open_objects(start.provision.storage, self._storage_term)
        self._recorder = Recorder(
            commit=self._record, settled=self._feed.settled, spent=self._settled, broken=self._storage_failed,
            refused=self.fail, pace_s=self._commit_pace_s,
            until_owned=None if self._objects is None else self._term.until_valid,
        )  # fmt: skip
        checks = ReplyChecks(
            self._feed, self._recorder, asks_again=not start.model.is_handed_over, validators=self._validators,
            failed=self._input_failed,
        )  # fmt: skip
        self._sink = self._recorder if start.model.takes_columns else checks
        self._answering = AnswerSink(self._engine, self._send, channel.drain)
        self._calling = Calling(self._engine, self._send)
        self._notes = NoteClient(self._send)
        self._owner_gone = asyncio.Event()
        self._failed = self._is_evicted = False

    def adopt(self, prepared: Prepared) -> None:
        """Give the engine what was started ahead for it. Called before `run`."""
        assert isinstance(self._engine, PreparingEngine), "a worker is started for one engine"
        self._engine.adopt(prepared)

    async def run(self) -> int:
        """Host the engine until the owner drains or leaves. Returns the exit code."""
        working = asyncio.create_task(self._work())
        background = {asyncio.create_task(each) for each in (self._listen(), self._recorder.run(), self._beat())}
        owner_gone = asyncio.create_task(self._owner_gone.wait())
        await asyncio.wait({working, owner_gone, *background}, return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if not task.done() or (error := task.exception()) is None:
                continue
            if isinstance(error, OSError):
                self._storage_failed(error)
            else:
                self._fail(as_failure(error, "the worker"), PauseReason.ENGINE_FAILED)
        if not working.done():
            # The owner died, or this worker cannot continue: write finished outcomes for the next owner.
            self._recorder.flush()
            working.cancel()
            if self._is_evicted or self._channel.is_on_node:
                await self._commit_finished()  # its owner is there, or nobody finds what is only on this node's disk
                await self._carried.wait_acknowledged(ACKNOWLEDGE_S)
            self._spill()
        self._answering.end()
        for task in (owner_gone, *background):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.stop(), STOP_S)
        await self._validators.close()
        return 1 if self._failed else 0

    def evict(self) -> None:
        """Its node is going away: begin no row, commit what is finished, and end."""
        self._is_evicted = True
        self._owner_gone.set()

    async def _commit_finished(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVICT_S):
                for held in list(self._held.values()):
                    await self._recorder.settle(held)

    async def _work(self) -> None:
        try:
            await self._engine.start()
            self._send(Ready(os.getpid()))
            await self._engine.run(self._feed, self._sink)
            await self._answering.finish()
            await self._calling.finish()
            self._send(Heartbeat(self._engine.stats()))  # with the counts since the last one
        except JobPaused as error:
            self._fail(error, error.reason)
        except BatchmillError as error:
            self._fail(error, PauseReason.ENGINE_FAILED)
        except Exception as error:  # a bug of the engine: the owner must get the error before this process ends
            failure = as_failure(error, f"the {self._model.engine} engine")
            self._fail(failure, failure.reason if isinstance(failure, JobPaused) else PauseReason.ENGINE_FAILED)
        await self._validators.finish()
        self._recorder.flush()
        await self._recorder.sync()
        await self._carried.wait_acknowledged(ACKNOWLEDGE_S)
        self._spill()
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

    # -- messages of the owner ----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        decode, complete, receive = messages.to_worker.decode, self._channel.complete, self._receive
        for data in self._first:
            receive(complete(decode(data)))
        while received := await self._channel.read():
            for data in received:
                receive(complete(decode(data)))
        self._owner_gone.set()

    def _receive(self, message: ToWorker) -> None:
        match message:
            case FunctionRequests(requests):
                self._calling.begin(requests)
            case Abandon(id_):
                self._answering.abandon(id_)
                self._calling.abandon(id_)
            case Open():
                self._open(message)
            case Grant():
                self._grant(message)
            case Ack():
                self._acknowledged(message)
            case SetShare(job, priority, share, row_cost):
                self._feed.weigh(job, priority=priority, share=share, row_cost=row_cost)
            case Allow():
                self._allow(message)
            case FailRows(job):
                if isinstance(self._engine, RetryingEngine):
                    self._engine.fail_rows(job)
            case Revoke(job, is_over, over):
                self._revoke(job, OVER if is_over else PAUSE, over)
            case Noted():
                self._notes.receive(message)
            case Provide(provision):
                secrets.take(provision)
            case Learn(poison):
                if isinstance(self._engine, CrashReportingEngine):
                    self._engine.learn(poison)
            case AnswerLive():
                self._answering.begin(message)
            case FlowCredit(id_, size):
                self._answering.add_credit(id_, size)
            case Renewed():
                self._storage_term.renew(message.at + message.storage_left_s, message.storage_refusal)
                if self._term.renew(message):
                    self._feed.wake()
            case Drain():
                self._feed.end()
            case Start():
                raise AssertionError("a worker is started once")

    def _acknowledged(self, ack: Ack) -> None:
        lease = ack.lease
        if not ack.counted:
            self._drop_stale(lease.job, lease.generation, lease.shard, lease.epoch)
            try:
                self._carried.spill_refused(lease.job, ack.ref)
            except OSError as error:
                self._storage_failed(error)
        self._carried.acknowledge(lease.job, ack.ref, is_open=lease.job in self._jobs)

    def _spill(self) -> None:
        """Write the outcomes that the owner has not acknowledged to files, for the next owner."""
        try:
            self._carried.spill()
        except OSError as error:
            self._storage_failed(error)

    def _open_segment(self, folder: Path, head: SegmentHead, roll: int) -> SegmentFile:
        if self._objects is not None:
            return self._objects.segment(folder, head, roll, is_spool=self._channel.is_on_node)
        make_folder(folder)  # a small job has none
        return SegmentFile(folder, head, roll)

    def _open(self, message: Open) -> None:
        if message.job in self._jobs:
            job = self._jobs[message.job]
            job.revoked, job.ending, job.over, job.allowance = False, "", "", None
            job.form, job.replies = message.form, message.replies
            return
        head, roll = SegmentHead(message.job, message.identity, self._name), self._rolls.get(message.job, 0)
        open_file = partial(self._open_segment, Path(message.segments.folder), head)
        segment: SegmentSink = self._carried.open(head, open_file, roll) if message.is_small else open_file(roll)
        self._jobs[message.job] = OpenJob(
            message.job, message.form, _open_rows(message), segment, adapters=message.adapters, project=message.project,
            replies=message.replies, media=message.media,
        )  # fmt: skip

    def _allow(self, message: Allow) -> None:
        """Add to the budget that this worker has for a job."""
        job, price = self._jobs.get(message.job), self._model.price
        if job is None or price is None:
            return
        if job.allowance is None:
            job.allowance = Allowance(
                job.id, price, has_requests=not self._model.takes_columns, takes_all=self._model.is_handed_over,
                attempts=0 if job.form.schema is None or self._model.is_handed_over else job.form.schema.attempts,
                send=self._send, media=MediaTokens(self._model),
            )  # fmt: skip
        job.allowance.add(message.usd, is_lean=message.is_lean, is_reply=message.is_reply)
        self._feed.unblock(job.id)

    def _settled(self, held: Held, outcomes: list[Outcome]) -> None:
        """Settle finished rows of a job with a budget."""
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
            ending=OVER if grant.is_over else job.ending, over=grant.over or job.over,
        )  # fmt: skip
        self._held[lease.job, lease.generation, lease.shard] = held
        if grant.quarantined:
            try:
                grant = self._record_quarantined(held, grant)
            except JobPaused as error:
                self._input_failed(job.id, error)
                return
        self._feed.grant(held, grant)
        if job.revoked:
            self._feed.drop(job.id)

    def _record_quarantined(self, held: Held, grant: Grant) -> Grant:
        """Record errors for rows that killed several workers. Returns the grant of the other rows."""
        positions, numbers = messages.unpack_u32(grant.positions), messages.unpack_u32(grant.rows)
        quarantined = set(grant.quarantined)
        error = RowError("worker_crashed", "the worker died every time it ran this row, and it was given up")
        pairs = list(zip(positions, numbers, strict=True))
        rows = [Row(p, n, held.job.rows.read_many([n])[0], held.job.form, held) for p, n in pairs if p in quarantined]
        self._recorder.put([Outcome(row, error=error, status=0) for row in rows])
        others = [(p, n) for p, n in pairs if p not in quarantined]
        return messages.replace_rows(grant, others)

    def _drop_stale(self, job: str, generation: int, shard: int, epoch: int) -> None:
        held = self._held.get((job, generation, shard))
        if held is not None and held.lease.epoch == epoch:
            held.stale = True
            self._feed.drop_lease(held)
            held.end(PAUSE)

    def _revoke(self, job_id: str, how: str, over: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            job.revoked, job.ending, job.over = True, how, over
            self._feed.drop(job_id)
            for held in [held for held in self._held.values() if held.job is job]:
                held.end(how, over)
        self._release_revoked()

    def _release_revoked(self) -> None:
        """Report to the owner every revoked job that has no row in flight."""
        for job in [job for job in self._jobs.values() if job.revoked]:
            # A pause does not wait for rows that wait for their service, or that cannot be validated.
            for part in (self._engine, self._sink):
                for row in part.give_back(job.id) if isinstance(part, RetryingEngine | ReplyChecks) else ():
                    self._feed.ask_again(row)
            leases = [held for held in self._held.values() if held.job is job]
            if any(held.undone > 0 and not held.stale and not held.is_left for held in leases):
                continue
            for held in leases:
                self._recorder.flush_lease(held)
            if not all(self._recorder.is_done_with(held) for held in leases):
                continue
            for held in leases:
                del self._held[held.lease.job, held.lease.generation, held.lease.shard]
            self._rolls[job.id] = job.segment.roll
            job.segment.close()
            job.rows.close()
            del self._jobs[job.id]
            self._carried.forget(job.id)
            if isinstance(self._engine, RetryingEngine):
                self._engine.forget(job.id)
            self._send(Released(job.id))

    # -- leases: `LeaseHost` ------------------------------------------------------------------------------------------

    async def note(self, held: Held, key: str, data: bytes) -> Noted:
        await self._recorder.settle(held)
        return REFUSED if held.stale else await self._notes.send(held.lease, key, data)

    def count_misfits(self, held: Held, tag: str, misfits: Mapping[int, Usage]) -> None:
        self._recorder.put_misfits(held, tag, misfits)

    async def until_owned(self) -> None:
        await self._term.until_valid()

    def leave(self, held: Held) -> None:
        self._feed.drop_lease(held)
        asyncio.get_running_loop().call_soon(self._release_left)

    def fail(self, held: Held, error: JobPaused) -> None:
        self._send(Failed(error.code, redaction.mask(error.message), error.reason, held.lease.job))

    def _release_left(self) -> None:
        """Report to the owner every lease that was left, once its outcomes have been sent."""
        for key, held in [(key, held) for key, held in self._held.items() if held.is_left]:
            self._recorder.flush_lease(held)
            if self._recorder.is_done_with(held):
                del self._held[key]
                self._send(LeaseReleased(held.lease))
        self._release_revoked()

    # -- messages to the owner ----------------------------------------------------------------------------------------

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
            asyncio.get_running_loop().call_soon(self._release_left)

    def _commit_pace_s(self, rows: int) -> float:
        """How long so many rows that have ended can wait for others to be committed with. The last ones do not wait."""
        if self._objects is not None:
            return COMMIT_PACE_S
        pace_s = self._channel.commit_pace_s if rows < SLOW_ROWS else self._channel.fast_commit_pace_s
        return pace_s if any(held.undone for held in self._held.values()) else 0.0

    async def _beat(self) -> None:
        if self._storage_term.is_over():  # it begins nothing before the reply, or puts nothing
            self._send(Heartbeat(self._engine.stats(), now_s()))
        sent, sent_at, counted_at = None, 0.0, 0.0
        while True:
            await asyncio.sleep(
                HEARTBEAT_S if not any(job.revoked for job in self._jobs.values()) else HEARTBEAT_S / 10
            )
            stats, now = self._engine.stats(), now_s()
            silent_s = now - sent_at
            is_due = silent_s >= (self._heartbeat_s if stats != sent else self._idle_heartbeat_s)
            if stats.adapters or is_due:
                self._send(Heartbeat(stats, now))
                sent, sent_at = stats, now
            for job in self._jobs.values():
                if job.allowance is not None:
                    job.allowance.return_unused()
            if now - counted_at >= self._heartbeat_s:
                self._calling.beat()
                counted_at = now
            self._release_left()

    def _input_failed(self, job_id: str, error: JobPaused) -> None:
        self._send(Failed(error.code, error.message, error.reason, job_id))

    def _storage_failed(self, error: OSError) -> None:
        """Report the error and end: no byte after a failed write or sync is ever referenced.

        Another worker writes another segment. The jobs of the model stop only if it would fail in the same way.
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


def _open_rows(message: Open) -> DatasetRows:
    """The rows of a job. Raises: InvalidDataset, DatasetDamaged."""
    home, access = Path(message.dataset), joined(message.stores, os.environ) if message.stores else {}
    if message.index:
        return open_rows(MemoryFolder(home, message.index), None, access)
    seal = moved(load_seal(home), message.moved) if message.moved else None
    return open_rows(home, seal, access)


def _open_objects(storage: Storage | None, term: PrefixTerm) -> ObjectSegments | None:
    if storage is None:
        return None
    worker_environment.lend(storage.environ)
    if not has_credentials(os.environ):
        worker_environment.lend(storage.credentials)
    return require("batchmill.store.segments.objects:ObjectSegments", "[storage] objects")(storage.url, term)


async def _prepare(engine: str) -> Prepared | None:
    """Import an engine, and start what does not depend on the model; None: nothing, or what failed fails again."""
    with contextlib.suppress(Exception):  # whatever an engine's packages raise: its start reports it to the owner
        engine_class = import_engine(engine)
        if not traits_of(engine).starts_process:
            lower_priority()  # before the function's process starts, which inherits it
        if isinstance(engine_class, PreparingEngine):
            return await engine_class.prepare()
    return None


async def main(engine: str, fd: int, *memory_fds: int) -> int:
    """Serve the owner on socket `fd` until the work ends.

    Args:
        engine: the engine of its `Start`.
        memory_fds: of the memory that both share.
    """
    set_up_memory()
    os.set_inheritable(fd, False)  # processes of user code do not inherit it
    memory = MemoryPair()
    memory.join(memory_fds, memoryview)
    channel = await open_channel(socket.socket(fileno=fd), memory, has_joined=True)
    prepared = await _prepare(engine)
    received = await channel.read()
    if not received:
        if prepared is not None:
            await prepared.close()
        return 0
    start = messages.to_worker.decode(received[0])
    assert isinstance(start, Start)
    take_start(start)
    try:
        traits = start.model.traits
        if start.model.limits.memory_bytes is not None and not traits.limits_memory:
            resource.setrlimit(resource.RLIMIT_AS, (start.model.limits.memory_bytes,) * 2)
        worker = Worker(start, channel, received[1:])
        if prepared is not None:
            worker.adopt(prepared)
    except Exception as error:  # the engine cannot be created: the owner must get the reason
        channel.send(failed_start(error, f"the {start.model.engine} engine"))
        await channel.drain()
        channel.close()
        return 1
    code = await worker.run()
    channel.close()
    return code


if __name__ == "__main__":
    exit_code = asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that still runs user code must not keep the process alive
