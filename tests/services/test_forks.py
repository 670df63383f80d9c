"""What a fork of an owner's process does not keep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The fork says what it has in the place of the lock, and lives until the process has looked.
PROGRAM = """
import os, resource, sys
from pathlib import Path
from batchmill.services.data_dirs.data_dirs import try_lock

place, taken = Path(sys.argv[1]), []
lock = try_lock(place)
(words, says), (waits, go_on) = os.pipe(), os.pipe()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
if not os.fork():
    os.close(go_on)
    os.write(says, f'{os.readlink(f"/proc/self/fd/{lock}")} {os.get_inheritable(lock)}'.encode())
    os.read(waits, 1)
    os._exit(0)
found = os.read(words, 1000).decode()
os.close(lock)
print(found, "locked" if try_lock(place) is None else "free")
"""


def test_a_fork_without_a_free_descriptor(tmp_path: Path) -> None:
    """It loses the lock all the same, and the number is no other file's."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{os.devnull} False free\n"
