"""Arrays with one value for each row of a job: in memory for a job of a few million rows, in unnamed files for more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from batchmill.datasets.layout import PIECE_ROWS
from batchmill.jobs.ledger.row_states import unnamed_pages

STEP_ROWS = 1024 * 1024  # handled at once
RESIDENT_ROWS = 64 * 1024  # set in a file, in any order, before its pages are given back: a page for each, at most


class RowArrays:
    """Makes arrays over `rows` rows. What is in files counts as memory of no process for longer than needed.

    Whatever ends the process, no file is left.
    Args: piece_rows: rows up to which arrays are in memory.
    """

    def __init__(self, folder: Path, rows: int, *, piece_rows: int = PIECE_ROWS) -> None:
        self._folder, self._rows = folder, rows
        self._is_in_memory = rows <= piece_rows
        self._maps: list[mmap.mmap] = []
        self._touched = 0

    def full(self, kind: type, value: object) -> np.ndarray:
        """A new array of one value. Raises: StorageFull."""
        if self._is_in_memory:
            return np.full(self._rows, value, kind)
        pages = unnamed_pages(self._folder, self._rows * np.dtype(kind).itemsize)
        self._maps.append(pages)
        array = np.frombuffer(pages, kind)
        if value:
            self.fill(array, value)
        return array

    def opened(self, path: Path, kind: type = np.uint32) -> np.ndarray:
        """A file of numbers, of which only what is used is read."""
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return np.empty(0, kind)
            pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._maps.append(pages)
        return np.frombuffer(pages, kind)

    def fill(self, array: np.ndarray, value: object) -> None:
        """Set every row."""
        for step in self.steps():
            array[step] = value
            self.touch(RESIDENT_ROWS)

    def steps(self) -> list[slice]:
        """All rows, in steps."""
        return [slice(start, min(start + STEP_ROWS, self._rows)) for start in range(0, self._rows, STEP_ROWS)]

    def touch(self, rows: int) -> None:
        """Note that so many values were read or set: after enough of them, pages of files leave this process."""
        self._touched += rows
        if self._touched >= RESIDENT_ROWS:
            self._touched = 0
            for pages in self._maps:
                pages.madvise(mmap.MADV_DONTNEED)  # the file keeps what was set
