"""Processes that batchmill starts as `python -P -m MODULE`, as forks of one that has imported the modules.

`ModulePopen` asks a forker: a process of one thread that holds nothing but the imports. The forker makes the new
process a child of the forker's parent (`CLONE_PARENT`), so that who started it waits for it as for any of its own.
The new process has what `subprocess` would give it: arguments, descriptors, environment, folder, session, limits and
signals. The tests' own process asks the server of `preloaded.py`; each forked command has a forker of its own, which
ends with it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import os
import pickle
import random
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

REAL_POPEN = subprocess.Popen
MODULES = (
    "batchmill.children.child",
    "batchmill.datasets.checking.validator",
    "batchmill.datasets.templates.process",
    "batchmill.executors.worker",
)
SERVERS = ("fakes.batch_provider", "fakes.ended_job", "fakes.order_server")  # of the tests; they may start MODULES
TESTS = str(Path(__file__).parent.parent)
READ_AT_START = (
    "PYTHON", "LD_", "MALLOC_", "SSL_", "OPENSSL_", "SQLALCHEMY", "MSGSPEC", "AIOHTTP_", "COVERAGE", "TZ",
    "LANG", "LC_",
)  # fmt: skip
HARMLESS = ("PYTHONUNBUFFERED",)
LIMITS = (
    resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
)  # fmt: skip
FDS_MAX = 64
PR_SET_PDEATHSIG = 1
CLONE_PARENT = 0x00008000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)  # elsewhere each gets a new interpreter
SHOWN_CHARS = 64 * 1024  # of the longest command line, and of the largest environment
Start = Callable[[dict[str, Any], list[int]], int]  # of a request with descriptors; returns the process id


def read_at_start(environ: dict[str, str]) -> dict[str, str]:
    """The variables that an interpreter heeds while it starts; the tests' own folder is no difference."""
    found = {name: value for name, value in environ.items() if name.startswith(READ_AT_START) and name not in HARMLESS}
    return {name: value for name, value in found.items() if (name, value) != ("PYTHONPATH", TESTS)}


def is_like(ours: dict[str, str], environ: dict[str, str]) -> bool:
    """Whether a module may be a fork of a process with `ours`. One that is not told of certificates asks nobody."""
    ours, theirs = read_at_start(ours), read_at_start(environ)
    return theirs == {name: value for name, value in ours.items() if not name.startswith("SSL_") or name in theirs}


class ModulePopen(REAL_POPEN):
    """`subprocess.Popen`, but `python -P -m` of one of MODULES or SERVERS is a fork."""

    start_module: Start
    can_run_module: Callable[[dict[str, str]], bool]  # whether an interpreter with this environment is like the forker

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(REAL_POPEN._execute_child).bind(self, *args, **kwargs).arguments
        request = self._request(given)
        if request is None:
            return super()._execute_child(*args, **kwargs)
        fds = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        fds = {number: number if fd == -1 else fd for number, fd in fds.items()}
        fds |= {fd: fd for fd in given["pass_fds"]}
        self.pid = self.start_module(request | {"fds": list(fds)}, list(fds.values()))
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))
        return None

    def _request(self, given: dict[str, Any]) -> dict[str, Any] | None:
        words = given["args"]
        if not isinstance(words, (list, tuple)) or [*words[:3]] != [sys.executable, "-P", "-m"]:
            return None
        unusual = ("gid", "gids", "uid", "preexec_fn")
        if SYS_CLONE is None or words[3] not in (*MODULES, *SERVERS) or given["shell"]:
            return None
        if any(given[name] is not None for name in unusual):
            return None
        environ = dict(os.environ if given["env"] is None else given["env"])
        if not self.can_run_module(environ):
            return None
        return {"module": words[3], "argv": list(map(str, words[4:])), **as_given(given, environ)}


