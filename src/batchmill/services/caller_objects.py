"""The objects that callers of a server name as inputs: only below the folders of their projects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.config import ProjectEntry
from batchmill.datasets import formats, sources
from batchmill.errors import AuthRefused, StorageFailed, Unavailable
from batchmill.object_store.prefixes import check_allowed
from batchmill.object_store.urls import is_object_url

FINDING_AT_ONCE = 4  # a store that fails is tried for a minute, in a thread
WAITING_MAX = 16  # per project


class CallerObjects:
    """Finds the objects of orders with the server's credentials."""

    def __init__(self, projects: Mapping[str, ProjectEntry]) -> None:
        self._projects = projects
        self._slots = FairSemaphore(FINDING_AT_ONCE, waiting_max=WAITING_MAX, what="orders with objects")

    def check(self, project: str, inputs: Iterable[str]) -> None:
        """Check the URLs among the inputs of an order; reads nothing. Raises: Forbidden, InvalidInput."""
        allowed = self._projects.get(project, ProjectEntry()).objects
        for url in filter(is_object_url, inputs):
            check_allowed(url, allowed, project)

    async def find(self, project: str, url: str) -> list[str]:
        """The objects that a URL names or matches. One that is named must exist.

        Raises: Forbidden; InvalidDataset; Unavailable (`busy`, `store_unavailable`).
        """
        self.check(project, [url])
        async with self._slots.slot(project):
            try:
                return await asyncio.to_thread(_find, url)
            except (AuthRefused, StorageFailed) as error:  # of the server's own credentials and store
                message = f"the server cannot read {url} now: {error.message}"
                raise Unavailable(message, code="store_unavailable") from None


def _find(url: str) -> list[str]:
    urls = formats.resolve([url])
    if urls == [url]:
        sources.describe(url)
    return urls
