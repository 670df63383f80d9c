"""Previews of job orders over HTTP: validate, plan and estimate. A limited number runs at once."""

from __future__ import annotations

from pathlib import Path

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.jobs.intake import preview
from batchmill.store.disk_room import DiskQuota
from batchmill.types import JobOrder
from batchmill.wire.native import Estimated, Planned, SealReport

PREVIEWS_AT_ONCE = 2  # each reads its whole dataset in its own processes
WAITING_MAX = 16  # per project


def _ignore_progress(share: float) -> None:
    """Nothing shows the progress of a preview."""


class PreviewService:
    """Raises, everywhere: InvalidInput if the order cannot run as it is; Unavailable if too many previews wait."""

    def __init__(self, data_dir: Path, disk: DiskQuota) -> None:
        self._data_dir, self._disk = data_dir, disk
        self._semaphore = FairSemaphore(PREVIEWS_AT_ONCE, waiting_max=WAITING_MAX, what="datasets to look at")

    async def validate(self, order: JobOrder) -> SealReport:
        """Check every row."""
        async with self._semaphore.place(order.project):
            return await preview.validate(order, self._data_dir, _ignore_progress, self._disk)

    async def plan(self, order: JobOrder) -> Planned:
        """Return the order in which the rows would run."""
        async with self._semaphore.place(order.project):
            return Planned(*await preview.plan(order, self._data_dir, _ignore_progress, self._disk))

    async def estimate(self, order: JobOrder, rows_per_s: float | None) -> Estimated:
        """Estimate tokens, cost and, at the given rate, time."""
        async with self._semaphore.place(order.project):
            return Estimated(*await preview.estimate(order, self._data_dir, _ignore_progress, rows_per_s, self._disk))
