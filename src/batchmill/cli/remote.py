"""Runs commands at a server: an `App` over the SDK.

It uploads inputs and downloads results, so that commands need not know where a job runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from batchmill.cli.clients import WATCH_S, JobsClient
from batchmill.cli.jobs.result_files import write_atomically
from batchmill.cli.session import App, Progress, ResultStream, Session
from batchmill.client import calls
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.inputs import Source
from batchmill.client.schema_classes import reference_of, refused, settings_of
from batchmill.client.streams import FileContent
from batchmill.config import Config
from batchmill.errors import Forbidden, InvalidInput, UnknownName
from batchmill.jobs.ledger.files import is_folder
from batchmill.jobs.results.results import errors_path, output_kind
from batchmill.models import functions
from batchmill.object_store.urls import is_object_url
from batchmill.states import JobState
from batchmill.types import (
    JobOrder,
    JobView,
    ModelSpec,
    OutputSchema,
    Sample,
    SchemaVersion,
    Submitted,
)
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.job_spec import EXISTS
from batchmill.wire.media import KINDS
from batchmill.wire.native import DeployReply, Estimate, Explanation, FileInfo, ModelInfo, SealReport

FULL_ID = re.compile(r"job_[0-9a-f]{20}")
JSONL = ".jsonl"


class RemoteApp:
    """Runs commands at a server. All methods raise the server's refusals with their codes, and Unavailable
    (`unreachable`) if there is no reply.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url, self._api_key = base_url, api_key

    def _client(self) -> AsyncClient:
        return AsyncClient(self._base_url, self._api_key)

    @contextlib.asynccontextmanager
    async def open(self, config: Config, project: str | None = None) -> AsyncIterator[AsyncClient]:
        if project is not None:
            raise InvalidInput(
                "--project works only on this machine: at a server the project is that of your key", code="no_project"
            )
        async with self._client() as client:
            yield client

    @contextlib.asynccontextmanager
    async def open_jobs(self, config: Config, project: str | None = None) -> AsyncIterator[ServerJobs]:
        async with self.open(config, project) as client:
            yield ServerJobs(client)

    async def preview_validate(self, order: JobOrder, config: Config, progress: Progress) -> SealReport:
        async with self._client() as client, _uploaded(client, order) as files:
            work = work_of(await _with_schema_version(client, order))
            return _with_paths(await client.validate(files, **work), files, order)

    async def preview_plan(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Explanation | None]:
        async with self._client() as client, _uploaded(client, order) as files:
            preview = await client.plan(files, **work_of(await _with_schema_version(client, order)))
            return _with_paths(preview.report, files, order), preview.plan

    async def preview_estimate(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Estimate | None]:
        async with self._client() as client, _uploaded(client, order) as files:
            preview = await client.estimate(files, **work_of(await _with_schema_version(client, order)))
            return _with_paths(preview.report, files, order), preview.estimate

    async def partial_results(self, config: Config, job_id: str, out: BinaryIO, *, sampled: bool = False) -> int:
        rows = 0
        async with self._client() as client:
            async for piece in client.read(FileContent(calls.partial(job_id, sampled=sampled), is_resumable=False)):
                out.write(piece)
                rows += piece.count(b"\n")
        return rows

    @contextlib.asynccontextmanager
    async def results(self, config: Config, view: JobView, *, errors: bool) -> AsyncIterator[ResultStream]:
        if view.output is not None and is_object_url(view.output):
            raise InvalidInput(
                f"the results of the job {view.id} are in {view.output}: read them there", code="no_copy_here"
            )
        file_id = view.errors_output if errors else view.output
        request = calls.errors(view.id) if errors else calls.results(view.id)
        async with self._client() as client:
            name = f"{view.id}{JSONL}" if file_id is None else (await client.file(file_id)).filename
            async with contextlib.aclosing(client.read(FileContent(request))) as pieces:
                yield ResultStream(name, pieces)

    async def inputs(self, config: Config, view: JobView, folder: Path) -> list[str]:
        """Download the files of the server: they do not change."""
        paths: list[str] = []
        async with self._client() as client:
            for file_id in (await client.job(view.id)).view.input:
                if is_input_url(file_id):
                    raise InvalidInput(
                        f"the input of the job {view.id} is at {file_id}, where the server read it: read it there",
                        code="no_copy_here",
                    )
                name = f"{len(paths):06d}-{os.path.basename((await client.file(file_id)).filename)}"
                with (folder / name).open("wb") as file:
                    async with contextlib.aclosing(client.read_file(file_id)) as pieces:
                        async for piece in pieces:
                            file.write(piece)
                paths.append(str(folder / name))
        return paths

    async def models(self, config: Config) -> list[ModelInfo]:
        async with self._client() as client:
            return await client.models()

    async def deploy(self, client: AsyncClient, config: Config, bundle: BinaryIO) -> DeployReply:
        return await client.send_bundle(bundle)

    async def deployed(self, config: Config, name: str) -> ModelSpec | None:
        """None: the server resolves the name when it gets the job."""
        return None

    async def deployed_schema(self, config: Config, name: str) -> OutputSchema:
        return OutputSchema("", version=SchemaVersion(name))

    async def adapted(self, config: Config, model: ModelSpec) -> ModelSpec:
        """The model as it is: the server adds its adapters."""
        return model


