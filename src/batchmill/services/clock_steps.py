"""Keeps work that is due at a time of the wall clock from waiting longer because somebody has set that clock back."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from batchmill.ports import Clock
from batchmill.store.database import Database

log = logging.getLogger("batchmill.server")

LEAST_S = 2.0  # a clock that is adjusted goes by less


class ClockSteps:
    """
    Args:
        table: of what is due, with columns `created` and `due`.
    """

    def __init__(self, database: Database, clock: Clock, table: sa.Table) -> None:
        self._database, self._clock, self._table = database, clock, table
        self._seen: tuple[float, float] | None = None  # the two clocks, as they were

    async def look(self) -> None:
        """Bring forward what is due later than it was meant to be. Called now and then, and first at the start."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        seen, self._seen = self._seen, (now, monotonic)
        if seen is None:
            await self._database.write(self._begin_new, now)
            return
        back_s = seen[0] + (monotonic - seen[1]) - now
        if back_s >= LEAST_S:
            log.warning("the clock was set back by %.0f s: what %s holds keeps its waits", back_s, self._table.name)
            await self._database.write(self._shift, now, back_s)

    def _begin_new(self, db: sa.Connection, now: float) -> None:
        """Work of a time that has not come was written before the clock was set back: nobody knows by how much."""
        columns = self._table.c
        db.execute(self._table.update().where(columns.due > now, columns.created > now).values(due=now))

    def _shift(self, db: sa.Connection, now: float, back_s: float) -> None:
        columns = self._table.c
        db.execute(self._table.update().where(columns.due > now).values(due=columns.due - back_s))
