"""The end of a process that we started, told by the process itself and not by its socket or pipe.

Whatever the process forked holds these open too: an end of file may come long after the process has gone, or never.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path


def kill_group(pid: int) -> None:
    """End the process group that `pid` leads or has led: a process started in a session of its own, and what it forked.

    The number of a group is not used again while one of its members lives.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_reading(sock: socket.socket) -> None:
    """What lies in the socket is still read, and then its end, whoever holds the other side."""
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RD)


def started(pid: int) -> str:
    """When a process began, in clock ticks since boot: with the pid it names the process for good. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def boot_id() -> str:
    """What this boot of the machine is called, and where process ids are counted; empty where nothing tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # containers share the boot, not the ids
    except OSError:
        return ""
