"""Short writes of a database in a file: the event loop runs their statements, and a thread commits."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from batchmill.errors import InvalidTransition, LedgerBroken
from batchmill.store.sql import loop_transactions
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import schema
from batchmill.store.sql.transactions import note_change

Write = Callable[[sa.Connection], object]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    for limit in ("ON_LOOP_S", "SLOW_S"):  # a busy machine takes long for everything
        monkeypatch.setattr(loop_transactions, limit, 600.0)
    database = Database(tmp_path / "a.db")
    yield database
    database.close()


class Writer:
    """Adds a row, and notes in which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self, db: sa.Connection, version: int) -> int:
        self.threads.append(threading.current_thread().name)
        db.execute(schema.insert().values(version=version))
        return version


@pytest.fixture
def add() -> Writer:
    return Writer()


def stored(db: sa.Connection) -> list[int]:
    return list(db.execute(sa.select(schema.c.version).where(schema.c.version >= 1000).order_by("version")).scalars())


def is_on_loop(thread: str) -> bool:
    return thread == threading.current_thread().name


def holding_commits(database: Database) -> threading.Event:
    """Have the thread wait for this event after each transaction that notes changes."""
    go_on = threading.Event()
    database.writer.listen(lambda _: go_on.wait(60))
    return go_on


async def give_turn_to_loop(database: Database, add: Writer) -> list[asyncio.Task[Any]]:
    """Have the thread give the loop, which is busy here, the turn of three writes. Returns all that has begun."""
    go_on = holding_commits(database)
    writes: list[asyncio.Task[Any]] = [asyncio.create_task(database.write_short(note_change, "job_1"))]
    writes += [asyncio.create_task(database.write_short(add, 1000 + n)) for n in range(3)]
    await asyncio.sleep(0)
    go_on.set()
    while database._writes._scheduled is None:
        time.sleep(0.001)  # noqa: ASYNC251 (the loop is to be busy)
    return writes


async def test_short_writes_share_a_transaction_on_the_loop(database, add):
    """The first does not wait for others; those that come until it is committed share the next one."""
    told: list[tuple[str, int]] = []
    database.writer.listen(lambda changes: told.append((threading.current_thread().name, len(changes))))
    go_on = holding_commits(database)

    def noted(db: sa.Connection, version: int) -> int:
        note_change(db, f"job_{version}")
        return add(db, version)

    writes = [asyncio.create_task(database.write_short(noted, 1000 + n)) for n in range(3)]
    await asyncio.sleep(0)
    assert len(add.threads) == 1
    go_on.set()
    assert await asyncio.gather(*writes) == [1000, 1001, 1002]
    assert all(map(is_on_loop, add.threads)) and len(add.threads) == 3
    assert [count for _, count in told] == [1, 2] and not is_on_loop(told[0][0])
    assert await database.read(stored) == [1000, 1001, 1002]


async def test_nobody_learns_of_a_write_before_it_is_committed(database, add):
    commits, goes_on = threading.Event(), threading.Event()

    def wait(_: sa.Connection) -> None:
        commits.set()
        goes_on.wait(30)

    sa.event.listen(database.writer.own._engine, "commit", wait)
    write = asyncio.create_task(database.write_short(add, 1000))
    await asyncio.to_thread(commits.wait, 30)  # in the thread, while the loop goes on
    assert len(add.threads) == 1 and not write.done() and await database.read(stored) == []
    goes_on.set()
    await write
    assert await database.read(stored) == [1000]


async def test_writes_keep_their_order(database, add):
    """Long ones run in the thread, with the short ones that wait behind them."""
    seen: list[list[int]] = []

    def look(db: sa.Connection, version: int) -> None:
        seen.append(stored(db))
        add(db, version)

    order = [database.write_short, database.write, database.write_short, database.write]
    await asyncio.gather(*(write(look, 1000 + n) for n, write in enumerate(order)))
    assert [len(each) for each in seen] == [0, 1, 2, 3]
    assert [is_on_loop(thread) for thread in add.threads] == [True, False, True, False]


async def test_a_short_write_that_fails_is_undone_alone(database, add):
    def refuse(db: sa.Connection) -> None:
        add(db, 1999)
        raise InvalidTransition("refused")

    first, refused, last = await asyncio.gather(
        database.write_short(add, 1000), database.write_short(refuse), database.write_short(add, 1001),
        return_exceptions=True,
    )  # fmt: skip
    assert (first, last) == (1000, 1001) and isinstance(refused, InvalidTransition)
    assert await database.read(stored) == [1000, 1001]
    assert await database.write_short(add, 1002) == 1002 and is_on_loop(add.threads[-1])


