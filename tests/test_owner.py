"""Opening a data directory: whatever fails on the way, nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from fakes.child_processes import children_of
from fakes.open_files import open_files
from msgspec.structs import replace

from batchmill import owner
from batchmill.client.messages import HttpRequest
from batchmill.config import Config, load
from batchmill.connection import connect
from batchmill.control.operations import PING
from batchmill.errors import StorageFailed
from batchmill.owner import open_owner, open_store
from batchmill.services.data_dirs.data_dirs import SOCKET, prepare_data_dir, try_lock
from batchmill.serving import serve
from batchmill.types import ModelSpec

MODELS = """
[models.double]
engine = "function"
source = "app.py:double"
"""
LOOP_TURNS = 3
Open = Callable[[Config], contextlib.AbstractAsyncContextManager[Any]]


class Opening:
    """Opens a data directory and closes it again."""

    def __init__(self, opens: Open, config: Config) -> None:
        self._opens, self._config = opens, config
        self.is_open = False

    async def run(self) -> None:
        async with self._opens(self._config):
            self.is_open = True


class Fault(OSError):
    """What a step of an opening may raise."""


class FailingStep:
    """Awaits an opening whose step of this number fails: what it waited for is there, and it gets an error instead."""

    def __init__(self, opening: Opening, number: int, error: type[BaseException]) -> None:
        self._opening, self._number, self._error = opening, number, error
        self.has_failed = False

    def __await__(self) -> Generator[Any, Any, None]:
        steps, count = self._opening.run().__await__(), 0
        wanted = next(steps, None)
        while wanted is not None:
            yield wanted
            count += 1
            try:
                if count == self._number and not self._opening.is_open:
                    self.has_failed = True
                    wanted = steps.throw(self._error("no"))
                else:
                    wanted = steps.send(None)
            except StopIteration:
                return


@contextlib.asynccontextmanager
async def owned(config: Config) -> AsyncIterator[None]:
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    assert lock is not None, "the one before gave it back"
    async with open_store(config, lock) as store, open_owner(store):
        yield


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[None]:
    """As a command that is about to run a job, whose processes start first."""
    async with connect(config) as connection:
        connection.expect([ModelSpec("double", "function", "app.py:double")])
        await connection.send(HttpRequest(PING.method, PING.path))
        yield


@pytest.mark.parametrize(
    ("opens", "error"), [(serve, Fault), (owned, asyncio.CancelledError), (running, asyncio.CancelledError)]
)
async def test_nothing_stays_of_an_opening_that_fails(tmp_path: Path, opens: Open, error: type[BaseException]) -> None:
    """Whichever step of the opening of a server or an owner fails, no task, process, file, socket or lock stays, and
    the next one can open the data directory."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "batchmill.toml").write_text(MODELS)
    config = load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    config = replace(config, server=replace(config.server, port=0, grpc_port=0))
    await Opening(opens, config).run()  # what is loaded once stays
    gc.collect()
    files, processes = open_files(), children_of(os.getpid())
    number, fails = 0, True
    while fails:
        number += 1
        step = FailingStep(Opening(opens, config), number, error)
        with contextlib.suppress(Fault, StorageFailed, asyncio.CancelledError):
            await step
        fails = step.has_failed
        async with asyncio.timeout(10):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)  # they were cancelled
            for _ in range(LOOP_TURNS):  # aborted transports are closed in the next ones
                await asyncio.sleep(0)
        assert not open_files() - files, number
        assert not set(children_of(os.getpid())) - set(processes), number
        assert not (config.data_dir / SOCKET).exists()
        lock = try_lock(config.data_dir)
        assert lock is not None, number
        os.close(lock)
    assert number > 5, "the steps were counted"


@pytest.mark.parametrize(("left_s", "stays"), [(math.inf, False), (1.0, False), (-1.0, True)])
async def test_the_control_socket_of_a_successor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, stays: bool
) -> None:
    """An owner that is ended in order may have been replaced before: the socket may be another process's."""
    config = load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    assert lock is not None
    async with open_store(config, lock) as store, open_owner(store):
        monkeypatch.setattr(store.database.term, "left_s", lambda: left_s)
    assert (config.data_dir / SOCKET).exists() == stays


@pytest.mark.parametrize(("left_s", "stays"), [(1.0, False), (-1.0, True)])
async def test_results_that_a_successor_sends_stay(tmp_path: Path, left_s: float, stays: bool) -> None:
    """An owner may have been stopped, and replaced, while it started."""
    config = load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    assert lock is not None
    (partial := config.data_dir / "partial" / "job_1.theirs.jsonl").parent.mkdir()
    partial.touch()
    async with open_store(config, lock) as store:
        store.database.term.left_s = lambda: left_s
        owner._sweep(store)
    assert partial.exists() == stays
