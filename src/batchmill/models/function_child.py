"""A deployed function's own process, as whoever starts it sees it: its start, its frames, its end and who is to blame.

The program is `function_runtime/main.py`, the frames are those of `function_runtime.frames`. No user code runs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from batchmill import function_runtime
from batchmill.errors import ModelFailed
from batchmill.function_runtime import frames
from batchmill.models import isolation, secrets
from batchmill.models.call_log import CallLog
from batchmill.models.environments import FOLDER, base_of
from batchmill.models.function_socket import Frame, FrameSocket
from batchmill.models.redaction import mask_known
from batchmill.models.secrets import Secret
from batchmill.models.worker_environment import environment_of
from batchmill.types import Interface, Isolation, ModelSpec

VARIABLE = "BATCHMILL_FUNCTION"
FILE = "function.mark"
KILL_S = 5.0  # what is killed may take so long to be gone
LOOK_S = 0.01


class Family:
    """Everything that one process of a function starts, and whatever that starts.

    Args:
        home: the folder in which it is remembered.
    """

    def __init__(self, home: Path) -> None:
        self._file = home / FILE
        self.mark = token_hex(16)

    def begin(self) -> None:
        """End what an earlier one left, and remember this one. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            _end(self._file.read_text())
        self._file.write_text(self.mark)

    def end(self) -> None:
        """Kill what is left of it. Blocks."""
        _end(self.mark)
        self._file.unlink(missing_ok=True)


