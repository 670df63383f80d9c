"""Descriptors by which other processes see that an owner lives: its lock and its connections.

A fork of its process, which a program may make for work of its own, does not keep them: they would outlive the owner.
"""

from __future__ import annotations

import contextlib
import os

_descriptors: dict[int, tuple[int, int]] = {}  # with the file of each: the number may be another's by now


def leave_to_owner(fd: int) -> None:
    """Have forks of this process lose a descriptor."""
    _descriptors[fd] = _file(fd)


def _file(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _forked() -> None:
    """Replace the descriptors in the child: objects that it has copied may still close their numbers. Each is closed
    first: there may be no number left.
    """
    for fd, file in _descriptors.items():
        with contextlib.suppress(OSError):  # it is closed; or there is nothing to replace it
            if _file(fd) == file:
                os.close(fd)
                _fill(fd)
    _descriptors.clear()


def _fill(fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if nothing != fd:
        os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_forked)