async def test_a_commit_that_fails_is_nobodys_result(database, add):
    """All calls run again, and who is to blame learns it."""
    rollbacks = []

    def end(db: sa.Connection) -> None:
        rollbacks.append(1)
        db.connection.driver_connection.rollback()  # as SQLite does of a full disk

    first, ended = await asyncio.gather(
        database.write_short(add, 1000), database.write_short(end), return_exceptions=True
    )
    assert first == 1000 and isinstance(ended, LedgerBroken) and len(rollbacks) > 1
    assert await database.read(stored) == [1000]


async def test_a_short_write_beside_work_in_the_thread(database, add):
    """It waits for what begins transactions of its own, and holds up none."""
    release = threading.Event()

    def work() -> None:
        release.wait(30)
        with database.writer.begin() as db:
            add(db, 1000)

    other = asyncio.create_task(database.call(work))
    await asyncio.sleep(0)
    short = asyncio.create_task(database.write_short(add, 1001))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(other, short)
    assert not any(map(is_on_loop, add.threads))
    assert await database.read(stored) == [1000, 1001]
    assert await database.write_short(add, 1002) == 1002 and is_on_loop(add.threads[-1])


async def test_a_short_write_behind_a_longer_one(database, add):
    """It shares no transaction with it, and is run on the loop."""
    told: list[int] = []
    database.writer.listen(lambda changes: told.append(len(changes)))
    go_on = holding_commits(database)

    def noted(db: sa.Connection, version: int) -> int:
        note_change(db, f"job_{version}")
        return add(db, version)

    ways = [database.write_short, database.write, database.write, database.write_short, database.write_short]
    writes = [asyncio.create_task(way(noted, 1000 + n)) for n, way in enumerate(ways)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*writes) == list(range(1000, 1005))
    assert list(map(is_on_loop, add.threads)) == [True, False, False, True, True] and told == [1, 2, 2]


async def test_the_loop_waits_for_no_other_process(database, add, tmp_path):
    """Such as a person's shell that holds the database's lock."""
    shell = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    shell.execute("BEGIN IMMEDIATE")
    write = asyncio.create_task(database.write_short(add, 1000))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not write.done() and add.threads == []
    shell.execute("ROLLBACK")
    shell.close()
    assert await write == 1000 and not is_on_loop(add.threads[0])


async def test_a_slow_disk_is_waited_for_in_the_thread(database, add, monkeypatch):
    monkeypatch.setattr(loop_transactions, "SLOW_S", -1.0)
    await database.write_short(add, 1000)
    await database.write_short(add, 1001)
    assert [is_on_loop(thread) for thread in add.threads] == [True, False]


