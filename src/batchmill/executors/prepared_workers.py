"""Worker processes of this machine that start before it is known which model they run.

A prepared worker imports its engine and waits for its `Start`. Until then it runs no user code and holds nothing: when
its owner ends, it reads the end of its socket and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.process_end import kill_session
from batchmill.executors.channel import Channel, open_channel
from batchmill.function_runtime.shared_memory import MemoryPair
from batchmill.types import ModelSpec

PREFIX = "prepared-"  # of the logs of workers that have no name yet


class WorkerProcess(Struct, frozen=True, eq=False):
    """A worker process that waits for its `Start`, the owner's end of its socket, and its log."""

    process: asyncio.subprocess.Process
    channel: Channel
    log: Path
    engine: str

    async def end(self) -> None:
        """Kill the process. Returns when it has ended."""
        kill_session(self.process.pid)
        await self.process.wait()
        self.channel.close()


async def start_process(log_path: Path, environ: Mapping[str, str], engine: str) -> WorkerProcess:
    """Start a worker. Args: engine: that of its model, which it imports while it waits for its `Start`."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, contextlib.ExitStack() as unless_started, open(log_path, "ab", buffering=0) as log:
        unless_started.enter_context(ours)
        memory = MemoryPair()
        channel = await open_channel(ours, memory)
        unless_started.callback(channel.close)
        with memory.create(memoryview) as memory_fds:
            fds = [theirs.fileno(), *memory_fds]
            process = await asyncio.create_subprocess_exec(
                # -P: a queue.py in the working folder must not replace the library module
                sys.executable, "-P", "-m", "batchmill.executors.worker", engine, *map(str, fds),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds, env=environ,
                start_new_session=True,  # only the owner handles a Ctrl-C at the terminal
            )  # fmt: skip
        unless_started.pop_all()
    return WorkerProcess(process, channel, log_path, engine)


class PreparedWorkers:
    """The prepared workers of the process that holds the data directory. Its owner closes it.

    Args: folder: for their logs until they have a name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.waiting: list[WorkerProcess] = []  # the next one to be taken first

    async def start(self, engines: Sequence[str]) -> None:
        """Start a worker for each engine, with the environment of this process. Raises: OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"{PREFIX}*"):  # of a killed owner
            leftover.unlink(missing_ok=True)
        for engine in engines:
            log = self._folder / f"{PREFIX}{uuid.uuid4().hex}.log"
            self.waiting.append(await start_process(log, os.environ, engine))

    async def take(self, model: ModelSpec, log: Path) -> WorkerProcess | None:
        """Return a worker for a model that nobody has yet, with its log at `log`; None: there is none."""
        while (worker := next((each for each in self.waiting if each.engine == model.engine), None)) is not None:
            is_running = worker.process.returncode is None
            if is_running:
                worker.log.rename(log)
            self.waiting.remove(worker)
            if is_running:
                return replace(worker, log=log)
            await self._discard(worker)  # the worker that is started in its place reports the reason
        return None

    async def _discard(self, worker: WorkerProcess) -> None:
        await worker.end()
        worker.log.unlink(missing_ok=True)

    async def close(self) -> None:
        """End the workers that nobody took. Returns when they have ended."""
        while self.waiting:
            await self._discard(self.waiting.pop())
