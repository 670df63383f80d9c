"""CoreTask: a background task without which no job goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from batchmill.errors import JobPaused
from batchmill.states import PauseReason

log = logging.getLogger("batchmill.jobs")


class CoreTask:
    """A task that runs until it is cancelled. If it fails, that is logged with its traceback; a server then ends.

    The jobs pause as interrupted ones: the next start of a server resumes them.
    """

    def __init__(self, name: str, work: Coroutine[Any, Any, None], on_ended: Callable[[JobPaused], None]) -> None:
        """Args: on_ended: called with the error for whoever waits, and for whoever comes later."""
        self._name, self._on_ended = name, on_ended
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        why = "it was closed"
        if not task.cancelled() and (error := task.exception()) is not None:
            why = f"{type(error).__name__}: {error}"
            log.critical("%s has failed: no more rows run until the next start", self._name, exc_info=error)
        self._on_ended(
            JobPaused(f"{self._name} has ended: {why}", code="ledger_broken", reason=PauseReason.INTERRUPTED)
        )

    @property
    def is_alive(self) -> bool:
        return not self.task.done()

    def cancel(self) -> None:
        self.task.cancel()
