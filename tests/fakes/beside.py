"""A fake that is written for an event loop, beside a test that has none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def beside(fake: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """The fake, open on a loop and a thread of its own for as long as the context lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        opened = asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result()
        try:
            yield opened
        finally:
            asyncio.run_coroutine_threadsafe(fake.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
