"""What Ctrl-C, SIGTERM and SIGHUP do to a command, from its first step until it has cleaned up after itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal does what somebody asked for with `first_does`, if anybody did; else it stops the command.

    Stopping cancels the command's task, once: whatever comes after that must not disturb what it still has to close.
    """

    def __init__(self) -> None:
        self.count = 0
        self._task: asyncio.Task[object] | None = None
        self._first: Callable[[], None] | None = None
        self._stopping: Callable[[], None] = lambda: None
        self._is_stopped = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals for the running task. One that is ignored, as by nohup, stays so."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        caught = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        for each in caught:
            loop.add_signal_handler(each, self._interrupt)
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)

    @contextlib.contextmanager
    def first_does(self, first: Callable[[], None], stopping: Callable[[], None]) -> Iterator[None]:
        """Call `first` at the first signal instead of stopping, and `stopping` when another one stops the command.

        A first signal that comes later does nothing: the command is about to end by itself, and orderly.
        """
        self._first, self._stopping = first, stopping
        try:
            yield
        finally:
            self._first = self._stopping = lambda: None

    def _interrupt(self) -> None:
        self.count += 1
        if self.count == 1 and self._first is not None:
            self._first()
        elif not self._is_stopped and self._task is not None:
            self._is_stopped = True
            self._stopping()
            self._task.cancel()
