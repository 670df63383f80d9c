"""One engine server and its guard, from start to stop; knows nothing of what the server speaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from batchmill.engines import guard
from batchmill.engines.server_log import read_tail, telling_lines
from batchmill.errors import ModelFailed

GRACE_S = 6.0  # from SIGTERM to SIGKILL; vLLM takes one to three
SLOTS_MAX = 256  # engines at once under one home
SOCKET_NAME = "s"
SOCKET_BYTES_MAX = 100  # Linux allows 107, macOS 103


class ServerProcess:
    """A server in a process tree of its own. Made by `claim`; started once, stopped for ever.

    Concurrency: one event loop.
    """

    def __init__(self, home: Path, slot: int, lock_fd: int, *, grace_s: float) -> None:
        self.pid_file = home / f"engine-{slot}.pid"
        self.log_path = home / f"engine-{slot}.log"
        self.scratch = make_scratch()
        self.socket = self.scratch / SOCKET_NAME
        self.exit_code: int | None = None
        self._grace_s = grace_s
        self._lock_fd = lock_fd
        self._marker = uuid.uuid4().hex
        self._guard: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0

    @classmethod
    def claim(cls, home: Path, *, grace_s: float = GRACE_S) -> ServerProcess:
        """Take a free slot under `home`, after ending what an earlier engine left in it. Blocks; call it in a thread.

        Raises: ModelFailed where every slot is taken.
        """
        home.mkdir(parents=True, exist_ok=True)
        for slot in range(SLOTS_MAX):
            fd = os.open(home / f"engine-{slot}.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if guard.try_lock(fd):
                guard.end_left(guard.read_record(fd))
                server = cls(home, slot, fd, grace_s=grace_s)
                guard.write_record(fd, server._record())
                return server
            os.close(fd)
        raise ModelFailed(f"{SLOTS_MAX} engine servers are running under {home}; stop some of them")

    def _record(self) -> dict[str, object]:
        pid = os.getpid()
        return {
            "marker": self._marker,
            "worker_pid": pid,
            "worker_start": guard.start_time(pid),
            "boot_id": guard.boot_id(),
            "scratch": str(self.scratch),
            "grace_s": self._grace_s,
        }

    async def start(self, command: list[str], env: Mapping[str, str]) -> None:
        """Start the guard, which starts the server. A command that cannot be started shows as a server that ended."""
        assert self._guard is None, "a server is started once"
        arguments = ["--worker", str(os.getpid()), "--lock-fd", str(self._lock_fd), "--log", str(self.log_path)]
        arguments += ["--scratch", str(self.scratch), "--grace-s", str(self._grace_s), "--", *command]
        with self.log_path.open("ab") as log:
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                guard.__file__,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**env, guard.MARKER: self._marker, "SPT_NOENV": "1"},  # SPT_NOENV: a new title spares the marker
                pass_fds=[self._lock_fd],
                start_new_session=True,
            )
        self._ended = asyncio.create_task(self._until_gone(self._guard))

    async def _until_gone(self, process: asyncio.subprocess.Process) -> int:
        code = await process.wait()
        if code < 0:  # somebody killed the guard; it does not end by a signal of itself
            await asyncio.to_thread(guard.end_left, guard.read_record(self._lock_fd))
            guard.write_record(self._lock_fd, {})
        self._release()
        self.exit_code = code
        return code

    def _release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    async def wait(self) -> int:
        """Return when nothing of the server is left: its exit code, or below zero where its guard was killed."""
        assert self._ended is not None, "the server was not started"
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the server and everything it started. Safe to call twice and before `start`."""
        if self._guard is None or self._ended is None:
            if self._lock_fd >= 0:
                guard.write_record(self._lock_fd, {})
                shutil.rmtree(self.scratch, ignore_errors=True)
                self._release()
            return
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        patience_s = self._grace_s + guard.KILL_WAIT_S + 5.0
        done, _ = await asyncio.wait([self._ended], timeout=patience_s)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await asyncio.wait([self._ended])

    def complaint(self) -> str:
        """How the server ended and what its log says about it, in a few lines."""
        said = telling_lines(read_tail(self.log_path, self._log_offset)) or "it wrote nothing"
        code = self.exit_code
        if code is None:
            return said
        ending = f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"
        return f"{ending}: {said}"


def make_scratch() -> Path:
    """A new private directory whose path is short: a Unix socket's name has room for some hundred bytes."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp", tempfile.gettempdir()):
        if base and os.access(base, os.W_OK | os.X_OK):
            path = Path(tempfile.mkdtemp(prefix="batchmill-", dir=base))
            if len(os.fsencode(path / SOCKET_NAME)) <= SOCKET_BYTES_MAX - 40:  # the engine's own sockets go there too
                return path
            path.rmdir()
    raise ModelFailed(
        f"no directory is short enough for a Unix socket: set XDG_RUNTIME_DIR to one of at most "
        f"{SOCKET_BYTES_MAX - 60} bytes"
    )
