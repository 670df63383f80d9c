"""Commands that work on this machine: the connection to the owner of a data directory as an `App`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from batchmill import connection
from batchmill.cli.clients import OwnerClient, OwnerJobs
from batchmill.cli.jobs.result_parts import open_parts
from batchmill.cli.session import App, Progress, ResultStream, Session
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.calls import typed_request
from batchmill.config import Config
from batchmill.control import operations
from batchmill.errors import InvalidInput
from batchmill.jobs.intake.reuse_orders import NONE, settled
from batchmill.jobs.ledger.files import is_folder
from batchmill.object_store.urls import ObjectInfo, is_object_url, open_store, parse_url
from batchmill.services.data_dirs import data_dirs
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.functions.sent_archives import sent_archive
from batchmill.types import JobOrder, JobView, ModelSpec, OutputSchema, ReuseCount, SalvageReport
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import DeployReply, Estimate, Explanation, ModelInfo, ModelList, SealReport

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

PIECE_BYTES = 1024 * 1024
CountReused = Callable[[JobSpec, str, str], Awaitable[ReuseCount]]
PREVIEW = "batchmill.jobs.intake.preview"  # it needs SQLAlchemy


def load_preview() -> ModuleType:
    """Import what previews orders."""
    return import_module(PREVIEW)


class LocalApp:
    """Runs commands on this machine."""

    # The open connection, which nested operations of a command share.
    _owner: connection.OwnerConnection | None = None

    def salvage(self, config: Config, progress: Callable[[str], None]) -> SalvageReport:
        return connection.load_owner().salvage(config, progress)

    @contextlib.asynccontextmanager
    async def open(self, config: Config, project: str | None = None) -> AsyncIterator[AsyncClient]:
        if self._owner is not None:
            yield OwnerClient(self._owner, project)
            return
        async with connection.connect(config) as self._owner:
            try:
                yield OwnerClient(self._owner, project)
            finally:
                self._owner = None

    @contextlib.asynccontextmanager
    async def open_jobs(self, config: Config, project: str | None = None) -> AsyncIterator[OwnerJobs]:
        async with self.open(config, project) as client:
            assert self._owner is not None, "the connection is open"
            yield OwnerJobs(client, self._owner.expect)

    async def preview_validate(self, order: JobOrder, config: Config, progress: Progress) -> SealReport:
        data_dirs.prepare_data_dir(config.data_dir)
        return await load_preview().validate(order, config.data_dir, progress)

    async def preview_plan(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Explanation | None]:
        data_dirs.prepare_data_dir(config.data_dir)
        async with self._counting(order, config) as (order, count):
            return await load_preview().plan(order, config.data_dir, progress, count_reused=count)

    @contextlib.asynccontextmanager
    async def _counting(self, order: JobOrder, config: Config) -> AsyncIterator[tuple[JobOrder, CountReused]]:
        """The order as its project has it, and what counts its rows that would take over results.

        An owner that opens removes previews of its process: so it is opened first, if it is needed.
        """

        async def count(spec: JobSpec, dataset: str, plan: str) -> ReuseCount:
            async with self.open(config) as client:
                planned = operations.PlannedRows(spec, dataset, plan)
                return await client.call(typed_request(operations.COUNT_REUSED, body=planned))

        order = settled(order, config.projects)
        async with contextlib.AsyncExitStack() as stack:
            if order.policy.reuse != NONE:
                client = await stack.enter_async_context(self.open(config))
                await client.call(typed_request(operations.PING))
            yield order, count

    async def preview_estimate(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> tuple[SealReport, Estimate | None]:
        """Time and lengths of answers are estimated from the newest jobs with the same models on this machine."""
        async with self.open_jobs(config) as jobs:
            views = await jobs.list()
        names = ", ".join(model.name for model in order.models)
        finished = [view for view in views if view.model == names and view.finished and view.elapsed_s]
        rate = finished[0].rows / finished[0].elapsed_s if finished else None
        async with self._counting(order, config) as (order, count):
            return await load_preview().estimate(order, config.data_dir, progress, rate, jobs=views, count_reused=count)

    async def partial_results(self, config: Config, job_id: str, out: BinaryIO, *, sampled: bool = False) -> int:
        async with self.open_jobs(config) as jobs:
            path = Path(await jobs.partial(job_id, sampled=sampled))
        rows = 0
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    out.write(line)
                    rows += 1
        finally:
            path.unlink()
        return rows

    @contextlib.asynccontextmanager
    async def results(self, config: Config, view: JobView, *, errors: bool) -> AsyncIterator[ResultStream]:
        path = view.errors_output if errors else view.output
        assert path is not None, "the command checks this first"
        if view.output is not None and is_folder(view.output):
            name, pieces = await open_parts(view.output, errors=errors)
            yield ResultStream(name, pieces)
            return
        if is_object_url(path):
            url = parse_url(path)
            store = await asyncio.to_thread(open_store, url.root)
            info = await asyncio.to_thread(store.head, url.key)
            yield ResultStream(path, _ranges(store, info))
            return
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise InvalidInput(f"the results in {path} cannot be read: {error.strerror}", code="no_file") from None
        with file:
            yield ResultStream(path, _pieces(file))

    async def inputs(self, config: Config, view: JobView, folder: Path) -> list[str]:
        for path in view.input:
            if is_input_url(path) and not is_object_url(path):
                raise far_input(view, path)
            if not is_object_url(path) and not Path(path).is_file():
                raise InvalidInput(f"the input {path} of the job {view.id} is not there any more", code="no_input")
        return view.input

    async def models(self, config: Config) -> list[ModelInfo]:
        configured = ConfiguredModels(config)
        await asyncio.to_thread(configured.check)
        specs = [configured.get(name) for name in configured.names]
        models = [ModelInfo(each.name, each.engine, list(each.adapters), each.price) for each in specs]
        if not data_dirs.has_models(config):
            return models
        async with self.open(config) as client:
            return (await client.call(typed_request(operations.LIST_ALL_MODELS, body=ModelList(models)))).models

    async def deploy(self, client: AsyncClient, config: Config, bundle: BinaryIO) -> DeployReply:
        """Write the archive to a file, which the owner reads."""
        data_dirs.prepare_data_dir(config.data_dir)
        with sent_archive(config.data_dir) as (path, file):
            await asyncio.to_thread(shutil.copyfileobj, bundle, file)
            file.flush()
            return await client.call(typed_request(operations.DEPLOY_ARCHIVE, body=operations.LocalFile(str(path))))

    async def deployed(self, config: Config, name: str) -> ModelSpec | None:
        if not data_dirs.has_models(config):
            return None
        async with self.open(config) as client:
            return (await client.call(typed_request(operations.FIND_MODEL, name))).model

    async def deployed_schema(self, config: Config, name: str) -> OutputSchema:
        async with self.open(config) as client:
            return (await client.call(typed_request(operations.FIND_SCHEMA, name))).schema

    async def adapted(self, config: Config, model: ModelSpec) -> ModelSpec:
        if not model.traits.loads_adapters or model.name not in config.models or not data_dirs.has_models(config):
            return model
        async with self.open(config) as client:
            adapted = (
                await client.call(typed_request(operations.ADAPT_MODEL, body=operations.ResolvedModel(model)))
            ).model
        assert adapted is not None, "the owner returns the model that it was sent"
        return adapted


def far_input(view: JobView, url: str) -> InvalidInput:
    return InvalidInput(
        f"the input of the job {view.id} is at {url}, where it may have changed since: --join reads only files and "
        "objects that are here",
        code="no_input",
    )


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


async def _ranges(store: ObjectStore, info: ObjectInfo) -> AsyncIterator[bytes]:
    ranges = store.read(info)
    while (data := await asyncio.to_thread(next, ranges, None)) is not None:
        yield bytes(data)


def app(session: Session) -> App:
    return LocalApp()
