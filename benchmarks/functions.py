"""The functions that the benchmarks run: they do nothing."""

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
