"""What every worker does for its own process, here and on Ray: its priority, its memory, and how its start fails."""

from __future__ import annotations

import contextlib
import os

from batchmill.errors import BatchmillError, JobPaused, to_storage_error
from batchmill.function_runtime.frames import keep_freed_memory
from batchmill.models import redaction, secrets
from batchmill.states import PauseReason
from batchmill.wire.messages import Failed, Start

KEPT_BYTES = 32 * 1024 * 1024  # of freed memory
NICENESS = 5


def set_up_memory() -> None:
    """Keep what is freed for the next block of rows, instead of asking the kernel for it again."""
    keep_freed_memory(KEPT_BYTES)


def lower_priority() -> None:
    """Run at a lower priority than the owner, which schedules and commits for all.

    If the kernel groups processes by session, as on most desktops, the priority of the group counts.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(NICENESS))


def take_start(start: Start) -> None:
    """Make this process the worker's own: secrets that logs hide, and its number."""
    secrets.take(start.provision)
    redaction.guard_logs()
    os.environ["BATCHMILL_REPLICA"] = str(start.replica)  # engines split the machine's devices by it


def failed_start(error: Exception, who: str) -> Failed:
    """Why a worker cannot be created, for its owner."""
    failure = error if isinstance(error, BatchmillError) else as_failure(error, who)
    reason = failure.reason if isinstance(failure, JobPaused) else PauseReason.ENGINE_FAILED
    return Failed(failure.code, redaction.mask(failure.message), reason)


def as_failure(error: BaseException, who: str) -> BatchmillError:
    """A bug as an error for the owner; the traceback goes to the worker's log."""
    redaction.print_exception(error)
    if isinstance(error, OSError) and (storage_error := to_storage_error(error)) is not None:
        return storage_error
    return BatchmillError(f"{who} failed: {type(error).__name__}: {error}", code="engine_bug")
