"""The parent's side of a function's process: start, frames, exit, and the calls that were running.

The program is `function_runtime/main.py`, with the frames of `function_runtime.frames`. No user code runs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from batchmill.children.process_end import VARIABLE, kill_marked
from batchmill.errors import ModelFailed
from batchmill.function_runtime import frames
from batchmill.function_runtime.shared_memory import MemoryPair, MemoryWriter
from batchmill.models import isolation, secrets
from batchmill.models.call_log import CallLog
from batchmill.models.function_progress import Call, ProgressPage
from batchmill.models.function_socket import Frame, FrameSocket
from batchmill.models.redaction import mask_known
from batchmill.models.runtime_process import (
    Command,
    PreparedRuntime,
    RuntimeProcess,
    new_mark,
    sandbox_prefix,
    start_runtime,
)  # fmt: skip
from batchmill.models.secrets import Secret
from batchmill.models.worker_environment import environment_of, inherited
from batchmill.types import Interface, Isolation, ModelSpec

FILE = "function.mark"


class MarkedProcesses:
    """A function's process with all its descendants, which have a mark in their environment variables.

    Args:
        home: the folder of the file with the mark.
    """

    def __init__(self, home: Path) -> None:
        self._file = home / FILE
        self.mark = new_mark()

    def replace(self) -> None:
        """Kill the processes of an earlier mark, and store this mark. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            kill_marked(self._file.read_text())
        self._file.write_text(self.mark)

    def kill(self) -> None:
        """Kill all processes with the mark. Blocks."""
        kill_marked(self.mark)
        self._file.unlink(missing_ok=True)


LOG_BYTES_MAX = 32 * 1024 * 1024  # of one log file; there is one older file
TRACEBACKS_MAX = 3  # of the same error
DISTINCT_ERRORS_MAX = 1000
TAIL_BYTES = 4096


class FunctionLog:
    """The log file of a function's process.

    The process itself writes to the file, so rotation truncates it in place and may lose lines written meanwhile.

    Args:
        path: the file. It and its folder are created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._counts: dict[tuple[str, str], int] = {}

    @property
    def fd(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_full(self) -> bool:
        return self.size() >= LOG_BYTES_MAX

    def rotate(self) -> None:
        """Copy the content to the older file and truncate this one. Blocks: call it in a thread."""
        older = self.path.with_suffix(".log.1")
        with open(self.path, "rb") as file, open(older, "wb") as older_file:
            file.seek(max(0, self.size() - LOG_BYTES_MAX))
            shutil.copyfileobj(file, older_file)
        os.ftruncate(self._fd, 0)

    def traceback(self, code: str, trace: str, about: str) -> bool:
        """Write a traceback, up to `TRACEBACKS_MAX` times for the same error and location. Returns whether it did."""
        key = code, _error_location(trace)
        count = self._counts.get(key, 0)
        if count >= TRACEBACKS_MAX or (count == 0 and len(self._counts) >= DISTINCT_ERRORS_MAX):
            return False
        self._counts[key] = count + 1
        text = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {about}:\n{mask_known(trace.rstrip())}\n"
        os.write(self._fd, text.encode("utf-8", "backslashreplace"))
        return True

    def tail(self, start: int = 0) -> str:
        """The last few lines written at or after byte `start`."""
        begin = max(start, self.size() - TAIL_BYTES)
        return mask_known(os.pread(self._fd, TAIL_BYTES, begin).decode("utf-8", "replace").strip())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _error_location(trace: str) -> str:
    """The last line of a traceback that names a file."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.lstrip().startswith("File ")), "")


STATUS_BYTES_MAX = 4096


class BubblewrapInfo:
    """The pipe (`--info-fd`) through which bubblewrap tells its pid."""

    def __init__(self) -> None:
        self._fd = -1
        self._init_pid = self._pid = 0  # of bubblewrap's init process in the sandbox; of its only child

    def open(self) -> int:
        """Open the pipe and return the end for bubblewrap. The caller closes it."""
        self._fd, child_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return child_end

    def pid(self) -> int:
        """The pid of the function's process; 0 if it has not started or is unknown."""
        if self._init_pid == 0 and self._fd >= 0:
            try:
                self._init_pid = int(json.loads(os.read(self._fd, STATUS_BYTES_MAX))["child-pid"])
            except (BlockingIOError, ValueError, KeyError):  # not written yet, or bubblewrap exited before
                return 0
            self.close()
        if self._pid == 0 and self._init_pid:
            self._pid = _child_of(self._init_pid)
        return self._pid

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _child_of(pid: int) -> int:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0
    except FileNotFoundError:  # it has exited, or the kernel has no such file: then search all processes
        return next((each for each in _pids() if _parent_of(each) == pid), 0)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


START_S = 1800.0  # setup() may load a large model
STOP_S = 5.0  # how long finalize() may take
END_S = 2.0  # how long a process may take to exit after it has closed its socket
MEMORY = 71  # exit code of a process that ends itself between two calls because its memory is full
DATA_FACTOR = 2  # it may allocate this times memory_bytes, which limits the resident size


