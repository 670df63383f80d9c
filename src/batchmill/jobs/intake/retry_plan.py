"""The plan of a retry: the rows that failed or never ran. It is made in a child process of the owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.datasets.folders import DiskFolder
from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger import plan
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.outcome_map import FAILED, OK, OPEN, rows_in
from batchmill.jobs.ledger.row_states import IN_MEMORY_ROWS, RowStates
from batchmill.owner_term import term_at
from batchmill.part_files import make_folder
from batchmill.ports.storage import SegmentSource
from batchmill.store.segments.blocks import open_segments
from batchmill.store.segments.format import read_outcomes
from batchmill.types import SegmentPlace, SegmentRef
from batchmill.wire.job_spec import JobSpec


class RetryOrder(Struct, frozen=True):
    """The input of a retry plan."""

    spec: JobSpec
    data_dir: str
    scratch: str | None  # of a small job: see JobFiles
    segments: SegmentPlace
    committed: list[tuple[int, SegmentRef]]  # the oldest generation first
    generation: int  # that is to be opened
    model: int | None = None  # number of the model that the rows go to; None: each to its own
    in_memory_rows: int = IN_MEMORY_ROWS
    term: str = ""  # see `Term.path`: a successor may open the same generation

    @classmethod
    def of(
        cls, spec: JobSpec, files: JobFiles, segments: SegmentPlace, blocks: list[tuple[int, SegmentRef]],
        generation: int, model: int | None,
    ) -> RetryOrder:  # fmt: skip
        scratch = None if files.scratch is None else str(files.scratch)
        return cls(spec, str(files.data_dir), scratch, segments, blocks, generation, model)


class Opened(Struct, frozen=True):
    """What the retry will run."""

    rows: int
    rows_ok: int  # leaders that keep their outcome
    settled: dict[str, int]  # error code -> rows that validation refused: they cannot be run again
    models: list[int]  # numbers of the models that the rows go to


async def plan_retry(order: RetryOrder, offload: Callable[..., Awaitable[bytes]]) -> Opened:
    """Plan a retry in a child process. Raises: InvalidTransition where there is no row to run."""
    answer = await offload(
        "batchmill.jobs.intake.retry_plan:plan_retry_offloaded", msgspec.json.encode(order), lambda _: None
    )
    opened = msgspec.json.decode(answer, type=Opened)
    if opened.rows == 0:
        raise InvalidTransition(f"the job {order.spec.id} has no failed rows that could be run again")
    return opened


def plan_retry_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: RetryOrder in, Opened out, both as JSON."""
    request = msgspec.json.decode(order, type=RetryOrder)
    with closing(open_segments(request.segments)) as segments:
        return msgspec.json.encode(plan_failed(request, segments))


def plan_failed(order: RetryOrder, segments: SegmentSource) -> Opened:
    """Write the plan of the generation and return its counts. Nothing is written if no row can run."""
    files = JobFiles(Path(order.data_dir), order.spec.id, None if order.scratch is None else Path(order.scratch))
    first = plan.PlanReader(files.plan(0))
    settled = Counter(refused.code for refused in plan.iter_rejected(files.dataset))
    with closing(RowStates(files.home, first.plan.rows, in_memory_rows=order.in_memory_rows)) as states:
        for _, ref in order.committed:  # the oldest generation first: the newest outcome of a row counts
            for block in read_outcomes(segments, ref):
                states.put(block.rows(), bytes((OK if block.ok else FAILED,)) * block.n)
        done = states.count(OK)
        rows = first.leaders - done
        models: list[int] = []
        if rows:
            home = files.plan(order.generation)
            make_folder(home)
            sizes = [plan.shard_rows(model, rows) for model in order.spec.models]
            folder = DiskFolder(home, term_at(order.term))
            planned = plan.plan_again(
                first, lambda numbers: rows_in(states, numbers, OPEN, FAILED), sizes, folder, order.model
            )
            models = [target.model for target in planned.targets if target.rows]
    return Opened(rows, done, dict(settled), models)
