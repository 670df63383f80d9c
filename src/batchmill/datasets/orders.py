"""What sealing is asked for, what it reports, and what its processes say to each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from batchmill.errors import InvalidDataset, OverQuota, StorageFull
from batchmill.types import DatasetSpec
from batchmill.wire.forms import Form

Fold = Literal["deterministic", "all", "none"]


class SealOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What to seal and which rows to allow.

    A target is (number of the model, number of model and adapter together); `urls` has one entry for each model.
    """

    dataset: DatasetSpec
    form: Form | None = None  # None: OpenAI rows, or a table whose columns are a function's arguments
    targets: dict[str, tuple[int, int]] = {}  # every value that `body.model` may have
    patterns: list[tuple[str, int, int]] = []  # of adapters that are yet to be fetched, and the target of their base
    default: tuple[int, int] | None = (0, 0)  # for rows that name no model; None: each OpenAI row has to
    any_model: bool = False  # rows that name an unknown model count as rows of the default
    urls: list[frozenset[str] | None] = field(default_factory=lambda: [None])  # None: any path, and a body of any kind
    services: list[int] = []  # numbers of the models that are run by others, and may know further fields
    pathless: list[int] = []  # numbers of the models to which a path below /v1 means nothing: any is taken
    features: list[list[str] | None] = []  # of each model: what its rows may ask of a service; None: anything
    endpoint: str | None = None  # the one `url` that OpenAI rows may have
    rows_max: int | None = None  # a dataset with more is refused
    bytes_left: int | None = None  # what of its project's quota is left for what is written; None: no quota
    no_room: str = ""  # what is said where that is not enough
    keys: bool = False  # write the columns that the plan is made from
    fold: Fold = "none"  # which rows may share an answer
    columns_max: int | None = None  # different columns of a table whose rows may differ; None: as many as they like
    problems_max: int = 1000
    processes: int = 2


class SourcePart(Struct, frozen=True):
    """Lines of one source: bytes start..end of a file that is read."""

    number: int
    path: str  # the file that is read
    source: str  # the file that the caller named
    base: int  # where byte 0 of the file lies when all files are counted as one
    start: int
    end: int


class ByteRange(Struct, frozen=True):
    """Bytes for one validator: it checks the lines that start in them."""

    number: int
    part: SourcePart
    start: int  # in the file
    end: int


class RefusedRow(Struct, frozen=True, array_like=True):
    """A row that validation refused; `row` and `line` count from 0, in a chunk or in the whole as said there."""

    row: int
    line: int
    code: str
    message: str


class ValidatedChunk(Struct, frozen=True, array_like=True):
    """What a validator found in a run of whole lines: columns as packed bytes."""

    start: int
    end: int
    lines: int
    rows: int
    block_rows: int
    offsets: bytes  # u64 a row
    crcs: bytes  # u32 a block
    ids: bytes  # i64 a row: hash of the custom_id; empty for tables
    keys: tuple[bytes, bytes, bytes, bytes]  # target u16, prefix u64, cost u32, fold 2 x u64; empty without keys
    refused: list[RefusedRow]


class RangeEnd(Struct, frozen=True, array_like=True):
    """Every chunk of a range has been sent."""

    digest: bytes  # sha256 of the range's bytes
    names: list[str] = []  # columns that this validator saw here for the first time, where they are counted
    adapters: list[str] = []  # as `names`: values of `body.model` that match one of the order's patterns


class RangeFailed(Struct, frozen=True, array_like=True):
    """The range could not be read."""

    code: str
    message: str
    changed: bool = False  # the file is not what it was when sealing began


FREE_BYTES = 1024**3  # so much may be made of any file: below that its ratio is not looked at
LOOK_BYTES = 64 * 1024 * 1024  # between two looks at the disk
ROW_BYTES_MIN = 11  # of a row that is converted: "{}", the end of its line, where it begins
RESERVE_BYTES, RESERVE_SHARE = 1024**3, 50  # of the disk that is left to others: the lesser of this, and a 50th of it


class SizeLimits:
    """Counts what is about to be written. `on_progress` is called now and then.

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
        self._looked = 0

    def foresee(self, rows: int) -> None:
        """So many rows are to be converted, as their file says: refused at once where that cannot be."""
        if rows > self.rows_max:
            self.refuse_rows()
        self._judge(rows * ROW_BYTES_MIN)

    def take(self, size_bytes: int, rows: int = 0) -> None:
        """So many more bytes are about to be written, and rows."""
        self.bytes += size_bytes
        self._rows += rows
        if self._rows > self.rows_max:
            self.refuse_rows()
        self._judge(self.bytes)
        if self.bytes - self._looked >= LOOK_BYTES:
            self._looked = self.bytes
            self._see_room()
        self._on_progress()

    def _judge(self, size_bytes: int) -> None:
        if size_bytes > self._bytes_max:
            raise self._too_large()
        left = self._order.bytes_left
        if left is not None and size_bytes > left:
            raise OverQuota(self._order.no_room)

    def refuse_rows(self) -> None:
        """Raises: InvalidDataset, with the setting that is to blame."""
        is_own = self._order.rows_max is not None and self.rows_max == self._order.rows_max
        setting = "server.rows_max" if is_own else "limits.rows_max"
        raise InvalidDataset(
            f"the dataset has more than {self.rows_max:,} rows, the most that are taken at once: split it, or have "
            f"{setting} raised",
            code="too_many_rows",
        )

    def _too_large(self) -> InvalidDataset:
        spec = self._order.dataset
        if self._is_ratio:
            bound = f"{FREE_BYTES:,} bytes and {spec.unpacked_ratio_max:,} times the {self._source_bytes:,} it has"
            setting = "limits.unpacked_ratio_max"
        else:
            bound, setting = f"{spec.unpacked_bytes_max:,} bytes", "limits.unpacked_bytes_max"
        return InvalidDataset(
            f"the dataset with its index becomes more than {bound} when it is unpacked: split it, or have {setting} "
            "raised",
            code="unpacked_too_large",
        )

    def _see_room(self) -> None:
        disk = os.statvfs(self._home)
        reserve = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // RESERVE_SHARE)
        if disk.f_bavail * disk.f_frsize < reserve:
            raise StorageFull(
                f"no space is left to unpack the dataset in {self._home}: {reserve:,} bytes of the disk are for others"
            )
