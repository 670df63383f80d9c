"""A process that has imported batchmill and forks itself for every command: the program that `preloaded.py` starts.

    python preloaded_server.py SOCKET

A request is one connection to the Unix socket: the length of a pickled dict (`!I`) with the file descriptors of the
command as ancillary data, then the dict. The reply is the process id (`!i`) and, once the process has ended, the status
of `waitpid` (`!i`). A command with `ends_with_caller` is killed when its connection closes. The server ends when its
standard input closes, and with it every command. A request for a module is answered with its process id alone: it is
a child of the server's parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

sys.path.insert(1, str(Path(__file__).parent.parent))
from fakes import forked_modules as forked  # noqa: E402

del sys.path[1]

# What `serve` and what it starts have imported once they work. grpc, pyarrow and opentelemetry start threads, which no
# fork keeps.
MODULES = (
    "batchmill.cli.main",
    "batchmill.cli.local",
    "batchmill.cli.remote",
    "batchmill.cli.session",
    "batchmill.cli.admin.serve",
    "batchmill.cli.jobs.run",
    "batchmill.owner",
    "batchmill.serving",
    "starlette.applications",
    "starlette.routing",
    "uvicorn",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "aiohttp",
    "encodings.idna",
    "httpx2",
    "rich.progress",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "batchmill.children.serving",
    "batchmill.control.http_server",
    "batchmill.datasets.external_sort",
    "batchmill.dialects.inferless",
    "batchmill.dialects.ml_commons.dialect",
    "batchmill.dialects.modelbit.dialect",
    "batchmill.dialects.native.dialect",
    "batchmill.dialects.open_inference.dialect",
    "batchmill.dialects.openai.dialect",
    "batchmill.dialects.predibase.dialect",
    "batchmill.server.function_replies",
    "batchmill.jobs.intake.preparation",
    "batchmill.engines.function.engine",
    "batchmill.engines.provider_batch.engine",
    "batchmill.engines.remote.connector",
    "batchmill.engines.remote.http",
    "batchmill.engines.llm.engine",
    *forked.MODULES,
)
RUNNERS = frozenset(
    ["deploy", "diff", "estimate", "plan", "resume", "results", "retry", "run", "serve", "sql", "validate"]
)  # commands that start modules; others' would be new interpreters
REQUEST_S = 30.0


def main(address: str) -> None:
    """Serve until standard input closes."""
    with warnings.catch_warnings(action="ignore"):
        for name in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # A fork keeps no thread but the one that forks.
    assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()
    forked.freeze()
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
                connection.settimeout(REQUEST_S)
                request, fds = forked.receive(connection)
                connection.settimeout(None)
            except (OSError, EOFError, struct.error, pickle.UnpicklingError) as error:
                print(f"a command could not be read: {error!r}", file=sys.stderr)
                connection.close()
                continue
            is_module = "module" in request
            pid = forked.fork_in_session(forked.fork_sibling if is_module else os.fork, request)
            if pid == 0:
                for one in (listener, connection, *running.values()):
                    one.close()
                signal.set_wakeup_fd(-1)
                os.close(ended)
                os.close(ending)
                (forked.become_module if is_module else _become)(request, fds)
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", pid))
            if is_module:
                connection.close()
                continue
            running[pid] = connection
            if request["ends_with_caller"]:
                callers[connection] = pid
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


def _become(request: dict, fds: list[int]) -> NoReturn:
    """Be the command from here on. What a new interpreter would do by itself is done by hand."""
    status = 70
    try:
        ctypes.CDLL(None).prctl(forked.PR_SET_PDEATHSIG, signal.SIGKILL)
        if not RUNNERS.isdisjoint(request["argv"]):
            forked.start_forker(request, fds)
        forked.become(request, fds)
        sys.argv = request["argv"]
        sys.path[0] = request["path"]
        from batchmill.cli.main import main as command

        status = forked.exit_code(command)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
