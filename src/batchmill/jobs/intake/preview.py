"""Previews: validate, plan and estimate an order in a temporary folder. No row runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from batchmill.children.offload import Offload, offload
from batchmill.datasets.folders import Folder
from batchmill.jobs.intake import PREPARE, asking_again, fetching, orders, routing
from batchmill.jobs.intake.estimate import EstimateOrder
from batchmill.jobs.intake.lengths import learn
from batchmill.jobs.intake.node_sealing import NodeSealing, warn_of
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, prepare_in, reuses
from batchmill.jobs.ledger.plan import explain
from batchmill.jobs.ledger.sampled_rows import PREVIEW, PreviewOrder
from batchmill.store.disk_room import DiskQuota, preparing
from batchmill.types import JobOrder, JobView, ReuseCount
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import Estimate, EstimateRange, Explanation, PlanSample, SealReport

Progress = Callable[[float], None]
Call = Callable[[Callable[[], Prepared]], Awaitable[Prepared]]
CountReused = Callable[[JobSpec, str, str], Awaitable[ReuseCount]]  # `ports.jobs.Jobs.count_reused`
PREVIEWS = "preview-"  # folders of the data directory


async def seal_and_plan(
    order: PrepareOrder, disk_quota: DiskQuota | None, offload: Offload, progress: Progress,
    nodes: NodeSealing | None = None,
) -> Prepared:  # fmt: skip
    """Seal and plan in a child process.

    Args:
        disk_quota: where what is written meanwhile counts; None: nowhere.
        nodes: those that check rows, if they can; None: all are checked here.

    Raises: OverQuota where its project has no room for it.
    """
    async with preparing(disk_quota, order.spec.project, Path(order.dataset)) as writing:

        def show(share: float) -> None:
            progress(share)
            writing.check_usage()

        order = msgspec.structs.replace(
            order, bytes_left=writing.bytes_left, no_space_message=writing.no_space_message,
            hub=fetching.hub_variables(order.spec.dataset),
        )  # fmt: skip
        work = _prepare(order, offload, show) if nodes is None else _prepare_with(nodes, order, offload, show)
        return await writing.stoppable(work)


async def seal_and_plan_at_once(
    order: PrepareOrder, dataset: Folder, plan_folder: Folder, disk_quota: DiskQuota | None, call: Call
) -> Prepared:
    """As `seal_and_plan`, in this process and into these folders. Args: call: calls bounded work, as a thread may."""
    async with preparing(disk_quota, order.spec.project, dataset.path) as writing:
        order = msgspec.structs.replace(
            order, bytes_left=writing.bytes_left, no_space_message=writing.no_space_message
        )  # fmt: skip
        return await call(partial(prepare_in, order, dataset, plan_folder, lambda _: None))


async def _prepare(order: PrepareOrder, offload: Offload, progress: Progress) -> Prepared:
    return msgspec.json.decode(await offload(PREPARE, msgspec.json.encode(order), progress), type=Prepared)


async def _prepare_with(nodes: NodeSealing, order: PrepareOrder, offload: Offload, progress: Progress) -> Prepared:
    async with nodes.checked(order, offload, progress) as (checked, rest):
        prepared = await _prepare(checked, offload, rest)
    warn_of(prepared, order.spec.id)
    return prepared


@asynccontextmanager
async def _prepared(
    order: JobOrder, data_dir: Path, progress: Progress, disk_quota: DiskQuota | None
) -> AsyncIterator[tuple[JobSpec, Path, Prepared]]:
    """The order's dataset, sealed and planned in a temporary folder."""
    unwritten = msgspec.structs.replace(order, output=None, part_rows=None)
    spec = await asyncio.to_thread(orders.describe, unwritten, time.time())  # which may read objects and URLs
    home = new_home(data_dir)
    try:
        (home / "dataset").mkdir()
        (home / "plan").mkdir()
        folders = str(home / "dataset"), str(home / "plan")
        request = PrepareOrder(spec, *folders, spec.created, is_preview=True)
        prepared = await seal_and_plan(request, disk_quota, partial(offload, stores=spec.uses_stores), progress)
        yield routing.with_choices(spec, prepared.choices), home, prepared
    finally:
        shutil.rmtree(home)


def new_home(data_dir: Path) -> Path:
    """A temporary folder whose name holds the id of its process."""
    return Path(tempfile.mkdtemp(prefix=f"{PREVIEWS}{os.getpid()}-", dir=data_dir))


def sweep(data_dir: Path, old_s: float) -> None:
    """Remove folders of killed processes, and folders older than any preview takes."""
    for home in data_dir.glob(f"{PREVIEWS}*"):
        maker = home.name.removeprefix(PREVIEWS).partition("-")[0]
        is_there = maker.isdigit() and os.path.exists(f"/proc/{maker}")
        with suppress(FileNotFoundError):
            if maker == str(os.getpid()) or not is_there or time.time() - home.stat().st_mtime > old_s:
                shutil.rmtree(home, ignore_errors=True)


async def validate(
    order: JobOrder, data_dir: Path, progress: Progress, disk_quota: DiskQuota | None = None
) -> SealReport:
    """Check every row. `disk_quota`: where what is unpacked meanwhile counts; None: nowhere."""
    async with _prepared(order, data_dir, progress, disk_quota) as (_, _, prepared):
        return prepared.report