class FunctionChild:
    """One process of a deployed function. It is started once.

    `on_frames` gets the frames of one read. `ended` is called once after the process has exited, after its last
    frames. Set both before `start` returns, or before the next turn of the event loop.
    Concurrency: one event loop.

    Args:
        spec: of the engine function_process.
        home: a folder for `function.log`.
        resolve: reads its secrets.
        isolation: the sandbox; None: it runs like this process.
        calls: the log for output of calls; None: all output goes to `function.log`.
        prepared: a process that was started ahead, which is used if it fits; None: there is none.
    """

    def __init__(
        self, spec: ModelSpec, home: Path, *, resolve: Callable[[str], Secret] = secrets.resolve,
        isolation: Isolation | None = None, calls: CallLog | None = None, prepared: PreparedRuntime | None = None,
    ) -> None:  # fmt: skip
        assert spec.function is not None, "a deployed function has a FunctionSpec"
        self._spec, self._function, self._resolve = spec, spec.function, resolve
        self._isolation, self._calls, self._prepared = isolation, calls, prepared
        self._ahead: dict[str, Any] = {}  # fields of the start frame for a process that was started ahead
        self._bubblewrap = BubblewrapInfo()
        self.on_frames: Callable[[list[Frame]], None] = self._ignore_frames
        self.ended: Callable[[], None] = _nothing
        self.exit_code: int | None = None
        self.batch_size = 0  # the most rows of one call; set by the start
        self.reads_arrow = False  # its environment has pyarrow; set by the start
        self.log = FunctionLog(home / "function.log")
        self._log_start = self.log.size()
        self._marked_processes = MarkedProcesses(home)
        self._memory = MemoryPair()
        self.memory: MemoryWriter | None = None  # for large buffers of frames to the process; set by the start
        self.progress: ProgressPage | None = None  # from the start to `stop`
        self._process: asyncio.subprocess.Process | None = None
        self._socket: FrameSocket | None = None
        self._exit_task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Interface] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self.exit_code is None

    async def start(self, timeout_s: float = START_S) -> Interface:
        """Start the process, load the function and call its setup.

        Cancelling ends the process. Raises: ModelFailed with the traceback, or with the end of the log.
        """
        assert self._process is None, "a function's process is started once"
        self._ready = asyncio.get_running_loop().create_future()
        try:
            runtime = self._take_prepared()
            if runtime is not None:
                self._own(runtime)
            await asyncio.to_thread(self._marked_processes.replace)
            if runtime is None:
                await self._spawn()
            self.send(self._start_frame() | self._ahead)
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                raise ModelFailed(f"{self._spec.source} was not ready after {timeout_s:g} s of setup") from None
            raise

    async def _spawn(self) -> None:
        prefix = await asyncio.to_thread(self._isolation_prefix)
        info_fds = [self._bubblewrap.open()] if prefix else []
        log_fds = [] if self._calls is None else [self._calls.fd]
        python = self._spec.python or sys.executable
        command = Command(
            python, self._environ() | {VARIABLE: self._marked_processes.mark}, self._function.folder or None,
            [*prefix[:1], *_status_arguments(info_fds), *prefix[1:]], [*info_fds, *log_fds], self.log.fd,
        )  # fmt: skip
        try:
            self._own(await start_runtime(command))
        except OSError as error:
            raise ModelFailed(f"{python} cannot be started: {error.strerror or error}{self._way_out(python)}") from None
        finally:
            for fd in info_fds:
                os.close(fd)

    def _way_out(self, python: str) -> str:
        if not self._function.version or os.path.exists(python):
            return ""
        return f"; `batchmill models restart {self._spec.name}` builds the environment of {self._spec.name} again"

    def _own(self, runtime: RuntimeProcess) -> None:
        self._process, self.progress, self._memory = runtime.process, runtime.progress, runtime.memory
        self._socket = FrameSocket(runtime.socket, runtime.memory, on_frames=self._receive, closed=self._disconnected)
        self._exit_task = asyncio.create_task(self._handle_exit(self._process))

    def _take_prepared(self) -> RuntimeProcess | None:
        """The process that was started ahead, if it is like the one that would be started now."""
        is_in_place = not (self._spec.python or self._function.folder or self._isolation or self._calls)
        runtime = self._prepared.take() if self._prepared is not None and is_in_place else None
        if runtime is not None and self._prepared is not None:
            self._marked_processes.mark = self._prepared.mark
            self._ahead = {"environ": self._prepared.changed_environ(), "output": str(self.log.path)}
        return runtime

    def _isolation_prefix(self) -> list[str]:
        """The command prefix. Blocks. Raises: ModelFailed for an interpreter whose folder has other files too."""
        if self._isolation is None:
            return []
        python = self._spec.python or sys.executable
        return sandbox_prefix(self._isolation, python, self._function.folder, gpus=self._function.gpus)

    def _environ(self) -> dict[str, str]:
        if not self._function.folder:
            return inherited()
        variables = environment_of(self._function, os.environ, self._resolve)
        if self._isolation is None:
            return variables
        return isolation.environ(variables, {*self._function.environment, *self._function.secrets})

    def _start_frame(self) -> dict[str, Any]:
        function, memory_bytes = self._function, self._spec.limits.memory_bytes
        return {
            "kind": "start",
            "source": self._spec.source,
            "folder": function.folder,
            "batch_size": function.batch_size,
            "batch_window_s": function.batch_window_s,
            "frame_columns": function.frame_columns,
            "received_shapes": function.received_shapes,
            "log_fd": None if self._calls is None else self._calls.fd,
            "in_flight_max": self._spec.limits.in_flight_max,
            "memory_bytes": None if memory_bytes is None else DATA_FACTOR * memory_bytes,
        }

    # -- from the process ---------------------------------------------------------------------------------------------

    def _receive(self, received: list[Frame]) -> None:
        if self._ready is None or self._ready.done():
            self.on_frames(received)
            return
        meta, _ = received[0]
        if meta["kind"] == "ready":
            self.batch_size = meta.get("batch_size") or 1
            self.reads_arrow = meta.get("reads_arrow") is True
            self.memory = self._memory.writer if meta.get("shares_memory") is True else None
            fields = {name: meta[name] for name in ("batch_size", "batch_window_s") if meta.get(name)}
            self._ready.set_result(msgspec.convert(meta["interface"] | fields, Interface))
        elif meta["kind"] == "failed":
            self._ready.set_exception(ModelFailed(str(meta["message"])))
        else:
            raise AssertionError(f"the first frame of a function's process is {meta['kind']!r}")
        if len(received) > 1:
            self.on_frames(received[1:])

    def _ignore_frames(self, received: list[Frame]) -> None:
        raise AssertionError(f"an unexpected frame {received[0][0]['kind']!r}")

    def _disconnected(self, why: str) -> None:
        """Kill the process soon after it has closed its socket, and at once if it broke the protocol."""
        asyncio.get_running_loop().call_later(0 if why else END_S, self.kill)

    async def _handle_exit(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        assert self._socket is not None
        self._socket.drain()
        self._socket.close()
        self._kill_group()  # its descendants in the same session
        await asyncio.to_thread(self._marked_processes.kill)  # and those in other sessions
        is_signal = self._isolation is not None and code > 128  # bubblewrap's exit code for a signal
        self.exit_code = 128 - code if is_signal else code
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ModelFailed(f"{self._spec.source} could not be started: {self.exit_report()}"))
        self.ended()

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it, as the kernel sends one where memory is short."""
        return self.exit_code is not None and self.exit_code < 0

    def ending(self) -> str:
        """The exit code or signal. Without its output, which may belong to other callers."""
        code = self.exit_code
        if code is None:
            return "it is running"
        return f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"

    def exit_report(self) -> str:
        """The exit code or signal, and the end of its output."""
        output = self.log.tail(self._log_start)
        return f"{self.ending()}; it wrote:\n{output}" if output else self.ending()

    def blamed(self) -> list[Call]:
        """The rows whose calls are running now, or were running when the process died."""
        return [] if self.progress is None else self.progress.running()

    def resident_bytes(self) -> int:
        """Its resident memory without the shared memory of requests; 0 if it is unknown."""
        try:
            pid = self.pid if self._isolation is None else self._bubblewrap.pid()
            with open(f"/proc/{pid}/statm", "rb") as file:
                held = int(file.read().split()[1]) * resource.getpagesize()
                return max(0, held - (0 if self.memory is None else self.memory.backed_bytes))
        except OSError:
            return 0

    # -- to the process -----------------------------------------------------------------------------------------------

    def send(self, meta: dict[str, Any], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a frame. It never waits, and does nothing after the process has exited."""
        self.write(frames.pack(meta, buffers, self.memory))

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """As `send`, for a frame that was packed with `memory`."""
        if self._socket is not None:
            self._socket.write(pieces)

    def kill(self) -> None:
        """Kill the process and its descendants. `ended` is still called."""
        if self.is_alive:
            self._kill_group()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Let the function finalize, then end the process and wait for it. Safe to call twice, and before `start`."""
        if self._exit_task is not None:
            self.send({"kind": "stop"})
            await asyncio.wait([self._exit_task], timeout=grace_s)
            self.kill()
            await self._exit_task
        self._close()

    async def wait(self) -> None:
        """Wait until the process has exited."""
        if self._exit_task is not None:
            await asyncio.shield(self._exit_task)

    def _close(self) -> None:
        self.log.close()
        self._bubblewrap.close()
        self.memory = None
        self._memory.close()
        if self.progress is not None:
            self.progress.close()
            self.progress = None


def _nothing() -> None: ...


def _status_arguments(info: list[int]) -> list[str]:
    return [word for fd in info for word in ("--info-fd", str(fd))]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
