"""Workers as child processes of the owner, each on one end of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from batchmill.executors.channel import Channel, open_channel
from batchmill.models import devices
from batchmill.types import ModelSpec
from batchmill.wire import messages
from batchmill.wire.messages import Start, ToOwner


class LocalWorker:
    """A worker process. `send` never waits; `messages` ends when the process has closed its socket."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, pid_file: Path) -> None:
        self._process, self._channel, self._pid_file = process, channel, pid_file

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Struct) -> None:
        self._channel.send(message)

    async def messages(self) -> AsyncIterator[ToOwner]:
        while found := await self._channel.read():
            for data in found:
                yield messages.to_owner.decode(data)

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
        code = await self._process.wait()
        self._channel.close()
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
        with open(home / f"{start.worker}.log", "ab", buffering=0) as log:
            process = await asyncio.create_subprocess_exec(
                # -P: the folder we stand in is the user's, and a queue.py there is not the library's
                sys.executable, "-P", "-m", "batchmill.executors.worker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                env=self._environ_of(start),
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
            )  # fmt: skip
        theirs.close()
        channel = await open_channel(ours)
        self._folder.mkdir(parents=True, exist_ok=True)
        pid_file = self._folder / f"{start.worker}.pid"
        pid_file.write_text(f"{process.pid} {_started(process.pid)}")
        worker = LocalWorker(process, channel, pid_file)
        worker.send(start)
        return worker

    def _environ_of(self, start: Start) -> dict[str, str]:
        """A worker sees the devices that are its own, where somebody deals them."""
        found = dict(os.environ) if self._environment is None else self._environment(start.model)
        own = None if start.gpus is None else ",".join(start.gpus)
        return found if own is None else {**found, devices.DEALT: own, devices.VISIBLE: own}

    def sweep(self) -> None:
        """End the workers that an owner left which was killed: they hold nothing that is not in their segments."""
        if not self._folder.is_dir():
            return
        for pid_file in self._folder.glob("*.pid"):
            pid, _, started = pid_file.read_text().partition(" ")
            if pid and started and _started(int(pid)) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            pid_file.unlink(missing_ok=True)


def _started(pid: int) -> str:
    """When a process began, in clock ticks since boot: with the pid it names the process for good. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