def _end(mark: str) -> None:
    until = time.monotonic() + KILL_S
    while mark and (pids := _marked(mark)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _marked(mark: str) -> list[int]:
    """Live processes of this user that bear the mark; none where nothing tells."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            if name.isdecimal() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:  # it has gone, or is another user's
            continue
    return found


LOG_BYTES_MAX = 32 * 1024 * 1024  # of one log file; one older file is kept
TRACEBACKS_MAX = 3  # of one distinct error
DISTINCT_ERRORS_MAX = 1000
TAIL_BYTES = 4096


class FunctionLog:
    """The process writes to the file by itself, so it is emptied in place: lines of that moment may be lost.

    Args:
        path: the file; it and the folder around it are made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._seen: dict[tuple[str, str], int] = {}

    @property
    def fd(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_full(self) -> bool:
        return self.size() >= LOG_BYTES_MAX

    def rotate(self) -> None:
        """Keep what is there as the older file and begin anew. Blocks: call it in a thread."""
        older = self.path.with_suffix(".log.1")
        with open(self.path, "rb") as file, open(older, "wb") as kept:
            file.seek(max(0, self.size() - LOG_BYTES_MAX))
            shutil.copyfileobj(file, kept)
        os.ftruncate(self._fd, 0)

    def traceback(self, code: str, trace: str, about: str) -> bool:
        """Write a traceback down, if this error from this place has not been seen often enough; whether it was."""
        key = code, _place(trace)
        times = self._seen.get(key, 0)
        if times >= TRACEBACKS_MAX or (times == 0 and len(self._seen) >= DISTINCT_ERRORS_MAX):
            return False
        self._seen[key] = times + 1
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


def _place(trace: str) -> str:
    """The last line of a traceback that names a file."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.lstrip().startswith("File ")), "")


STATUS_BYTES_MAX = 4096


class Inside:
    """What bubblewrap says of itself through a pipe (`--info-fd`)."""

    def __init__(self) -> None:
        self._fd = -1
        self._first = self._pid = 0  # of bubblewrap's own, which only collects the dead; of its one child

    def open(self) -> int:
        """The end for bubblewrap; whoever passes it on closes it."""
        self._fd, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return theirs

    def pid(self) -> int:
        """The process itself, once it was started; 0: nothing tells."""
        if self._first == 0 and self._fd >= 0:
            try:
                self._first = int(json.loads(os.read(self._fd, STATUS_BYTES_MAX))["child-pid"])
            except (BlockingIOError, ValueError, KeyError):  # it has not come that far, or has ended before
                return 0
            self.close()
        if self._pid == 0 and self._first:
            self._pid = _child_of(self._first)
        return self._pid

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _child_of(pid: int) -> int:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0
    except FileNotFoundError:  # it has ended, or the kernel does not tell: then every process is asked whose it is
        return next((each for each in _pids() if _parent_of(each) == pid), 0)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


PROGRAM = Path(function_runtime.__file__).parent / "main.py"
START_S = 1800.0  # setup() may load a large model
STOP_S = 5.0  # finalize() may take so long
END_S = 2.0  # a process that has closed its socket may take so long to be gone
PROGRESS_BYTES = 64 * 1024
MEMORY = 71  # its exit code when what it holds leaves it no room: between two calls, by itself
DATA_ROOM = 2  # times memory_bytes that it may allocate: the resident size is what is limited
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<QII")
ENTRIES_MAX = (PROGRESS_BYTES - _COUNT.size) // _ENTRY.size

Call = tuple[int, int, int]  # ask id, first row, rows


class FunctionChild:
    """One process of a deployed function. Started once, ended for ever.

    `on_frames` gets the frames of one read, `ended` is called once when the process is gone, after its last frames;
    set them before `start` returns, or between `start` and the first turn of the loop after it.
    Concurrency: one event loop.

    Args:
        spec: of the engine function_process.
        home: a folder for `function.log`.
        resolve: finds its secrets.
        isolation: how it is kept from the machine; None: it runs as this process does.
        calls: where what it prints is kept with whose call it was; None: all of it goes to `function.log`.
    """

    def __init__(
        self, spec: ModelSpec, home: Path, *, resolve: Callable[[str], Secret] = secrets.resolve,
        isolation: Isolation | None = None, calls: CallLog | None = None,
    ) -> None:  # fmt: skip
        assert spec.function is not None, "a deployed function has a FunctionSpec"
        self._spec, self._function, self._resolve = spec, spec.function, resolve
        self._isolation, self._calls = isolation, calls
        self._inside = Inside()
        self.on_frames: Callable[[list[Frame]], None] = self._ignore_frames
        self.ended: Callable[[], None] = _nothing
        self.exit_code: int | None = None
        self.batch_size = 0  # rows that it calls together at most; known once it has started
        self.log = FunctionLog(home / "function.log")
        self._log_start = self.log.size()
        self._family = Family(home)
        self._progress: mmap.mmap | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket: FrameSocket | None = None
        self._gone: asyncio.Task[None] | None = None
        self._began: asyncio.Future[Interface] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self.exit_code is None

    async def start(self, timeout_s: float = START_S) -> Interface:
        """Start the process, load the function and call its setup.

        Raises: ModelFailed with the traceback, or with what the process left in its log. Cancelling ends the process.
        """
        assert self._process is None, "a function's process is started once"
        self._began = asyncio.get_running_loop().create_future()
        try:
            await asyncio.to_thread(self._family.begin)
            await self._spawn()
            self.send(self._start_frame())
            async with asyncio.timeout(timeout_s):
                return await self._began
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                raise ModelFailed(f"{self._spec.source} was not ready after {timeout_s:g} s of setup") from None
            raise

    async def _spawn(self) -> None:
        before = await asyncio.to_thread(self._isolated)
        ours, theirs = socket.socketpair()
        progress = os.memfd_create("batchmill-progress")
        info = [self._inside.open()] if before else []
        log = [] if self._calls is None else [self._calls.fd]
        try:
            os.ftruncate(progress, PROGRESS_BYTES)
            self._progress = mmap.mmap(progress, PROGRESS_BYTES)
            self._process = await asyncio.create_subprocess_exec(
                *before[:1], *_status_arguments(info), *before[1:],
                self._spec.python or sys.executable, str(PROGRAM), str(theirs.fileno()), str(progress),
                stdin=asyncio.subprocess.DEVNULL, stdout=self.log.fd, stderr=self.log.fd,
                cwd=self._function.folder,
                env=self._environ() | {VARIABLE: self._family.mark},
                pass_fds=[theirs.fileno(), progress, *info, *log], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise ModelFailed(f"{self._spec.python or sys.executable} cannot be started: {error}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in (progress, *info):
                os.close(fd)
        self._socket = FrameSocket(ours, on_frames=self._take, closed=self._disconnected)
        self._gone = asyncio.create_task(self._until_gone(self._process))

    def _isolated(self) -> list[str]:
        """What comes before the command. Blocks. Raises: ModelFailed for an interpreter that cannot be shown alone."""
        if self._isolation is None:
            return []
        python, folder = self._spec.python or sys.executable, self._function.folder
        place = Path(python).parent.parent
        if place.parent == Path(self._isolation.data_dir, FOLDER):
            base = base_of(place)
            python, places = base.python, [str(place), *base.places]
        else:
            places = [*isolation.places_of(python)]
        places.append(str(PROGRAM.parent))
        return isolation.of_function(self._isolation, python, places, folder=folder, gpus=self._function.gpus)

    def _environ(self) -> dict[str, str]:
        found = environment_of(self._function, os.environ, self._resolve)
        if self._isolation is None:
            return found
        return isolation.environ(found, {*self._function.environment, *self._function.secrets})

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
            "memory_bytes": None if memory_bytes is None else DATA_ROOM * memory_bytes,
        }

    # -- what it says -------------------------------------------------------------------------------------------------

    def _take(self, come: list[Frame]) -> None:
        if self._began is None or self._began.done():
            self.on_frames(come)
            return
        meta, _ = come[0]
        if meta["kind"] == "ready":
            self.batch_size = meta.get("batch_size") or 1
            fields = {name: meta[name] for name in ("batch_size", "batch_window_s") if meta.get(name)}
            self._began.set_result(msgspec.convert(meta["interface"] | fields, Interface))
        elif meta["kind"] == "failed":
            self._began.set_exception(ModelFailed(str(meta["message"])))
        else:
            raise AssertionError(f"the first frame of a function's process is {meta['kind']!r}")
        if len(come) > 1:
            self.on_frames(come[1:])

    def _ignore_frames(self, come: list[Frame]) -> None:
        raise AssertionError(f"nobody asked for {come[0][0]['kind']!r}")

    def _disconnected(self, why: str) -> None:
        """It has closed its socket, or speaks no frames any more: it is of no use, and must be gone soon."""
        asyncio.get_running_loop().call_later(0 if why else END_S, self.kill)

    async def _until_gone(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        assert self._socket is not None
        self._socket.drain()
        self._socket.close()
        self._kill_group()  # what it has started goes with it
        await asyncio.to_thread(self._family.end)  # and what of that began a session of its own
        self.exit_code = 128 - code if self._isolation is not None and code > 128 else code  # as bubblewrap tells of it
        if self._began is not None and not self._began.done():
            self._began.set_exception(ModelFailed(f"{self._spec.source} could not be started: {self.last_words()}"))
        self.ended()

    def ending(self) -> str:
        """How it ended. Fit for everybody who calls it: what it printed may be of others."""
        code = self.exit_code
        if code is None:
            return "it is running"
        return f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"

    def last_words(self) -> str:
        """How it ended, and the end of what it printed."""
        said = self.log.tail(self._log_start)
        return f"{self.ending()}; it wrote:\n{said}" if said else self.ending()

    def blamed(self) -> list[Call]:
        """The rows whose call had begun and not ended when this is called, or when the process died."""
        if self._progress is None:
            return []
        (count,) = _COUNT.unpack_from(self._progress)
        places = range(_COUNT.size, _COUNT.size + min(count, ENTRIES_MAX) * _ENTRY.size, _ENTRY.size)
        return [_ENTRY.unpack_from(self._progress, place) for place in places]

    def last_called(self) -> int:
        """The ask whose call began last, though it may have ended; 0: none has begun."""
        return 0 if self._progress is None else _ENTRY.unpack_from(self._progress, _COUNT.size)[0]

    def resident_bytes(self) -> int:
        """What it holds in memory now; 0 where nothing tells."""
        try:
            pid = self.pid if self._isolation is None else self._inside.pid()
            with open(f"/proc/{pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        except OSError:
            return 0

    # -- what it is told ----------------------------------------------------------------------------------------------

    def send(self, meta: dict[str, Any], buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a frame; never waits, and is quiet when the process has gone."""
        self.write(frames.pack(meta, buffers))

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """As `send`, of a frame that is packed already."""
        if self._socket is not None:
            self._socket.write(pieces)

    def kill(self) -> None:
        """End it and what it has started at once; `ended` is still called."""
        if self.is_alive:
            self._kill_group()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Let the function finalize, then end it; return when it has gone. Safe to call twice, and before `start`."""
        if self._gone is not None:
            self.send({"kind": "stop"})
            await asyncio.wait([self._gone], timeout=grace_s)
            self.kill()
            await self._gone
        self._close()

    async def wait(self) -> None:
        """Return when the process has gone."""
        if self._gone is not None:
            await asyncio.shield(self._gone)

    def _close(self) -> None:
        self.log.close()
        self._inside.close()
        if self._progress is not None:
            self._progress.close()
            self._progress = None


def _nothing() -> None: ...


def _status_arguments(info: list[int]) -> list[str]:
    return [word for fd in info for word in ("--info-fd", str(fd))]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
