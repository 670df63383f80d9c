"""The end of a command, and of a server's process."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import asyncio, threading
from batchmill.cli.admin import serve as ending
ending.THREADS_S = 0.1
async def main():
    threads = ending.own_threads()
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    {}
asyncio.run(main())
"""


def run(line: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", STUCK.format(line)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_stuck_thread_keeps_no_process():
    """A thread that never ends is named and left behind, and so is a server that does not come to its end."""
    code, said = run("ending.leave(threads, 0)")
    assert code == 0 and "threads that did not end: work_0" in said
    code, said = run("ending.end_within(0.1); await asyncio.Event().wait()")
    assert code == 1 and "did not end within 0.1 s" in said


def test_threads_that_are_idle_are_no_news():
    """Where no thread is at work the process ends as it always does."""
    code = "from concurrent.futures import ThreadPoolExecutor; from batchmill.cli.admin import serve as ending; "
    code += "threads = ThreadPoolExecutor(); threads.submit(int).result(); ending.leave(threads, 7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_whose_standard_error_is_closed_succeeds():
    """A descriptor that was closed before the command started changes no exit code."""
    command = '"$0" -m batchmill --version 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith("batchmill")) == (0, True)
