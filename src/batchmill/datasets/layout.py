"""Names and layouts of the files of a sealed dataset, for the one that writes them and the one that reads them.

Numbers are little-endian. A chunk is a run of whole lines of one file; a block is a run of its rows with one checksum.
"""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

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
