"""Objects that are files of a folder. Each gets its name once it is whole and durable, which obstore does not see to:
a loss of power would leave a name with other content, which no later writer could replace.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from batchmill.part_files import make_folder, sync_folder


def write(path: Path, pieces: Iterable[bytes | memoryview], *, overwrite: bool) -> bool:
    """Write an object durably. Returns: False: there is one, and it stays unless `overwrite`. Raises: OSError."""
    make_folder(path.parent, 0o777)
    part = path.with_name(f"{path.name}#{secrets.randbits(32)}")  # obstore lists no such name
    try:
        with open(part, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(part, path)
        else:
            os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
