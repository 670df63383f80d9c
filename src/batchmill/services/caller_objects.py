"""The objects that callers of a server name as inputs: only below the folders of their projects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.config import ProjectEntry
from batchmill.datasets import formats, sources
from batchmill.errors import AuthRefused, InvalidDataset, InvalidInput, StorageFailed, Unavailable
from batchmill.object_store.prefixes import check_allowed
from batchmill.object_store.urls import is_object_url

log = logging.getLogger(__name__)

FINDING_AT_ONCE = 2  # one of each project: a store that fails is tried for a minute, in a thread of the server
WAITING_MAX = 16  # per project
PATTERNS_MAX = 16  # folders and globs of one order: each may list 100,000 objects
_OF_CALLERS = ("no_object", "no_input", "too_many_objects", "invalid_url")  # what the store says of the URL itself


class CallerObjects:
    """Finds the objects of orders with the server's credentials."""

    def __init__(self, projects: Mapping[str, ProjectEntry]) -> None:
        self._projects = projects
        self._slots = FairSemaphore(FINDING_AT_ONCE, waiting_max=WAITING_MAX, what="orders with objects")

    def check(self, project: str, inputs: Iterable[str]) -> None:
        """Check the URLs among the inputs of an order; reads nothing. Raises: Forbidden, InvalidInput."""
        urls = [each for each in inputs if is_object_url(each)]
        self._check_allowed(project, urls)
        patterns = sum(map(sources.is_pattern, urls))
        if patterns > PATTERNS_MAX:
            raise InvalidInput(
                f"{patterns} of the inputs are folders or globs: {PATTERNS_MAX} are the most; name the objects, or "
                "their common folder",
                code="too_many_patterns",
            )

    async def find(self, project: str, url: str) -> list[str]:
        """The objects that a URL names or matches. One that is named must exist.

        Raises: Forbidden; InvalidDataset; Unavailable (`busy`, `store_unavailable`).
        """
        self.check(project, [url])
        async with self._slots.slot(project):
            try:
                found = await asyncio.to_thread(_find, url)
            except (AuthRefused, StorageFailed, InvalidDataset) as error:
                if error.code in _OF_CALLERS:
                    raise
                # What the store says of the server's credentials and address is for the operator.
                log.warning("the object store does not serve %s to the project %s: %s", url, project, error.message)
                why = "refuses the server's credentials" if isinstance(error, AuthRefused) else "does not serve it"
                message = f"the server cannot read {url}: the object store {why}; try again later, or ask the operator"
                raise Unavailable(message, code="store_unavailable") from None
        self._check_allowed(project, found)
        return found

    def _check_allowed(self, project: str, urls: Iterable[str]) -> None:
        allowed = self._projects.get(project, ProjectEntry()).objects
        for url in urls:
            check_allowed(url, allowed, project)


def _find(url: str) -> list[str]:
    urls = formats.resolve([url])
    if urls == [url]:
        sources.describe(url)
    return urls
