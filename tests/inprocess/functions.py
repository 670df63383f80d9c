"""Functions of a module, as models."""

import os
import time
from pathlib import Path


def size(text, n):
    if n == 3:
        raise ValueError("three")
    return len(text) + n


def counted(n):
    """Writes down that it was called. Row 60 waits for the file `go`, having said so in `blocked`."""
    place = Path(os.environ["INPROCESS_PLACE"])
    with open(place / "calls", "a") as calls:
        calls.write(f"{n}\n")
    if n == 60:
        (place / "blocked").touch()
        while not (place / "go").exists():
            time.sleep(0.01)
    return n * 2


def mixed(n):
    return {1: 1, 2: {"n": n}}.get(n, "three")
