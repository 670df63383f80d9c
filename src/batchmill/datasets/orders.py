"""The order to seal a dataset, the messages between its processes, and the limits on its size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from batchmill.errors import (
    AuthRefused,
    BatchmillError,
    InputChanged,
    InvalidDataset,
    OverQuota,
    StorageFailed,
    StorageFull,
)
from batchmill.types import DatasetSpec, SealedFile
from batchmill.wire.rows.forms import Form

Fold = Literal["deterministic", "all", "none"]
KeepMedia = Callable[[str, bytes], None]  # gets the BLAKE3 of a file's content, and the content


class SealOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What to seal and which rows to allow.

    A target is (number of the model, number of model and adapter together); `urls` has one entry for each model.
    """

    dataset: DatasetSpec
    form: Form | None = None  # None: OpenAI rows, or a table whose columns are a function's arguments
    targets: dict[str, tuple[int, int]] = {}  # every value that `body.model` may have
    bases: list[int] = []  # second numbers of targets that are models without an adapter
    patterns: list[tuple[str, int, int]] = []  # of adapters that are not fetched yet, and the target of their base
    default: tuple[int, int] | None = (0, 0)  # for rows without a model; None: each OpenAI row must name one
    any_model: bool = False  # rows with an unknown model use the default
    urls: list[frozenset[str] | None] = field(default_factory=lambda: [None])  # None: any path and any body
    services: list[int] = []  # numbers of the models that remote services run; they may accept further fields
    any_path_models: list[int] = []  # numbers of the models that accept any path below /v1
    features: list[list[str] | None] = []  # of each model: the features of a service that its rows may use; None: all
    endpoint: str | None = None  # the only `url` that OpenAI rows may have
    rows_max: int | None = None  # a dataset with more is refused
    bytes_left: int | None = None  # of the project's disk quota, for what is written; None: no quota
    no_space_message: str = ""  # the message of the error when `bytes_left` is not enough
    keys: bool = False  # write the columns that the plan is made from
    fold: Fold = "none"  # which rows may share a result
    requests: bool = False  # write the digest of each request: results of other jobs are looked for. Needs `keys`
    columns_max: int | None = None  # different columns of a table whose rows may differ; None: no limit
    problems_max: int = 1000
    processes: int = 2
    files: list[SealedFile] = []  # the sources, as they were when sealing began; set by `sealing`, as the next
    id_seed: int = 0  # of the hashes of custom_ids: all that check rows of the dataset have one
    may_be_columnar: bool = False  # all rows go to one function, in the order of the files: Parquet is read in place


class SourcePart(Struct, frozen=True):
    """Lines of one source: bytes start..end of a file that is read."""

    number: int
    path: str  # the file to read
    source: str  # the file that the caller named
    base: int  # offset of the file's byte 0 in all files together
    start: int
    end: int


class ByteRange(Struct, frozen=True):
    """Bytes for one validator: it checks the lines that start in them."""

    number: int
    part: SourcePart
    start: int  # in the file
    end: int


class RefusedRow(Struct, frozen=True, array_like=True):
    """A row that validation refused. `row` and `line` count from 0; the field that holds it says from where."""

    row: int
    line: int
    code: str
    message: str


class ValidatedChunk(Struct, frozen=True, array_like=True):
    """The results of one chunk of whole lines: columns as packed bytes."""

    start: int
    end: int
    lines: int
    rows: int
    block_rows: int
    offsets: bytes  # u64 a row
    checksums: bytes  # u32 a block
    ids: bytes  # u64 a row: hash of the custom_id; empty for tables
    keys: tuple[bytes, bytes, bytes, bytes]  # target u16, prefix u64, cost u32, fold 2 x u64; empty without keys
    refused: list[RefusedRow]
    requests: bytes = b""  # digest of each request, if the order asks for them


class RangeEnd(Struct, frozen=True, array_like=True):
    """The end of a range: all its chunks have been sent."""

    digest: bytes  # BLAKE3 of the range's bytes
    names: list[str] = []  # columns that are new to this validator, if the order limits their number
    adapters: list[str] = []  # new values of `body.model` that match a pattern of the order


