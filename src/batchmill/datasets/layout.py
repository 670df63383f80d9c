"""The files of a sealed dataset: their names, layouts and checksums."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchmill.errors import DatasetDamaged

SEAL, OFFSETS, CHUNKS, CRCS = "seal.json", "offsets.u64", "chunks.bin", "crcs.u32"
SUMS = "sums.json"  # of these files themselves
REJECTED, ROWS, SCHEMA = "rejected.jsonl", "rows.jsonl", "schema.arrow"
TARGET, PREFIX, COST, FOLD = "target.u16", "prefix.u64", "cost.u32", "fold.u64"
KEYS = (TARGET, PREFIX, COST, FOLD)
# Only while sealing: a hash means nothing without the seed of its process, and lists of refused rows become one.
HASHES, REFUSED_EARLY, REFUSED_BY_LINE = "ids.i64", "refused-early.jsonl", "refused-lines.jsonl"
FILES = (SEAL, SUMS, OFFSETS, CHUNKS, CRCS, REJECTED, ROWS, SCHEMA, *KEYS, HASHES, REFUSED_EARLY, REFUSED_BY_LINE)
COPIES = "source-*.jsonl"

RANGE_BYTES = 8 * 1024 * 1024  # what one validator reads at a time, and what one digest of a file covers
CHUNK_BYTES = (
    512 * 1024
)  # whole lines of about this much are checked at once: it bounds memory, and fits a core's cache
BLOCK_BYTES = 64 * 1024  # what one checksum covers, about

BOM = b"\xef\xbb\xbf"

CHUNK_FIELDS = 9
CHUNK = struct.Struct(f"<{CHUNK_FIELDS}Q")

assert sys.byteorder == "little", "batchmill's files are little-endian, and are read and written as they lie in memory"


class ChunkRecord(NamedTuple):
    """One entry of `chunks.bin`. Bytes count through all files of the dataset, one after the other."""

    first_row: int
    rows: int
    block_rows: int  # rows in each of its blocks; the last may have fewer
    first_block: int  # its place in `crcs.u32`
    start: int  # where its first line starts
    end: int  # behind its last line
    first_line: int  # 1-based, in its part
    lines: int  # rows and blank lines
    part: int  # which source its lines come from


SUMMED = (SEAL, OFFSETS, CHUNKS, CRCS, REJECTED)
PIECE_BYTES = 1024 * 1024
Sums = dict[str, tuple[int, int]]  # name -> (bytes, crc32)


def write_sums(home: Path, seal: bytes) -> None:
    """Note the sums of the files in `home`, durably; the seal itself is written next."""
    sums: Sums = {name: _sum(home / name) for name in SUMMED if name != SEAL}
    sums[SEAL] = len(seal), zlib.crc32(seal)
    with open(home / SUMS, "wb") as file:
        file.write(msgspec.json.encode(sums))
        file.flush()
        os.fsync(file.fileno())


def faults(home: Path) -> list[str]:
    """What is wrong with the files of a sealed dataset; empty: nothing."""
    try:
        sums = msgspec.json.decode((home / SUMS).read_bytes(), type=Sums)
    except FileNotFoundError:
        return [f"{SUMS} is gone"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return [f"{SUMS} cannot be read"]
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
