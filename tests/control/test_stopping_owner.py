"""An owner that is about to end: changes under way get their replies, later ones wait for the next owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchmill.client import calls
from batchmill.client.messages import HttpReply, HttpRequest, OwnerGone
from batchmill.config import Config
from batchmill.connection import OwnerConnection
from batchmill.control import operations
from batchmill.control.app import LAST_EVENT, OWNER_STOPPING, ControlApp
from batchmill.control.client import ControlClient
from batchmill.control.listener import ControlListener
from batchmill.errors import Conflict, InvalidConfig, InvalidTransition, Unavailable
from batchmill.services.data_dirs.data_dirs import SOCKET, prepare_data_dir, try_lock
from batchmill.types import JobView
from batchmill.wire import operations as table

PAUSE = calls.steer("job_1", "pause").request
SHOW = calls.show("job_1").request
WATCH = calls.events("job_1", 0.5, None)
RAW_PAUSE = f"{PAUSE.method} {PAUSE.path} HTTP/1.1\r\nhost: owner\r\ncontent-length: 0\r\n\r\n".encode()


class OneJob:
    """Handlers that count; a pause waits until it may end."""

    def __init__(self, message: str = "") -> None:
        self.pauses, self.watches, self.message = 0, 0, message
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        handlers = ((table.PAUSE_JOB, self.pause), (table.SHOW_JOB, self.show), (table.WATCH_JOB, self.watch))
        self.app = ControlApp(handlers)

    async def pause(self, call) -> JobView:
        self.pauses += 1
        self.begun.set()
        await self.may_end.wait()
        return JobView(id="job_1", state="paused", message=self.message)

    async def show(self, call) -> JobView:
        return JobView(id="job_1", state="running")

    async def watch(self, call) -> AsyncIterator[JobView]:
        """Watch the job, as the real handler, which may resume it first."""
        self.watches += 1
        return self._views()

    async def _views(self) -> AsyncIterator[JobView]:
        yield JobView(id="job_1", state="running", message=self.message)
        await self.may_end.wait()


@contextlib.asynccontextmanager
async def owned(folder: Path, job: OneJob) -> AsyncIterator[tuple[ControlListener, ControlClient]]:
    listener = ControlListener(job.app, folder / SOCKET)
    await listener.open()
    client = ControlClient(folder / SOCKET)
    try:
        yield listener, client
    finally:
        await client.close()
        await listener.close(at_once=True)


async def test_a_change_under_way_gets_its_reply(tmp_path: Path):
    """An owner that ends answers the change that it has begun, and closes the connection after it."""
    job = OneJob()
    async with owned(tmp_path, job) as (listener, client):
        asking = asyncio.create_task(client.send(PAUSE))
        await job.begun.wait()
        closing = asyncio.create_task(listener.close())
        await asyncio.sleep(0)
        assert not closing.done()
        job.may_end.set()
        assert b"paused" in (await asking).body
        await closing
    assert job.pauses == 1


async def test_a_long_reply_is_sent_whole(tmp_path: Path):
    """A reply that is longer than the socket's buffer reaches its client before the connection is closed."""
    job = OneJob(message="x" * 5_000_000)
    async with owned(tmp_path, job) as (listener, client):
        asking = asyncio.create_task(client.send(PAUSE))
        await job.begun.wait()
        closing = asyncio.create_task(listener.close())
        job.may_end.set()
        assert len((await asking).body) > 5_000_000
        await closing


