"""The end of a server's process: whatever still runs in it keeps it no longer than was agreed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger("batchmill.server")

THREADS_S = 1.0  # for threads that are at work when everything else has been closed
EXIT_STUCK = 1


def own_threads() -> ThreadPoolExecutor:
    """Have the running loop's work in threads done by these: `leave` does not wait for them without an end."""
    threads = ThreadPoolExecutor(thread_name_prefix="work")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


def end_within(seconds: float) -> None:
    """End this process then, whatever it does. What is durable stays so, as after a kill."""

    def end() -> None:
        log.error(
            "the server did not end within %g s: it is ended now, and its jobs go on with the next start", seconds
        )
        _exit(EXIT_STUCK)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def leave(threads: ThreadPoolExecutor, code: int) -> None:
    """Return where no thread is at work any more; else end the process, which Python would keep for their sake."""
    threads.shutdown(wait=False, cancel_futures=True)
    until = time.monotonic() + THREADS_S
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    for each in others:
        each.join(max(0.0, until - time.monotonic()))
    if stuck := [each.name for each in others if each.is_alive()]:
        log.warning("threads that did not end: %s", ", ".join(stuck[:10]))
        _exit(code)


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
