"""The control socket: a client gets the owner's replies over HTTP, and an error at once when the owner ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.terms import SetTerm

from batchmill import errors
from batchmill.cli.clients import OwnerClient, OwnerJobs
from batchmill.client import calls
from batchmill.client.messages import OwnerGone
from batchmill.control.app import ControlApp
from batchmill.control.client import ControlClient
from batchmill.control.listener import ControlListener
from batchmill.owned_files import OwnedFiles
from batchmill.states import PauseReason
from batchmill.types import JobQuery, JobView
from batchmill.wire import operations as table
from batchmill.wire.native import JobPage

JOBS = [JobView(id=f"job_{n}", state="running") for n in range(6, -1, -1)]
ERRORS = [
    errors.Conflict("taken", code="name_taken"), errors.ModelFailed("Traceback …", code="deploy_failed"),
    errors.JobPaused("paused", reason=PauseReason.STORAGE_FULL), errors.RateLimited("slow", retry_after_s=7.0),
    errors.LedgerBroken("twice"),
]  # fmt: skip


@contextlib.asynccontextmanager
async def open_client(app: ControlApp, path: Path) -> AsyncIterator[tuple[ControlListener, ControlClient]]:
    listener = ControlListener(app, path)
    await listener.open()
    client = ControlClient(path)
    try:
        yield listener, client
    finally:
        await client.close()
        await listener.close()


async def test_the_socket_is_its_users_alone_wherever_it_lies(tmp_path):
    """A socket that a killed owner left behind is replaced; it lies in a folder of any depth, for its user alone."""
    folder = tmp_path / ("deep" * 20) / ("deeper" * 20)
    folder.mkdir(parents=True)
    path = folder / "control.sock"
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as left:
        left.bind(path.name)
    async with open_client(ControlApp([]), path) as (_, client):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await client.check()


async def test_the_socket_of_a_successor_stays(tmp_path):
    """An owner that was replaced while it started has no socket: it waits, until it is ended or is the owner again."""
    (path := tmp_path / "control.sock").touch()
    left_s = 0.0
    listener = ControlListener(ControlApp([]), path, OwnedFiles(SetTerm(lambda: left_s)))
    opening = asyncio.create_task(listener.open())
    done, _ = await asyncio.wait({opening}, timeout=0.2)
    assert not done and path.is_file()
    left_s = 1.0
    await opening
    assert path.is_socket()
    await listener.close()


async def test_a_long_list_comes_in_pages(tmp_path, monkeypatch):
    """A client gets all jobs that it requested, in the owner's order, in pages of the allowed size."""
    monkeypatch.setattr("batchmill.cli.clients.PAGE_MAX", 3)
    requests = []

    async def listed(call):
        requests.append(call.query.limit)
        at = [each.id for each in JOBS].index(call.query.after) + 1 if call.query.after else 0
        page = JOBS[at : at + call.query.limit]
        return JobPage(page, page[-1].id if len(page) == call.query.limit else None)

    async with open_client(ControlApp([(table.LIST_JOBS, listed)]), tmp_path / "control.sock") as (_, client):
        jobs = OwnerJobs(OwnerClient(client))
        for limit, wanted in ((None, 7), (1, 1), (3, 3), (5, 5), (100, 7)):
            assert await jobs.list(JobQuery(limit=limit)) == JOBS[:wanted], limit
    assert max(requests) == 3


async def test_errors_are_what_they_were(tmp_path):
    """The client raises a handler's error with its kind, code, message, reason and delay, also after a crash."""
    raised: list[Exception] = []

    async def fail(call):
        raise raised[-1]

    async with open_client(ControlApp([(table.SHOW_JOB, fail)]), tmp_path / "control.sock") as (_, client):
        for error in ERRORS:
            raised.append(error)
            with pytest.raises(type(error)) as found:
                await client.send(calls.show("job_1").request)
            assert (found.value.code, found.value.message) == (error.code, error.message)
            for name in ("reason", "retry_after_s"):
                assert getattr(found.value, name, None) == getattr(error, name, None)
        raised.append(KeyError("x"))
        with pytest.raises(errors.BatchmillError, match="the process that owns the data directory failed: KeyError"):
            await client.send(calls.show("job_1").request)
        with pytest.raises(errors.InvalidInput, match="does not support GET"):
            await client.send(calls.models().request)


async def test_an_owner_that_ends_hangs_up(tmp_path):
    """A client that waits for a reply or reads events gets an error at once when its owner ends."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(call):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def watch(call):
        async def views():
            yield JOBS[0]
            await asyncio.Event().wait()

        return views()

    app = ControlApp([(table.PAUSE_JOB, wait), (table.WATCH_JOB, watch)])
    async with open_client(app, tmp_path / "control.sock") as (listener, client):
        asking = asyncio.ensure_future(client.send(calls.steer("job_1", "pause").request))
        await begun.wait()
        async with client.stream(calls.events("job_1", 0.5, None)) as reply:
            assert b"job_6" in await anext(reply.pieces)
            await listener.close(at_once=True)
            with pytest.raises(OwnerGone):
                await anext(reply.pieces)
        with pytest.raises(OwnerGone):
            await asking
        assert ended.is_set()
        with pytest.raises(OwnerGone):
            await client.check()


async def test_a_client_that_disconnects_ends_its_stream(tmp_path):
    """The owner makes no more views for a client that has disconnected."""
    ended = asyncio.Event()

    async def watch(call):
        async def views():
            try:
                yield JOBS[0]
                await asyncio.Event().wait()
            finally:
                ended.set()

        return views()

    async with open_client(ControlApp([(table.WATCH_JOB, watch)]), tmp_path / "control.sock") as (_, client):
        async with client.stream(calls.events("job_1", 0.5, None)) as reply:
            await anext(reply.pieces)
        await asyncio.wait_for(ended.wait(), 10)