async def plan(
    order: JobOrder, data_dir: Path, progress: Progress, disk_quota: DiskQuota | None = None, *,
    count_reused: CountReused,
) -> tuple[SealReport, Explanation | None]:  # fmt: skip
    """Explain in which order the rows would run. The explanation is None where the dataset was refused."""
    async with _prepared(order, data_dir, progress, disk_quota) as (spec, home, prepared):
        if prepared.plan is None:
            return prepared.report, None
        explained = explain(prepared.plan, [model.name for model in spec.models])
        notes = [*_unfetched(prepared.report), *routing.sentences(spec), *asking_again.plan_notes(spec)]
        reused = await _reused(spec, home, count_reused)
        sample = None
        if spec.sample is not None and spec.sample.rows < prepared.plan.rows:
            request = PreviewOrder(str(home / "plan"), str(home / "dataset"), spec.sample)
            answer = await offload(PREVIEW, msgspec.json.encode(request), progress)
            sample = msgspec.json.decode(answer, type=PlanSample)
        notes += [reused.note] if reused.note else []
        return prepared.report, msgspec.structs.replace(explained, notes=notes, sample=sample, reused=reused.rows)


async def estimate(
    order: JobOrder,
    data_dir: Path,
    progress: Progress,
    rows_per_s: float | None,
    disk_quota: DiskQuota | None = None,
    *,
    jobs: Sequence[JobView] = (),
    count_reused: CountReused,
) -> tuple[SealReport, Estimate | None]:
    """Estimate tokens, cost and, at the rate given, time. The estimate is None where the dataset was refused.

    Args: jobs: earlier ones, the newest first, which tell how long answers are.
    """
    async with _prepared(order, data_dir, progress, disk_quota) as (spec, home, prepared):
        if prepared.plan is None:
            return prepared.report, None
        lengths = learn(jobs, [model.name for model in spec.models], spec.work)
        request = EstimateOrder(spec, str(home / "dataset"), str(home / "plan"), rows_per_s, lengths)
        answer = await offload(
            "batchmill.jobs.intake.estimate:estimate_offloaded",
            msgspec.json.encode(request),
            progress,
            stores=spec.uses_stores,
        )
        found = msgspec.json.decode(answer, type=Estimate)
        notes = [*_unfetched(prepared.report), *routing.sentences(spec), *found.notes]
        reused = await _reused(spec, home, count_reused)
        notes += [reused.note] if reused.note else []
        if not reused.rows:
            return prepared.report, msgspec.structs.replace(found, notes=notes)
        takes_over = "take over results of earlier jobs, which costs nothing"
        if spec.sample is not None:
            notes.append(
                f"{reused.rows:,} of the rows of the whole job {takes_over}; the figures count all of the sample"
            )
        else:
            rest = found.run - reused.rows
            notes.append(f"{reused.rows:,} of the rows that run {takes_over}: the figures are of the {rest:,} others")
            found = _of_rows(found, rest)
        return prepared.report, msgspec.structs.replace(found, notes=notes)


def _of_rows(found: Estimate, rows: int) -> Estimate:
    """What so many of its rows use: the others take over results, as many of each model."""
    share = rows / found.run if found.run else 0.0
    models = [
        msgspec.structs.replace(
            model, input_tokens=_tokens(model.input_tokens, share), output_tokens=_tokens(model.output_tokens, share),
            cost=_scaled(model.cost, share), cost_input=_scaled(model.cost_input, share),
            cost_max=_times(model.cost_max, share),
        )
        for model in found.models
    ]  # fmt: skip
    return msgspec.structs.replace(
        found, models=models, input_tokens=_tokens(found.input_tokens, share),
        output_tokens=_tokens(found.output_tokens, share), cost=_scaled(found.cost, share),
        cost_input=_scaled(found.cost_input, share), time_s=_times(found.time_s, share),
        time_s_min=_times(found.time_s_min, share), cost_max=_times(found.cost_max, share),
    )  # fmt: skip


def _times(value: float | None, share: float) -> float | None:
    return None if value is None else value * share


def _scaled(range_: EstimateRange | None, share: float) -> EstimateRange | None:
    return None if range_ is None else EstimateRange(range_.low * share, range_.mid * share, range_.high * share)


def _tokens(range_: EstimateRange | None, share: float) -> EstimateRange | None:
    scaled = _scaled(range_, share)
    return None if scaled is None else EstimateRange(round(scaled.low), round(scaled.mid), round(scaled.high))


async def _reused(spec: JobSpec, home: Path, count: CountReused) -> ReuseCount:
    """How many of the planned rows would take over the result of an earlier job."""
    return await count(spec, str(home / "dataset"), str(home / "plan")) if reuses(spec) else ReuseCount(0)


def _unfetched(report: SealReport) -> list[str]:
    """The note about adapters that are fetched only for a real job."""
    if not report.adapters:
        return []
    adapters = "1 adapter" if len(report.adapters) == 1 else f"{len(report.adapters):,} adapters"
    return [f"{adapters} are fetched when the job comes ({report.adapters[0]} …): their rows count as their base's"]
