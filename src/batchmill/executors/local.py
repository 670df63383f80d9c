"""Workers as child processes of the owner, each on one end of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from batchmill.children.process_end import boot_id, kill_marked, kill_session, marks_of, started
from batchmill.executors.channel import Channel
from batchmill.executors.prepared_workers import PreparedWorkers, WorkerProcess, start_process
from batchmill.models import devices
from batchmill.types import ModelSpec
from batchmill.wire import messages
from batchmill.wire.messages import Start, ToOwner

CLOSED_S = 20.0  # for a worker to end after it has closed its socket; half of it is for its engine to stop


class LocalWorker:
    """A worker process. `send` never waits; `messages` ends when the process has ended or has closed its socket.

    Its child processes may hold its socket open. So the process itself is watched too. Its session is killed with it,
    and so is user code that has left the session.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, pid_file: Path, marks: str) -> None:
        """Args: marks: what those of its user code begin with."""
        self._process, self._channel, self._pid_file, self._marks = process, channel, pid_file, marks
        self._received: deque[memoryview] = deque()  # messages of one read that were not yielded
        self._exited = asyncio.create_task(self._wait_exit())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Struct) -> None:
        self._channel.send(message)

    async def messages(self) -> AsyncIterator[ToOwner]:
        while True:
            if not self._received:
                self._received.extend(await self._channel.read())
            if not self._received:
                break
            yield self._channel.complete(messages.to_owner.decode(self._received.popleft()))
        if not self._exited.done():
            asyncio.get_running_loop().call_later(CLOSED_S, self.kill)

    def is_frozen(self) -> bool:
        """Whether a signal has stopped the process: it sends nothing until it is continued."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = await asyncio.shield(self._exited)
        self._channel.close()
        return code

    async def _wait_exit(self) -> int:
        code = await self._process.wait()
        kill_session(self.pid)
        self._channel.finish()
        if code:  # one that ends by itself has ended these
            await asyncio.to_thread(kill_marked, self._marks)
        self._pid_file.unlink(missing_ok=True)
        return code


class LocalExecutor:
    """Starts workers on this machine.

    Args:
        folder: for the process ids of workers, which the next owner sweeps.
        environment: returns the environment variables of a worker of a model; None: those of this process, as for a
            command, whose workers act for its user.
        prepared: workers with the environment of this process, which are used first; None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        environment: Callable[[ModelSpec], dict[str, str]] | None = None,
        prepared: PreparedWorkers | None = None,
    ) -> None:
        self._folder, self._environment = folder, environment
        self._prepared = prepared

    async def start(self, start: Start) -> LocalWorker:
        """A new worker process that has been sent `start`."""
        home = Path(start.home)
        home.mkdir(parents=True, exist_ok=True)
        started_process = await self._process(start, home / f"{start.worker}.log")
        process, pid_file = started_process.process, self._folder / f"{start.worker}.pid"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            pid_file.write_text(f"{process.pid} {(began := started(process.pid))} {boot_id()}")
        except OSError:
            await started_process.end()
            raise
        worker = LocalWorker(process, started_process.channel, pid_file, marks_of(process.pid, began))
        worker.send(start)
        return worker

    async def _process(self, start: Start, log: Path) -> WorkerProcess:
        """A prepared process if one has the right environment, otherwise a new one."""
        if self._prepared is not None and self._environment is None and start.gpus is None:
            prepared = await self._prepared.take(start.model, log)
            if prepared is not None:
                return prepared
        return await start_process(log, self._environ_of(start), start.model.engine)

    def _environ_of(self, start: Start) -> dict[str, str]:
        """The environment of a worker, with its own devices if they are allocated."""
        variables = dict(os.environ) if self._environment is None else self._environment(start.model)
        gpus = None if start.gpus is None else ",".join(start.gpus)
        return variables if gpus is None else {**variables, devices.ASSIGNED: gpus, devices.VISIBLE: gpus}

    def sweep(self) -> None:
        """Kill the workers of a killed owner, the child processes of ended workers, and what their user code has left.

        Every finished outcome is already in their segments.
        """
        if not self._folder.is_dir():
            return
        for pid_file in self._folder.glob("*.pid"):
            match pid_file.read_text().split():
                case [pid, start, boot] if boot == boot_id():
                    if started(int(pid)) in (start, ""):
                        kill_session(int(pid))
                    kill_marked(marks_of(int(pid), start))
            pid_file.unlink(missing_ok=True)
