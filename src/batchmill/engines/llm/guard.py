"""Guard: ends an engine server when the worker that started it ends.

A separate program in its own session that uses only the standard library. It starts the server, writes its log, and
ends the server and its descendants when its standard input closes, which happens whenever the worker dies, even of
SIGKILL. The worker imports `sweep`, which ends processes that a killed guard left running.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

MARKER = "BATCHMILL_ENGINE"  # in the environment of the server and of everything it starts
LOG_BYTES_MAX = 8 * 1024 * 1024  # twice this on disk: the log and the one before it
TICK_S = 0.25  # how often the guard checks that its worker is still its parent
KILL_WAIT_S = 20.0  # how long a killed process may take to be gone
EXIT_NOT_STARTED = 127
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"


# Processes in /proc


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return stat[stat.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """The start of a live process in clock ticks since boot; with its id it identifies the process."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """The id of this boot; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if _LINUX else []


def descendants(root: int) -> list[int]:
    """Every live process below `root`, in any session, without zombies."""
    children: dict[int, list[int]] = {}
    dead = set()
    for pid in _pids():
        fields = _fields(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
            if fields[0] in "ZX":
                dead.add(pid)
    below: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        below += level
    return [pid for pid in below if pid not in dead]


def find_marked(marker: str) -> list[int]:
    """Every live process of this user with the marker in its environment."""
    variable = f"{MARKER}={marker}".encode()
    pids = []
    for pid in _pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it ended, or belongs to another user
            continue
        if variable in environ.split(b"\0") and pid != os.getpid():
            pids.append(pid)
    return pids


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_until_gone(list_pids: Callable[[], list[int]]) -> list[int]:
    """SIGKILL the processes of `list_pids` until there are none; return those that do not end."""
    deadline = time.monotonic() + KILL_WAIT_S
    while pids := list_pids():
        signal_all(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            return pids
        time.sleep(0.02)
    return []


# The record: one file per engine slot, locked while its worker or its guard lives


def try_lock(fd: int) -> bool:
    """Lock a slot's file, unless a live process holds it. The last process with the file open holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_record(fd: int) -> dict[str, object]:
    """The record in a slot's file; empty for an unused slot."""
    try:
        record = json.loads(os.pread(fd, 65536, 0) or b"{}")
    except ValueError:  # its writer was killed while writing, and had started nothing yet
        return {}
    return record if isinstance(record, dict) else {}


def write_record(fd: int, record: dict[str, object]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(record).encode(), 0)


def _is_alive(record: dict[str, object], role: str) -> bool:
    pid, started = record.get(f"{role}_pid"), record.get(f"{role}_start")
    return isinstance(pid, int) and started is not None and start_time(pid) == started


def end_leftovers(record: dict[str, object]) -> list[int]:
    """Kill the server of an engine's record and all processes with its marker; return those that do not end."""
    marker, server = record.get("marker"), record.get("server_pid")
    survivors: list[int] = []
    if isinstance(marker, str) and marker and record.get("boot_id") == boot_id():
        if isinstance(server, int) and _is_alive(record, "server"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server, signal.SIGKILL)
        survivors = kill_until_gone(lambda: find_marked(marker))
    scratch = record.get("scratch")
    if isinstance(scratch, str) and scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return survivors


def sweep(home: Path) -> int:
    """End every engine under `home` whose worker and guard are dead; return their number.

    Wait for an engine that its guard is ending, so that its memory is free when the next engine starts.
    """
    swept = 0
    for path in sorted(home.glob("engine-*.pid")):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            record = read_record(fd)
            if not _wait_for_lock(fd, record):
                continue
            record = read_record(fd)
            if record:
                end_leftovers(record)
                write_record(fd, {})
                swept += 1
        finally:
            os.close(fd)
    return swept


def _wait_for_lock(fd: int, record: dict[str, object]) -> bool:
    grace = record.get("grace_s")
    deadline = time.monotonic() + KILL_WAIT_S + (grace if isinstance(grace, int | float) else 0.0)
    while not try_lock(fd):
        if _is_alive(record, "worker") or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# The guard


class Log:
    """The server's output on disk, limited in size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.size_bytes = path.stat().st_size

    def write(self, data: bytes) -> None:
        # A full disk loses log lines, but does not stop the engine.
        with contextlib.suppress(OSError):
            if self.size_bytes + len(data) > LOG_BYTES_MAX:
                self.file.close()
                self.path.replace(self.path.with_suffix(".log.1"))
                self.file = self.path.open("ab", buffering=0)
                self.size_bytes = 0
            self.file.write(data)
            self.size_bytes += len(data)


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guard:
    """Runs one server until all of its processes have ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.should_end = False
        self.status: int | None = None  # the server's wait status, once it is dead
        self.log = Log(options.log)
        self.record = read_record(options.lock_fd)

    def run(self) -> int:
        """Start the server, watch it, end everything. Returns the server's exit code, or 128 + N after signal N."""
        # Orphans of the server become our children and not init's, so `descendants` lists them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._start()
        except OSError as error:
            self.log.write(f"cannot start {self.options.command[0]}: {error}\n".encode())
            self._forget()
            return EXIT_NOT_STARTED
        self._watch()
        self._end()
        code = os.waitstatus_to_exitcode(self.status) if self.status is not None else -signal.SIGKILL
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.should_end = True

    def _start(self) -> None:
        guard = os.getpid()

        def follow_guard() -> None:
            # If the guard itself is killed, the server gets SIGTERM.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guard:
                os._exit(EXIT_NOT_STARTED)

        self.server = subprocess.Popen(
            self.options.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=follow_guard,
        )
        assert self.server.stdout is not None
        self.output = self.server.stdout.fileno()
        os.set_blocking(self.output, False)
        pid = self.server.pid
        self.record |= {"server_pid": pid, "server_start": start_time(pid)}
        write_record(self.options.lock_fd, self.record)

    def _watch(self) -> None:
        """Wait until the worker has ended or closes the input, or the server is dead."""
        watched = [0, self.output]
        while not self.should_end and os.getppid() == self.options.worker:
            ready, _, _ = select.select(watched, [], [], TICK_S)
            if self.output in ready and not self._drain():
                watched.remove(self.output)
            self._reap()
            if self.status is not None or (0 in ready and not os.read(0, 1024)):
                return

    def _end(self) -> None:
        """End the server: SIGTERM, a grace period, SIGKILL; then delete the files that only it used."""
        self._reap()
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.server.pid, signal.SIGTERM)
        signal_all(self._alive(), signal.SIGTERM)
        deadline = time.monotonic() + self.options.grace_s
        while self._alive() and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.05)
        survivors = kill_until_gone(self._alive)
        self._drain()
        if survivors:
            self.log.write(f"the guard could not end the processes {survivors}\n".encode())
        else:
            self._forget()

    def _forget(self) -> None:
        """Delete the engine's files after all of its processes have ended."""
        shutil.rmtree(self.options.scratch, ignore_errors=True)
        write_record(self.options.lock_fd, {})

    def _alive(self) -> list[int]:
        self._reap()
        server = [self.server.pid] if self.status is None else []
        return descendants(os.getpid()) if _LINUX else server

    def _reap(self) -> None:
        """Reap every dead child: the server, and orphans of it."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.server.pid:
                    self.status = ended[1]
                    self.server.returncode = os.waitstatus_to_exitcode(ended[1])

    def _drain(self) -> bool:
        """Copy the server's output to the log; False once every writer has closed it."""
        try:
            while data := os.read(self.output, 65536):
                self.log.write(data)
        except BlockingIOError:
            return True
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="start an engine server and end it with its worker")
    parser.add_argument("--worker", type=int, required=True, help="process id of the worker")
    parser.add_argument("--lock-fd", type=int, required=True, help="open file with the engine's record, locked")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="directory to delete at the end")
    parser.add_argument("--grace-s", type=float, required=True, help="from SIGTERM to SIGKILL")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    # The server must not inherit the lock, or a dead guard would not be noticed.
    os.set_inheritable(options.lock_fd, False)
    return Guard(options).run()


if __name__ == "__main__":
    sys.exit(main())
