"""Serializes changes of connectors, models and groups, and creates their ids."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Runs one change at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()  # references: the event loop keeps only weak ones

    async def make(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change after the earlier ones. Cancelling the caller does not cancel it."""
        task = asyncio.ensure_future(self._run_locked(change))
        self._running.add(task)
        task.add_done_callback(self._discard)
        return await asyncio.shield(task)

    async def _run_locked(self, change: Coroutine[Any, Any, T]) -> T:
        async with self._lock:
            return await change

    def _discard(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the caller got the error, or was cancelled


ID_BYTES = 15


def new_id() -> str:
    """An unguessable id. It never looks like a command-line option or like a route (`_search`)."""
    while True:
        id_ = base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).decode()
        if id_[0].isalnum():
            return id_
