"""An owner with 1,000 workers that each commit once a second: its processor time, its memory, the time of a grant.

The workers are simulated by one process, over the sockets and with the messages of real ones: heartbeats, requests for
rows, grants and commits. Ledger, dispatcher and database are real; no row runs. The same owner runs
on SQLite and on a PostgreSQL server of this machine, with its commits on the disk.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import harness

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "jobs")]

import sqlalchemy as sa  # noqa: E402
from fakes.postgres_server import PostgresServer  # noqa: E402
from msgspec import Struct  # noqa: E402
from written_dataset import RowKeys, write_dataset  # noqa: E402

from batchmill.engines.clock import SystemClock  # noqa: E402
from batchmill.errors import BatchmillError  # noqa: E402
from batchmill.executors.channel import Channel, open_channel  # noqa: E402
from batchmill.executors.worker import HEARTBEAT_S  # noqa: E402
from batchmill.function_runtime.shared_memory import MemoryPair  # noqa: E402
from batchmill.jobs.ledger.commits import CommitCallback, CommitLog  # noqa: E402
from batchmill.jobs.ledger.files import JobFiles  # noqa: E402
from batchmill.jobs.ledger.ledger import JobEnd, Ledger, Verdict  # noqa: E402
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make  # noqa: E402
from batchmill.jobs.pools.dispatcher import Dispatcher  # noqa: E402
from batchmill.jobs.pools.job_run import JobRun  # noqa: E402
from batchmill.states import JobState  # noqa: E402
from batchmill.store.sql.database import Database  # noqa: E402
from batchmill.store.sql.positions import pack_positions  # noqa: E402
from batchmill.types import (  # noqa: E402
    Commit,
    DatasetSpec,
    EngineStats,
    ModelSpec,
    Policy,
    SegmentRef,
    Usage,
)
from batchmill.wire import messages  # noqa: E402
from batchmill.wire.job_spec import JobSpec  # noqa: E402
from batchmill.wire.rows.forms import OpenAIForm  # noqa: E402

SHARD_ROWS, BLOCK_BYTES = 10, 100_000
COMMIT_S, WARM_S = 1.0, 22.0
GRANT_LIMIT_S, CORES_LIMIT, MEMORY_LIMIT_BYTES = 0.25, 1.0, 2 * 2**30
JOB = "job"
SETTINGS = ("shared_buffers=256MB", "max_wal_size=2GB")


# -- the workers ------------------------------------------------------------------------------------------------------


class SimulatedWorker:
    """The messages of a worker that commits one row a second."""

    def __init__(self, channel: Channel, name: str, figures: dict[str, list[float]]) -> None:
        self._channel, self._name, self._figures = channel, name, figures
        self._grants: asyncio.Queue[messages.Grant] = asyncio.Queue()
        self._requested = 0.0
        self._offset = 0

    async def run(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        while received := await self._channel.read():
            for data in received:
                match messages.to_worker.decode(data):
                    case messages.Start():
                        self._channel.send(messages.Ready(os.getpid()))
                        tasks += [asyncio.create_task(self._beat()), asyncio.create_task(self._work())]
                    case messages.Open():
                        pass
                    case messages.Grant() as grant:
                        if self._requested:
                            self._figures["grant"].append(time.monotonic() - self._requested)
                        self._grants.put_nowait(grant)
                    case messages.Ack() as refused:  # nobody else has the lease
                        raise AssertionError(f"{refused}")
        for task in tasks:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._channel.send(messages.Heartbeat(EngineStats(), time.monotonic()))

    async def _work(self) -> None:
        due = time.monotonic() + random.Random(self._name).random() * SHARD_ROWS * COMMIT_S  # no two in step
        while True:
            grant = await self._grants.get()
            self._requested = time.monotonic()
            self._channel.send(messages.RequestRows(JOB))  # one grant ahead, as the feed of a worker
            for row in range(grant.n):
                due += COMMIT_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._offset += BLOCK_BYTES
                done = pack_positions([grant.position + row], grant.base)
                ref = SegmentRef(f"{self._name}-0001.seg", self._offset, BLOCK_BYTES)
                commit = Commit(
                    grant.lease, grant.seq + row, ref, done, rows_ok=1, rows_failed=0, usage=Usage(100, 0, 50)
                )
                self._channel.send(messages.Record(commit))


async def simulate(control: socket.socket) -> None:
    """Play every worker whose socket arrives, until the control socket is closed; then print what they saw."""
    figures: dict[str, list[float]] = {"grant": []}
    tasks = []
    loop = asyncio.get_running_loop()
    control.setblocking(False)
    arrived = asyncio.Event()
    loop.add_reader(control, arrived.set)
    while True:
        await arrived.wait()
        arrived.clear()
        try:
            data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4))
        except BlockingIOError:
            continue
        if not data:
            break
        if data == b"r":  # the measurement begins
            figures["grant"].clear()
            continue
        (fd,) = array.array("i", ancillary[0][2][:4])
        channel = await open_channel(socket.socket(fileno=fd), MemoryPair())
        tasks.append(asyncio.create_task(SimulatedWorker(channel, f"w{len(tasks)}", figures).run()))
    print(json.dumps(figures), flush=True)
    os._exit(0)


# -- the owner --------------------------------------------------------------------------------------------------------


class Handle:
    """The owner's end of a simulated worker."""

    pid = 0

    def __init__(self, channel: Channel) -> None:
        self._channel, self._ended = channel, asyncio.Event()

    def send(self, message: Struct) -> None:
        self._channel.send(message)

    async def messages(self) -> AsyncIterator[messages.ToOwner]:
        while received := await self._channel.read():
            for data in received:
                yield self._channel.complete(messages.to_owner.decode(data))
        self._ended.set()

    def is_frozen(self) -> bool:
        return False

    def kill(self) -> None:
        self._ended.set()
        self._channel.close()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


