"""A deployed function's own process, as whoever starts it sees it: its start, its frames, its end and who is to blame.

The program is `function_side/main.py`; the frames are said in `function_side.frames`. Nothing here calls user code.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchmill import function_side
from batchmill.errors import ModelFailed
from batchmill.function_side import frames
from batchmill.models import isolation, secrets
from batchmill.models.call_log import CallLog
from batchmill.models.environments import FOLDER, base_of
from batchmill.models.function_environment import environment_of
from batchmill.models.function_family import VARIABLE, Family
from batchmill.models.function_log import FunctionLog
from batchmill.models.function_socket import Frame, FrameSocket
from batchmill.models.isolated_process import Inside
from batchmill.models.secrets import Secret
from batchmill.types import Interface, Isolation, ModelSpec

PROGRAM = Path(function_side.__file__).parent / "main.py"
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

    `heard` is called with the frames that came together, `ended` once when the process is gone, after its last frames;
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
        self.heard: Callable[[list[Frame]], None] = self._hear_nothing
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
                *before[:1], *_told_at(info), *before[1:],
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
        self._socket = FrameSocket(ours, heard=self._take, closed=self._disconnected)
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
            self.heard(come)
            return
        meta, _ = come[0]
        if meta["kind"] == "ready":
            self.batch_size = meta.get("batch_size") or 1
            told = {name: meta[name] for name in ("batch_size", "batch_window_s") if meta.get(name)}
            self._began.set_result(msgspec.convert(meta["interface"] | told, Interface))
        elif meta["kind"] == "failed":
            self._began.set_exception(ModelFailed(str(meta["message"])))
        else:
            raise AssertionError(f"the first frame of a function's process is {meta['kind']!r}")
        if len(come) > 1:
            self.heard(come[1:])

    def _hear_nothing(self, come: list[Frame]) -> None:
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


def _told_at(info: list[int]) -> list[str]:
    return [word for fd in info for word in ("--info-fd", str(fd))]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
