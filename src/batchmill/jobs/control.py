"""The owner's control socket: other commands reach its JobService through it, with the same promises.

A call is one message; its replies are one message, or for `watch` one a view and then `End`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, of_system
from batchmill.ports import Jobs
from batchmill.types import Amendment, JobOrder, JobQuery, JobView, LedgerReport, Once, RemoteJob, Submitted, Wait
from batchmill.wire import messages
from batchmill.wire.raised import Raised

PAGE_JOBS = 500  # views that travel in one message


class Submit(Struct, frozen=True, tag="submit"):
    order: JobOrder


class Ordered(Struct, frozen=True, tag="ordered"):
    once: Once


class Known(Struct, frozen=True, tag="known"):
    job: str | None


class Answered(Struct, frozen=True, tag="answered"):
    key: str


class ListJobs(Struct, frozen=True, tag="list"):
    query: JobQuery = JobQuery()


class Ask(Struct, frozen=True, tag="ask"):
    verb: str  # one of VERBS
    job: str


class Amend(Struct, frozen=True, tag="amend"):
    job: str
    change: Amendment


class Settle(Struct, frozen=True, tag="settle"):
    job: str
    submission: str
    remote_id: str | None


class Watch(Struct, frozen=True, tag="watch"):
    job: str
    interval_s: float


class Viewed(Struct, frozen=True, tag="viewed"):
    view: JobView


class Listed(Struct, frozen=True, tag="listed"):
    views: list[JobView]


class Taken(Struct, frozen=True, tag="taken"):
    submitted: Submitted


class Audited(Struct, frozen=True, tag="audited"):
    report: LedgerReport


class Explained(Struct, frozen=True, tag="explained"):
    wait: Wait


class Remotes(Struct, frozen=True, tag="remotes"):
    jobs: list[RemoteJob]


class Written(Struct, frozen=True, tag="written"):
    path: str


class Tell(Struct, frozen=True, tag="tell"):
    """A call of something else that the owner holds, in that thing's own words."""

    door: str
    message: bytes


class Told(Struct, frozen=True, tag="told"):
    message: bytes


class Ping(Struct, frozen=True, tag="ping"):
    pass


class End(Struct, frozen=True, tag="end"):
    pass


_call = msgspec.msgpack.Decoder(Submit | Ordered | Answered | ListJobs | Ask | Amend | Settle | Watch | Tell | Ping)
_reply = msgspec.msgpack.Decoder(
    Viewed | Listed | Taken | Known | Audited | Explained | Remotes | Written | Told | End | Raised
)
ANSWER_S = 15.0
VERBS = {
    "show", "pause", "resume", "cancel", "retry", "fail_rows", "explain", "partial", "remote", "verify", "rebuild",
    "remove",
}  # fmt: skip


Door = Callable[[bytes], Awaitable[bytes]]


class OwnerGone(ConnectionError):
    """The process that owned the data directory has ended."""


