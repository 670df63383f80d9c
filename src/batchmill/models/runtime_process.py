"""Starts `function_runtime/main.py`: for a function that is known, or ahead, for one that `Start` will name.

A process that was started ahead has imported the runtime and waits for the frame `start`. It has loaded no user code,
and ends when the process that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

from msgspec import Struct

from batchmill import function_runtime
from batchmill.children.process_end import VARIABLE, marks_of, started
from batchmill.function_runtime.shared_memory import MemoryPair
from batchmill.models import isolation
from batchmill.models.environments import FOLDER, base_of, folder_of
from batchmill.models.function_progress import ProgressPage
from batchmill.models.worker_environment import inherited
from batchmill.types import Isolation

PROGRAM = Path(function_runtime.__file__).parent / "main.py"


class RuntimeProcess(Struct, frozen=True, eq=False):
    """A process of the runtime that waits for its start frame. The holder ends it and closes the others."""

    process: asyncio.subprocess.Process
    socket: socket.socket
    progress: ProgressPage
    memory: MemoryPair  # shared with it, for large buffers of frames


class Command(Struct, frozen=True):
    """How to start the runtime's program.

    Args:
        prefix: the words before the interpreter, of a sandbox.
        passed: descriptors that it inherits.
        output: the descriptor for what it prints; None: that of this process.
    """

    python: str
    environ: Mapping[str, str]
    folder: str | None = None
    prefix: Sequence[str] = ()
    passed: Sequence[int] = ()
    output: int | None = None


def new_mark() -> str:
    """A mark for user code that this process starts: see `children.process_end`."""
    return marks_of(os.getpid(), started(os.getpid())) + token_hex(16)


def sandbox_prefix(sandbox: Isolation, python: str, folder: str, *, gpus: int) -> list[str]:
    """The words before an interpreter that runs `PROGRAM` with the code of a folder in a sandbox. Blocks.

    Raises: ModelFailed for an interpreter whose folder has other files too.
    """
    venv = Path(python).parent.parent
    if venv.parent.name == FOLDER and venv.is_relative_to(sandbox.data_dir):  # of a node, in the folder of its store
        base = base_of(venv)
        python, paths = (
            base.python,
            [str(venv), str(folder_of(venv)), *base.places],
        )  # programs in `bin` name the folder
    else:
        paths = [*isolation.interpreter_folders(python)]
    paths.append(str(PROGRAM.parent))
    return isolation.function_prefix(sandbox, python, paths, folder=folder, gpus=gpus)


async def start_runtime(command: Command) -> RuntimeProcess:
    """Start the program. Raises: OSError."""
    parent_end, child_end = socket.socketpair()
    with child_end, contextlib.ExitStack() as unless_started, contextlib.ExitStack() as stack:
        unless_started.callback(parent_end.close)
        shared = os.memfd_create("batchmill-progress")
        stack.callback(os.close, shared)
        progress = ProgressPage(shared)
        unless_started.callback(progress.close)
        memory = MemoryPair()
        unless_started.callback(memory.close)
        fds = [child_end.fileno(), shared, *stack.enter_context(memory.create())]
        process = await asyncio.create_subprocess_exec(
            *command.prefix, command.python, str(PROGRAM), *map(str, fds),
            stdin=asyncio.subprocess.DEVNULL, stdout=command.output, stderr=command.output,
            cwd=command.folder, env=command.environ, pass_fds=[*fds, *command.passed],
            process_group=0,
        )  # fmt: skip
        unless_started.pop_all()
    return RuntimeProcess(process, parent_end, progress, memory)


class PreparedRuntime:
    """A process that was started ahead, with this interpreter, folder and environment. Its owner closes it."""

    def __init__(self, started: RuntimeProcess, mark: str, environ: Mapping[str, str]) -> None:
        """Args: mark, environ: what it has in its environment."""
        self._started: RuntimeProcess | None = started
        self.mark, self._environ = mark, environ

    @classmethod
    async def start(cls) -> PreparedRuntime:
        """Raises: OSError."""
        mark, environ = new_mark(), dict(os.environ)
        started = await start_runtime(Command(sys.executable, environ | {VARIABLE: mark}))
        return cls(started, mark, environ)

    def take(self) -> RuntimeProcess | None:
        """The process; None if it was taken or has ended, or a variable was removed since it was started."""
        if self._started is None or self._started.process.returncode is not None or self._environ.keys() - os.environ:
            return None
        started, self._started = self._started, None
        return started

    def changed_environ(self) -> dict[str, str]:
        """The variables of this process that have changed since, without what was lent to it."""
        return {name: value for name, value in inherited().items() if self._environ.get(name) != value}

    async def close(self) -> None:
        """End the process if nobody took it. Returns when it has ended."""
        started, self._started = self._started, None
        if started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.process.pid, signal.SIGKILL)
            await started.process.wait()
            started.socket.close()
            started.progress.close()
            started.memory.close()
