"""Commands that work at a server: the SDK as an `App`.

Inputs are uploaded and results downloaded here, so that commands need not know where a job runs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec.structs import replace

from batchmill.cli.clients import WATCH_S, JobsClient
from batchmill.cli.jobs.result_files import written_whole
from batchmill.cli.session import App, Progress, ResultStream, Session
from batchmill.client import calls
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.streams import FileContent
from batchmill.config import Config
from batchmill.errors import InvalidInput, UnknownName
from batchmill.jobs.results.results import errors_path, output_kind
from batchmill.states import JobState
from batchmill.types import (
    JobOrder,
    JobView,
    ModelSpec,
    Submitted,
)
from batchmill.wire.native import DeployReply, Estimate, Explanation, FileInfo, ModelInfo, SealReport

FULL_ID = re.compile(r"job_[0-9a-f]{20}")
JSONL = ".jsonl"


class RemoteApp:
    """Raises, everywhere: what the server refuses, with its code; Unavailable (`unreachable`) without an answer."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url, self._api_key = base_url, api_key

    def _client(self) -> AsyncClient:
        return AsyncClient(self._base_url, self._api_key)

    @contextlib.asynccontextmanager
    async def open(self, config: Config, project: str | None = None) -> AsyncIterator[AsyncClient]:
        if project is not None:
            raise InvalidInput("--project is for this machine: at a server it is your key's own", code="no_project")
        async with self._client() as client:
            yield client

    @contextlib.asynccontextmanager
    async def open_jobs(self, config: Config, project: str | None = None) -> AsyncIterator[ServerJobs]:
        async with self.open(config, project) as client:
            yield ServerJobs(client)

    async def preview_validate(self, order: JobOrder, config: Config, progress: Progress) -> SealReport:
        async with self._client() as client, _uploaded(client, order) as files:
            return _with_paths(await client.validate(files, **work_of(order)), files, order)

    async def preview_plan(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Explanation | None]:
        async with self._client() as client, _uploaded(client, order) as files:
            found = await client.plan(files, **work_of(order))
            return _with_paths(found.report, files, order), found.plan

    async def preview_estimate(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Estimate | None]:
        async with self._client() as client, _uploaded(client, order) as files:
            found = await client.estimate(files, **work_of(order))
            return _with_paths(found.report, files, order), found.estimate

    async def partial_results(self, config: Config, job_id: str, out: BinaryIO) -> int:
        rows = 0
        async with self._client() as client:
            async for piece in client.read(FileContent(calls.partial(job_id), is_resumable=False)):
                out.write(piece)
                rows += piece.count(b"\n")
        return rows

    @contextlib.asynccontextmanager
    async def results(self, config: Config, view: JobView, *, errors: bool) -> AsyncIterator[ResultStream]:
        file_id = view.errors_output if errors else view.output
        request = calls.errors(view.id) if errors else calls.results(view.id)
        async with self._client() as client:
            name = f"{view.id}{JSONL}" if file_id is None else (await client.file(file_id)).filename
            async with contextlib.aclosing(client.read(FileContent(request))) as pieces:
                yield ResultStream(name, pieces)

    async def models(self, config: Config) -> list[ModelInfo]:
        async with self._client() as client:
            return await client.models()

    async def deploy(self, opened: AsyncClient, config: Config, bundle: BinaryIO) -> DeployReply:
        return await opened.send_bundle(bundle)

    async def deployed(self, config: Config, name: str) -> ModelSpec | None:
        """The server finds out when the job comes."""
        return None

    async def adapted(self, config: Config, model: ModelSpec) -> ModelSpec:
        """And adds what it has."""
        return model


