"""The program of a child process: `python -P -m batchmill.children.child PARENT EXPECTED`.

It is bound to its parent before anything that takes time is imported. It is asked for one MODULE:FUNCTION after
another, and imports the EXPECTED one before it is asked, unless that is empty.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from batchmill.imports import import_large


def die_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent: it has nothing to save."""
    PR_SET_PDEATHSIG = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had died before the kernel was asked
        os._exit(1)


def _main(parent: int, expected: str) -> None:
    die_with(parent)
    serving = import_large("batchmill.children.serving")
    if expected:
        _find(expected)
    serving.serve(_find)


def _find(target: str) -> Callable[..., bytes]:
    module, _, name = target.partition(":")
    return getattr(import_large(module), name)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