async def test_a_change_that_meets_the_end_is_refused(tmp_path: Path):
    """A client that connected before the owner ended gets the refusal, wherever its request is by then."""
    job = OneJob()
    async with owned(tmp_path, job) as (listener, client):
        await client.check()
        accepted = await asyncio.open_unix_connection(tmp_path / SOCKET)
        await client.check()  # meanwhile the owner accepts the connection before
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(str(tmp_path / SOCKET))
        waiting.send(RAW_PAUSE)  # the owner has not even accepted this one
        closing = asyncio.create_task(listener.close())
        await asyncio.sleep(0)
        accepted[1].write(RAW_PAUSE)
        for reader, writer in (accepted, await asyncio.open_unix_connection(sock=waiting)):
            assert OWNER_STOPPING.encode() in await reader.read()
            writer.close()
        await closing
        with pytest.raises(OwnerGone) as gone:
            await client.send(PAUSE)
        assert not gone.value.was_sent
    assert job.pauses == 0


async def test_a_silent_client_does_not_keep_an_owner(tmp_path: Path, monkeypatch):
    """An owner that ends waits for a client without a request only so long."""
    monkeypatch.setattr("batchmill.control.listener.DRAIN_S", 0.0)
    async with owned(tmp_path, OneJob()) as (listener, client):
        await client.check()
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        await listener.close()
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        writer.close()


async def test_a_stopping_owner_changes_nothing_and_still_shows(tmp_path: Path):
    """A change is refused before its handler runs; what only reads is answered."""
    job = OneJob()
    async with owned(tmp_path, job) as (_, client):
        job.app.stop()
        with pytest.raises(Unavailable) as refused:
            await client.send(PAUSE)
        assert refused.value.code == OWNER_STOPPING and job.pauses == 0
        assert b"running" in (await client.send(SHOW)).body


async def test_a_change_waits_for_the_next_owner(tmp_path: Path):
    """A command that meets a stopping owner sends its change to the one that comes next, once."""
    config = Config(data_dir=tmp_path, base=tmp_path)
    prepare_data_dir(tmp_path)
    lock = try_lock(tmp_path)
    assert lock is not None
    first, second = OneJob(), OneJob()
    second.may_end.set()
    async with contextlib.AsyncExitStack() as stack, owned(tmp_path, first) as (listener, _):
        first.app.stop()
        sending = asyncio.create_task(OwnerConnection(config, stack).send(PAUSE))
        showing = await OwnerConnection(config, stack).send(SHOW)
        assert b"running" in showing.body
        await listener.close()
        async with owned(tmp_path, second):  # the lock stays: the command finds another owner, not itself
            assert b"paused" in (await sending).body
        assert (first.pauses, second.pauses) == (0, 1)
    os.close(lock)


async def test_a_stopping_owner_opens_no_watch(tmp_path: Path):
    """A watch may resume its job, so a stopping owner refuses it, and ends those that are open."""
    job = OneJob()
    async with owned(tmp_path, job) as (_, client), client.stream(WATCH) as reply:
        await anext(reply.pieces)
        job.app.stop()
        with pytest.raises(OwnerGone):
            await anext(reply.pieces)
        with pytest.raises(Unavailable) as refused:
            await client.send(WATCH)
    assert (refused.value.code, job.watches) == (OWNER_STOPPING, 1)


async def test_a_watch_continues_with_the_next_owner(tmp_path: Path):
    """The events of a watched job continue when another owner has taken over."""
    prepare_data_dir(tmp_path)
    lock = try_lock(tmp_path)
    assert lock is not None
    first, second = OneJob("first"), OneJob("second")
    second.may_end.set()
    async with contextlib.AsyncExitStack() as stack, owned(tmp_path, first) as (listener, _):
        connection = OwnerConnection(Config(data_dir=tmp_path, base=tmp_path), stack)
        async with connection.stream(WATCH) as reply:
            assert b"first" in await anext(reply.pieces)
            await listener.close()
            async with owned(tmp_path, second):
                rest = b"".join([piece async for piece in reply.pieces])
    assert b"second" in rest and rest.endswith(LAST_EVENT)
    os.close(lock)


