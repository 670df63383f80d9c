"""A process that has imported batchmill and forks itself for every command: the program that `preloaded.py` starts.

    python preloaded_server.py SOCKET

A request is one connection to the Unix socket: the length of a pickled dict (`!I`) with the file descriptors of the
command as ancillary data, then the dict. The reply is the process id (`!i`) and, once the process has ended, the status
of `waitpid` (`!i`). A command with `ends_with_caller` is killed when its connection closes. The server ends when its
standard input closes, and with it every command.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import warnings
from typing import NoReturn

# What `serve` has imported once it answers. grpc, pyarrow and opentelemetry start threads, which no fork keeps.
MODULES = (
    "batchmill.cli.main",
    "batchmill.cli.local",
    "batchmill.cli.remote",
    "batchmill.cli.session",
    "batchmill.cli.jobs.run",
    "batchmill.owner",
    "batchmill.serving",
    "starlette.applications",
    "starlette.routing",
    "uvicorn",
    "uvicorn.protocols.http.httptools_impl",
    "aiohttp",
    "httpx2",
    "rich.progress",
    "sqlalchemy.dialects.sqlite.aiosqlite",
)
FDS_MAX = 64
REQUEST_S = 30.0
PR_SET_PDEATHSIG = 1


def main(address: str) -> None:
    """Serve until standard input closes."""
    with warnings.catch_warnings(action="ignore"):
        for name in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()  # a fork keeps no thread but the one that forks
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    ended, ending = os.pipe()
    os.set_blocking(ending, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(ending, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process ends the server
    print("ready", flush=True)
    _serve(listener, ended, ending)


def _serve(listener: socket.socket, ended: int, ending: int) -> None:
    import select

    running: dict[int, socket.socket] = {}
    callers: dict[socket.socket, int] = {}  # of commands that end with them
    while True:
        ready, _, _ = select.select([0, listener, ended, *callers], [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
            for connection in _report_ended(running):
                callers.pop(connection, None)
        for connection in callers.keys() & set(ready):
            os.kill(callers.pop(connection), signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            try:
                request, fds = _receive(connection)
            except (OSError, EOFError, struct.error, pickle.UnpicklingError) as error:
                print(f"a command could not be read: {error!r}", file=sys.stderr)
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                for one in (listener, connection, *running.values()):
                    one.close()
                signal.set_wakeup_fd(-1)
                os.close(ended)
                os.close(ending)
                _become(request, fds)
            for fd in fds:
                os.close(fd)
            running[pid] = connection
            if request["ends_with_caller"]:
                callers[connection] = pid
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", pid))
        if 0 in ready and not os.read(0, 1):
            return


def _report_ended(running: dict[int, socket.socket]) -> list[socket.socket]:
    """Send the statuses of commands that have ended. Returns their connections, which are closed."""
    connections = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return connections
        if not pid:
            return connections
        with running.pop(pid) as connection, contextlib.suppress(OSError):  # the test may not wait
            connection.sendall(struct.pack("!i", status))
        connections.append(connection)


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    connection.settimeout(REQUEST_S)
    head, fds, _, _ = socket.recv_fds(connection, 4, FDS_MAX)
    with connection.makefile("rb") as reader:
        while len(head) < 4:
            more = reader.read(4 - len(head))
            if not more:
                raise EOFError("the connection closed")
            head += more
        request = pickle.loads(reader.read(struct.unpack("!I", head)[0]))
    connection.settimeout(None)
    return request, fds


def _become(request: dict, fds: list[int]) -> NoReturn:
    """Be the command from here on. What a new interpreter would do by itself is done by hand."""
    status = 70
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _take_fds(request["fds"], fds)
        os.chdir(request["cwd"])
        if request["new_session"]:
            os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["environ"])
        random.seed()
        if replies := sys.modules.get("batchmill.server.replies"):
            replies._ids.seed(os.urandom(32))
        for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            setattr(sys, name, _open(fd, mode, sys_errors="backslashreplace" if fd == 2 else "strict"))
            setattr(sys, f"__{name}__", getattr(sys, name))
        sys.argv = request["argv"]
        sys.path[0] = request["path"]
        from batchmill import faults
        from batchmill.cli.main import main as command

        importlib.reload(faults)  # it reads the environment when it is imported
        status = _exit_code(command)
    finally:
        os._exit(status)


def _take_fds(numbers: list[int], fds: list[int]) -> None:
    """Give each descriptor its number of the request, by way of numbers above all of these."""
    above = max([*numbers, *fds, 2]) + 1
    moved = []
    for fd in fds:
        moved.append(_duplicate_above(fd, above))
        os.close(fd)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _duplicate_above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, least)


def _open(fd: int, mode: str, *, sys_errors: str) -> io.TextIOWrapper:
    """A standard stream as a new interpreter opens it."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "w"
    raw = open(fd, f"{mode}b", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    is_line_buffered = mode == "w" and (fd == 2 or os.isatty(fd))
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors=sys_errors, newline="\n" if mode == "w" else None,
        line_buffering=is_line_buffered, write_through=is_unbuffered,
    )  # fmt: skip


def _exit_code(command: object) -> int:
    """Run it as the interpreter runs a main program: its exit status, with what it left to run at the end."""
    import atexit
    import traceback

    code = 0
    try:
        command()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads that are not daemons, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    return code & 0xFF


if __name__ == "__main__":
    main(sys.argv[1])
