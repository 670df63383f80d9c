"""How much a dataset may become while it is unpacked, converted and indexed: judged while it is written.

A few hundred kilobytes of gzip, zstd or Parquet can be a disk full of rows. What is written is counted in pieces of a
few MiB, and the one that goes too far is not written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from batchmill.datasets.orders import SealOrder
from batchmill.errors import InvalidDataset, OverQuota, StorageFull

FREE_BYTES = 1024**3  # so much may be made of any file: below that its ratio is not looked at
LOOK_BYTES = 64 * 1024 * 1024  # between two looks at the disk
ROW_BYTES_MIN = 11  # of a row that is converted: "{}", the end of its line, where it begins
RESERVE_BYTES, RESERVE_SHARE = 1024**3, 50  # of the disk that is left to others: the lesser of this, and a 50th of it


class Allowance:
    """Told of what is about to be written. `heard` is called now and then, so that whoever waits hears of it.

    Raises: InvalidDataset (`unpacked_too_large`, `too_many_rows`), OverQuota, StorageFull.
    """

    def __init__(self, order: SealOrder, home: Path, source_bytes: int, heard: Callable[[], None]) -> None:
        spec = order.dataset
        self._order, self._home, self._heard = order, home, heard
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
        self._heard()

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
