"""The owner's side of results in parts: one index, then child processes that write parts, then the manifest."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from batchmill.children.offload import Offload
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder, Written
from batchmill.jobs.results.results import GatherOrder, Manifest
from batchmill.wire.job_spec import JobSpec

INDEX = "batchmill.jobs.results.part_gathering:index_offloaded"
PART = "batchmill.jobs.results.part_gathering:part_offloaded"
PUBLISH = "batchmill.jobs.results.part_gathering:publish_offloaded"
PART_ROWS = 1_000_000
PARTS_MAX = 100_000  # of a job with more rows, parts are larger
PARTS_AT_ONCE_MAX = 8  # children, and parts on the local disk; fewer on a machine with fewer cores
INDEX_SHARE = 0.3  # of the progress

Reply = TypeVar("Reply")


class PartsRun:
    """One attempt to publish the results of a job in parts."""

    def __init__(self, spec: JobSpec, files: JobFiles, offload: Offload, term: str) -> None:
        """Args: term: see `Database.term_path`."""
        self._spec, self._files, self._offload, self._term = spec, files, offload, term

    async def run(self, gather: GatherOrder, progress: Callable[[float], None]) -> Manifest:
        """Write all parts and publish the manifest. Cancelling ends the children."""
        attempt = uuid.uuid4().hex[:8]
        order = PartsOrder(
            gather, self._spec.id, len(gather.plans) - 1, attempt,
            str(self._files.home / f"parts-{attempt}"), self._spec.replaced_job, self._term,
        )  # fmt: skip
        indexed = await self._call(INDEX, order, Indexed, lambda share: progress(share * INDEX_SHARE))
        written = await self._write_parts(order, indexed.rows, progress)
        return await self._call(PUBLISH, PublishOrder(order, indexed, written), Manifest, lambda _: None)

    async def _write_parts(self, order: PartsOrder, rows: int, progress: Callable[[float], None]) -> list[Written]:
        part_rows = max(self._spec.part_rows or PART_ROWS, -(-rows // PARTS_MAX))
        starts = range(0, rows, part_rows)
        waiting = iter(enumerate(starts))
        written: dict[int, Written] = {}

        async def write() -> None:
            for number, first in waiting:
                part = PartOrder(order, number, first, min(first + part_rows, rows))
                written[number] = await self._call(PART, part, Written, lambda _: None)
                progress(INDEX_SHARE + (1 - INDEX_SHARE) * len(written) / len(starts))

        cores = len(os.sched_getaffinity(0))
        writers = [asyncio.create_task(write()) for _ in range(min(cores, PARTS_AT_ONCE_MAX, len(starts)))]
        try:
            await asyncio.gather(*writers)
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
        return [written[number] for number in range(len(starts))]

    async def _call(self, target: str, order: Struct, reply: type[Reply], progress: Callable[[float], None]) -> Reply:
        return msgspec.json.decode(await self._offload(target, msgspec.json.encode(order), progress), type=reply)
