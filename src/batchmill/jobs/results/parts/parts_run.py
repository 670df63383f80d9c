"""The owner's side of results in parts: one index, then parts that are written side by side, then the manifest."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.offload import Offload
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.parts.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder
from batchmill.jobs.results.parts.part_writers import LocalWriters, Nodes, NodeWriters, PartWriters, can_use_nodes, each
from batchmill.jobs.results.results import GatherOrder, Learned, Manifest, merged
from batchmill.wire.job_spec import JobSpec

INDEX = "batchmill.jobs.results.parts.part_gathering:index_offloaded"
PUBLISH = "batchmill.jobs.results.parts.part_gathering:publish_offloaded"
PART_ROWS = 1_000_000
PARTS_MAX = 100_000  # of a job with more rows, parts are larger
INDEX_SHARE, LEARN_SHARE = 0.3, 0.2  # of the progress

Reply = TypeVar("Reply")


class PartsRun:
    """One attempt to publish the results of a job in parts."""

    def __init__(self, spec: JobSpec, files: JobFiles, offload: Offload, term: str, nodes: Nodes | None = None) -> None:
        """Args: term: see `Term.path`. nodes: of a cluster, which write the parts if they can."""
        self._spec, self._files, self._offload, self._term, self._nodes = spec, files, offload, term, nodes
        self._local = LocalWriters(offload)

    async def run(self, gather: GatherOrder, progress: Callable[[float], None]) -> Manifest:
        """Write all parts and publish the manifest. Cancelling ends what writes them."""
        attempt = uuid.uuid4().hex[:8]
        order = PartsOrder(
            gather, self._spec.id, len(gather.plans) - 1, attempt,
            str(self._files.home / f"parts-{attempt}"), self._spec.replaced_job, self._term, self._spec.output_format,
        )  # fmt: skip
        indexed = await self._call(INDEX, order, Indexed, lambda share: progress(share * INDEX_SHARE))
        if indexed.is_saved:
            order = replace(order, gather=replace(gather, committed=[]))  # there may be millions
        part_rows = max(self._spec.part_rows or PART_ROWS, -(-indexed.rows // PARTS_MAX))
        starts = range(0, indexed.rows, part_rows)
        parts = [
            PartOrder(order, number, first, min(first + part_rows, indexed.rows))
            for number, first in enumerate(starts)
        ]  # fmt: skip
        done = INDEX_SHARE
        learned = Learned()
        writers = await self._writers(order, indexed)
        try:
            await writers.open(part_rows)
            if indexed.must_learn and parts:
                asked = parts if indexed.must_learn == "parts" else [PartOrder(order, 0, 0, indexed.rows)]
                found = await writers.learn(asked, lambda share: progress(INDEX_SHARE + LEARN_SHARE * share))
                learned, done = merged(found), INDEX_SHARE + LEARN_SHARE
            parts = [replace(part, learned=learned) for part in parts]
            written = await each(
                writers.write, parts, writers.at_once, lambda share: progress(done + (1 - done) * share)
            )  # fmt: skip
            written = await writers.check(parts, written)
        finally:
            await writers.close()
        return await self._call(PUBLISH, PublishOrder(order, indexed, written), Manifest, lambda _: None)

    async def _writers(self, order: PartsOrder, indexed: Indexed) -> PartWriters:
        if self._nodes is None or not indexed.is_saved:
            return self._local
        if not await asyncio.to_thread(can_use_nodes, self._spec, self._files):
            return self._local
        return NodeWriters(self._spec, self._files, self._nodes, self._offload, order)

    async def _call(self, target: str, order: Struct, reply: type[Reply], progress: Callable[[float], None]) -> Reply:
        return msgspec.json.decode(await self._offload(target, msgspec.json.encode(order), progress), type=reply)
