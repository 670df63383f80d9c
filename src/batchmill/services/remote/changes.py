"""Changes of what callers make: one after another, each to its end, under ids of ours."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """What is changed through one of these is changed by nobody else meanwhile."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()  # the event loop alone would forget them

    async def make(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change when those before it are done. Cancelling the caller does not end it."""
        task = asyncio.ensure_future(self._alone(change))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _alone(self, change: Coroutine[Any, Any, T]) -> T:
        async with self._lock:
            return await change

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked has been told, or has gone


ID_BYTES = 15


def new_id() -> str:
    """An id that nobody can guess. It never looks like a flag of a command line, nor like a route (`_search`)."""
    while True:
        found = base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).decode()
        if found[0].isalnum():
            return found