class ServerJobs(JobsClient):
    """The jobs of a server. A unique prefix of an id is enough, as on this machine."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client)
        self._orders: dict[str, JobOrder] = {}  # of this command, with the paths for their results
        self._names: dict[str, str] = {}  # file id -> path of the uploaded file

    async def submit(self, order: JobOrder) -> Submitted:
        """Upload the inputs and start the job. `watch` downloads the results once the job has ended."""
        _check_output(order)
        sent = await _with_schema_version(self._client, order)
        job = await self._client.submit(order.dataset.paths, **job_of(sent))
        uploads = [each for each in job.view.input if not is_input_url(each)]
        self._names |= dict(zip(uploads, _local(order), strict=True))
        self._orders[job.id] = order
        return Submitted(job.id, "started")

    async def watch(self, job_id: str, interval_s: float = WATCH_S) -> AsyncGenerator[JobView]:
        async with contextlib.aclosing(super().watch(job_id, interval_s)) as views:
            async for view in views:
                yield await self._download_results(view) if JobState(view.state).is_at_rest else view

    async def steer(self, job_id: str, verb: calls.Steering) -> JobView:
        """Change the state of a job. `resume` of a running job does nothing: the caller wants to follow it."""
        if verb == "resume":
            view = await self.show(job_id)
            if view.state != JobState.PAUSED and not JobState(view.state).is_at_rest:
                return view
        return await super().steer(job_id, verb)

    async def full_id(self, job_id: str) -> str:
        """The id of the only job whose id begins with `job_id`. Raises: UnknownName."""
        if FULL_ID.fullmatch(job_id):
            return job_id
        matches = [view.id async for view in self._client.jobs() if view.id.startswith(job_id)]
        if len(matches) == 1:
            return matches[0]
        problem = f"{len(matches)} jobs begin with" if matches else "no job is called"
        raise UnknownName(f"{problem} {job_id!r}", code="unknown_job")

    def shown(self, view: JobView) -> JobView:
        """A view with the paths of the inputs instead of their file ids."""
        names = (view.origin or {}).get("files", {}) | self._names
        return replace(
            view,
            input=[names.get(each, each) for each in view.input],
            problems=[replace(each, path=names.get(each.path, each.path)) for each in view.problems],
        )

    async def _download_results(self, view: JobView) -> JobView:
        """Download the results of an ended job to the paths of its order."""
        order = self._orders.get(view.id)
        if order is None or order.output is None or (view.output is None and view.errors_output is None):
            return view
        if is_object_url(order.output):
            return view  # the server has written them
        await self._download(calls.results(view.id), order.output, order)
        if view.errors_output is None:
            return replace(view, output=order.output)
        errors_output = str(errors_path(Path(order.output)))
        await self._download(calls.errors(view.id), errors_output, order)
        return replace(view, output=order.output, errors_output=errors_output)

    async def _download(self, request: calls.HttpRequest, path: str, order: JobOrder) -> None:
        with write_atomically(path, order.dataset.paths) as out:
            async with contextlib.aclosing(self._client.read(FileContent(request))) as pieces:
                async for piece in pieces:
                    out.write(piece)


def work_of(order: JobOrder) -> dict[str, Any]:
    """The fields of the server's API for the work of an order."""
    return {
        "models": [model.name for model in order.models], "format": order.dataset.format, "prompt": order.prompt,
        "system": order.system, "template": None if order.template is None else order.template.text,
        "url": order.url, "params": order.params, "on_invalid": order.policy.on_invalid,
        "dedupe": order.policy.dedupe, "reuse": None if order.policy.reuse is None else order.policy.reuse != "none",
        "deadline": order.policy.deadline,
        "allow_constant_prompt": order.constant_prompt, "model_column": order.model_column,
        "adapter_column": order.adapter_column,
        **{f"{kind}_columns": [each.column for each in order.media if each.kind == kind] for kind in KINDS},
    } | _schema_fields(order.schema) | _sample_fields(order.sample)  # fmt: skip


