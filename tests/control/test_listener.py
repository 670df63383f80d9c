"""The control socket: what a guest gets over HTTP is what the owner has, and it hears at once when the owner ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchmill import errors
from batchmill.cli.clients import MachineClient, MachineJobs
from batchmill.client import calls
from batchmill.client.messages import OwnerGone
from batchmill.control.app import ControlApp
from batchmill.control.guest import Guest
from batchmill.control.listener import ControlListener
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
async def guest_of(app: ControlApp, path: Path) -> AsyncIterator[tuple[ControlListener, Guest]]:
    listener = ControlListener(app, path)
    await listener.open()
    guest = Guest(path)
    try:
        yield listener, guest
    finally:
        await guest.close()
        await listener.close()


async def test_the_socket_is_its_users_alone_wherever_it_lies(tmp_path):
    """A socket that a killed owner left behind is replaced; it lies in a folder of any depth, for its user alone."""
    folder = tmp_path / ("deep" * 20) / ("deeper" * 20)
    folder.mkdir(parents=True)
    path = folder / "control.sock"
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as left:
        left.bind(path.name)
    async with guest_of(ControlApp([]), path) as (_, guest):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await guest.check()


async def test_a_long_list_comes_in_pages(tmp_path, monkeypatch):
    """However many jobs there are, a guest gets all it asked for, in the owner's order, no page larger than it may."""
    monkeypatch.setattr("batchmill.cli.clients.PAGE_MAX", 3)
    asked = []

    async def listed(call):
        asked.append(call.query.limit)
        at = [each.id for each in JOBS].index(call.query.after) + 1 if call.query.after else 0
        page = JOBS[at : at + call.query.limit]
        return JobPage(page, page[-1].id if len(page) == call.query.limit else None)

    async with guest_of(ControlApp([(table.LIST_JOBS, listed)]), tmp_path / "control.sock") as (_, guest):
        jobs = MachineJobs(MachineClient(guest))
        for limit, wanted in ((None, 7), (1, 1), (3, 3), (5, 5), (100, 7)):
            assert await jobs.list(JobQuery(limit=limit)) == JOBS[:wanted], limit
    assert max(asked) == 3


async def test_errors_are_what_they_were(tmp_path):
    """What a handler raises is raised at the guest: its kind, code, message, reason and delay; a crash is told too."""
    raised: list[Exception] = []

    async def fail(call):
        raise raised[-1]

    async with guest_of(ControlApp([(table.SHOW_JOB, fail)]), tmp_path / "control.sock") as (_, guest):
        for error in ERRORS:
            raised.append(error)
            with pytest.raises(type(error)) as found:
                await guest.send(calls.show("job_1").request)
            assert (found.value.code, found.value.message) == (error.code, error.message)
            for name in ("reason", "retry_after_s"):
                assert getattr(found.value, name, None) == getattr(error, name, None)
        raised.append(KeyError("x"))
        with pytest.raises(errors.BatchmillError, match="the process that owns the data directory failed: KeyError"):
            await guest.send(calls.show("job_1").request)
        with pytest.raises(errors.InvalidInput, match="knows no GET"):
            await guest.send(calls.models().request)


async def test_an_owner_that_ends_hangs_up(tmp_path):
    """A guest that waits for a reply, or reads events, hears at once that its owner has gone."""
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
    async with guest_of(app, tmp_path / "control.sock") as (listener, guest):
        asking = asyncio.ensure_future(guest.send(calls.steer("job_1", "pause").request))
        await begun.wait()
        async with guest.stream(calls.events("job_1", 0.5, None)) as reply:
            assert b"job_6" in await anext(reply.pieces)
            await listener.close(at_once=True)
            with pytest.raises(OwnerGone):
                await anext(reply.pieces)
        with pytest.raises(OwnerGone):
            await asking
        assert ended.is_set()
        with pytest.raises(OwnerGone):
            await guest.check()


async def test_a_guest_that_leaves_ends_its_stream(tmp_path):
    """Views are no longer made for a guest that has gone."""
    ended = asyncio.Event()

    async def watch(call):
        async def views():
            try:
                yield JOBS[0]
                await asyncio.Event().wait()
            finally:
                ended.set()

        return views()

    async with guest_of(ControlApp([(table.WATCH_JOB, watch)]), tmp_path / "control.sock") as (_, guest):
        async with guest.stream(calls.events("job_1", 0.5, None)) as reply:
            await anext(reply.pieces)
        await asyncio.wait_for(ended.wait(), 10)