async def test_a_command_says_for_which_process_it_waits(tmp_path: Path, monkeypatch, caplog):
    """A command waits for as long as a process that answers no requests has the lock, and names it."""
    monkeypatch.setattr("batchmill.connection.TAKEOVER_S", 0.0)
    prepare_data_dir(tmp_path)
    lock = try_lock(tmp_path)
    assert lock is not None
    async with contextlib.AsyncExitStack() as stack:
        sending = asyncio.create_task(OwnerConnection(Config(data_dir=tmp_path, base=tmp_path), stack).send(SHOW))
        while not (caplog.records or sending.done()):
            await asyncio.sleep(0)
        async with owned(tmp_path, OneJob()):
            assert b"running" in (await sending).body
    (message,) = caplog.messages
    assert f"waiting for process {os.getpid()}" in message and str(tmp_path) in message
    os.close(lock)


async def test_an_owner_that_does_not_answer_is_named(tmp_path: Path, monkeypatch):
    """The error about an owner that is stopped by a signal says which process that is."""
    monkeypatch.setattr("batchmill.control.client.REPLY_S", 0.0)
    prepare_data_dir(tmp_path)
    lock = try_lock(tmp_path)
    assert lock is not None
    async with owned(tmp_path, OneJob()) as (_, client):
        with pytest.raises(InvalidConfig, match=f"kill -CONT {os.getpid()}"):
            await client.check()
    os.close(lock)


class LostReplies:
    """An owner that ends after it has carried out a request, and then the next owner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connection: OwnerConnection) -> None:
        self.requests: list[tuple[str, str]] = []
        monkeypatch.setattr(connection, "_owner_connection", self._next_owner)

    async def _next_owner(self) -> LostReplies:
        return self

    async def send(self, request: HttpRequest) -> HttpReply:
        self.requests.append((request.method, request.path))
        if len(self.requests) == 1:
            raise OwnerGone("gone", was_sent=True)
        if request.method != "GET":
            raise InvalidTransition("it is paused already")
        return HttpReply(200, {}, b"shown")


@pytest.mark.parametrize("verb", table.STEERING)
async def test_a_change_of_a_job_whose_reply_was_lost_is_shown(tmp_path: Path, monkeypatch, verb):
    """If the next owner refuses the repeated change, the last one has carried it out: the command gets the job."""
    async with contextlib.AsyncExitStack() as stack:
        connection = OwnerConnection(Config(data_dir=tmp_path, base=tmp_path), stack)
        owners = LostReplies(monkeypatch, connection)
        assert (await connection.send(calls.steer("job_1", verb).request)).body == b"shown"
    assert owners.requests[1:] == [owners.requests[0], ("GET", SHOW.path)]


@pytest.mark.parametrize("name", table.STEERING)
async def test_a_name_is_not_taken_for_a_change_of_a_job(tmp_path: Path, monkeypatch, name):
    """A request that must not be repeated is sent once, also if its path ends like that of a change of a job."""
    async with contextlib.AsyncExitStack() as stack:
        connection = OwnerConnection(Config(data_dir=tmp_path, base=tmp_path), stack)
        owners = LostReplies(monkeypatch, connection)
        with pytest.raises(OwnerGone):
            await connection.send(calls.typed_request(operations.REMOVE_SECRET, name).request)
    assert len(owners.requests) == 1


async def test_other_refusals_are_not_tried_again(tmp_path: Path):
    """Unavailable for another reason, and every other error, reach the command as they are."""
    raised: list[Exception] = [Unavailable("no room"), Conflict("taken", code="name_taken")]

    async def fail(call):
        raise raised[0]

    prepare_data_dir(tmp_path)
    lock = try_lock(tmp_path)
    assert lock is not None
    job = OneJob()
    job.app = ControlApp([(table.PAUSE_JOB, fail)])
    async with contextlib.AsyncExitStack() as stack, owned(tmp_path, job):
        connection = OwnerConnection(Config(data_dir=tmp_path, base=tmp_path), stack)
        while raised:
            with pytest.raises(type(raised[0])):
                await connection.send(PAUSE)
            raised.pop(0)
    os.close(lock)
