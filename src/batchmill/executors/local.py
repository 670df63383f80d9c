"""Workers as child processes of the owner, each on one end of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from batchmill.children.process_end import boot_id, kill_group, started
from batchmill.executors.channel import Channel, open_channel
from batchmill.models import devices
from batchmill.types import ModelSpec
from batchmill.wire import messages
from batchmill.wire.messages import Start, ToOwner

CLOSED_S = 20.0  # a worker that has closed its socket may take so long to be gone; its engine has half of that to stop


class LocalWorker:
    """A worker process. `send` never waits; `messages` ends when the process has ended or has closed its socket.

    What it forked may hold its socket too: its end is watched beside the socket, and its process group ended with it.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, pid_file: Path) -> None:
        self._process, self._channel, self._pid_file = process, channel, pid_file
        self._gone = asyncio.create_task(self._until_gone())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Struct) -> None:
        self._channel.send(message)

    async def messages(self) -> AsyncIterator[ToOwner]:
        while found := await self._channel.read():
            for data in found:
                yield messages.to_owner.decode(data)
        if not self._gone.done():
            asyncio.get_running_loop().call_later(CLOSED_S, self.kill)

    def is_frozen(self) -> bool:
        """The process is stopped by a signal: it will say nothing until somebody continues it."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = await asyncio.shield(self._gone)
        self._channel.close()
        return code

    async def _until_gone(self) -> int:
        code = await self._process.wait()
        kill_group(self.pid)
        self._channel.finish()
        self._pid_file.unlink(missing_ok=True)
        return code


class LocalExecutor:
    """Starts workers on this machine.

    Args:
        folder: keeps their logs and the process ids that the next owner sweeps.
        environment: what a worker of a model finds in its environment; None: all that this process has, for a command,
            whose workers do what its user asked for.
    """

    def __init__(self, folder: Path, environment: Callable[[ModelSpec], dict[str, str]] | None = None) -> None:
        self._folder, self._environment = folder, environment

    async def start(self, start: Start) -> LocalWorker:
        """A new worker process that has been sent `start`."""
        home = Path(start.home)
        home.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log_path, pid_file = home / f"{start.worker}.log", self._folder / f"{start.worker}.pid"
        with theirs, contextlib.ExitStack() as unless_started, open(log_path, "ab", buffering=0) as log:
            unless_started.enter_context(ours)
            channel = await open_channel(ours)
            unless_started.callback(channel.close)
            process = await asyncio.create_subprocess_exec(
                # -P: the working folder is the user's, and a queue.py there is not the library's
                sys.executable, "-P", "-m", "batchmill.executors.worker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                env=self._environ_of(start),
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
            )  # fmt: skip
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                pid_file.write_text(f"{process.pid} {started(process.pid)} {boot_id()}")
            except OSError:
                kill_group(process.pid)
                await process.wait()
                raise
            unless_started.pop_all()
        worker = LocalWorker(process, channel, pid_file)
        worker.send(start)
        return worker

    def _environ_of(self, start: Start) -> dict[str, str]:
        """A worker sees the devices that are its own, where somebody deals them."""
        found = dict(os.environ) if self._environment is None else self._environment(start.model)
        own = None if start.gpus is None else ",".join(start.gpus)
        return found if own is None else {**found, devices.ASSIGNED: own, devices.VISIBLE: own}

    def sweep(self) -> None:
        """End the workers that an owner left which was killed, and what workers that have gone had forked.

        They hold nothing that is not in their segments.
        """
        if not self._folder.is_dir():
            return
        for pid_file in self._folder.glob("*.pid"):
            match pid_file.read_text().split():
                case [pid, began, boot] if boot == boot_id() and started(int(pid)) in (began, ""):
                    kill_group(int(pid))
            pid_file.unlink(missing_ok=True)
