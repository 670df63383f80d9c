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
from batchmill.jobs.results.results import GatherOrder, Learned, Manifest, merged
from batchmill.wire.job_spec import JobSpec

INDEX = "batchmill.jobs.results.part_gathering:index_offloaded"
PART = "batchmill.jobs.results.part_gathering:part_offloaded"
LEARN = "batchmill.jobs.results.part_gathering:learn_offloaded"
PUBLISH = "batchmill.jobs.results.part_gathering:publish_offloaded"
PART_ROWS = 1_000_000
PARTS_MAX = 100_000  # of a job with more rows, parts are larger
PARTS_AT_ONCE_MAX = 8  # children, and parts on the local disk; fewer on a machine with fewer cores
INDEX_SHARE, LEARN_SHARE = 0.3, 0.2  # of the progress

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
            str(self._files.home / f"parts-{attempt}"), self._spec.replaced_job, self._term, self._spec.output_format,
        )  # fmt: skip
        indexed = await self._call(INDEX, order, Indexed, lambda share: progress(share * INDEX_SHARE))
        part_rows = max(self._spec.part_rows or PART_ROWS, -(-indexed.rows // PARTS_MAX))
        starts = range(0, indexed.rows, part_rows)
        parts = [
            PartOrder(order, number, first, min(first + part_rows, indexed.rows))
            for number, first in enumerate(starts)
        ]  # fmt: skip
        done = INDEX_SHARE
        learned = Learned()
        if indexed.must_learn and parts:
            asked = parts if indexed.must_learn == "parts" else [PartOrder(order, 0, 0, indexed.rows)]
            found = await self._all(LEARN, asked, Learned, lambda share: progress(INDEX_SHARE + LEARN_SHARE * share))
            learned, done = merged(found), INDEX_SHARE + LEARN_SHARE
        parts = [msgspec.structs.replace(part, learned=learned) for part in parts]
        written = await self._all(PART, parts, Written, lambda share: progress(done + (1 - done) * share))
        return await self._call(PUBLISH, PublishOrder(order, indexed, written), Manifest, lambda _: None)

    async def _all(
        self, target: str, orders: list[PartOrder], reply: type[Reply], progress: Callable[[float], None]
    ) -> list[Reply]:  # fmt: skip
        """The replies to all orders, in their order; several children work at once."""
        waiting = iter(enumerate(orders))
        replies: dict[int, Reply] = {}

        async def work() -> None:
            for number, order in waiting:
                replies[number] = await self._call(target, order, reply, lambda _: None)
                progress(len(replies) / len(orders))

        cores = len(os.sched_getaffinity(0))
        workers = [asyncio.create_task(work()) for _ in range(min(cores, PARTS_AT_ONCE_MAX, len(orders)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [replies[number] for number in range(len(orders))]

    async def _call(self, target: str, order: Struct, reply: type[Reply], progress: Callable[[float], None]) -> Reply:
        return msgspec.json.decode(await self._offload(target, msgspec.json.encode(order), progress), type=reply)
