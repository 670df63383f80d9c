"""The owner's side of rows that nodes of a cluster check while a dataset is sealed.

Nodes read the rows where they lie and put what they find as objects, which the child that seals reads in the place of
validators' results. It checks what no node has checked, or not as it should: nodes only save work.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill import faults
from batchmill.children.offload import Offload
from batchmill.datasets.checking.spans import CheckedSpan, Checks, SpanOrder, describes, spans
from batchmill.datasets.sealing import Survey
from batchmill.errors import BatchmillError
from batchmill.jobs.intake.preparation import NodeChecks, Prepared, PrepareOrder
from batchmill.jobs.results.parts.node_tries import FAILED_MAX, run_on_node
from batchmill.jobs.results.parts.part_writers import Nodes, each
from batchmill.object_store.urls import is_object_url
from batchmill.types.cluster import TASK_FAILED, NodeWork
from batchmill.wire.job_spec import JobSpec

log = logging.getLogger("batchmill.jobs")

SURVEY = "batchmill.jobs.intake.span_checks:survey_offloaded"
ON_NODE = "batchmill.jobs.intake.span_checks:check_on_node"
BYTES_MIN = 64 * 1024 * 1024  # of a dataset: less is checked here sooner than a node begins
CHECKS_SHARE = 0.8  # of the progress
FLAWS_SHOWN = 5


class NodeSealing:
    """
    Args: term: see `Term.path`.
    """

    def __init__(self, nodes: Nodes, term: str) -> None:
        self._nodes, self._term = nodes, term

    @asynccontextmanager
    async def checked(
        self, order: PrepareOrder, offload: Offload, progress: Callable[[float], None]
    ) -> AsyncIterator[tuple[PrepareOrder, Callable[[float], None]]]:
        """The order with what nodes found in the rows, for as long as it can be read, and the rest of the progress."""
        survey = None
        if all(map(is_object_url, order.spec.dataset.paths)):
            answer = await offload(SURVEY, msgspec.json.encode(order), lambda _: None)
            survey = msgspec.msgpack.decode(answer, type=Survey | None)
        if survey is None or sum(part.end - part.start for part in survey.parts) < BYTES_MIN:
            yield order, progress
            return
        async with self._nodes.stored.scratch(Path(order.dataset).parent) as prefix:
            run = _SpanRun(order.spec, survey, self._nodes, self._term, prefix)
            found = await run.run(lambda share: progress(share * CHECKS_SHARE))
            faults.point("after_spans")
            checks = Checks(survey.order.files, survey.order.id_seed, found)
            yield (
                replace(order, checks=NodeChecks(self._nodes.tasks.store, checks)),
                lambda share: progress(CHECKS_SHARE + share * (1 - CHECKS_SHARE)),
            )


class _SpanRun:
    """All spans of one dataset."""

    def __init__(self, spec: JobSpec, survey: Survey, nodes: Nodes, term: str, prefix: str) -> None:
        self._spec, self._survey, self._nodes, self._term, self._prefix = spec, survey, nodes, term, prefix
        limits = spec.dataset.rows_max, survey.order.rows_max
        self._rows_max = min(limit for limit in limits if limit is not None)
        self._files = {file.path: file for file in survey.order.files}
        self._rows = self._failed = 0

    async def run(self, progress: Callable[[float], None]) -> list[CheckedSpan | None]:
        orders = [
            SpanOrder(replace(self._survey.order, files=[]), span, f"{self._prefix}{number:06d}-")
            for number, span in enumerate(spans(self._survey.parts))
        ]  # fmt: skip
        return await each(self._check, orders, self._nodes.tasks.at_once, progress)

    async def _check(self, order: SpanOrder) -> CheckedSpan | None:
        """None: no node can check it, or none needs to: there are more rows than a job may have."""
        if self._failed >= FAILED_MAX or self._rows > self._rows_max:
            return None
        wanted = dict.fromkeys(range_.part.path for range_ in order.ranges)
        order = replace(order, seal=replace(order.seal, files=[self._files[path] for path in wanted]))

        def attempt() -> tuple[NodeWork, Callable[[bytes], CheckedSpan]]:
            own = replace(order, prefix=f"{order.prefix}{uuid.uuid4().hex[:8]}/")
            return NodeWork(ON_NODE, msgspec.msgpack.encode(own), [], self._term), lambda answer: _read(answer, own)

        try:
            checked = await run_on_node(self._nodes.tasks, attempt, self._spec.project)
        except BatchmillError as error:
            self._failed += 1
            log.warning(
                "rows of job %s are checked on this machine, as no node can: %s", self._spec.id, error.message
            )  # fmt: skip
            return None
        self._rows += checked.rows
        return checked


def _read(answer: bytes, order: SpanOrder) -> CheckedSpan:
    """Raises: BatchmillError for what no node says of its work."""
    try:
        checked = msgspec.msgpack.decode(answer, type=CheckedSpan)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchmillError(f"a node sent what describes no rows: {error}", code=TASK_FAILED) from None
    if not describes(checked, order):
        raise BatchmillError("a node sent what does not describe the rows it was to check", code=TASK_FAILED)
    return checked


def warn_of(prepared: Prepared, job: str) -> None:
    """Log what nodes had checked and this machine checked again."""
    for flaw in prepared.flaws[:FLAWS_SHOWN]:
        log.warning("rows of job %s that a node has checked are checked again on this machine: %s", job, flaw)