class RangeFailed(Struct, frozen=True, array_like=True):
    """The range could not be read. `kind` is the name of one of READ_ERRORS."""

    kind: str
    code: str
    message: str

    def error(self) -> BatchmillError:
        return READ_ERRORS[self.kind](self.message, code=self.code)


READ_ERRORS: dict[str, type[BatchmillError]] = {
    each.__name__: each for each in (InvalidDataset, InputChanged, AuthRefused, StorageFailed)
}


FREE_BYTES = 1024**3  # any file may unpack to this size: the ratio limits larger ones
DISK_CHECK_BYTES = 64 * 1024 * 1024  # written between two checks of free disk space
ROW_BYTES_MIN = 11  # of a converted row: "{}", its line end, its offset
RESERVE_BYTES, RESERVE_SHARE = 1024**3, 50  # kept free: the lesser of 1 GiB and a 50th of the disk


class SizeLimits:
    """Counts what sealing is about to write, and enforces the limits. Calls `on_progress` after each addition.

    Raises: InvalidDataset (`unpacked_too_large`, `too_many_rows`), OverQuota, StorageFull.
    """

    def __init__(self, order: SealOrder, home: Path, source_bytes: int, on_progress: Callable[[], None]) -> None:
        spec = order.dataset
        self._order, self._home, self._on_progress = order, home, on_progress
        self._source_bytes = source_bytes
        ratio = max(FREE_BYTES, spec.unpacked_ratio_max * source_bytes)
        self._bytes_max = min(spec.unpacked_bytes_max, ratio)
        self._is_ratio = ratio < spec.unpacked_bytes_max
        self.rows_max = min(spec.rows_max, order.rows_max or spec.rows_max)
        self.bytes = self._rows = 0
        self._disk_checked = 0

    def check_rows(self, rows: int) -> None:
        """Refuse a file at once if the row count in its metadata exceeds the limits."""
        if rows > self.rows_max:
            self.refuse_rows()
        self._check_size(rows * ROW_BYTES_MIN)

    def add(self, size_bytes: int, rows: int = 0) -> None:
        """Count bytes and rows that are about to be written."""
        self.bytes += size_bytes
        self._rows += rows
        if self._rows > self.rows_max:
            self.refuse_rows()
        self._check_size(self.bytes)
        if self.bytes - self._disk_checked >= DISK_CHECK_BYTES:
            self._disk_checked = self.bytes
            check_disk(self._home)
        self._on_progress()

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._bytes_max:
            raise self._too_large()
        left = self._order.bytes_left
        if left is not None and size_bytes > left:
            raise OverQuota(self._order.no_space_message)

    def refuse_rows(self) -> None:
        """Raises: InvalidDataset, with the setting of the limit."""
        is_own = self._order.rows_max is not None and self.rows_max == self._order.rows_max
        setting = "server.rows_max" if is_own else "limits.rows_max"
        raise InvalidDataset(
            f"the dataset has more than {self.rows_max:,} rows, the most of one job: split it, or raise {setting}",
            code="too_many_rows",
        )

    def _too_large(self) -> InvalidDataset:
        spec = self._order.dataset
        if self._is_ratio:
            ratio = f"{spec.unpacked_ratio_max:,} times the {self._source_bytes:,} bytes of its files"
            limit = f"{FREE_BYTES:,} bytes and {ratio}"
            setting = "limits.unpacked_ratio_max"
        else:
            limit, setting = f"{spec.unpacked_bytes_max:,} bytes", "limits.unpacked_bytes_max"
        return InvalidDataset(
            f"the dataset with its index takes more than {limit} once it is unpacked: split it, or raise {setting}",
            code="unpacked_too_large",
        )


def check_disk(home: Path) -> None:
    """Raises: StorageFull if no more of a dataset may be written to its folder."""
    disk = os.statvfs(home)
    reserve = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // RESERVE_SHARE)
    if disk.f_bavail * disk.f_frsize < reserve:
        raise StorageFull(
            f"no space is left to write the dataset in {home}: {reserve:,} bytes of the disk are kept free"
        )
