"""Datasets, before and after they are sealed."""

from __future__ import annotations

from msgspec import Struct


class DatasetSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a job's rows come from."""

    paths: list[str]  # absolute files, in the order in which they count as one dataset
    format: str | None = None  # openai, jsonl, csv, parquet; None: seen from the name and the first row
    copy: bool = False  # keep a copy of the file with the job; otherwise it is used where it lies
    line_bytes_max: int = 16 * 1024 * 1024
    depth_max: int = 128
    rows_max: int = 2**32 - 1  # that a row's number can tell apart
    unpacked_bytes_max: int = 2**40  # what the rows and their index come to, unpacked and converted
    unpacked_ratio_max: int = 1000  # the same, for each byte of the files; see datasets.allowance


class SealedFile(Struct, frozen=True):
    """A file as it was when it was sealed."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int


class Seal(Struct, frozen=True):
    """A sealed dataset: what never changes once every row has been read. Written as `seal.json`."""

    rows: int
    bytes: int  # of the files as they are read
    sha256: str  # over the sha256 digests of 8 MiB blocks of every source file, in order
    format: str  # openai, jsonl, csv, parquet
    columns: list[str]  # of a table, in order; empty for OpenAI rows
    files: list[SealedFile]  # what the rows' bytes are read from
    sources: list[SealedFile]  # what the caller named
    rejected: int = 0  # rows that validation refused


class Problem(Struct, frozen=True):
    """One thing that validation found."""

    code: str
    message: str
    line: int  # 1-based line, or row of a Parquet file
    path: str = ""
    row: int | None = None  # its number, where the line became a row
