"""The plan of a retry: the rows that failed or never ran. It is made in a child process of the owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger import plan
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.outcome_map import FAILED, OK, put
from batchmill.ports import SegmentSource
from batchmill.store.segment_blocks import open_segments
from batchmill.store.segments import read_ref
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


class Opened(Struct, frozen=True):
    """What the retry will run."""

    rows: int
    rows_ok: int  # leaders that keep their outcome
    settled: dict[str, int]  # error code -> rows that validation refused: they cannot be run again


async def plan_retry(
    spec: JobSpec,
    files: JobFiles,
    segments: SegmentPlace,
    blocks: list[tuple[int, SegmentRef]],
    generation: int,
    offload: Callable[..., Awaitable[bytes]],
) -> Opened:
    """Plan a retry in a child process. Raises: InvalidTransition where there is no row to run."""
    scratch = None if files.scratch is None else str(files.scratch)
    order = RetryOrder(spec, str(files.data_dir), scratch, segments, blocks, generation)
    answer = await offload(
        "batchmill.jobs.intake.retry_plan:plan_retry_offloaded", msgspec.json.encode(order), lambda _: None
    )
    opened = msgspec.json.decode(answer, type=Opened)
    if opened.rows == 0:
        raise InvalidTransition(f"the job {spec.id} has no failed rows that could be run again")
    return opened


def plan_retry_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: RetryOrder in, Opened out, both as JSON."""
    request = msgspec.json.decode(order, type=RetryOrder)
    scratch = None if request.scratch is None else Path(request.scratch)
    files = JobFiles(Path(request.data_dir), request.spec.id, scratch)
    with closing(open_segments(request.segments)) as segments:
        return msgspec.json.encode(plan_failed(request.spec, files, segments, request.committed, request.generation))


def outcomes(segments: SegmentSource, blocks: list[tuple[int, SegmentRef]], rows: int) -> bytearray:
    """OPEN, OK or FAILED for every row, as its newest generation has it. One byte a row."""
    state = bytearray(rows)
    for _, ref in blocks:  # the oldest generation first
        for block in read_ref(segments, ref):
            put(state, block.rows(), bytes((OK if block.ok else FAILED,)) * block.n)
    return state


def plan_failed(
    spec: JobSpec, files: JobFiles, segments: SegmentSource, blocks: list[tuple[int, SegmentRef]], generation: int
) -> Opened:
    """Write the plan of `generation` and return its counts. Nothing is written if no row can run."""
    first = plan.PlanReader(files.plan(0))
    state = outcomes(segments, blocks, first.plan.rows)
    settled = Counter(refused.code for refused in plan.iter_rejected(files.dataset))
    done = state.count(OK)
    rows = first.leaders - done
    if rows:
        home = files.plan(generation)
        home.mkdir(parents=True, exist_ok=True)
        sizes = [plan.shard_rows(model, rows) for model in spec.models]
        plan.plan_again(first, lambda number: state[number] != OK, sizes, home)
    return Opened(rows, done, dict(settled))
