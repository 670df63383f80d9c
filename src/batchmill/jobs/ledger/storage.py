"""JobStorage: what an owner needs of one job, brought to its data directory; and what it made, published.

Without `[storage]` there is nothing to bring and to publish: see `store.stored_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.owned_files import OwnedFiles
from batchmill.store.stored_files import StoredFiles
from batchmill.wire.job_spec import JobSpec


class ResultFile(Protocol):
    @property
    def path(self) -> str: ...


class ResultFiles(Protocol):
    """The result files of a job, as `results.Manifest` has them."""

    @property
    def output(self) -> ResultFile: ...

    @property
    def errors(self) -> ResultFile | None: ...


class JobStorage:
    def __init__(self, stored: StoredFiles, files: JobFiles) -> None:
        self._stored, self._files = stored, files
        self._holder = f"job {uuid.uuid4().hex}"  # a reader that ends releases nothing of the job's runner

    def move(self, files: JobFiles) -> None:
        """The job's files are these from now on. What was brought stays until `release`."""
        self._files = files

    async def bring(self, spec: JobSpec, record: Mapping[str, Any]) -> None:
        """Bring inputs, dataset, plans and segments, which stay until `release`. No worker may run rows of the job.

        Segments that a dead worker spooled and did not put are put.
        """
        if not self._stored.is_elsewhere:
            return
        await self.bring_inputs(spec)
        await self.bring_plans(record)
        if record["rows"]:
            await self._stored.settle_segments(self._files.segments)

    async def bring_segments(self) -> None:
        """Bring what workers on nodes have written so far. Those of this machine write to the folder itself."""
        if self._stored.has_nodes:
            await self._stored.settle_segments(self._files.segments)

    async def bring_plans(self, record: Mapping[str, Any]) -> None:
        """Bring dataset and plans."""
        plans = [self._files.plan(generation) for generation in range(record["generation"] + 1)]
        await self._stored.fetch(self._files.home, self._files.dataset, *plans, holder=self._holder)

    async def bring_inputs(self, spec: JobSpec) -> None:
        """Bring the input files and the adapters that a server keeps."""
        if not self._stored.is_elsewhere:
            return
        adapters = [Path(place) for model in spec.models for place in model.adapters.values()]
        paths = [self._files.home, *map(Path, spec.dataset.paths), *adapters]
        await self._stored.fetch(*paths, holder=self._holder)

    async def publish(self, *folders: Path) -> None:
        await self._stored.publish(*folders)

    def publishing(self, *folders: Path) -> AbstractAsyncContextManager[Callable[[sa.Connection], None]]:
        """See `StoredFiles.publishing`."""
        return self._stored.publishing(*folders)

    async def publish_results(self, results: ResultFiles) -> None:
        """Publish result files in the data directory: one elsewhere belongs to its caller."""
        files = [results.output, *([] if results.errors is None else [results.errors])]
        await self._stored.publish(*(Path(each.path) for each in files))

    def release(self) -> None:
        self._stored.release(self._holder)


@contextlib.asynccontextmanager
async def bring_files(
    stored: StoredFiles, files: JobFiles, record: Mapping[str, Any], *, is_running: bool
) -> AsyncIterator[None]:
    """All files of a job stay in the data directory meanwhile; the runner of one that runs has brought them."""
    storage = JobStorage(stored, files)
    try:
        if not is_running:
            await storage.bring(read_spec(record["spec"]), record)
        else:
            await storage.bring_segments()
        yield
    finally:
        storage.release()


async def bring_description(stored: StoredFiles, data_dir: Path, record: Mapping[str, Any]) -> JobFiles:
    """The files of a job with its dataset, and `job.json`, which is written from the database where it is missing."""
    files = JobFiles(data_dir, record["id"])
    if stored.is_elsewhere:
        await stored.fetch(files.dataset)
        if not files.spec.exists():
            await asyncio.to_thread(files.write_spec, read_spec(record["spec"]), OwnedFiles())  # a copy
    return files
