"""StoredFiles: where the immutable files and folders of a data directory are durable.

Each has one path below the data directory, and never changes under it until it is published again. Without `[storage]`
the data directory itself is durable and there is nothing to do; with it, `store.object_files` keeps every published
path as objects, and the data directory is their cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import sqlalchemy as sa

from batchmill.owner_term import ENDLESS, PrefixTerm
from batchmill.wire.messages import StoredFile

if TYPE_CHECKING:
    from batchmill.store.file_log import FileLog


class StoredFiles(Protocol):
    """Paths are absolute. What is not below the data directory, or was never published, is left alone.

    Raises, everywhere: StorageFailed if the store cannot be reached, or refuses the credentials.
    """

    @property
    def log(self) -> FileLog | None:
        """Makes short files durable without a sync of each; None: they are published, or synced one by one."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is published survives the loss of the data directory."""

    @property
    def url(self) -> str:
        """Of the object store that keeps them, for child processes; empty: there is none."""

    @property
    def has_nodes(self) -> bool:
        """Whether workers run on nodes of a cluster, which see none of this machine's files: what they write is in the
        store alone.
        """

    @property
    def term(self) -> PrefixTerm:
        """How long objects may be changed."""

    def references(self, *paths: Path) -> list[StoredFile]:
        """Where those of these paths are kept that have a local copy, or are in a folder that has."""

    async def publish(self, *paths: Path) -> None:
        """Make files or folders that lie in the data directory durable. Call it before their record is stored."""

    def publishing(self, *paths: Path) -> AbstractAsyncContextManager[Callable[[sa.Connection], None]]:
        """As `publish`, where one transaction is to name the files and to store their record: the context gives what
        it calls. Files that are not named then go at the end of the context, or with the next owner.
        """

    async def link(self, source: Path, target: Path) -> None:
        """Publish `target`, a hard link to the published file `source`."""

    async def fetch(self, *paths: Path, holder: str = "") -> None:
        """Put published paths in their place, unless they are there. Those of a `holder` stay until `release`; others
        may be removed at once to make room: see `using`. A job's folder stands for all that is in it.
        """

    def release(self, holder: str) -> None:
        """The holder needs its paths no longer: they may be removed from the data directory to make room."""

    async def holds(self, path: Path) -> bool:
        """Whether a path is published, wherever it lies."""

    async def same(self, path: Path, others: list[Path]) -> list[Path]:
        """Those of `others` that were linked with `path`."""

    async def names_in(self, folder: Path) -> list[str]:
        """The names of the published files directly in a folder."""

    async def remove(self, *paths: Path) -> None:
        """Remove published paths, and everything that is published below them. Idempotent."""

    def scratch(self, folder: Path) -> AbstractAsyncContextManager[str]:
        """What the names of objects may begin with that no path is kept in. They go at the end of the context, or with
        the next owner, or, where a node writes them even later, with the folder of the job.
        """

    async def settle_segments(self, folder: Path, worker: str = "") -> None:
        """Bring the segments of a job, of one worker or of all, to the same bytes in its folder and in the store. No
        worker writes to the folder.
        """


_numbers = itertools.count()  # of the readers of this process, which alone counts them


@contextlib.asynccontextmanager
async def using(stored: StoredFiles, *paths: Path) -> AsyncIterator[None]:
    """Fetch paths, which stay in their place meanwhile."""
    holder = f"reader {next(_numbers)}"
    try:
        await stored.fetch(*paths, holder=holder)
        yield
    finally:
        stored.release(holder)


class LocalFiles:
    """The data directory is durable: services write there with their own fsync."""

    is_elsewhere = has_nodes = False
    url = ""
    term = PrefixTerm(ENDLESS, math.inf)

    def __init__(self, log: FileLog | None = None) -> None:
        self.log = log

    def references(self, *paths: Path) -> list[StoredFile]:
        return []

    async def publish(self, *paths: Path) -> None:
        return

    def publishing(self, *paths: Path) -> AbstractAsyncContextManager[Callable[[sa.Connection], None]]:
        return contextlib.nullcontext(lambda _: None)

    async def link(self, source: Path, target: Path) -> None:
        return

    async def fetch(self, *paths: Path, holder: str = "") -> None:
        return

    def release(self, holder: str) -> None:
        return

    async def holds(self, path: Path) -> bool:
        return False

    async def same(self, path: Path, others: list[Path]) -> list[Path]:
        return []

    async def names_in(self, folder: Path) -> list[str]:
        return []

    async def remove(self, *paths: Path) -> None:
        return

    def scratch(self, folder: Path) -> AbstractAsyncContextManager[str]:
        raise NotImplementedError("there are no nodes without an object store")

    async def settle_segments(self, folder: Path, worker: str = "") -> None:
        return