class ControlServer:
    """Answers calls on the socket at `path`, which only this user may open. `doors`: by name, what else can be told."""

    def __init__(self, jobs: Jobs, path: Path, doors: Mapping[str, Door] = MappingProxyType({})) -> None:
        self._jobs, self._path, self._doors = jobs, path, doors
        self._server: asyncio.Server | None = None
        self._guests: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._path.unlink(missing_ok=True)
        with _short(self._path) as name:
            self._server = await asyncio.start_unix_server(self._welcome, name, limit=2**20)
        os.chmod(self._path, 0o600)

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest = asyncio.create_task(self._answer(reader, writer))
        self._guests.add(guest)
        guest.add_done_callback(self._guests.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (data := await messages.read(reader)) is not None:
                try:
                    async for reply in self._replies(_call.decode(data)):
                        writer.write(messages.pack(reply))
                        await writer.drain()
                except BatchmillError as error:
                    writer.write(messages.pack(Raised.of(error)))
                except OSError as error:
                    told = of_system(error) or BatchmillError(f"{type(error).__name__}: {error}")
                    writer.write(messages.pack(Raised.of(told)))
                except Exception as error:  # the door: whoever asked is told, and does not ask for ever
                    text = f"the process that owns the data directory failed: {type(error).__name__}: {error}"
                    writer.write(messages.pack(Raised.of(BatchmillError(text))))
                await writer.drain()
        except ConnectionError:
            pass  # the guest left; what it asked for goes on
        finally:
            writer.close()

    def _replies(self, call: Struct) -> AsyncIterator[Struct]:
        return self._told(call) if isinstance(call, Tell) else _replies(self._jobs, call)

    async def _told(self, call: Tell) -> AsyncIterator[Struct]:
        if call.door not in self._doors:
            raise InvalidInput(f"this process holds no {call.door!r}", code="unknown_door")
        yield Told(await self._doors[call.door](call.message))

    async def close(self) -> None:
        """Hang up on every guest: it notices, and may become the owner."""
        if self._server is not None:
            self._server.close()
        for guest in self._guests:
            guest.cancel()
        if self._guests:
            await asyncio.wait(self._guests)


async def _replies(jobs: Jobs, call: Struct) -> AsyncIterator[Struct]:
    match call:
        case Submit(order):
            yield Taken(await jobs.submit(order))
        case Ordered(once):
            yield Known(await jobs.ordered(once))
        case Answered(key):
            await jobs.answered(key)
            yield End()
        case ListJobs(query):
            yield Listed(await jobs.list(query))
        case Amend(job, change):
            yield Viewed(await jobs.amend(job, change))
        case Settle(job, tag, remote_id):
            yield Remotes([await jobs.settle_remote(job, tag, remote_id)])
        case Watch(job, interval_s):
            async for view in jobs.watch(job, interval_s):
                yield Viewed(view)
            yield End()
        case Ping():
            yield End()
        case Ask(verb, job):
            if verb not in VERBS:
                raise InvalidInput(f"no command is called {verb!r}; there are {', '.join(sorted(VERBS))}")
            match await getattr(jobs, verb)(job):
                case LedgerReport() as report:
                    yield Audited(report)
                case Wait() as wait:
                    yield Explained(wait)
                case str() as path:
                    yield Written(path)
                case list() as remotes:
                    yield Remotes(remotes)
                case view:
                    yield Viewed(view)


class ControlClient:
    """`ports.Jobs` through the socket of another process. Raises OwnerGone when that process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def check(self) -> None:
        """Raises: OwnerGone when nobody listens; InvalidConfig when the owner is there and does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._ask(Ping())
        except TimeoutError:
            raise InvalidConfig(
                f"the process that owns {self._path.parent} has not answered for {ANSWER_S:.0f} s: it may be stopped "
                "(its id is in owner.lock); continue or end it"
            ) from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            with _short(self._path) as name:
                return await asyncio.open_unix_connection(name, limit=2**20)
        except (FileNotFoundError, ConnectionError) as error:
            raise OwnerGone(str(self._path)) from error

    async def _talk(self, call: Struct) -> AsyncIterator[Any]:
        reader, writer = await self._connect()
        try:
            writer.write(messages.pack(call))
            while (data := await messages.read(reader)) is not None:
                reply = _reply.decode(data)
                if isinstance(reply, Raised):
                    raise reply.error()
                yield reply
            raise OwnerGone(str(self._path))
        finally:
            writer.close()

    async def _ask(self, call: Struct) -> Any:
        async with contextlib.aclosing(self._talk(call)) as replies:
            return await anext(replies)

    async def tell(self, door: str, message: bytes) -> bytes:
        """Ask something else of the owner. Raises what it raises."""
        return (await self._ask(Tell(door, message))).message

    async def submit(self, order: JobOrder) -> Submitted:
        return (await self._ask(Submit(order))).submitted

    async def ordered(self, once: Once) -> str | None:
        return (await self._ask(Ordered(once))).job

    async def answered(self, key: str) -> None:
        await self._ask(Answered(key))

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        """Of a long list one page after another: each is one message."""
        views: list[JobView] = []
        while query.limit is None or len(views) < query.limit:
            wanted = PAGE_JOBS if query.limit is None else min(PAGE_JOBS, query.limit - len(views))
            after = views[-1].id if views else query.after
            page = (await self._ask(ListJobs(msgspec.structs.replace(query, after=after, limit=wanted)))).views
            views += page
            if len(page) < wanted:
                break
        return views

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        async with contextlib.aclosing(self._talk(Watch(job_id, interval_s))) as replies:
            async for reply in replies:
                if isinstance(reply, End):
                    return
                yield reply.view

    async def show(self, job_id: str) -> JobView:
        return (await self._ask(Ask("show", job_id))).view

    async def pause(self, job_id: str) -> JobView:
        return (await self._ask(Ask("pause", job_id))).view

    async def resume(self, job_id: str) -> JobView:
        return (await self._ask(Ask("resume", job_id))).view

    async def cancel(self, job_id: str) -> JobView:
        return (await self._ask(Ask("cancel", job_id))).view

    async def retry(self, job_id: str) -> JobView:
        return (await self._ask(Ask("retry", job_id))).view

    async def fail_rows(self, job_id: str) -> JobView:
        return (await self._ask(Ask("fail_rows", job_id))).view

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        return (await self._ask(Amend(job_id, change))).view

    async def explain(self, job_id: str) -> Wait:
        return (await self._ask(Ask("explain", job_id))).wait

    async def partial(self, job_id: str) -> str:
        return (await self._ask(Ask("partial", job_id))).path

    async def remote(self, job_id: str) -> list[RemoteJob]:
        return (await self._ask(Ask("remote", job_id))).jobs

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        return (await self._ask(Settle(job_id, tag, remote_id))).jobs[0]

    async def remove(self, job_id: str, by: str = "") -> JobView:
        return (await self._ask(Ask("remove", job_id))).view

    async def verify(self, job_id: str) -> LedgerReport:
        return (await self._ask(Ask("verify", job_id))).report

    async def rebuild(self, job_id: str) -> LedgerReport:
        return (await self._ask(Ask("rebuild", job_id))).report


@contextlib.contextmanager
def _short(path: Path):
    """A name for a socket in a folder of any depth: the kernel takes at most 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
