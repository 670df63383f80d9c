"""Commands of batchmill as forks of a process that has imported it: a start of 0.02 s instead of 0.5 to 2 s.

`conftest.py` puts `PreloadedPopen` in the place of `subprocess.Popen`. A test starts `python -m batchmill …` as ever
and gets a process of its own, with its own id, signals, descriptors, folder, environment and session; only the imports
are done before. Whatever starts another program, or sets what an interpreter reads while it starts (`PYTHONPATH`,
`LD_…`), gets a new interpreter. Tests of what is imported, and figures, use `python -c`, which is never forked.
`BATCHMILL_TESTS_FORK=0` starts every command in a new interpreter.
"""

from __future__ import annotations

import atexit
import inspect
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import threading
import warnings
from pathlib import Path
from typing import Any

from fakes.forked_modules import REAL_POPEN, SHOWN_CHARS, ModulePopen, is_like, read_at_start, receive_pid, send
from fakes.forked_runtimes import FORKED_RUNTIMES, in_lasting_thread
from fakes.own_folders import make_folder

import batchmill
from batchmill.children.process_end import started

SERVER = Path(__file__).with_name("preloaded_server.py")
IS_ENABLED = os.environ.get("BATCHMILL_TESTS_FORK") != "0"
MAIN = Path(batchmill.__file__).with_name("__main__.py")
SCRIPT = Path(sysconfig.get_path("scripts")) / "batchmill"
STATUS = struct.Struct("!i")
STOP_S = 10.0

# Starts fast with -S -E: forwards its arguments and descriptors, and the signals that a shell sends. Its command ends
# with it, so that a test that kills a shell's process group leaves nothing behind.
FORWARDER = """\
#!{python} -ISE
import os, signal, socket, struct, sys
import _pickle as pickle
def start():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect({address!r})
    body = pickle.dumps({{
        "argv": sys.argv[:], "path": {path!r}, "cwd": os.getcwd(), "environ": dict(os.environ), "new_session": False,
        "ends_with_caller": True, "fds": [0, 1, 2],
    }})
    socket.send_fds(connection, [struct.pack("!I", len(body))], [0, 1, 2])
    connection.sendall(body)
    return connection
signals = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
connection = start()
pid = struct.unpack("!i", connection.recv(4, socket.MSG_WAITALL))[0]
for number in signals:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
status = struct.unpack("!i", connection.recv(4, socket.MSG_WAITALL))[0]
if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
"""


