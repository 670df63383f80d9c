"""Loads what cells of media columns name, shortly before the requests of their rows are made: files, bytes and URLs.

All rows of an engine together hold a bounded number of bytes; one row more is loaded only if nothing else would go on.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from msgspec import Struct

from batchmill.datasets.media.loading import has_media, loaded, read_bytes
from batchmill.engines.media_copies import CopyReader
from batchmill.engines.media_places import Places
from batchmill.engines.media_urls import MediaUrls, too_large
from batchmill.function_runtime.frames import share_freed_memory
from batchmill.ports.clock import Clock
from batchmill.types import FetchedPart, LoadedPart, MediaBounds, Row
from batchmill.wire.json_bytes import split_object
from batchmill.wire.media import HEAD_BYTES, encoded_bytes, type_for
from batchmill.wire.rows.rendered_rows import MediaPart, media_of

READS_MAX = 16  # rows whose media are read at once
MEDIA_BYTES_MAX = 128 * 1024 * 1024  # of media in memory, as base64: loaded ones and calls; and those of one row more
LOADED_BYTES_MAX = 64 * 1024 * 1024  # of those that are loaded and no calls yet
AHEAD_MAX = 32  # rows that are loaded beyond those that an engine holds

Result = TypeVar("Result")


class RowMedia:
    """The media of the rows of one run of an engine.

    Args:
        calls: how many bytes the calls have that were made of rows with media; `wake` is called when there are fewer.
        attempts_max: to fetch a URL for one row.
        bytes_max: of media that are loaded and of calls, together.
    """

    def __init__(
        self, calls: Callable[[], int], *, attempts_max: int, clock: Clock,
        jitter: Callable[[], float] = random.random, bytes_max: int = MEDIA_BYTES_MAX,
    ) -> None:  # fmt: skip
        self._bytes_max, self._calls = bytes_max, calls
        self.urls = MediaUrls(attempts_max, self._on_wait, clock=clock, jitter=jitter)
        self.places, self.encoding = Places(READS_MAX, self._first), asyncio.Lock()
        self._copies, self._numbers = CopyReader(), count()
        self._held: dict[int, int] = {}  # number of a row -> its bytes
        self._waiting: set[int] = set()  # numbers of rows that wait for room
        self._shares_memory = False
        self._beyond: int | None = None  # the one row that may have more bytes than there is room for
        self._changed = asyncio.Event()

    def read(self, part: MediaPart, copies: str) -> bytes | None:
        """The bytes of a part that has no URL; None: they are in its cell. Raises: InvalidRow."""
        return self._copies.read(part, copies) if part.is_copied else read_bytes(part)

    async def close(self) -> None:
        await self.urls.close()

    @property
    def note(self) -> str:
        """What keeps media from being loaded, for views; empty: nothing."""
        return self.urls.note

    def _first(self) -> int | None:
        """The row that must go on: the oldest, or the one that it waits for."""
        return self.urls.fetcher_for(next(iter(self._held))) if self._held else None

    def _on_wait(self) -> None:
        """A row waits for another one."""
        self.places.check()
        self.wake()

    def share_memory(self) -> None:
        """A worker keeps freed memory for the next rows: that of media, for each of its threads, would be much."""
        if not self._shares_memory:
            share_freed_memory()
            self._shares_memory = True

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
        self.wake()

    def loaded(self, number: int) -> None:
        """A row needs no more room."""
        if self._beyond == number:
            self._beyond = None
            self.wake()

    def end(self, number: int) -> None:
        self.loaded(number)
        self._held.pop(number, None)
        self.places.leave(number)
        self.wake()

    def _fits(self, number: int, more: int) -> bool:
        if number == self._beyond:
            return True
        if any(other < number for other in self._waiting):  # a large row does not wait for ever
            return False
        loaded = sum(self._held.values()) + more
        return loaded <= LOADED_BYTES_MAX and self._calls() + loaded <= self._bytes_max

    def _may_exceed(self, number: int) -> bool:
        """Let the oldest row, or the one that it waits for, exceed the limit, unless calls will make room."""
        has_few_calls = self._calls() <= self._bytes_max // 2
        if self._beyond is None and has_few_calls and number == self._first():
            self._beyond = number
        return self._beyond == number


class _Content(Struct):
    """What a part of a row holds."""

    part: MediaPart
    type: str
    data: bytes | None  # None: it is in a cell of the row
    fetched: FetchedPart | None = None


def _made(prepare: Callable[[Row], Result], row: Row, contents: list[_Content]) -> Result:
    """`prepare(row)` with these contents, which are gone then."""
    row.fetched = tuple(each.fetched for each in contents if each.fetched is not None)
    members, parts = split_object(row.raw), list[LoadedPart]()
    for each in contents:
        data, each.data = each.data, None
        parts.append(loaded(each.part, each.type, data, members))
        del data
    row.media = tuple(parts)
    try:
        return prepare(row)
    finally:
        row.media = None


class LoadingRow:
    """One row from the first byte of its media until its request is held by an engine. `close` it in any case."""

    def __init__(self, media: RowMedia, row: Row, number: int) -> None:
        self._media, self.row, self.number = media, row, number
        self.run = "" if row.lease is None else row.lease.key

    def close(self) -> None:
        """Its bytes are held no longer, or by a call."""
        self._media.end(self.number)

    async def make(self, prepare: Callable[[Row], Result]) -> Result:
        """`prepare(row)`, in a thread, while the row has its media. Raises: InvalidRow, and what `prepare` raises."""
        row = self.row
        if not has_media(row):
            return prepare(row)
        self._media.share_memory()
        await self._media.places.take(self.number)
        try:
            contents = await self._load(row)
        finally:
            self._media.places.leave(self.number)
        self._media.loaded(self.number)
        async with self._media.encoding:  # one at a time: a request takes its bytes several times while it is made
            return await asyncio.to_thread(_made, prepare, row, contents)

    async def _load(self, row: Row) -> list[_Content]:
        members = split_object(row.raw)
        bounds: MediaBounds = MediaBounds() if row.lease is None else row.lease.media
        left, contents = bounds.row_bytes_max, []
        for part in media_of(members):
            if part.url:
                content = await self._fetch(part, bounds, left)
                left -= len(content.data or b"")
            else:
                await self.hold(part.size_bytes)
                data = await asyncio.to_thread(self._media.read, part, bounds.copies)
                content = _Content(part, part.type, data)
                left -= part.size_bytes
            contents.append(content)
        return contents

    async def _fetch(self, part: MediaPart, bounds: MediaBounds, left: int) -> _Content:
        if left < 0:
            raise too_large(part.url, bounds.row_bytes_max)
        fetched = await self._media.urls.get(part.url, min(bounds.bytes_max, left), self)
        found = type_for(part.kind, part.column, fetched.data[:HEAD_BYTES])
        return _Content(part, found, fetched.data, fetched.about)

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """See `media_urls.Holder`."""
        self._media.places.leave(self.number)
        yield
        await self._media.places.take(self.number)

    async def hold(self, more: int) -> None:
        """See `media_urls.Holder`."""
        await self._media.hold(self.number, encoded_bytes(more))
