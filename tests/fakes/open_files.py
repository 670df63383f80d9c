"""What a test's process has open.

A test compares what is new since it began: servers and clients of earlier tests may close theirs at any time.
"""

from __future__ import annotations

import contextlib
import os


def open_files() -> set[str]:
    """A number and what it stands for, of each file and socket, but for the folder that is read here."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found
