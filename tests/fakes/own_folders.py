"""Folders of a process of tests, in the temporary folder. What a killed process leaves, a later one deletes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def make_folder(prefix: str) -> Path:
    """A new folder whose name tells this process. Its maker deletes it; those of ended processes are deleted here.

    A PostgreSQL server that has outlived its tests ends by itself once its folder is gone.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}-*-*"):
        pid = folder.name.removeprefix(f"{prefix}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-"))
