"""Detects the end of a process from the process itself, not from its socket or pipe.

Whatever the process forked holds these open too: an end of file may come long after the process has gone, or never.
Run as a program, `process_end.py LEADER STARTED` waits for the end of its standard input, then kills what the process
LEADER, which began at STARTED, has left.

User code may begin sessions of its own, which no kernel ends with their parent. So the processes that run it, and all
that they start, have a mark in their environment, which begins with the process that marked them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

VARIABLE = "BATCHMILL_FUNCTION"  # in the environment of a process that runs user code and its descendants: its mark
KILL_S = 5.0  # how long killed processes may take to exit
POLL_S = 0.01


def kill_group(pid: int) -> None:
    """Kill the process group of `pid`, which was started in its own session, with everything that it forked.

    The number of a group is not used again while one of its members lives.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kill every other process of a session, in whatever process groups they are. Blocks: it reads /proc."""
    kill_group(leader)
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if name.isdecimal() and int(name) != os.getpid() and os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


def marks_of(pid: int, began: str) -> str:
    """What the marks begin with that a process has made. Args: began: see `started`."""
    return f"{pid}.{began}."


def kill_marked(mark: str) -> None:
    """Kill all of this user's processes whose mark begins so. Blocks."""
    deadline = time.monotonic() + KILL_S
    while mark and (pids := _pids_with_mark(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _pids_with_mark(mark: str) -> list[int]:
    """The pids of this user's processes with the mark; none without a /proc."""
    variable = f"\0{VARIABLE}={mark}".encode()
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            if name.isdecimal() and variable in b"\0" + Path(f"/proc/{name}/environ").read_bytes():
                pids.append(int(name))
        except OSError:  # it has exited, or belongs to another user
            continue
    return pids


def end_reading(sock: socket.socket) -> None:
    """Read what is in the socket, then end of file, even if another process holds the other end."""
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RD)


def started(pid: int) -> str:
    """The start of a process in clock ticks since boot; with the pid it identifies the process. "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def boot_id() -> str:
    """The id of this boot and pid namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # containers share the boot, not the ids
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_session(int(sys.argv[1]))
    kill_marked(marks_of(int(sys.argv[1]), sys.argv[2]))
