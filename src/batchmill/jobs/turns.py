"""Turns: how many jobs may run at once. The others wait with what the ledger has of them, and hold nothing else.

A job waits only for jobs of its own models and priority: a slow model keeps none waiting that does not use it, and many
jobs of a low priority none of a higher one. Jobs of a project may have half of the turns.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.wire.job_spec import JobSpec

TURNS = 512  # of one model and priority; a running job costs its owner some 25 kB, and what a small one unpacks

_Key = tuple[str, int]  # model, priority


class Turns:
    """The turns of all jobs of an owner."""

    def __init__(self, turns: int = TURNS) -> None:
        self._turns = turns
        self._semaphores: WeakValueDictionary[_Key, FairSemaphore] = WeakValueDictionary()  # those of living jobs

    def turn_of(self, spec: JobSpec) -> Turn:
        """A turn of a job, which it does not have yet."""
        # What runs at a provider needs no room here, and may take a day.
        models = {model.name for model in spec.models if not model.traits.hands_over}
        keys = sorted((name, spec.policy.priority) for name in models)
        return Turn(spec.project, {key: self._semaphore(key) for key in keys})

    def _semaphore(self, key: _Key) -> FairSemaphore:
        found = self._semaphores.get(key)
        if found is None:
            found = self._semaphores[key] = FairSemaphore(self._turns)
        return found


class Turn:
    """A job's turn to run."""

    def __init__(self, project: str, semaphores: dict[_Key, FairSemaphore]) -> None:
        self._project, self._semaphores = project, semaphores
        self._held = AsyncExitStack()
        self.is_held = False
        self.waits_for = ""  # in words

    def is_free(self) -> bool:
        """Whether `take` would not wait."""
        return self.is_held or all(each.is_free(self._project) for each in self._semaphores.values())

    async def take(self) -> None:
        """Wait for the turn. Of several models in one order, so that no two jobs wait for each other."""
        if self.is_held:
            return
        async with AsyncExitStack() as held:
            for (model, _), semaphore in self._semaphores.items():
                self.waits_for = f"other jobs of its priority run on the model {model!r}, as many as may at once"
                await held.enter_async_context(semaphore.slot(self._project))
            self._held, self.is_held = held.pop_all(), True
        self.waits_for = ""

    async def give_back(self) -> None:
        """Let another job run."""
        self.is_held = False
        self.waits_for = ""
        await self._held.aclose()
