"""Functions' processes that the tests' own process starts, as forks of one that has imported their runtime.

A test starts `python function_runtime/main.py …` as ever and gets a child of its own; only the imports are done before:
0.01 s of a processor instead of 0.08. Each interpreter that runs functions has a forker, `runtime_forker.py`. Processes
that workers start are new interpreters, and so are those with another environment, in a sandbox or of another Python.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fakes.forked_modules import REAL_POPEN, SHOWN_CHARS, SYS_CLONE, as_given, is_like, receive_pid, send

from batchmill import function_runtime

T = TypeVar("T")

PROGRAM = str(Path(function_runtime.__file__).with_name("main.py"))
FORKER = Path(__file__).with_name("runtime_forker.py")
PYTHONS = frozenset([sys.executable, os.environ.get("BATCHMILL_FUNCTION_PYTHON", sys.executable)])
STOP_S = 10.0


def in_lasting_thread(call: Callable[[], T]) -> T:
    """Call it in a thread that does not end: the kernel would kill what a process that it starts forks with it."""
    if threading.current_thread() is threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
            return
        finally:
            is_done.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    is_done.wait()
    if errors:
        raise errors[0]
    return results[0]


class ForkedRuntimes:
    """The forkers of this process of tests, each started by the first function of its interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        self._environ = dict(os.environ)  # before a test changes any

    def request(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """The request of a process of the runtime; None for anything else."""
        words = given["args"]
        if SYS_CLONE is None or not isinstance(words, (list, tuple)) or given["shell"]:
            return None
        words = [os.fspath(word) for word in words]
        if words[0] not in PYTHONS or words[1:2] != [PROGRAM] or "validate" in words:
            return None
        if any(given[name] is not None for name in ("gid", "gids", "uid", "preexec_fn")):
            return None
        environ = dict(os.environ if given["env"] is None else given["env"])
        if not is_like(self._environ, environ) or not os.path.isdir(given["cwd"] or "."):
            return None
        return {"python": words[0], "argv": words[2:], **as_given(given, environ)}

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start it as a child of this process. Returns its process id."""
        python = request["python"]
        with self._lock:
            if python not in self._connections:
                self._connections[python] = in_lasting_thread(lambda: self._start_forker(python))
            send(self._connections[python], request, fds)
            return receive_pid(self._connections[python])

    def _start_forker(self, python: str) -> socket.socket:
        room = " " * SHOWN_CHARS
        ours, theirs = socket.socketpair()
        with theirs:
            process = REAL_POPEN(
                [python, str(FORKER), PROGRAM, room], stdin=theirs.fileno(), env={**self._environ, "ROOM": room}
            )
        atexit.register(self._stop, os.getpid(), ours, process)
        return ours

    def _stop(self, pid: int, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        if os.getpid() == pid:
            connection.close()
            try:
                process.wait(STOP_S)
            finally:
                process.kill()


FORKED_RUNTIMES = ForkedRuntimes()
