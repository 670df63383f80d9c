"""A command's way to the owner of its data directory: it is the owner itself, or it asks the process that is.

Owners come and go: when the one that was asked ends, another process takes over, perhaps this one, and is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from msgspec.structs import replace

from batchmill.client import calls
from batchmill.client.messages import Ask, Broken, OwnerGone, Reply, Request
from batchmill.client.replies import value_of
from batchmill.client.streams import Views
from batchmill.config import Config
from batchmill.control import operations as own
from batchmill.control.app import ControlApp, Pieces
from batchmill.errors import InvalidConfig, InvalidTransition
from batchmill.jobs import preview
from batchmill.owner import open_owner, open_store
from batchmill.services.data_dirs import SOCKET, TAKEOVER_S, TAKEOVER_TRIES, prepare_data_dir, try_lock
from batchmill.types import Amendment, JobOrder, JobQuery, JobView, LedgerReport, RemoteJob, Submitted, Wait
from batchmill.wire.native import PAGE_MAX, Change
from batchmill.wire.operations import SHOW_JOB, STEERING
from batchmill.wire.previews import Estimate, Explanation, SealReport

if TYPE_CHECKING:
    from batchmill.control.guest import Guest

GUEST = "batchmill.control.guest"  # it needs httpx
T = TypeVar("T")
Progress = Callable[[float], None]


def load_guest() -> type[Guest]:
    """What asks another process."""
    return import_module(GUEST).Guest


class OwnerConnection:
    """Carries requests to the owner, whoever that is by then. The data directory is opened with the first of them.

    Raises: what the owner's handlers raise; InvalidConfig when the data directory cannot be used. No request is held
    back or tried again for any other reason than another owner.
    """

    def __init__(self, config: Config, stack: contextlib.AsyncExitStack) -> None:
        """Args: stack: of whoever opens this; what this process comes to own is closed with it."""
        self._config, self._stack = config, stack
        self._own: ControlApp | None = None  # once this process is the owner
        self._guest: Guest | None = None  # once another process was asked
        self._opening = asyncio.Lock()

    async def _reached(self) -> ControlApp | Guest:
        """The application of this process, or a way to the owner's."""
        async with self._opening:
            if self._own is not None:
                return self._own
            if self._guest is None:
                prepare_data_dir(self._config.data_dir)
            for _ in range(TAKEOVER_TRIES):
                if (lock := try_lock(self._config.data_dir)) is not None:
                    self._own = await self._stack.enter_async_context(_own(self._config, lock))
                    return self._own
                if self._guest is None:
                    self._guest = load_guest()(self._config.data_dir / SOCKET)
                    self._stack.push_async_callback(self._guest.close)
                with contextlib.suppress(OwnerGone):
                    await self._guest.check()
                    return self._guest
                await asyncio.sleep(TAKEOVER_S)
        raise InvalidConfig(
            f"{self._config.data_dir} is locked by a process that does not answer on its control socket; end that "
            "process"
        )

    async def send(self, request: Request) -> Reply:
        """The reply, of the owner that is asked last."""
        was_asked = False
        while True:
            reached = await self._reached()
            try:
                return await reached.send(request)
            except OwnerGone:
                was_asked = True
            except InvalidTransition:
                job, _, verb = request.path.rpartition("/")
                if not was_asked or verb not in STEERING:
                    raise
                request = replace(request, method=SHOW_JOB.method, path=job)  # it was done: only the answer was lost

    @contextlib.asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Pieces]:
        """A reply as it comes. Raises: OwnerGone when the owner ends before it: the same request reaches another."""
        async with (await self._reached()).stream(request) as reply:
            yield reply


@contextlib.asynccontextmanager
async def _own(config: Config, lock: int) -> AsyncIterator[ControlApp]:
    async with open_store(config, lock) as store, open_owner(store) as owner:
        yield owner.control


@contextlib.asynccontextmanager
async def connect(config: Config) -> AsyncIterator[OwnerConnection]:
    """A connection for as long as a command takes. Leaving it pauses what this process runs; leaving it by
    cancellation, at once.
    """
    async with contextlib.AsyncExitStack() as stack:
        yield OwnerConnection(config, stack)