class Executor:
    """Starts workers in the process that simulates them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    async def start(self, start: messages.Start) -> Handle:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        theirs.setblocking(False)
        socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        theirs.close()
        handle = Handle(await open_channel(mine, MemoryPair()))
        handle.send(start)
        return handle

    def sweep(self) -> None:
        """Nothing is left of an earlier owner."""


def open_database(folder: Path, url: str) -> Database:
    if not url:
        return Database(folder / "batchmill.db")
    from batchmill.store.sql.postgres import PostgresBackend

    backend = PostgresBackend(sa.make_url(url))
    backend.claim("the benchmark", "", "")
    return Database(backend)


def size_of(database: Database, folder: Path, url: str) -> int:
    if not url:
        return sum(path.stat().st_size for path in folder.glob("batchmill.db*"))
    with database.reader.begin() as db:
        return db.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one()


class TimedLog(CommitLog):
    """Notes how long each commit takes from its message until it is counted."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.seconds: list[float] = []

    async def commit(
        self, commit: Commit, cost: float | None, callback: CommitCallback, end: JobEnd | None = None
    ) -> None:
        began = time.monotonic()

        def counted(verdict: Verdict | BatchmillError) -> None:
            self.seconds.append(time.monotonic() - began)
            callback(verdict)

        await super().commit(commit, cost, counted, end)


