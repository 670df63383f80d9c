"""Files whose bytes are on the disk before their record is stored, and what an earlier owner left of such files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set

SWEEP_MAX = 500  # names that are looked up at once
Recorded = Callable[[Sequence[str]], Awaitable[Collection[str]]]


class Arrivals:
    """The ids of arriving files, by which `sweep` knows them from files that have no record since a process was killed.

    The id of a result is always the same. So a result may arrive under the name of what is just being removed: it waits
    for that.

    Concurrency: `begin` and `end` are called on the event loop, and in the one that runs or ends a transaction.
    """

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._leaving: frozenset[str] = frozenset()
        self._removing = asyncio.Lock()

    def begin(self, ids: Collection[str]) -> bool:
        """Note files before their bytes are written. False: one of them is just being removed, and nothing is noted."""
        self.ids.update(ids)
        if self._leaving.isdisjoint(ids):
            return True
        self.end(ids)
        return False

    async def begin_soon(self, ids: Collection[str]) -> None:
        """As `begin`, once none of them is being removed."""
        while not self.begin(ids):
            async with self._removing:
                pass

    def end(self, ids: Iterable[str]) -> None:
        """Their records are stored, or their bytes are gone."""
        self.ids.difference_update(ids)

    async def sweep(
        self, names: Sequence[str], recorded: Recorded, remove: Callable[[Sequence[str]], Awaitable[None]]
    ) -> None:  # fmt: skip
        """Remove files that neither have a record nor are arriving.

        Args: recorded: those of some names that have a record.
        """
        for first in range(0, len(names), SWEEP_MAX):
            known = await recorded(names[first : first + SWEEP_MAX])
            async with self._removing:
                self._leaving = frozenset(names[first : first + SWEEP_MAX]).difference(known)
                arriving: Set[str] = frozenset(self.ids)
                try:  # what arrived before, and does so no more, has its record by now
                    if orphans := sorted(self._leaving - arriving):
                        known = await recorded(orphans)
                        await remove([name for name in orphans if name not in known])
                finally:
                    self._leaving = frozenset()
