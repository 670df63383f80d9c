"""Where the parts of an attempt are written: in children of this machine, or as tasks on the nodes of a cluster.

Nodes write what the manifest may name, and nothing that counts: the owner alone puts the manifest, once it has compared
what each node says with its own index and with what lies in the store. A part that no node writes as it should is
written here, by the process whose errors are the job's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.offload import Offload
from batchmill.datasets.sealed import load_seal
from batchmill.errors import BatchmillError
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.parts.node_tries import FAILED_MAX, run_on_node
from batchmill.jobs.results.parts.output_folders import Part, part_name
from batchmill.jobs.results.parts.part_orders import CheckOrder, PartOrder, PartsOrder, SliceOrder, Slices, Written
from batchmill.jobs.results.results import CAUSES_MAX, COLUMNS_MAX, ColumnKind, Learned, merged
from batchmill.object_store.urls import is_object_url
from batchmill.ports.executors import NodeTasks
from batchmill.store.segments.format import SAMPLE_CHARS_MAX
from batchmill.store.stored_files import StoredFiles
from batchmill.types.cluster import TASK_FAILED, NodeWork
from batchmill.wire.job_spec import JobSpec

log = logging.getLogger("batchmill.jobs")

LEARN = "batchmill.jobs.results.parts.part_gathering:learn_offloaded"
PART = "batchmill.jobs.results.parts.part_gathering:part_offloaded"
CHECK = "batchmill.jobs.results.parts.node_parts:check_offloaded"
SLICE = "batchmill.jobs.results.parts.index_slices:slice_offloaded"
LEARN_ON_NODE = "batchmill.jobs.results.parts.node_parts:learn_on_node"
PART_ON_NODE = "batchmill.jobs.results.parts.node_parts:write_on_node"
PARTS_AT_ONCE_MAX = 8  # children, and parts on the local disk; fewer on a machine with fewer cores
CODE_CHARS_MAX = 256  # of an error code that a node names
ADDED_MAX = 64  # columns that batchmill may add
KIND_NAMES = frozenset(ColumnKind)
_SHA256 = re.compile("[0-9a-f]{64}")

Order = TypeVar("Order")
Reply = TypeVar("Reply")


class PartWriters(Protocol):
    at_once: int  # parts

    async def open(self, part_rows: int) -> None:
        """Called once, before the first part. Args: part_rows: of each part but the last, which may have fewer."""

    async def learn(self, orders: list[PartOrder], progress: Callable[[float], None]) -> list[Learned]:
        """What is to be known of the rows of parts of tables before one of them is written."""

    async def write(self, order: PartOrder) -> Written:
        """Write a part. It is in its place then, and nothing names it. Cancelling ends what writes it."""

    async def check(self, orders: list[PartOrder], written: list[Written]) -> list[Written]:
        """Called after the last part. Returns: the parts that the manifest may name."""

    async def close(self) -> None:
        """Called at the end of every attempt. It raises nothing that would hide why the attempt failed."""


class LocalWriters:
    """Children of this machine."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self.at_once = min(len(os.sched_getaffinity(0)), PARTS_AT_ONCE_MAX)

    async def open(self, part_rows: int) -> None:
        return

    async def learn(self, orders: list[PartOrder], progress: Callable[[float], None]) -> list[Learned]:
        return await each(self.learn_one, orders, self.at_once, progress)

    async def learn_one(self, order: PartOrder) -> Learned:
        answer = await self._offload(LEARN, msgspec.json.encode(order), lambda _: None)
        return msgspec.json.decode(answer, type=Learned)

    async def write(self, order: PartOrder) -> Written:
        answer = await self._offload(PART, msgspec.json.encode(order), lambda _: None)
        return msgspec.json.decode(answer, type=Written)

    async def check(self, orders: list[PartOrder], written: list[Written]) -> list[Written]:
        return written

    async def close(self) -> None:
        return


class Nodes(Struct, frozen=True, eq=False):
    """The nodes of a cluster, and the object store that they read."""

    tasks: NodeTasks
    stored: StoredFiles


def can_use_nodes(spec: JobSpec, files: JobFiles) -> bool:
    """Whether a node can read the input and write the parts: both are objects. Concurrency: blocks."""
    if spec.output is None or not is_object_url(spec.output):
        return False
    return all(is_object_url(path) or _is_in(files, path) for path in _inputs(files))