def as_given(given: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """What a process is to have of the arguments of `_execute_child` and of its starter, but for its descriptors."""
    return {
        "environ": environ, "limits": {which: resource.getrlimit(which) for which in LIMITS},
        "cwd": os.path.abspath(os.fspath(given["cwd"] or ".")), "new_session": given["start_new_session"],
        "process_group": given["process_group"],
        "umask": int(Path("/proc/self/status").read_text().split("Umask:")[1].split()[0], 8),
    }  # fmt: skip


def send(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    """A request with descriptors: its length with them, then itself."""
    body = pickle.dumps(request)
    connection.sendmsg([struct.pack("!I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What `send` has sent. Raises: EOFError."""
    head, fds, _, _ = socket.recv_fds(connection, 4, FDS_MAX)
    with connection.makefile("rb", buffering=0) as reader:
        head += _read(reader, 4 - len(head))
        return pickle.loads(_read(reader, struct.unpack("!I", head)[0])), fds


def _read(reader: io.RawIOBase, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = reader.read(count - len(data))
        if not more:
            raise EOFError("the connection closed")
        data += more
    return data


def receive_pid(connection: socket.socket) -> int:
    reply = connection.recv(4, socket.MSG_WAITALL)
    assert len(reply) == 4, "the process that forks has ended"
    return struct.unpack("!i", reply)[0]


def fork_sibling() -> int:
    """As `os.fork`, but a child of this process's parent."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    # `PyDLL` keeps the interpreter's lock, as `os.fork` does.
    pid = ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "the system makes no process"
    return pid


def fork_in_session(fork: Callable[[], int], request: dict[str, Any]) -> int:
    """Fork. The new process has the session and the group of the request when its number is known, as with
    `subprocess`: whoever kills its process group at once must find one."""
    ready, begun = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(ready)
        if request["new_session"]:
            os.setsid()
        if request.get("process_group", -1) >= 0:
            os.setpgid(0, request["process_group"])
        os.close(begun)
        return 0
    os.close(begun)
    os.read(ready, 1)
    os.close(ready)
    return pid


def start_forker(request: dict[str, Any], fds: list[int]) -> None:
    """Have this process, which is to be the command of a request, start its modules as forks. It has one thread yet.

    The forker ends a moment after its command. It has neither the command's environment nor its arguments, so that
    a test that looks for what a command has left does not find it.
    """
    environ = request["environ"]
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            serve(theirs, become_module)
        finally:
            os._exit(0)
    theirs.close()
    ours = _move_above(ours, max(*request["fds"], *fds))  # the command will have descriptors of these numbers
    lock = threading.Lock()

    def start(request: dict[str, Any], fds: list[int]) -> int:
        with lock:
            send(ours, request, fds)
            return receive_pid(ours)

    def can_run(other: dict[str, str]) -> bool:
        return is_like(environ, other)

    ModulePopen.start_module, ModulePopen.can_run_module = staticmethod(start), staticmethod(can_run)
    subprocess.Popen = ModulePopen


def serve(connection: socket.socket, become_one: Callable[[dict[str, Any], list[int]], NoReturn]) -> None:
    """Fork until the other end closes, holding no descriptor that anybody waits for."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    kept = connection.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    while True:
        try:
            request, fds = receive(connection)
        except EOFError:
            return
        pid = fork_in_session(fork_sibling, request)
        if pid == 0:
            connection.close()
            become_one(request, fds)
        for fd in fds:
            os.close(fd)
        connection.sendall(struct.pack("!i", pid))


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Have the descriptors, the folder, the signals and the environment of a request."""
    take_fds(request["fds"], fds)
    os.chdir(request["cwd"])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"])
    show([f"{name}={value}" for name, value in os.environ.items()], is_environ=True)
    random.seed()
    if replies := sys.modules.get("batchmill.server.replies"):
        replies._ids.seed(os.urandom(32))
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        setattr(sys, name, _open(fd, mode, sys_errors="backslashreplace" if fd == 2 else "strict"))
        setattr(sys, f"__{name}__", getattr(sys, name))
    if faults := sys.modules.get("batchmill.faults"):
        importlib.reload(faults)  # it reads the environment when it is imported


def take_limits(request: dict[str, Any]) -> None:
    """Have the mask and the limits of a request."""
    os.umask(request["umask"])
    for which, limits in request["limits"].items():
        if resource.getrlimit(which) != limits:
            resource.setrlimit(which, limits)


def become_module(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be `python -P -m MODULE` from here on."""
    status = 70
    try:
        take_limits(request)
        if request["module"] in SERVERS:
            start_forker(request, fds)
        become(request, fds)
        sys.path.pop(0)  # -P: neither the folder nor the script's
        if os.environ.get("PYTHONPATH") == TESTS:
            sys.path.insert(0, TESTS)
        sys.argv[1:] = request["argv"]
        show([sys.executable, "-P", "-m", request["module"], *request["argv"]])
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # that it has been imported
            status = exit_code(lambda: runpy.run_module(request["module"], run_name="__main__", alter_sys=True))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def show(words: list[str], *, is_environ: bool = False) -> None:
    """Have `/proc/PID/cmdline` or `environ` hold these words. What the forker was started with left them room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[47:49] if is_environ else fields[45:47])  # as proc(5) numbers them
    text = os.fsencode("".join(f"{word}\0" for word in words))
    assert len(text) < end - begin, f"there is room for {end - begin} characters"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def exit_code(run: Callable[[], object]) -> int:
    """Run it as the interpreter runs a main program: its exit status, with what it left to run at the end."""
    import atexit

    code = 0
    try:
        run()
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


def take_fds(numbers: list[int], fds: list[int]) -> None:
    """Give each descriptor its number of the request, by way of numbers above all of these."""
    above = max([*numbers, *fds, 2]) + 1
    moved = []
    for fd in fds:
        moved.append(_duplicate_above(fd, above))
        os.close(fd)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _move_above(end: socket.socket, number: int) -> socket.socket:
    with end:
        return socket.socket(fileno=_duplicate_above(end.fileno(), number + 1))


def _duplicate_above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)


def _open(fd: int, mode: str, *, sys_errors: str) -> io.TextIOWrapper:
    """A standard stream as a new interpreter opens it."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "w"
    raw = open(fd, f"{mode}b", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    is_line_buffered = mode == "w" and (fd == 2 or os.isatty(fd))
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors=sys_errors, newline="\n" if mode == "w" else None,
        line_buffering=is_line_buffered, write_through=is_unbuffered,
    )  # fmt: skip


def freeze() -> None:
    """Have the collector of garbage leave what is imported alone: the forks share its memory."""
    with contextlib.suppress(AttributeError):
        gc.collect()
        gc.freeze()
