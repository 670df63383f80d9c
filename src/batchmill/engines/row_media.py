"""Loads what cells of media columns name, shortly before the requests of their rows are made: files, bytes and URLs.

All rows of an engine together hold a bounded number of bytes; one row more is loaded only if nothing else would go on.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

from batchmill.datasets.media.loading import encoded_text, has_media, read_part
from batchmill.engines.media_urls import MediaUrls, too_large
from batchmill.ports import Clock
from batchmill.types import FetchedPart, LoadedPart, MediaBounds, Row
from batchmill.wire.json_bytes import split_object
from batchmill.wire.media import HEAD_BYTES, encoded_bytes, type_for
from batchmill.wire.rendered_rows import MediaPart, media_of

READS_MAX = 16  # rows whose media are read at once
AHEAD_MAX = 32  # rows that are loaded beyond those that an engine holds

Result = TypeVar("Result")


class RowMedia:
    """The media of the rows of one run of an engine.

    Args:
        bytes_max: of media that are loaded and of calls, together.
        calls: how many bytes the calls have that were made of rows; `wake` is called when there are fewer.
        attempts_max: to fetch a URL for one row.
    """

    def __init__(
        self, bytes_max: int, calls: Callable[[], int], *, attempts_max: int, clock: Clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._bytes_max, self._calls = bytes_max, calls
        self.urls = MediaUrls(attempts_max, self.wake, clock=clock, jitter=jitter)
        self.places, self.encoding = asyncio.Semaphore(READS_MAX), asyncio.Lock()
        self._numbers = count()
        self._held: dict[int, int] = {}  # number of a row -> its bytes
        self._waiting: set[int] = set()  # numbers of rows that wait for room
        self._beyond: int | None = None  # the one row that may have more bytes than there is room for
        self._changed = asyncio.Event()

    async def close(self) -> None:
        await self.urls.close()

    def begin(self, row: Row) -> LoadingRow:
        number = next(self._numbers)
        self._held[number] = 0
        return LoadingRow(self, row, number)

    async def make_all(
        self, rows: Iterable[Row], prepare: Callable[[Row], Result], put: Callable[[Row, Callable[[], Result]], None]
    ) -> None:
        """Make the requests of rows, some ahead, and put them in the order of the rows.

        Args: put: gets what was made by a call, which raises InvalidRow, or what `prepare` raised.
        """
        left, ahead = iter(rows), deque[tuple[LoadingRow, asyncio.Task[Result]]]()
        try:
            while True:
                while len(ahead) < READS_MAX and (row := next(left, None)) is not None:
                    loading = self.begin(row)
                    ahead.append((loading, asyncio.create_task(loading.make(prepare))))
                if not ahead:
                    return
                loading, task = ahead[0]
                await asyncio.wait((task,))
                put(loading.row, task.result)
                ahead.popleft()
                loading.close()
        finally:
            for _, task in ahead:
                task.cancel()
            await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
            for loading, _ in ahead:
                loading.close()

    def wake(self) -> None:
        """Look again whether there is room."""
        if self._waiting:
            self._changed.set()
            self._changed = asyncio.Event()

    async def hold(self, number: int, more: int) -> None:
        """Wait until a row may hold so many bytes more. Fewer than 0: it holds fewer from now on."""
        try:
            while more > 0 and not self._fits(number, more):
                self._waiting.add(number)
                if not self._may_exceed(number):
                    await self._changed.wait()
        finally:
            self._waiting.discard(number)
        self._held[number] += more
        if more < 0:
            self.wake()

    def loaded(self, number: int) -> None:
        """A row needs no more room."""
        if self._beyond == number:
            self._beyond = None
            self.wake()

    def end(self, number: int) -> None:
        self.loaded(number)
        self._held.pop(number, None)
        self.wake()

    def _fits(self, number: int, more: int) -> bool:
        return number == self._beyond or self._calls() + sum(self._held.values()) + more <= self._bytes_max

    def _may_exceed(self, number: int) -> bool:
        """Let the oldest row, or the one that it waits for, exceed the limit: no call is out that will make room."""
        if self._beyond is None and not self._calls() and number == self.urls.fetcher_for(min(self._held)):
            self._beyond = number
        return self._beyond == number


class LoadingRow:
    """One row from the first byte of its media until its request is held by an engine. `close` it in any case."""

    def __init__(self, media: RowMedia, row: Row, number: int) -> None:
        self._media, self.row, self.number = media, row, number

    def close(self) -> None:
        """Its bytes are held no longer, or by a call."""
        self._media.end(self.number)

    async def make(self, prepare: Callable[[Row], Result]) -> Result:
        """`prepare(row)`, in a thread, while the row has its media. Raises: InvalidRow, and what `prepare` raises."""
        row = self.row
        if not has_media(row):
            return prepare(row)
        async with self._media.places:
            row.media, row.fetched = await self._load(row)
        self._media.loaded(self.number)
        try:
            async with self._media.encoding:  # one at a time: each takes its bytes twice
                return await asyncio.to_thread(prepare, row)
        finally:
            row.media = None

    async def _load(self, row: Row) -> tuple[tuple[LoadedPart, ...], tuple[FetchedPart, ...]]:
        members = split_object(row.raw)
        bounds: MediaBounds = MediaBounds() if row.lease is None else row.lease.media
        parts, left, loaded, fetched = media_of(members), bounds.row_bytes_max, [], []
        for part in parts:
            if part.url:
                one, size, about = await self._fetch(part, bounds, left)
                fetched.append(about)
            else:
                await self.hold(part.size_bytes)
                one, size = await asyncio.to_thread(read_part, part, members), part.size_bytes
            left -= size
            loaded.append(one)
        return tuple(loaded), tuple(fetched)

    async def _fetch(self, part: MediaPart, bounds: MediaBounds, left: int) -> tuple[LoadedPart, int, FetchedPart]:
        if left < 0:
            raise too_large(part.url, bounds.row_bytes_max)
        fetched = await self._media.urls.get(part.url, min(bounds.bytes_max, left), self)
        found = type_for(part.kind, part.column, fetched.data[:HEAD_BYTES])
        text = await asyncio.to_thread(encoded_text, fetched.data)
        return LoadedPart(found, text), len(fetched.data), fetched.about

    async def hold(self, more: int) -> None:
        """See `media_urls.Holder`."""
        await self._media.hold(self.number, encoded_bytes(more))