async def own(folder: Path, url: str, workers: int, seconds: float, control: socket.socket) -> dict[str, Any]:
    """Run the owner; what it took in the measured time."""
    database = open_database(folder, url)
    commit_log = TimedLog(Ledger(database))
    model = ModelSpec("m", "function", "app.py:f", workers=workers)
    spec = JobSpec(
        id=JOB, dataset=DatasetSpec(["/data/in.jsonl"]), models=[model], form=OpenAIForm(), policy=Policy(),
        output=None, identity=JOB, code={}, created=1.0,
    )  # fmt: skip
    files = JobFiles(folder, JOB)
    (files.home / "segments").mkdir(parents=True)
    rows = int(workers * (WARM_S + seconds + 3 * SHARD_ROWS))
    written = write_dataset(files.home, [RowKeys()] * rows, keys=False)
    make(PlanOrder([(0, None)], [ShardRows(SHARD_ROWS)]), written.dataset, written.plan, lambda _: None)
    commit_log.ledger.create(spec)
    for state in (JobState.PLANNING, JobState.QUEUED, JobState.RUNNING):
        commit_log.ledger.move(JOB, state)
    clock = SystemClock()
    dispatcher = Dispatcher(folder, commit_log, Executor(control), clock)
    run = JobRun(spec, 0, PlanReader(files.home / "plan"), files=files, clock=clock)
    run.load({})
    dispatcher.reserve(JOB, [model])
    dispatcher.add(run)
    await asyncio.sleep(WARM_S)
    control.send(b"r")
    commit_log.seconds.clear()
    before, cpu, began = await _counted(database), time.process_time(), time.monotonic()
    size = size_of(database, folder, url)
    await asyncio.sleep(seconds)
    wall = time.monotonic() - began
    found = {
        "commits": (await _counted(database) - before) / wall,
        "cores": (time.process_time() - cpu) / wall,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "growth": (size_of(database, folder, url) - size) / wall,
        "counted": commit_log.seconds,
    }
    control.close()
    return found


async def _counted(database: Database) -> int:
    return await database.read(lambda db: db.execute(sa.text("SELECT count(*) FROM commits")).scalar_one())


# -- the figures ------------------------------------------------------------------------------------------------------


def measure(kind: str, url: str, workers: int, seconds: float) -> None:
    """Run owner and workers, each in a process, and print the figures."""
    with harness.work_folder() as folder:
        owners, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, "--workers", str(workers), "--seconds", str(seconds)]
        simulating = subprocess.Popen(
            [*command, "--simulate", str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
        )
        theirs.close()
        owning = subprocess.Popen(
            [*command, "--own", str(owners.fileno()), "--folder", str(folder), "--url", url],
            pass_fds=[owners.fileno()], stdout=subprocess.PIPE,
        )  # fmt: skip
        owners.close()
        found = json.loads(owning.communicate()[0])
        seen = json.loads(simulating.communicate()[0])
    print(f"{kind}: {workers:,} workers, a commit a second each, {seconds:.0f} s")
    grants = statistics.quantiles(seen["grant"], n=100)
    commits = statistics.quantiles(found["counted"], n=100)
    print(f"    commits: {1000 * commits[49]:.0f} ms p50, {1000 * commits[98]:.0f} ms p99 until counted")
    print(f"    grants: {1000 * grants[49]:.0f} ms p50, {len(seen['grant']):,} of them")
    print(f"    the database grows by {found['growth'] * 86_400 / 2**30:,.1f} GiB a day at this rate")
    aim = 0.95 * workers
    print(f"    {found['commits']:,.0f} commits/s ({harness.verdict(found['commits'] >= aim)}: {aim:,.0f} or more)")
    harness.print_limit("    grant p99", grants[98], GRANT_LIMIT_S, "s")
    harness.print_limit("    owner's processor time", found["cores"], CORES_LIMIT, "cores")
    harness.print_limit("    owner's memory", found["bytes"] / 2**20, MEMORY_LIMIT_BYTES / 2**20, "MiB")


def main() -> None:
    """Measure on both kinds of database."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--simulate", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if arguments.simulate is not None:
        asyncio.run(simulate(socket.socket(fileno=arguments.simulate)))
    elif arguments.own is not None:
        control = socket.socket(fileno=arguments.own)
        found = asyncio.run(_owned(arguments, control))
        print(json.dumps(found), flush=True)
        os._exit(0)
    for kind in arguments.database or ["sqlite", "postgresql"]:
        if kind == "sqlite":
            measure(kind, "", arguments.workers, arguments.seconds)
            continue
        server = PostgresServer(*SETTINGS)
        measure(kind, server.create_database("owner_commits"), arguments.workers, arguments.seconds)
        server.close()


async def _owned(arguments: argparse.Namespace, control: socket.socket) -> dict[str, float]:
    found = await own(arguments.folder, arguments.url, arguments.workers, arguments.seconds, control)
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