class OpenJobs:
    """`ports.Jobs` over a connection."""

    def __init__(self, connection: OwnerConnection) -> None:
        self._connection = connection

    async def _ask(self, what: Ask[T]) -> T:
        return value_of(what, await self._connection.send(what.request))

    async def _steer(self, job_id: str, verb: calls.Steering) -> JobView:
        return await self._ask(calls.steer(job_id, verb))

    async def submit(self, order: JobOrder) -> Submitted:
        return await self._ask(calls.ask(own.RUN, body=order))

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        """Of a long list one page after another."""
        views: list[JobView] = []
        while query.limit is None or len(views) < query.limit:
            wanted = PAGE_MAX if query.limit is None else min(PAGE_MAX, query.limit - len(views))
            after = views[-1].id if views else query.after
            what = calls.jobs(
                state=query.state, label=None, limit=wanted, after=after, model=query.model, since=query.since
            )
            if query.project is not None:
                what = replace(what, request=replace(what.request, headers={own.PROJECT: query.project}))
            page = (await self._ask(what)).jobs
            views += page
            if len(page) < wanted:
                break
        return views

    async def show(self, job_id: str) -> JobView:
        return await self._ask(calls.show(job_id))

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        views = Views(job_id, interval_s)
        while not views.is_over:
            try:
                async with self._connection.stream(views.request()) as reply:
                    views.begin(200, {})
                    async for piece in reply.pieces:
                        for view in views.feed(piece):
                            yield view
                    views.end()
            except Broken:
                await asyncio.sleep(TAKEOVER_S)

    async def pause(self, job_id: str) -> JobView:
        return await self._steer(job_id, "pause")

    async def resume(self, job_id: str) -> JobView:
        return await self._steer(job_id, "resume")

    async def cancel(self, job_id: str) -> JobView:
        return await self._steer(job_id, "cancel")

    async def retry(self, job_id: str) -> JobView:
        return await self._steer(job_id, "retry")

    async def fail_rows(self, job_id: str) -> JobView:
        return await self._steer(job_id, "fail_rows")

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        return await self._ask(calls.amend(job_id, Change(change.priority, change.deadline, change.budget)))

    async def explain(self, job_id: str) -> Wait:
        return await self._ask(calls.explain(job_id))

    async def partial(self, job_id: str) -> str:
        return (await self._ask(calls.ask(own.PARTIAL, job_id))).path

    async def remote(self, job_id: str) -> list[RemoteJob]:
        return (await self._ask(calls.remote(job_id))).jobs

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        return await self._ask(calls.settle_remote(job_id, tag, remote_id))

    async def remove(self, job_id: str, by: str = "") -> JobView:
        return await self._ask(calls.remove(job_id))

    async def verify(self, job_id: str) -> LedgerReport:
        return await self._ask(calls.verify(job_id))

    async def rebuild(self, job_id: str) -> LedgerReport:
        return await self._ask(calls.ask(own.REBUILD, job_id))


@contextlib.asynccontextmanager
async def open_jobs(config: Config) -> AsyncIterator[OpenJobs]:
    """The jobs of a data directory, as `connect`."""
    async with connect(config) as connection:
        yield OpenJobs(connection)


async def preview_validate(order: JobOrder, config: Config, progress: Progress) -> SealReport:
    """Check every row of an order; none is run."""
    prepare_data_dir(config.data_dir)
    return await preview.validate(order, config.data_dir, progress)


async def preview_plan(order: JobOrder, config: Config, progress: Progress) -> tuple[SealReport, Explanation | None]:
    """Explain in which order the rows would run; no explanation where the dataset was refused."""
    prepare_data_dir(config.data_dir)
    return await preview.plan(order, config.data_dir, progress)


async def preview_estimate(order: JobOrder, config: Config, progress: Progress) -> tuple[SealReport, Estimate | None]:
    """Estimate tokens, cost and time; no estimate where the dataset was refused.

    The time is that of the newest finished job of the same models on this machine.
    """
    async with open_jobs(config) as jobs:
        views = await jobs.list()
    names = ", ".join(model.name for model in order.models)
    rates = [view.rows / view.elapsed_s for view in views if view.model == names and view.finished and view.elapsed_s]
    return await preview.estimate(order, config.data_dir, progress, rates[0] if rates else None)


async def partial_results(config: Config, job_id: str, out: BinaryIO) -> int:
    """Write the lines of every row that has its outcome, in row order; returns how many."""
    async with open_jobs(config) as jobs:
        path = Path(await jobs.partial(job_id))
    rows = 0
    try:
        with open(path, "rb") as lines:
            for line in lines:
                out.write(line)
                rows += 1
    finally:
        path.unlink()
    return rows
