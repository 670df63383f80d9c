"""What an actor makes of its process on a node: the leader of a session that ends with it, and its way to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from batchmill.children import process_end

THREADS = "OMP_NUM_THREADS"
EXIT = "raise_sys_exit_with_custom_error_message"  # what Ray's handler of SIGTERM calls


def lead_session() -> None:
    """Begin a session, all of whose processes are killed once this process has ended, however it ended. So is what user
    code of this process has left the session with.

    The process that does so belongs to the session: no other process gets the session's number before it ends.
    Raises: OSError.
    """
    if os.getsid(0) != os.getpid():
        if os.getpgid(0) == os.getpid():  # Ray makes each worker the leader of a process group, if that is set
            _leave_group()
        os.setsid()
    ours, _ = os.pipe()  # this process holds the other end until it ends
    own = str(os.getpid()), process_end.started(os.getpid())
    subprocess.Popen(
        [sys.executable, "-I", "-S", process_end.__file__, *own], stdin=ours, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, process_group=0,
    )  # fmt: skip
    os.close(ours)


def _leave_group() -> None:
    """Move this process from the group that it leads: the leader of a group cannot begin a session.

    It joins the group of a child. Its parent's group would not do: a raylet that has ended leaves it to a parent in
    another session, whose groups it may not join.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, process_group=0,
    ) as child:  # fmt: skip
        try:
            os.setpgid(0, child.pid)
        finally:
            child.kill()


def forget_threads() -> None:
    """Remove the number of threads that Ray has set for this process: it is no choice of anybody's.

    Ray sets it in a process that has begun. So what the process began with is a choice of the node's operator, and
    stays.
    """
    began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(each.startswith(f"{THREADS}=".encode()) for each in began_with):
        os.environ.pop(THREADS, None)


def on_first_sigterm(leave: Callable[[], None]) -> None:
    """Call `leave` at the first SIGTERM, in the main thread; the next one ends the process, as Ray has it.

    Only the main thread may set a handler, and Ray's own code runs there. So Ray's handler stays, and what it calls is
    replaced. A Ray without it ends the process at once.
    """
    handler = signal.getsignal(signal.SIGTERM)
    names = getattr(handler, "__globals__", {})
    if (end := names.get(EXIT)) is None:
        return

    def called(*arguments: object, **named: object) -> None:
        names[EXIT] = end
        leave()

    names[EXIT] = called


def end_with_this_thread() -> None:
    """End this process as `sys.exit` ends any other, if what runs in this thread calls it.

    The thread has Ray's event loop. Without this it would end alone, without a word, and what waits for the actor
    would wait for ever.
    """
    thread, others = threading.current_thread(), threading.excepthook

    def ended(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is not thread or not isinstance(failure.exc_value, SystemExit):
            others(failure)
            return
        traceback.print_exception(failure.exc_value)
        code = failure.exc_value.code
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    threading.excepthook = ended


__all__ = ["end_with_this_thread", "forget_threads", "lead_session", "on_first_sigterm"]