class Preloaded:
    """One server for this process of tests, started by the first command."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._environ = dict(os.environ)  # before a test changes any

    @property
    def pid(self) -> int:
        """Of the server; 0 before the first command."""
        return self._process.pid if self._process else 0

    @property
    def address(self) -> str:
        """The server's socket, once it listens."""
        with self._lock:
            if self._process is None:
                self._folder = make_folder("batchmill-tests")
                try:
                    process = in_lasting_thread(self._start)
                    atexit.register(self._stop, os.getpid())
                except BaseException:  # a test that was interrupted: the next one starts another server
                    shutil.rmtree(self._folder)
                    raise
                self._process = process
        return self._address

    def _start(self) -> subprocess.Popen[bytes]:
        room = " " * SHOWN_CHARS
        process = REAL_POPEN(
            [sys.executable, str(SERVER), self._address, room], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**self._environ, "ROOM": room, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would be in no fork
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "the preloaded process did not start"
        except BaseException:
            process.kill()
            process.communicate()  # it makes no socket any more
            raise
        return process

    @property
    def _address(self) -> str:
        return f"{self._folder}/socket"

    def can_run(self, environ: dict[str, str]) -> bool:
        """Whether an interpreter that starts with `environ` is like the one that has started."""
        if not IS_ENABLED:
            return False
        _ = self.address
        return read_at_start(environ) == read_at_start(self._environ)

    def can_run_module(self, environ: dict[str, str]) -> bool:
        return self.can_run(self._environ) and is_like(self._environ, environ)

    def start(
        self, argv: list[str], *, path: str, cwd: str, environ: dict[str, str], new_session: bool, fds: dict[int, int]
    ) -> tuple[int, int]:
        """Its process id, and the descriptor on which its status comes. `fds` maps its numbers to descriptors here."""
        request = {
            "argv": argv, "path": path, "cwd": cwd, "environ": environ, "new_session": new_session,
            "ends_with_caller": False, "fds": list(fds),
        }  # fmt: skip
        connection = self._ask(request, list(fds.values()))
        return receive_pid(connection), connection.detach()

    def start_module(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start a module as a child of this process. Returns its process id."""
        with self._ask(request, fds) as connection:
            return receive_pid(connection)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.address)
        send(connection, request, fds)
        return connection

    def write_script(self, folder: Path) -> Path:
        """A program `batchmill` in `folder` for shells; it runs as a fork of the server."""
        program = folder / "batchmill"
        text = FORWARDER.format(python=sys.executable, address=self.address, path=str(SCRIPT.parent))
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return program

    def _stop(self, pid: int) -> None:
        if self._process is None or os.getpid() != pid:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.stdout.close()
            shutil.rmtree(self._folder)


PRELOADED = Preloaded()


class PreloadedPopen(ModulePopen):
    """`subprocess.Popen`, but a command of batchmill is a fork of `PRELOADED`.

    `subprocess` keeps an object that nobody refers to until its process has ended. So the status comes on a plain
    descriptor: a socket object would be closed with the test's other garbage, and every later start would ask it.
    """

    _status_fd: int | None = None  # until the process has ended
    _test = ""  # that started it
    _is_of_asyncio = False
    can_run_module = staticmethod(PRELOADED.can_run_module)

    @staticmethod
    def start_module(request: dict[str, Any], fds: list[int]) -> int:
        return (FORKED_RUNTIMES.start if "python" in request else PRELOADED.start_module)(request, fds)

    def _request(self, given: dict[str, Any]) -> dict[str, Any] | None:
        return (FORKED_RUNTIMES.request(given) if IS_ENABLED else None) or super()._request(given)

    def __del__(self, **kwargs: Any) -> None:
        """Name the test that has left a process behind: it is some later test that fails for it.

        asyncio waits for its processes in a thread; an event loop that was closed does not hear of their end.
        """
        if self._child_created and self.returncode is None and self._is_of_asyncio and not started(self.pid):
            self.returncode = -1
        if self._child_created and self.returncode is None:
            text = f"{self._test or 'no test'} has not waited for the end of process {self.pid}: {self.args}"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
        super().__del__(**kwargs)

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "")
        given = inspect.signature(REAL_POPEN._execute_child).bind(self, *args, **kwargs).arguments
        self._is_of_asyncio = _is_of_asyncio()
        command = None if self._is_of_asyncio else _command(given)  # asyncio waits for children of this process alone
        if command is None:
            return super()._execute_child(*args, **kwargs)
        argv, path, environ = command
        fds = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        fds = {number: number if fd == -1 else fd for number, fd in fds.items()}
        fds |= {fd: fd for fd in given["pass_fds"]}
        cwd = os.path.abspath(os.fspath(given["cwd"] or "."))
        if not os.path.isdir(cwd):
            raise FileNotFoundError(cwd)
        self.pid, self._status_fd = PRELOADED.start(
            argv, path=path, cwd=cwd, environ=environ, new_session=given["start_new_session"], fds=fds
        )
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))
        return None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status_fd is None:
            return super()._try_wait(wait_flags)
        if wait_flags == os.WNOHANG and not _is_readable(self._status_fd):
            return 0, 0
        status = os.read(self._status_fd, STATUS.size)  # sent in one piece
        fd, self._status_fd = self._status_fd, None
        os.close(fd)
        assert len(status) == STATUS.size, "the preloaded process has ended"
        return self.pid, STATUS.unpack(status)[0]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._status_fd is None:
            return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _is_of_asyncio() -> bool:
    """Whether it is asyncio that makes the object whose `_execute_child` calls this."""
    return sys._getframe(3).f_globals.get("__name__", "").startswith("asyncio.")


def _command(given: dict[str, Any]) -> tuple[list[str], str, dict[str, str]] | None:
    """`sys.argv`, the first of `sys.path` and the environment of a command of batchmill; None for anything else."""
    words = given["args"]
    if isinstance(words, (str, bytes, os.PathLike)) or given["shell"] or given["preexec_fn"] is not None:
        return None
    words = [os.fspath(word) for word in words]
    unusual = ("gid", "gids", "uid")
    if given["executable"] not in (None, words[0]) or any(given[name] is not None for name in unusual):
        return None
    environ = dict(os.environ if given["env"] is None else given["env"])
    if words[0] == str(SCRIPT):
        command = words, str(SCRIPT.parent)
    elif words[:3] == [sys.executable, "-m", "batchmill"]:
        command = [str(MAIN), *words[3:]], ""
    elif words[:4] == [sys.executable, "-P", "-m", "batchmill"]:
        command = [str(MAIN), *words[4:]], str(SCRIPT.parent)  # no folder of the caller's
    else:
        return None
    if not PRELOADED.can_run(environ):
        return None
    argv, path = command
    return argv, path or os.path.abspath(os.fspath(given["cwd"] or ".")), environ


def _is_readable(fd: int) -> bool:
    """As `select`, which takes no descriptor beyond 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
