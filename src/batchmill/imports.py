"""Imports of many modules at once.

What they create stays until the process ends, so the garbage collector finds nothing: looking costs an eighth of the
time of importing the owner, and as much again in each later collection and at the end.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from types import ModuleType

_programs: set[int] = set()  # processes of programs that are not batchmill's; a fork is not


def leave_collector_alone() -> None:
    """From now on imports do not touch the garbage collector of this process: it is a program's, with its settings."""
    _programs.add(os.getpid())


def import_large(name: str) -> ModuleType:
    """Import a module that imports many others. The garbage collector leaves them alone, now and later."""
    if name in sys.modules or os.getpid() in _programs:
        return import_module(name)  # to freeze once more would keep the garbage of all work since
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
