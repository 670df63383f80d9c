"""Work that is due at a time keeps its wait when somebody sets the clock back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.databases import open_database

from batchmill.services.clock_steps import ClockSteps
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import outbox

NOON = 1_700_000_000.0


class TwoClocks:
    """The wall clock and the other, each as a test sets it."""

    def __init__(self) -> None:
        self.wall, self.passed = NOON, 0.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.passed

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here."""

    def go_on(self, seconds: float, *, back: float = 0.0) -> None:
        self.passed += seconds
        self.wall += seconds - back


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


async def test_a_wait_is_as_long_as_it_was_meant_to_be(database):
    """What is due after a minute is due after a minute though the clock goes back by an hour meanwhile, and what was
    delivered or given up stays so; a clock that goes on, or is adjusted a little, changes nothing."""
    clock = TwoClocks()
    steps = ClockSteps(database, clock, outbox)

    async def waits() -> dict[str, float | None]:
        rows = await database.read(lambda db: db.execute(outbox.select()).all())
        return {row.id: None if row.due is None else row.due - clock.wall for row in rows}

    def put(db, **more):
        base = {"endpoint": "e", "project": "p", "type": "t", "payload": b"", "created": NOON - 60}
        db.execute(outbox.insert().values(**base | more))

    await steps.check()
    await database.write(put, id="later", due=NOON + 60)
    await database.write(put, id="done", due=None)
    clock.go_on(10.0, back=1.0)
    await steps.check()
    assert await waits() == {"later": 51.0, "done": None}
    clock.go_on(10.0, back=3600.0)
    await steps.check()
    assert await waits() == {"later": 41.0, "done": None}
    await steps.check()
    assert await waits() == {"later": 41.0, "done": None}


async def test_work_of_a_time_to_come_begins_with_the_start(database):
    """What was written down before the clock went back, while nobody looked, is due at once."""
    clock = TwoClocks()
    values = {"endpoint": "e", "project": "p", "type": "t", "payload": b""}
    await database.write(lambda db: db.execute(outbox.insert().values(id="new", created=NOON, due=NOON, **values)))
    clock.wall = NOON - 3600
    await ClockSteps(database, clock, outbox).check()
    due = await database.read(lambda db: db.execute(outbox.select()).one().due)
    assert due == clock.wall