class ServerJobs(JobsClient):
    """The jobs of a server. An id may be shortened, as on this machine, as long as it is of one job only."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client)
        self._orders: dict[str, JobOrder] = {}  # of this command: where their results are to go
        self._names: dict[str, str] = {}  # file id -> the path it was uploaded from

    async def submit(self, order: JobOrder) -> Submitted:
        """Upload the inputs and start the job; its results are downloaded once it has ended and was watched."""
        _check_output(order)
        job = await self._client.submit(order.dataset.paths, **job_of(order))
        self._names |= dict(zip(job.view.input, order.dataset.paths, strict=True))
        self._orders[job.id] = order
        return Submitted(job.id, "started")

    async def watch(self, job_id: str, interval_s: float = WATCH_S) -> AsyncGenerator[JobView]:
        async with contextlib.aclosing(super().watch(job_id, interval_s)) as views:
            async for view in views:
                yield await self._fetched(view) if JobState(view.state).is_at_rest else view

    async def steer(self, job_id: str, verb: calls.Steering) -> JobView:
        """A job that runs is not disturbed by `resume`: to come back to it is what was asked for."""
        if verb == "resume":
            view = await self.show(job_id)
            if view.state != JobState.PAUSED and not JobState(view.state).is_at_rest:
                return view
        return await super().steer(job_id, verb)

    async def full_id(self, job_id: str) -> str:
        """The one job that an id or its first letters mean."""
        if FULL_ID.fullmatch(job_id):
            return job_id
        known = [view.id async for view in self._client.jobs() if view.id.startswith(job_id)]
        if len(known) == 1:
            return known[0]
        found_text = f"{len(known)} jobs begin with" if known else "no job is called"
        raise UnknownName(f"{found_text} {job_id!r}", code="unknown_job")

    def shown(self, view: JobView) -> JobView:
        """The names of the input in place of the ids that the server gave them."""
        names = (view.origin or {}).get("files", {}) | self._names
        return replace(
            view,
            input=[names.get(each, each) for each in view.input],
            problems=[replace(each, path=names.get(each.path, each.path)) for each in view.problems],
        )

    async def _fetched(self, view: JobView) -> JobView:
        """A job that has ended, its results where its order wanted them."""
        order = self._orders.get(view.id)
        if order is None or order.output is None or (view.output is None and view.errors_output is None):
            return view
        await self._fetch(calls.results(view.id), order.output, order)
        if view.errors_output is None:
            return replace(view, output=order.output)
        apart = str(errors_path(Path(order.output)))
        await self._fetch(calls.errors(view.id), apart, order)
        return replace(view, output=order.output, errors_output=apart)

    async def _fetch(self, request: calls.HttpRequest, path: str, order: JobOrder) -> None:
        with written_whole(path, order.dataset.paths) as out:
            async with contextlib.aclosing(self._client.read(FileContent(request))) as pieces:
                async for piece in pieces:
                    out.write(piece)


def work_of(order: JobOrder) -> dict[str, Any]:
    """What an order computes, in the words of the server's API."""
    return {
        "models": [model.name for model in order.models], "format": order.dataset.format, "prompt": order.prompt,
        "system": order.system, "url": order.url, "params": order.params, "on_invalid": order.policy.on_invalid,
        "dedupe": order.policy.dedupe, "deadline": order.policy.deadline,
    }  # fmt: skip


def job_of(order: JobOrder) -> dict[str, Any]:
    """An order as a job of the server's API."""
    policy = order.policy
    fields = {
        "budget": policy.budget, "priority": policy.priority, "labels": order.labels, "together": order.together,
    }  # fmt: skip
    if order.output is not None:
        kind, packed = output_kind(Path(order.output))
        fields["output_format"] = kind + packed
    return work_of(order) | fields


def _check_output(order: JobOrder) -> None:
    """The rules for an output on this machine, before anything is sent. Raises: InvalidInput."""
    if order.output is None:
        return
    output = Path(order.output)
    for path in (output,) if order.together else (output, errors_path(output)):
        if path.exists() and not order.overwrite:
            raise InvalidInput(
                f"{path} exists and is not this job's: choose another output, or write over it with --overwrite",
                code="output_exists",
            )
        if any(os.path.realpath(path) == os.path.realpath(each) for each in order.dataset.paths):
            raise InvalidInput(f"{path} is an input: results cannot be written over it", code="output_is_input")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise InvalidInput(f"the folder {str(output.parent)!r} of the output cannot be written", code="invalid_output")


@contextlib.asynccontextmanager
async def _uploaded(client: AsyncClient, order: JobOrder) -> AsyncIterator[list[FileInfo]]:
    """The inputs at the server, for as long as they are looked at."""
    files: list[FileInfo] = []
    try:
        for path in order.dataset.paths:
            files.append(await client.upload(path))  # noqa: PERF401 - what was sent before one fails is removed
        yield files
    finally:
        await client.discard([file.id for file in files])


def _with_paths(report: SealReport, files: list[FileInfo], order: JobOrder) -> SealReport:
    """What validation found, with the names that the person at the terminal knows."""
    names = {file.id: path for file, path in zip(files, order.dataset.paths, strict=True)}
    sources = [replace(each, path=names.get(each.path, each.path)) for each in report.seal.sources]
    problems = [replace(each, path=names.get(each.path, each.path)) for each in report.problems]
    return replace(report, seal=replace(report.seal, sources=sources), problems=problems)


def app(session: Session) -> App:
    """The server of this command's flags or settings, with its key."""
    assert session.server_url is not None
    return RemoteApp(session.server_url, session.api_key() or None)
