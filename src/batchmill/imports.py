"""Imports of many modules at once.

What they create stays until the process ends, so the garbage collector finds nothing: looking costs an eighth of the
time of importing the owner, and as much again in each later collection and at the end.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module that imports many others. The garbage collector leaves them alone, now and later."""
    if name in sys.modules:
        return import_module(name)  # to freeze once more would keep the garbage of all work since
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