async def test_a_disk_that_stays_slow_is_waited_for_longer(database, add, monkeypatch):
    """One slow transaction keeps the loop from writing for half a second, those that follow it for up to ten."""
    now = 1000.0
    monkeypatch.setattr(loop_transactions, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(loop_transactions, "SLOW_S", -1.0)
    on_loop: list[float] = []
    while now < 1037:
        await database.write_short(add, int(now * 4))
        if is_on_loop(add.threads[-1]):
            on_loop.append(now - 1000)
        now += 0.25
    assert on_loop == [0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5]
    now = 1056.0
    await database.write_short(add, 5000)
    now = 1056.5
    await database.write_short(add, 5001)
    assert list(map(is_on_loop, add.threads[-2:])) == [True, True], "a slow transaction long ago does not count"


async def test_the_loop_is_held_for_a_short_time(database, add, monkeypatch):
    """What is left then gets the next transaction, after all that is ready."""
    monkeypatch.setattr(loop_transactions, "ON_LOOP_S", -1.0)
    notes: list[int] = []
    database.writer.listen(lambda changes: notes.append(len(changes)))
    go_on, begun_before = holding_commits(database), []

    def noted(db: sa.Connection, version: int) -> int:
        note_change(db, f"job_{version}")
        asyncio.get_running_loop().call_soon(lambda: begun_before.append(len(add.threads)))
        return add(db, version)

    writes = [asyncio.create_task(database.write_short(noted, 1000 + n)) for n in range(3)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*writes)
    await asyncio.sleep(0)
    assert notes == [1, 1, 1] and all(map(is_on_loop, add.threads)) and begun_before[1:] == [2, 3]


async def test_a_caller_that_is_cancelled_before_its_turn(database, add):
    go_on = holding_commits(database)
    earlier = asyncio.create_task(database.write_short(note_change, "job_1"))
    write = asyncio.create_task(database.write_short(add, 1000))
    await asyncio.sleep(0)
    write.cancel()
    await asyncio.wait({write})
    go_on.set()
    await earlier
    assert await database.write_short(add, 1001) == 1001
    assert await database.read(stored) == [1001]


def test_a_loop_that_ends_before_its_turn(database, add):
    """The next loop's writes do not wait for it."""
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        writes = await give_turn_to_loop(database, add)
        loop.stop()
        await asyncio.gather(*writes)

    beginning = loop.create_task(begin())
    loop.run_forever()
    assert not beginning.done() and len(add.threads) == 0
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    assert asyncio.run(database.write_short(add, 1001)) == 1001


def test_what_waits_is_run_when_the_database_is_closed(tmp_path, add):
    database = Database(tmp_path / "a.db")

    async def begin() -> None:
        writes = await give_turn_to_loop(database, add)
        database.close()
        assert await asyncio.gather(*writes) == [None, 1000, 1001, 1002]
        assert len(add.threads) == 3 and not any(map(is_on_loop, add.threads))

    asyncio.run(begin())
    again = Database(tmp_path / "a.db")
    assert asyncio.run(again.read(stored)) == [1000, 1001, 1002]
    again.close()


async def test_many_writers_of_every_kind(database, add):
    """Nothing is lost, and nothing waits for ever."""

    def work(version: int) -> None:
        with database.writer.begin() as db:
            add(db, version)

    async def one(version: int) -> None:
        if version % 7 == 0:
            await database.call(work, version)
        elif version % 3 == 0:
            await database.write(add, version)
        elif version % 11 == 0:
            database.write_soon(add, version)
        else:
            await database.write_short(add, version)

    for first in range(1000, 1400, 40):
        await asyncio.gather(*(one(version) for version in range(first, first + 40)))
    await database.write(lambda _: None)
    assert await database.read(stored) == list(range(1000, 1400))


async def test_a_call_that_a_thread_takes_at_once(database, add):
    """The loop that made it finds nothing to do, and later calls find the turn free."""
    began, goes_on, taken = threading.Event(), threading.Event(), threading.Event()

    def wait(_: sa.Connection) -> None:
        began.set()
        goes_on.wait(30)

    class Waiting(deque):
        """The thread runs at once what is appended."""

        def append(self, call) -> None:
            super().append(call)
            goes_on.set()
            taken.wait(30)

    leave = database._writes._leave_turn

    def leave_and_tell() -> bool:
        if has_left := leave():
            taken.set()
        return has_left

    first = asyncio.create_task(database.write(wait))
    await asyncio.to_thread(began.wait, 30)
    database._writes._waiting, database._writes._leave_turn = Waiting(), leave_and_tell
    assert await database.write(add, 1000) == 1000
    await first
    assert await asyncio.wait_for(database.write_short(add, 1001), 30) == 1001


@pytest.mark.parametrize("is_short", [True, False])
async def test_an_error_that_is_no_exception_is_its_calls_alone(database, add, is_short):
    """Others that share the transaction get their results."""

    def cancel(db: sa.Connection) -> None:
        add(db, 1999)
        raise asyncio.CancelledError

    write = database.write_short if is_short else database.write
    running = [asyncio.create_task(write(*args)) for args in ((add, 1000), (cancel,), (add, 1001))]
    await asyncio.wait_for(asyncio.wait(running), 30)
    assert [task.cancelled() for task in running] == [False, True, False]
    assert await database.read(stored) == [1000, 1001]


async def test_a_slow_disk_that_fails_is_waited_for_in_the_thread(database, add, monkeypatch):
    def fail(db: sa.Connection) -> None:
        add(db, 1000)
        raise OSError("too slow")

    monkeypatch.setattr(loop_transactions, "SLOW_S", -1.0)
    with pytest.raises(OSError, match="too slow"):
        await database.write_short(fail)
    await database.write_short(add, 1001)
    assert [is_on_loop(thread) for thread in add.threads] == [True, False, False]


def test_a_database_that_is_closed_as_a_turn_is_given_to_the_loop(tmp_path, add, monkeypatch):
    """The thread takes it: after `close` nothing is written."""
    database = Database(tmp_path / "a.db")
    commits, gives, goes_on = threading.Event(), threading.Event(), threading.Event()

    class Clock:
        """Waits where the thread looks whether the loop may take the turn."""

        @staticmethod
        def monotonic() -> float:
            if threading.current_thread() is not threading.main_thread():
                gives.set()
                goes_on.wait(30)
            return time.monotonic()

    def wait(_: sa.Connection) -> None:
        commits.wait(30)

    async def begin() -> None:
        sa.event.listen(database.writer.own._engine, "commit", wait)
        first = asyncio.create_task(database.write_short(add, 1000))
        while not add.threads:
            await asyncio.sleep(0)
        second = asyncio.create_task(database.write_short(add, 1001))
        await asyncio.sleep(0)
        monkeypatch.setattr(loop_transactions, "time", Clock)
        monkeypatch.setattr(database._backend, "stop_waiting", goes_on.set)
        commits.set()
        await asyncio.to_thread(gives.wait, 30)
        database.close()
        assert await asyncio.wait_for(asyncio.gather(first, second), 30) == [1000, 1001]

    asyncio.run(begin())
    again = Database(tmp_path / "a.db")
    assert asyncio.run(again.read(stored)) == [1000, 1001]
    again.close()
