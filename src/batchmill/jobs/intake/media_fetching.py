"""Fetches the URLs in cells of media columns, through the guard of all URLs that callers give."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from batchmill.datasets.orders import check_disk
from batchmill.errors import InvalidDataset, InvalidInput, InvalidRow, OverQuota, StorageFailed, TooLarge
from batchmill.jobs.intake.fetching import Bounds
from batchmill.models.addresses import read_private
from batchmill.models.downloads import Downloads
from batchmill.wire.input_urls import shown

AT_ONCE = 16  # URLs that are fetched together
URL_S = 30.0  # for one of them, all attempts and redirects together
KNOWN_MAX = 10_000  # URLs that are remembered, so that rows which share one fetch it once
CODES = {"url_not_allowed": "media_not_allowed", "no_such_url": "media_missing", "url_refused": "media_missing"}


class UrlMedia:
    """Fetches each URL into a file that is named by it.

    Args: bounds: of all files together, with `bytes_max`.
    """

    def __init__(self, private_hosts: Sequence[str], bounds: Bounds, bytes_max: int) -> None:
        self._private_hosts, self._bounds = private_hosts, bounds
        self._ends = time.monotonic() + bounds.time_s
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[str, Path | InvalidRow] = OrderedDict()

    def begin(self) -> None:
        """See `datasets.media.adding.MediaFetcher`."""
        self._bytes = 0
        self._known.clear()

    def fetch(self, urls: list[str], folder: Path, bytes_max: int) -> dict[str, Path | InvalidRow]:
        """See `datasets.media.adding.MediaFetcher`."""
        check_disk(folder)
        new = [url for url in urls if url not in self._known]
        results = asyncio.run(self._fetch_all(new, folder, bytes_max)) if new else {}
        found = {url: results[url] if url in results else self._known[url] for url in urls}
        self._known |= results
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return found

    async def _fetch_all(self, urls: list[str], folder: Path, bytes_max: int) -> dict[str, Path | InvalidRow]:
        places = asyncio.Semaphore(AT_ONCE)
        with closing(Downloads(read_private(self._private_hosts))) as downloads:

            async def one(url: str) -> Path | InvalidRow:
                async with places:
                    return await self._fetch(downloads, url, folder, bytes_max)

            tasks = [asyncio.create_task(one(url)) for url in urls]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(urls, results, strict=True))

    async def _fetch(self, downloads: Downloads, url: str, folder: Path, bytes_max: int) -> Path | InvalidRow:
        target = folder / hashlib.sha256(url.encode()).hexdigest()
        if target.exists() and not target.with_name(f"{target.name}.download").exists():
            return target  # of a URL that is no longer remembered

        def check_size(size_bytes: int) -> None:
            if size_bytes > bytes_max:
                raise TooLarge(f"{shown(url)} has more than {bytes_max:,} bytes (limits.media_bytes_max)")

        time_s = max(0.0, min(URL_S, self._ends - time.monotonic()))
        try:
            await downloads.fetch(url, target, check_size, lambda size, whole: None, time_s=time_s)
        except TooLarge as error:
            return self._failed(target, InvalidRow(error.message, code="media_too_large"))
        except (InvalidInput, InvalidDataset) as error:
            return self._failed(target, InvalidRow(error.message, code=CODES.get(error.code, "media_missing")))
        except StorageFailed as error:
            if error.code != "download_failed":
                raise  # a fault of this machine's disk
            cause = error.message.rpartition("; ")[0]
            message = f"{cause}; run the row in a new job when the server answers"
            return self._failed(target, InvalidRow(message, code="media_missing"))
        target.with_name(f"{target.name}.download").unlink(missing_ok=True)
        self._count(target.stat().st_size)
        return target

    def _failed(self, target: Path, error: InvalidRow) -> InvalidRow:
        target.unlink(missing_ok=True)
        target.with_name(f"{target.name}.download").unlink(missing_ok=True)
        return error

    def _count(self, size_bytes: int) -> None:
        """Raises: OverQuota, InvalidDataset where all files together are too large."""
        self._bytes += size_bytes
        left = self._bounds.bytes_left
        if left is not None and self._bytes > left:
            raise OverQuota(self._bounds.no_space_message)
        if self._bytes > self._bytes_max:
            raise InvalidDataset(
                f"the media of the dataset have more than {self._bytes_max:,} bytes: split it, or raise "
                "limits.download_bytes_max",
                code="media_too_large",
            )
