"""The log and the thread that user code gets."""

import sys

import pytest

from batchmill.engines.function import in_worker_calls
from batchmill.engines.function.in_worker_calls import UserLog, UserThread


def test_a_full_log_is_set_aside(tmp_path):
    """A log at its maximum becomes the one older file; whoever holds the file object writes on into the new one."""
    log = UserLog(tmp_path / "function.log")
    log.capture_stdout()
    try:
        held = sys.stdout
        held.write("x" * (in_worker_calls.LOG_BYTES_MAX - 1))
        log.rotate()
        assert not (tmp_path / "function.log.1").exists()
        held.write("y")
        log.rotate()
        held.write("new\n")
    finally:
        log.close()
    assert (tmp_path / "function.log.1").stat().st_size == in_worker_calls.LOG_BYTES_MAX
    assert (tmp_path / "function.log").read_text() == "new\n"


def test_distinct_errors_are_bounded(tmp_path):
    """Each distinct error is written a few times, and only so many distinct ones are."""
    log = UserLog(tmp_path / "function.log")
    kinds = [type(f"E{n}", (Exception,), {}) for n in range(in_worker_calls.DISTINCT_ERRORS_MAX + 1)]
    for kind in kinds:
        log.traceback(kind("once"), "row 1")
    for _ in range(in_worker_calls.TRACEBACKS_MAX):
        log.traceback(kinds[0]("again"), "row 2")
    log.close()
    text = (tmp_path / "function.log").read_text()
    assert text.count(": once") == in_worker_calls.DISTINCT_ERRORS_MAX
    assert text.count(": again") == in_worker_calls.TRACEBACKS_MAX - 1


async def test_the_thread_hands_results_and_errors_back():
    """Calls run in order in one thread; what they raise reaches whoever awaits."""
    thread = UserThread()
    order = []
    futures = [thread.submit(lambda n=n: order.append(n) or n) for n in range(3)]
    assert [await future for future in futures] == [0, 1, 2] == order
    with pytest.raises(ZeroDivisionError):
        await thread.submit(lambda: 1 // 0)
    thread.close()