def _sample_fields(sample: Sample | None) -> dict[str, Any]:
    if sample is None:
        return {}
    return {"limit": sample.rows} if sample.seed is None else {"sample": sample.rows, "seed": sample.seed}


def _schema_fields(schema: OutputSchema | None) -> dict[str, Any]:
    if schema is None:
        return {}
    fields = {"schema_attempts": schema.attempts, "field_prefix": schema.prefix}
    if schema.version is not None:
        return {"validator": schema.version.reference} | fields
    assert not schema.validator, "a class with code is deployed first"
    return {"schema": msgspec.json.decode(schema.document)} | fields


async def _with_schema_version(client: AsyncClient, order: JobOrder) -> JobOrder:
    """Deploy the class of an order, if its schema is one that validates in Python. The same code is the same version.

    Raises: Forbidden for a key that may not, with the way out; ModelFailed with the traceback.
    """
    schema = order.schema
    if schema is None or not schema.validator or schema.version is not None:
        return order
    source = functions.parse(schema.validator)
    path = await asyncio.to_thread(functions.file_of, source)
    try:
        reply = await client.deploy(f"{path}:{source.attribute}", **settings_of({}))
    except Forbidden as error:
        raise refused(f"{path.name}:{source.attribute}", error) from None
    return replace(order, schema=replace(schema, version=SchemaVersion(reference_of(reply.version))))


def job_of(order: JobOrder) -> dict[str, Any]:
    """The fields of the server's API for a job."""
    policy = order.policy
    fields = {
        "budget": policy.budget, "priority": policy.priority, "labels": order.labels, "together": order.together,
        "fail_on": order.replies.fail_on,
    }  # fmt: skip
    if order.output is not None and is_object_url(order.output):
        fields |= {"output": order.output, "part_rows": order.part_rows, "overwrite": order.overwrite or order.update}
        if is_folder(order.output):
            fields["output_format"] = order.output_format
    elif order.output is not None:
        kind, codec = output_kind(Path(order.output))
        fields["output_format"] = kind + codec
    return work_of(order) | fields


def _check_output(order: JobOrder) -> None:
    """Check the output path before anything is sent. Raises: InvalidInput."""
    if order.output is not None and is_object_url(order.output):
        return  # the server writes it, and checks it
    if order.part_rows is not None:
        raise InvalidInput(
            "with --server only an output like s3://bucket/out/ is in parts: leave out --part-rows",
            code="invalid_part_rows",
        )
    if order.output is None:
        return
    if is_folder(order.output):
        raise InvalidInput(
            f"with --server the results are downloaded as one file, not as parts in {order.output}: name a file, or a "
            "folder of objects that the server writes",
            code="invalid_output",
        )
    output = Path(order.output)
    for path in (output,) if order.together else (output, errors_path(output)):
        if path.exists() and not (order.overwrite or order.update):
            raise InvalidInput(
                f"{path} exists and is not this job's: choose another output, or replace it: --update takes over what "
                "earlier jobs have answered and runs what is new, --overwrite runs all",
                code=EXISTS,
            )
        if any(os.path.realpath(path) == os.path.realpath(each) for each in order.dataset.paths):
            raise InvalidInput(f"{path} is an input: results cannot overwrite it", code="output_is_input")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise InvalidInput(f"the folder {str(output.parent)!r} of the output cannot be written", code="invalid_output")


@contextlib.asynccontextmanager
async def _uploaded(client: AsyncClient, order: JobOrder) -> AsyncIterator[list[Source]]:
    """Upload the inputs, and remove them from the server at the end. It reads URLs itself."""
    files: list[FileInfo] = []
    try:
        for path in _local(order):
            files.append(await client.upload(path))  # noqa: PERF401 - if one fails, those already sent are removed
        yield [*files, *filter(is_input_url, order.dataset.paths)]
    finally:
        await client.discard([file.id for file in files])


def _local(order: JobOrder) -> list[str]:
    """The inputs that lie on this machine."""
    return [path for path in order.dataset.paths if not is_input_url(path)]


def _with_paths(report: SealReport, files: list[Source], order: JobOrder) -> SealReport:
    """The report of validation with the paths of the inputs instead of their file ids."""
    uploads = [file.id for file in files if isinstance(file, FileInfo)]
    names = dict(zip(uploads, _local(order), strict=True))
    sources = [replace(each, path=names.get(each.path, each.path)) for each in report.seal.sources]
    problems = [replace(each, path=names.get(each.path, each.path)) for each in report.problems]
    return replace(report, seal=replace(report.seal, sources=sources), problems=problems)


def app(session: Session) -> App:
    """An App for the server of the session, with its key."""
    assert session.server_url is not None
    return RemoteApp(session.server_url, session.api_key() or None)
