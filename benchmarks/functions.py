"""The functions that the benchmarks run: they do nothing, some of them slowly."""

import hashlib
import os
import time
from pathlib import Path

FIRST_CALL = os.environ.get("BENCHMARK_FIRST_CALL")  # where `nothing_noted` writes when it was first called
_noted = FIRST_CALL is None


def nothing(**fields: object) -> dict[str, bool]:
    """Do nothing with a row."""
    return {"ok": True}


def nothing_noted(**fields: object) -> dict[str, bool]:
    """Do nothing, and leave the time of this process's first call."""
    global _noted
    if not _noted:
        _noted = True
        Path(f"{FIRST_CALL}.{os.getpid()}").write_text(str(time.time()))
    return {"ok": True}


_HASHED = bytes(88 * 1024)  # takes about 50 us to hash


def fifty_us(**fields: object) -> dict[str, bool]:
    """Take about 50 us of processor time for a row."""
    hashlib.sha256(_HASHED).digest()
    return {"ok": True}


def tenth(**fields: object) -> dict[str, bool]:
    """Take a tenth of a second for a row."""
    time.sleep(0.1)
    return {"ok": True}


def milli(**fields: object) -> dict[str, bool]:
    """Take a millisecond for a row."""
    time.sleep(0.001)
    return {"ok": True}