def _inputs(files: JobFiles) -> list[str]:
    return [file.path for file in load_seal(files.dataset).files]


def _is_in(files: JobFiles, path: str) -> bool:
    return Path(path).is_relative_to(files.data_dir)


class NodeWriters:
    """Tasks of a cluster; children of this machine for what no node can write.

    Args: order: what the attempt's parts have in common. Its scratch folder has the index, which was saved.
    """

    def __init__(self, spec: JobSpec, files: JobFiles, nodes: Nodes, offload: Offload, order: PartsOrder) -> None:
        self._spec, self._files, self._nodes, self._offload, self._order = spec, files, nodes, offload, order
        self._local = LocalWriters(offload)
        self._local_slots = asyncio.Semaphore(self._local.at_once)
        self._failed = 0
        self._by_nodes: set[int] = set()  # numbers of parts
        self._learned_by_nodes: list[int] = []  # the same of parts whose columns they have looked at
        self._input: list[str] = []  # paths of the dataset
        self._slices: Slices | None = None
        self._opened = AsyncExitStack()
        self.at_once = nodes.tasks.at_once

    async def open(self, part_rows: int) -> None:
        """Put the index into the store, in slices: one for each part."""
        prefix = await self._opened.enter_async_context(self._nodes.stored.scratch(self._files.home))
        order = SliceOrder(self._order, part_rows, self._nodes.tasks.store, prefix)
        answer = await self._offload(SLICE, msgspec.json.encode(order), lambda _: None)
        self._slices = msgspec.json.decode(answer, type=Slices)
        inputs = await asyncio.to_thread(_inputs, self._files)
        dataset = self._order.gather.dataset
        own = [path for path in inputs if _is_in(self._files, path) and not Path(path).is_relative_to(dataset)]
        self._input = [dataset, *own]

    async def learn(self, orders: list[PartOrder], progress: Callable[[float], None]) -> list[Learned]:
        """What one node says is compared: if it is wrong, this machine learns what is to be known of all parts."""
        learned = await each(self._learn, orders, self.at_once, progress)
        if self._learned_by_nodes:
            number = random.choice(self._learned_by_nodes)
            if merged([learned[number]]) != merged([await self._local.learn_one(orders[number])]):
                log.warning(
                    "the columns of part %d of job %s are not what its node says: they are looked at here",
                    number, self._spec.id,
                )  # fmt: skip
                self._failed = FAILED_MAX
                return await self._local.learn(orders, progress)
        return learned

    async def _learn(self, order: PartOrder) -> Learned:
        learned = await self._try(order, LEARN_ON_NODE, lambda answer, _: checked_columns(answer))
        if learned is None:
            async with self._local_slots:
                return await self._local.learn_one(order)
        self._learned_by_nodes.append(order.number)
        return learned

    async def write(self, order: PartOrder) -> Written:
        written = await self._try(order, PART_ON_NODE, checked)
        if written is None:
            return await self._here(order)
        self._by_nodes.add(order.number)
        return written

    async def _try(
        self, order: PartOrder, target: str, read: Callable[[bytes, PartOrder], Reply]
    ) -> Reply | None:  # fmt: skip
        """What a node says of a part; None if this machine is to look at it."""
        assert self._slices is not None, "open comes first"
        given = self._slices.parts[order.number]
        if self._failed >= FAILED_MAX or given is None:
            return None
        try:
            return await self._on_node(replace(order, slice=given), target, read)
        except BatchmillError as error:
            self._failed += 1
            log.warning(
                "part %d of job %s is made on this machine, as no node can: %s",
                order.number, self._spec.id, error.message,
            )  # fmt: skip
            return None

    async def _here(self, order: PartOrder) -> Written:
        async with self._local_slots:
            return await self._local.write(order)

    async def _on_node(
        self, order: PartOrder, target: str, read: Callable[[bytes, PartOrder], Reply]
    ) -> Reply:  # fmt: skip
        """Raises: BatchmillError."""
        assert self._slices is not None and order.slice is not None, "only such parts are for nodes"
        gather, facts = order.parts.gather, self._slices.facts
        gather = replace(gather, segments=replace(gather.segments, blocks={}))  # the slice has those of its rows
        paths = self._input if order.slice.needs_input else []

        def attempt() -> tuple[NodeWork, Callable[[bytes], Reply]]:
            parts = replace(order.parts, gather=gather, attempt=uuid.uuid4().hex[:8], term="", facts=facts)  # its own
            own = replace(order, parts=parts)
            work = NodeWork(target, msgspec.json.encode(own), paths, self._order.term)
            return work, lambda answer: read(answer, own)

        return await run_on_node(self._nodes.tasks, attempt, self._spec.project)

    async def check(self, orders: list[PartOrder], written: list[Written]) -> list[Written]:
        """Write the parts again, here, that are not what the index and the store say."""
        found = list(written)
        check = CheckOrder(self._order, {number: found[number] for number in sorted(self._by_nodes)})
        if check.written:
            answer = await self._offload(CHECK, msgspec.json.encode(check), lambda _: None)
            wrong = msgspec.json.decode(answer, type=list[int])
            for number in wrong:
                log.warning("part %d of job %s is not what its node says: it is written again", number, self._spec.id)
            again = await each(
                self._here, [orders[number] for number in wrong], self._local.at_once, lambda _: None
            )  # fmt: skip
            for number, part in zip(wrong, again, strict=True):
                found[number] = part
        return found

    async def close(self) -> None:
        """Remove the slices from the store."""
        await self._opened.aclose()


