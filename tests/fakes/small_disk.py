"""A disk of a few megabytes that a test fills up: a file system in memory, in a namespace of its own. Linux only."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BALLAST = "ballast"
CHUNK_BYTES, PAGE_BYTES = 1024 * 1024, 4096
END_S = 10.0


def are_namespaces_allowed() -> bool:
    """Whether this user may mount a file system that only some processes see."""
    unshare = shutil.which("unshare")
    words = ["--user", "--map-root-user", "--mount", "true"]
    return unshare is not None and subprocess.run([unshare, *words], capture_output=True, check=False).returncode == 0


class SmallDisk:
    """A file system at `folder`, which is there. Only processes that `command` has started see it."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        mount = f"mount -t tmpfs -o size={size_bytes},mode=0700 none '{folder}' && echo mounted && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "mounted\n", "no file system was mounted"
        # What is on it, for processes of this user that do not see it.
        self.content = Path("/proc", str(self._holder.pid), "root", *folder.resolve().parts[1:])

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """The command that runs another one in a folder, with this disk."""
        enter = ["nsenter", "--user", "--preserve-credentials", "--mount", "--target", str(self._holder.pid), "--"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]

    def fill(self) -> None:
        """Take all the room that there is."""
        with (self.content / BALLAST).open("ab", buffering=0) as ballast:
            for size in (CHUNK_BYTES, PAGE_BYTES):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        (self.content / BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """End the file system; those who use it have ended."""
        self._holder.kill()
        self._holder.wait(END_S)
        assert self._holder.stdout is not None
        self._holder.stdout.close()
