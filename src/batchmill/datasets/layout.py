"""The files of a sealed dataset: their names, layouts and checksums."""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

import msgspec

from batchmill.checksums import checksum, checksum_of
from batchmill.datasets.folders import Folder, Home, folder_of
from batchmill.errors import DatasetDamaged
from batchmill.types import Seal

SEAL, OFFSETS, CHUNKS, CHECKSUMS = "seal.json", "offsets.u64", "chunks.bin", "checksums.u32"
SUMS = "sums.json"  # checksums of these files
REJECTED, ROWS, SCHEMA = "rejected.jsonl", "rows.jsonl", "schema.arrow"
ROW_GROUPS = "groups.u64"  # of a dataset that is read as columns: (first row, file, number in it) of each row group
TARGET, PREFIX, COST, FOLD = "target.u16", "prefix.u64", "cost.u32", "fold.u64"
KEYS = (TARGET, PREFIX, COST, FOLD)
REQUESTS = "requests.sha256"  # 32 bytes a row, if results of other jobs are looked for: see `request_digests`
# Only while sealing: a hash is useless without its seed, and the lists of refused rows are merged.
HASHES, REFUSED_EARLY, REFUSED_BY_LINE = "ids.u64", "refused-early.jsonl", "refused-lines.jsonl"
FILES = (
    SEAL, SUMS, OFFSETS, CHUNKS, CHECKSUMS, REJECTED, ROWS, SCHEMA, ROW_GROUPS, *KEYS, REQUESTS, HASHES,
    REFUSED_EARLY, REFUSED_BY_LINE,
)  # fmt: skip
COPIES = "source-*.jsonl"
FETCHED = "fetched-*"  # inputs that were fetched before they are read: see jobs.intake.fetching

RANGE_BYTES = 8 * 1024 * 1024  # what a validator reads at a time, and what one digest of a file covers
# Whole lines of about this size are checked at once: this bounds memory, and fits the cache of a core.
CHUNK_BYTES = 512 * 1024
BLOCK_BYTES = 64 * 1024  # what one checksum covers, about

PIECE_ROWS = 4 * 1024 * 1024  # rows of which an array may be in memory: more are sorted and joined in pieces

BOM = b"\xef\xbb\xbf"

CHUNK_FIELDS = 9
CHUNK = struct.Struct(f"<{CHUNK_FIELDS}Q")

assert sys.byteorder == "little", "batchmill's files are little-endian, and are read and written as memory holds them"


class ChunkRecord(NamedTuple):
    """One entry of `chunks.bin`. Bytes count through all files of the dataset, one after the other."""

    first_row: int
    rows: int
    block_rows: int  # rows in each of its blocks; the last may have fewer
    first_block: int  # its index in `checksums.u32`
    start: int  # where its first line starts
    end: int  # the end of its last line
    first_line: int  # 1-based, in its part
    lines: int  # rows and blank lines
    part: int  # which source its lines come from


SUMMED_LINES = (OFFSETS, CHUNKS, CHECKSUMS, REJECTED)
INDEX = (SEAL, OFFSETS, CHUNKS, CHECKSUMS)  # what rows of lines are read with
SUMMED_COLUMNS = (ROW_GROUPS, CHECKSUMS, REJECTED)
PIECE_BYTES = 1024 * 1024
Sums = dict[str, tuple[int, int]]  # name -> (bytes, checksum)


def write_seal(home: Home, seal: Seal) -> None:
    """Make every file in `home` durable, and write the seal last."""
    folder = folder_of(home)
    folder.sync()
    data = msgspec.json.encode(seal)
    write_sums(folder, data)
    folder.write(SEAL, data)


def write_sums(home: Home, seal: bytes) -> None:
    """Durably write the checksums of the files in `home` and of the seal, which the caller writes next."""
    folder = folder_of(home)
    names = SUMMED_COLUMNS if ROW_GROUPS in folder.names() else SUMMED_LINES
    sums: Sums = {name: _sum(folder, name) for name in names}
    sums[SEAL] = len(seal), checksum(seal)
    folder.write(SUMS, msgspec.json.encode(sums))


def faults(home: Home) -> list[str]:
    """The faults of the files of a sealed dataset; empty if there are none."""
    folder = folder_of(home)
    if not folder.is_on_disk:
        return []
    try:
        sums = msgspec.json.decode(folder.read(SUMS), type=Sums)
    except FileNotFoundError:
        return [f"{SUMS} is missing"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return [f"{SUMS} cannot be read"]
    messages = []
    for name in (SEAL, *(SUMMED_COLUMNS if ROW_GROUPS in sums else SUMMED_LINES)):
        try:
            if sums.get(name) != _sum(folder, name):
                messages.append(f"{name} was changed or damaged")
        except FileNotFoundError:
            messages.append(f"{name} is missing")
        except OSError as error:
            messages.append(f"{name} cannot be read: {error.strerror}")
    return messages


def check(home: Home) -> None:
    """Verify the index before rows are read: no block checksum covers the offsets of rows. Raises: DatasetDamaged."""
    if messages := faults(home):
        raise damaged(home, messages)


def damaged(home: Home, messages: list[str]) -> DatasetDamaged:
    """The error for damaged files in `home`, when the input is not at fault."""
    path = folder_of(home).path
    return DatasetDamaged(
        f"the index of the dataset in {path} is damaged ({'; '.join(messages)}); the input is not the cause: rebuild "
        f"the index from the input with `batchmill ledger rebuild {path.parent.name}`, then resume the job"
    )


def _sum(folder: Folder, name: str) -> tuple[int, int]:
    with folder.open(name) as file:
        value = checksum_of(iter(lambda: file.read(PIECE_BYTES), b""))
        return file.tell(), value
