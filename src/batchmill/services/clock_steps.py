"""Corrects due times after the wall clock is set back, so that scheduled work does not wait longer."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from batchmill.ports.clock import Clock
from batchmill.store.sql.database import Database

log = logging.getLogger("batchmill.server")

STEP_MIN_S = 2.0  # ordinary corrections of a clock are smaller


class ClockSteps:
    """
    Args:
        table: scheduled work, with columns `created` and `due`.
    """

    def __init__(self, database: Database, clock: Clock, table: sa.Table) -> None:
        self._database, self._clock, self._table = database, clock, table
        self._last_times: tuple[float, float] | None = None  # the last wall clock and monotonic time

    async def check(self) -> None:
        """Bring forward work whose due time is too late. Call it at the start and then regularly."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        last, self._last_times = self._last_times, (now, monotonic)
        if last is None:
            await self._database.write(self._make_due, now)
            return
        back_s = last[0] + (monotonic - last[1]) - now
        if back_s >= STEP_MIN_S:
            log.warning(
                "the clock was set back by %.0f s: the due times in %s are moved back too", back_s, self._table.name
            )
            await self._database.write(self._shift, now, back_s)

    def _make_due(self, db: sa.Connection, now: float) -> None:
        """Make due now what was created in the future: the clock was set back by an unknown amount since."""
        columns = self._table.c
        db.execute(self._table.update().where(columns.due > now, columns.created > now).values(due=now))

    def _shift(self, db: sa.Connection, now: float, back_s: float) -> None:
        columns = self._table.c
        db.execute(self._table.update().where(columns.due > now).values(due=columns.due - back_s))
