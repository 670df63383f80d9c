"""Whether a sealed dataset's own files are what was written: their sizes and checksums lie beside them.

What they say of the input holds only while they do. It imports nothing heavy: workers read with it.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec

from batchmill.datasets import layout
from batchmill.errors import DatasetDamaged

SUMMED = (layout.SEAL, layout.OFFSETS, layout.CHUNKS, layout.CRCS, layout.REJECTED)
PIECE_BYTES = 1024 * 1024
Sums = dict[str, tuple[int, int]]  # name -> (bytes, crc32)


def write_sums(home: Path, seal: bytes) -> None:
    """Note the sums of the files in `home`, durably; the seal itself is written next."""
    sums: Sums = {name: _sum(home / name) for name in SUMMED if name != layout.SEAL}
    sums[layout.SEAL] = len(seal), zlib.crc32(seal)
    with open(home / layout.SUMS, "wb") as file:
        file.write(msgspec.json.encode(sums))
        file.flush()
        os.fsync(file.fileno())


def faults(home: Path) -> list[str]:
    """What is wrong with the files of a sealed dataset; empty: nothing."""
    try:
        sums = msgspec.json.decode((home / layout.SUMS).read_bytes(), type=Sums)
    except FileNotFoundError:
        return [f"{layout.SUMS} is gone"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return [f"{layout.SUMS} cannot be read"]
    found = []
    for name in SUMMED:
        try:
            if sums.get(name) != _sum(home / name):
                found.append(f"{name} is not what was written")
        except FileNotFoundError:
            found.append(f"{name} is gone")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def check(home: Path) -> None:
    """Raises: DatasetDamaged. Before rows are read: where one begins within a block has no other checksum."""
    if wrong := faults(home):
        raise damaged(home, wrong)


def damaged(home: Path, what: list[str]) -> DatasetDamaged:
    """What is said where the files in `home` are at fault, and not the input."""
    return DatasetDamaged(
        f"the index of the dataset in {home} is damaged ({'; '.join(what)}), the input is not to blame: "
        f"`batchmill ledger rebuild {home.parent.name}` makes it anew from the input, then resume the job"
    )


def _sum(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc
