"""What became of a function's calls, summed until somebody takes the sums."""

from __future__ import annotations

import time
from typing import Any

from batchmill.types import BatchTimes, CallStats


class Counts:
    """Sums of one engine. Durations are in nanoseconds."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.succeeded = self.succeeded_ns = self.failed = self.failed_ns = 0
        self._rows = self._executions = self._queue_ns = 0
        self._sizes: dict[int, list[int]] = {}  # batch size -> executions and what they took
        self._is_new = False

    def called(self, meta: dict[str, Any]) -> None:
        """A `results` frame: what the process has called since its last one."""
        self._is_new = True
        self._queue_ns += meta["queue_ns"]
        for size, executions, input_ns, infer_ns, output_ns in meta["ran"]:
            self._rows += size * executions
            self._executions += executions
            had = self._sizes.get(size)
            if had is None:
                self._sizes[size] = [executions, input_ns, infer_ns, output_ns]
            else:
                had[0] += executions
                had[1] += input_ns
                had[2] += infer_ns
                had[3] += output_ns

    def answered(self, is_ok: bool, took_ns: int, requests: int = 1) -> None:
        """So many requests, or rows of jobs, have been answered; `took_ns` for each."""
        self._is_new = True
        if is_ok:
            self.succeeded += requests
            self.succeeded_ns += took_ns * requests
        else:
            self.failed += requests
            self.failed_ns += took_ns * requests

    def take(self) -> CallStats | None:
        """The sums since this was last called; None: there is nothing new."""
        if not self._is_new:
            return None
        batches = [BatchTimes(size, *self._sizes[size]) for size in sorted(self._sizes)]
        taken = CallStats(
            rows=self._rows, executions=self._executions, succeeded=self.succeeded, succeeded_ns=self.succeeded_ns,
            failed=self.failed, failed_ns=self.failed_ns, queue_ns=self._queue_ns, batches=batches, last_at=time.time(),
        )  # fmt: skip
        self._clear()
        return taken
