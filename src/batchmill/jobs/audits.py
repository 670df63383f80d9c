"""Audits: the ledger of a job compared with its files, or made again from them, in a child process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec

from batchmill.jobs.ledger.audit import AuditOrder
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.ledger.snapshot import Rebuilt, Snapshot
from batchmill.jobs.ledger.storage import bring_files
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.store.sql.transactions import Record
from batchmill.types import LedgerReport, SegmentPlace
from batchmill.wire.job_spec import JobSpec

VERIFY = "batchmill.jobs.ledger.audit:verify_offloaded"
REBUILD = "batchmill.jobs.repair:rebuild_offloaded"

Answer = TypeVar("Answer", LedgerReport, Rebuilt)


class Audits:
    def __init__(self, tools: RunnerTools) -> None:
        self._tools, self._commit_log, self._ledger = tools, tools.commit_log, tools.commit_log.ledger

    @asynccontextmanager
    async def use(self, record: Record, *, is_running: bool) -> AsyncIterator[JobFiles]:
        """Have the files of a job on this machine."""
        async with (
            self._tools.scratch.use(read_spec(record["spec"])) as files,
            bring_files(self._tools.stored, files, record, is_running=is_running),
        ):
            yield files

    async def segments(self, spec: JobSpec) -> SegmentPlace:
        blocks = await self._commit_log.call_reader(self._ledger.blocks, spec.id)
        return SegmentPlace(self._tools.scratch.files(spec).segment_place.folder, blocks)

    async def verify(self, record: Record, *, is_running: bool) -> LedgerReport:
        spec = read_spec(record["spec"])
        order = await self._order(spec)
        async with self.use(record, is_running=is_running):  # which brings all that the order names
            return await self._run(VERIFY, order, LedgerReport)

    @asynccontextmanager
    async def rebuild(self, spec: JobSpec) -> AsyncIterator[tuple[Snapshot, Rebuilt]]:
        """What the ledger has of a job that does not run, and what it should have. Replace it before you leave."""
        async with AsyncExitStack() as stack:
            files = await stack.enter_async_context(self._tools.scratch.use(spec))
            if self._tools.stored.is_elsewhere:
                record = await self._commit_log.call_reader(self._ledger.job, spec.id)
                await stack.enter_async_context(bring_files(self._tools.stored, files, record, is_running=False))
            order = await self._order(spec)
            yield order.before, await self._run(REBUILD, order, Rebuilt)

    async def store_plans(self, spec: JobSpec) -> None:
        """Store the plans of a job; a rebuild may have made another generation. Within `rebuild`."""
        await self._tools.scratch.store(spec)

    async def _run(self, target: str, order: AuditOrder, answer: type[Answer]) -> Answer:
        request, stores = msgspec.json.encode(order), order.spec.uses_stores
        return msgspec.json.decode(
            await self._tools.offload(target, request, lambda _: None, stores=stores), type=answer
        )

    async def _order(self, spec: JobSpec) -> AuditOrder:
        scratch = str(self._tools.scratch.home) if spec.is_small else None
        before = await self._commit_log.call_reader(self._ledger.snapshot, spec.id)
        return AuditOrder(spec, str(self._tools.data_dir), await self.segments(spec), before, scratch)
