"""What is being called now, where the worker still sees it when this process has died.

A page of shared memory: u32 count, then count times (u64 ask id, u32 first row, u32 rows). Count 0: no user code runs.
"""

from __future__ import annotations

import mmap
import os

BYTES = 64 * 1024
ENTRIES_MAX = (BYTES - 4) // 16
FIRST = 3  # the word that holds the first row of the first entry


class Progress:
    """`words` is the page as u32: for rows called one by one, only words[FIRST] changes from row to row."""

    def __init__(self, fd):
        self._page = mmap.mmap(fd, BYTES)
        os.close(fd)
        self.words = memoryview(self._page).cast("I")

    def one(self, ask_id, first, rows=1):
        """One ask's rows are about to be called."""
        words = self.words
        words[0] = 0
        words[1] = ask_id & 0xFFFFFFFF
        words[2] = ask_id >> 32
        words[FIRST] = first
        words[4] = rows
        words[0] = 1

    def many(self, entries):
        """These (ask id, first row, rows) are about to be called, or go on."""
        self.words[0] = 0
        for place, entry in enumerate(entries[:ENTRIES_MAX]):
            self._write(place, *entry)
        self.words[0] = min(len(entries), ENTRIES_MAX)

    def add(self, place, ask_id, first, rows):
        """One call more, as number `place` of those that are running."""
        if place < ENTRIES_MAX:
            self._write(place, ask_id, first, rows)
            self.words[0] = place + 1

    def take(self, place, count):
        """Number `place` of `count` calls has ended; the last takes its number."""
        last = count - 1
        if last < ENTRIES_MAX:
            words = self.words
            words[1 + 4 * place : 5 + 4 * place] = words[1 + 4 * last : 5 + 4 * last]
            words[0] = last

    def _write(self, place, ask_id, first, rows):
        words, at = self.words, 1 + 4 * place
        words[at] = ask_id & 0xFFFFFFFF
        words[at + 1] = ask_id >> 32
        words[at + 2] = first
        words[at + 3] = rows

    def none(self):
        """User code is not running."""
        self.words[0] = 0

    def forget(self):
        """Write where nobody reads, and let nobody write who holds the page: this is a child of user code."""
        self.words.release()
        self.words = memoryview(bytearray(BYTES)).cast("I")
