"""The objects that callers of a server name as inputs and output: only below the folders of their projects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.config import ProjectEntry
from batchmill.datasets import formats, sources
from batchmill.errors import AuthRefused, InvalidInput, StorageFailed, Unavailable
from batchmill.object_store.prefixes import check_allowed
from batchmill.object_store.urls import SHOWN_CHARS, is_object_url

log = logging.getLogger(__name__)

FINDING_AT_ONCE = 2  # one of each project: a store that fails is tried for a minute, in a thread of the server
WAITING_MAX = 16  # per project
PATTERNS_MAX = 16  # folders and globs of one order: each may list 100,000 objects
_OF_STORES = ("storage_failed", "store_unavailable", "store_refused", "store_unsupported")


class CallerObjects:
    """Finds the objects of orders with the server's credentials."""

    def __init__(self, projects: Mapping[str, ProjectEntry]) -> None:
        self._projects = projects
        self._slots = FairSemaphore(FINDING_AT_ONCE, waiting_max=WAITING_MAX, what="orders with objects")

    def check(self, project: str, inputs: Iterable[str], output: str | None = None) -> None:
        """Check the output and the URLs among the inputs of an order; reads nothing.

        Raises: Forbidden, InvalidInput.
        """
        urls = [each for each in inputs if is_object_url(each)]
        self._check_allowed(project, urls)
        if output is not None:
            if not is_object_url(output):
                raise InvalidInput(
                    f"the output {output[:SHOWN_CHARS]!r} must be the URL of an object (s3://, gs://, az://) or a "
                    "folder of objects; without one, the results stay at the server until you download them",
                    code="invalid_output",
                )
            self._check_allowed(project, [output])
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
        async with self.using(project):
            found = await asyncio.to_thread(_find, url)
        self._check_allowed(project, found)
        return found

    @contextlib.asynccontextmanager
    async def using(self, project: str) -> AsyncIterator[None]:
        """Hold a slot for calls of a store. Raises: Unavailable (`busy`, `store_unavailable`)."""
        async with self._slots.slot(project):
            with shown_to_callers(project):
                yield

    def _check_allowed(self, project: str, urls: Iterable[str]) -> None:
        allowed = self._projects.get(project, ProjectEntry()).objects
        for url in urls:
            check_allowed(url, allowed, project)


@contextlib.contextmanager
def shown_to_callers(project: str) -> Iterator[None]:
    """Raises: Unavailable (`store_unavailable`) for an error of a store, without its words: what it says of the
    server's credentials and of its own address is for the operator.
    """
    try:
        yield
    except (AuthRefused, StorageFailed, Unavailable, InvalidInput) as error:
        is_refused = isinstance(error, AuthRefused)
        if not is_refused and error.code not in _OF_STORES:
            raise
        log.warning("an order of the project %s: %s", project, error.message)
        why = "refuses the server's credentials" if is_refused else "does not serve its inputs or output"
        raise Unavailable(
            f"the object store of this order {why}; try again later, or ask the operator", code="store_unavailable"
        ) from None


def _find(url: str) -> list[str]:
    urls = formats.resolve([url])
    if urls == [url]:
        sources.describe(url)
    return urls
