"""What runs next on an event loop. asyncio runs callbacks in the order in which they became ready.

In a busy process one turn of the loop takes milliseconds, and each task that is started, or woken, waits for a turn. A
request that five tasks and futures hand over to each other would wait five times.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_Calls = deque[Callable[[], object]]
_adding = threading.RLock()  # held while what is ready changes at its beginning
_posted: WeakKeyDictionary[asyncio.AbstractEventLoop, _Calls] = WeakKeyDictionary()


def start_next(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task whose first step runs next."""
    loop = asyncio.get_running_loop()
    return run_next(loop, partial(loop.create_task, work))


def run_next(loop: asyncio.AbstractEventLoop, schedule: Callable[[], T]) -> T:
    """Call what schedules callbacks on this loop, which runs now: it starts a task or resolves a future. They run
    before all that was ready, in their order. What must wait for them comes before all that becomes ready later, so a
    request is held up by the hand-overs of those before it, and no more. Never for what goes on without end.

    On a loop that keeps no list of what is ready, such as uvloop's, they run as usual.
    """
    ready = getattr(loop, "_ready", None)
    if ready is None:
        return schedule()
    with _adding:
        before = len(ready)
        result = schedule()
        ready.rotate(len(ready) - before)  # a thread may have added to its end: then that runs next, too
    return result


def post_next(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """From a thread: have a loop call back before all that is ready. What is posted runs in its order.

    A busy loop would take a whole turn until then. Raises: RuntimeError if it is closed.
    """
    with _adding:
        calls = _posted.setdefault(loop, deque())
    calls.append(partial(callback, *args))
    try:
        handle = loop.call_soon_threadsafe(_call_first, calls)  # which wakes the loop
    except RuntimeError:
        calls.clear()  # nothing will call them
        raise
    ready = getattr(loop, "_ready", None)
    if ready is not None:
        with _adding:
            ready.appendleft(handle)  # it comes twice: once for each that waits at least


def _call_first(calls: _Calls) -> None:
    if calls:
        calls.popleft()()


async def answer_with(work: Awaitable[T], answer: asyncio.Future[T]) -> None:
    """Await work. Its result or error becomes the `answer`, unless there is one already, and who waits for that runs
    next. A task of its own does so: the work goes on when who waits is cancelled.
    """
    try:
        result = await work
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:
        if not answer.done():
            run_next(answer.get_loop(), partial(answer.set_exception, error))
    else:
        if not answer.done():
            run_next(answer.get_loop(), partial(answer.set_result, result))