async def each(
    work: Callable[[Order], Awaitable[Reply]], orders: list[Order], at_once: int, progress: Callable[[float], None]
) -> list[Reply]:
    """The replies to all orders, in their order; so many are worked on at once. One that fails ends the others."""
    waiting = iter(enumerate(orders))
    replies: dict[int, Reply] = {}

    async def serve() -> None:
        for number, order in waiting:
            replies[number] = await work(order)
            progress(len(replies) / len(orders))

    tasks = [asyncio.create_task(serve()) for _ in range(min(at_once, len(orders)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [replies[number] for number in range(len(orders))]


def checked_columns(answer: bytes) -> Learned:
    """What a node says of the columns of a part. Raises: BatchmillError for what cannot be."""
    try:
        learned = msgspec.json.decode(answer, type=Learned)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchmillError(f"a node sent what describes no columns: {error}", code=TASK_FAILED) from None
    is_sound = (
        len(learned.names) <= COLUMNS_MAX
        and len(learned.kinds) <= COLUMNS_MAX + ADDED_MAX
        and all(KIND_NAMES.issuperset(kinds) for kinds in learned.kinds.values())
        and learned.output is None
    )
    if not is_sound:
        raise BatchmillError("a node sent what does not describe columns", code=TASK_FAILED)
    return learned


def checked(answer: bytes, order: PartOrder) -> Written:
    """What a node says of a part that it was to write. Raises: BatchmillError for what cannot be."""
    try:
        written = msgspec.json.decode(answer, type=Written)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchmillError(f"a node sent what describes no part: {error}", code=TASK_FAILED) from None
    parts, rows = order.parts, order.end - order.first
    errors_apart = parts.kind == "jsonl" and parts.gather.form.errors_apart
    files = [(written.part, "part", rows - written.failed if errors_apart else rows)]
    if written.errors is not None:
        files.append((written.errors, "errors", written.failed))
    is_sound = (
        0 <= written.failed <= rows
        and (written.errors is not None) == (errors_apart and written.failed > 0)
        and sum(count for count, _ in written.causes.values()) == written.failed
        and all(count > 0 for count, _ in written.causes.values())
        and len(written.causes) <= CAUSES_MAX + 1  # and `OTHER`
        and all(len(code) <= CODE_CHARS_MAX for code in written.causes)
        and all(_is_file_of(order, *each) for each in files)
    )
    if not is_sound:
        raise BatchmillError(f"a node sent what does not describe part {order.number}", code=TASK_FAILED)
    causes = {code: (count, sample[:SAMPLE_CHARS_MAX]) for code, (count, sample) in written.causes.items()}
    return replace(written, causes=causes)


def _is_file_of(order: PartOrder, part: Part, prefix: str, rows: int) -> bool:
    parts = order.parts
    name = part_name(prefix, order.number, parts.job, parts.attempt, parts.kind)
    return (
        (part.name, part.first, part.end, part.rows) == (name, order.first, order.end, rows)
        and part.bytes >= 0
        and _SHA256.fullmatch(part.sha256) is not None
    )
