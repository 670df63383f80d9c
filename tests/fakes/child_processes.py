"""The processes that a process has started.

`/proc/PID/task/*/children` does not tell: a thread's list is gone with the thread, and its processes move to the list
of another one, which a reader may have passed.
"""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that live or have not been waited for, ascending."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)
