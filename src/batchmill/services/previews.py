"""Previews of orders that come over HTTP: validate, plan and estimate. A bounded number at once."""

from __future__ import annotations

from pathlib import Path

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.jobs.intake import preview
from batchmill.store.disk_room import DiskQuota
from batchmill.types import JobOrder
from batchmill.wire.native import Estimated, Planned, SealReport

AT_ONCE = 2  # each reads its whole dataset in processes of its own
WAITING_MAX = 16  # of one project


def _unseen(share: float) -> None:
    """Nobody watches how far it is."""


class PreviewService:
    """Raises, everywhere: InvalidInput when the order cannot be run as it is; Unavailable when too many wait."""

    def __init__(self, data_dir: Path, room: DiskQuota) -> None:
        self._data_dir, self._disk = data_dir, room
        self._places = FairSemaphore(AT_ONCE, waiting_max=WAITING_MAX, what="datasets to look at")

    async def validate(self, order: JobOrder) -> SealReport:
        """Check every row."""
        async with self._places.place(order.project):
            return await preview.validate(order, self._data_dir, _unseen, self._disk)

    async def plan(self, order: JobOrder) -> Planned:
        """Explain in which order the rows would run."""
        async with self._places.place(order.project):
            return Planned(*await preview.plan(order, self._data_dir, _unseen, self._disk))

    async def estimate(self, order: JobOrder, rows_per_s: float | None) -> Estimated:
        """Estimate tokens, cost and, at the rate given, time."""
        async with self._places.place(order.project):
            return Estimated(*await preview.estimate(order, self._data_dir, _unseen, rows_per_s, self._disk))
