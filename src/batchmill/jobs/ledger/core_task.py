"""CoreTask: a background task without which no job goes on."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from batchmill.errors import JobPaused
from batchmill.states import PauseReason
from batchmill.store.sql.transactions import Record

log = logging.getLogger("batchmill.jobs")

FAILURES_MAX = 2  # of core tasks while a job runs; then a server does not resume it by itself


class CoreTask:
    """A task that runs until it is cancelled. If it fails, that is logged with its traceback; a server then ends.

    The running jobs pause as INTERNAL_ERROR. The next start of a server resumes those that came over HTTP, unless core
    tasks have failed `FAILURES_MAX` times while they ran: such a job may be the cause, and would end every server.
    """

    def __init__(self, name: str, work: Coroutine[Any, Any, None], on_ended: Callable[[JobPaused], None]) -> None:
        """Args: on_ended: called with the error for callers that wait, and for those that come later."""
        self._name, self._on_ended = name, on_ended
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            self._on_ended(JobPaused(f"{self._name} has ended: it was closed", reason=PauseReason.INTERRUPTED))
            return
        log.critical("%s has failed: no more rows run until the next start", self._name, exc_info=error)
        text = f"{self._name} has failed: {type(error).__name__}: {error}{_place_of(error)}"
        self._on_ended(JobPaused(text, code="core_task_failed", reason=PauseReason.INTERNAL_ERROR))

    @property
    def is_alive(self) -> bool:
        return not self.task.done()

    def cancel(self) -> None:
        self.task.cancel()


def _place_of(error: BaseException) -> str:
    """Where it was raised: " (dispatcher.py, line 7, in _match)"."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return "".join(f" ({Path(at.filename).name}, line {at.lineno}, in {at.name})" for at in frames)


def was_cut_off(record: Record) -> bool:
    """Whether only the end of its owner stopped a paused job, and core tasks do not keep failing while it runs."""
    if record["reason"] == PauseReason.INTERNAL_ERROR:
        return record["internal_errors"] < FAILURES_MAX
    return record["reason"] == PauseReason.INTERRUPTED
