"""SDK clients for commands: they call the owner of a data directory in the way that others call a server."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec.structs import replace

from batchmill.cli.jobs.own_rows import new_key, order_once
from batchmill.client import calls
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.messages import HttpReply, HttpRequest
from batchmill.client.streams import Views
from batchmill.connection import OwnerConnection
from batchmill.control import operations
from batchmill.control.app import ControlApp
from batchmill.types import (
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    ModelSpec,
    RemoteJob,
    RetryChange,
    Submitted,
    Wait,
)
from batchmill.wire.native import PAGE_MAX, Change

if TYPE_CHECKING:
    from batchmill.control.client import ControlClient

WATCH_S = 0.5  # between two views


class OwnerTransport:
    """Sends the requests of one client. Args: project: acts for this project; None: each operation has a default."""

    def __init__(self, connection: OwnerConnection | ControlApp | ControlClient, project: str | None) -> None:
        self._connection = connection
        self._headers = {} if project is None else {operations.PROJECT: project}

    async def send(self, request: HttpRequest, file: BinaryIO | None = None) -> HttpReply:
        assert file is None, "files of this machine are sent as paths"
        return await self._connection.send(self._with_project(request))

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[Any]:
        return self._connection.stream(self._with_project(request))

    def _with_project(self, request: HttpRequest) -> HttpRequest:
        return replace(request, headers=request.headers | self._headers)

    async def close(self) -> None:
        """The connection stays open: its owner closes it."""


class OwnerClient(AsyncClient):
    """Sends requests to the current owner of a data directory."""

    def __init__(self, connection: OwnerConnection | ControlApp | ControlClient, project: str | None = None) -> None:
        super().__init__(transport=OwnerTransport(connection, project))


class JobsClient(ABC):
    """The operations on jobs that commands use, at a server or with the owner of a data directory."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @abstractmethod
    async def submit(self, order: JobOrder) -> Submitted:
        """Start, resume or join a job. Raises: InvalidInput when the order cannot be run as it is."""

    async def require_cluster(self) -> None:
        """Refuse an owner whose workers are processes of this machine. A server has workers of its own."""
        return

    async def full_id(self, job_id: str) -> str:
        """The full id for the first letters of one. An owner resolves them itself."""
        return job_id

    def shown(self, view: JobView) -> JobView:
        """A view with the file names that the user knows."""
        return view

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        """List jobs, one page after another."""
        views: list[JobView] = []
        while query.limit is None or len(views) < query.limit:
            limit = PAGE_MAX if query.limit is None else min(PAGE_MAX, query.limit - len(views))
            after = views[-1].id if views else query.after
            request = calls.jobs(
                state=query.state, label=None, limit=limit, after=after, model=query.model, since=query.since
            )
            page = await self._client.call(request)
            views += [self.shown(view) for view in page.jobs]
            if page.after is None:
                break
        return views

    async def show(self, job_id: str) -> JobView:
        return self.shown(await self._client.call(calls.show(await self.full_id(job_id))))

    async def watch(self, job_id: str, interval_s: float = WATCH_S) -> AsyncGenerator[JobView]:
        async with contextlib.aclosing(self._client.read(Views(await self.full_id(job_id), interval_s))) as views:
            async for view in views:
                yield self.shown(view)

    async def steer(self, job_id: str, verb: calls.Steering) -> JobView:
        return self.shown(await self._client.call(calls.steer(await self.full_id(job_id), verb)))

    async def retry(self, job_id: str, change: RetryChange, model: ModelSpec | None) -> JobView:
        """Run the failed rows again. Args: model: what `change` names, where the caller resolves names."""
        return self.shown(await self._client.call(calls.retry(await self.full_id(job_id), change)))

    async def amend(self, job_id: str, change: Change) -> JobView:
        return self.shown(await self._client.call(calls.amend(await self.full_id(job_id), change)))

    async def explain(self, job_id: str) -> Wait:
        return await self._client.call(calls.explain(await self.full_id(job_id)))

    async def remote(self, job_id: str) -> list[RemoteJob]:
        return (await self._client.call(calls.remote(await self.full_id(job_id)))).jobs

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        return await self._client.call(calls.settle_remote(await self.full_id(job_id), tag, remote_id))

    async def remove(self, job_id: str) -> JobView:
        return self.shown(await self._client.call(calls.remove(await self.full_id(job_id))))

    async def verify(self, job_id: str) -> LedgerReport:
        return await self._client.call(calls.verify(await self.full_id(job_id)))


class OwnerJobs(JobsClient):
    """Jobs of a data directory. Their orders name files and code of this machine.

    Args: expect: is called with the models of an order before it is submitted.
    """

    def __init__(self, client: AsyncClient, expect: Callable[[Sequence[ModelSpec]], None] | None = None) -> None:
        super().__init__(client)
        self._expect = expect

    async def submit(self, order: JobOrder) -> Submitted:
        """A request whose reply is lost is sent again, to the next owner. By its key that knows the job which the first
        one has become: `restart` and `overwrite` would begin another.
        """
        if self._expect is not None:
            self._expect(order.models)
        return await self._client.call(calls.typed_request(operations.RUN, body=order_once(order)))

    async def retry(self, job_id: str, change: RetryChange, model: ModelSpec | None) -> JobView:
        """By its key, an owner knows a retry whose reply was lost, also if the job has ended since."""
        body = operations.LocalRetry(change, model, new_key("retry"))
        return await self._client.call(calls.typed_request(operations.RETRY, job_id, body=body))

    async def require_cluster(self) -> None:
        """Raises: InvalidInput. It also opens the owner before an order, so that no process is started ahead."""
        await self._client.call(calls.typed_request(operations.SHOW_CLUSTER, brief=True))

    async def partial(self, job_id: str, *, is_numbered: bool = False, sampled: bool = False) -> str:
        """As `ports.jobs.Jobs.partial`: the caller removes the file."""
        query = {"is_numbered": is_numbered or None, "sampled": sampled or None}
        return (await self._client.call(calls.typed_request(operations.PARTIAL, job_id, **query))).path

    async def rebuild(self, job_id: str) -> LedgerReport:
        """Rebuild the ledger from the job's description and its segments."""
        return await self._client.call(calls.typed_request(operations.REBUILD, job_id))
