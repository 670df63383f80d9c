"""Publishes a job's results: copied while it runs if possible, otherwise gathered in a child process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from batchmill.children.offload import Offload
from batchmill.datasets.sealed import load_seal
from batchmill.errors import BatchmillError, JobPaused
from batchmill.jobs.ledger.files import JobFiles, is_folder
from batchmill.jobs.ledger.plan import Plan, PlanReader
from batchmill.jobs.ledger.scratch import to_its_end
from batchmill.jobs.results.object_results import UPLOAD, UploadOrder
from batchmill.jobs.results.parts.part_writers import Nodes
from batchmill.jobs.results.parts.parts_run import PartsRun
from batchmill.jobs.results.results import GatherOrder, Manifest, can_stream, output_kind, stored_name
from batchmill.jobs.results.streaming_results import StreamingGather
from batchmill.object_store.urls import is_object_url
from batchmill.part_files import HeldFile
from batchmill.store.file_log import FILE_BYTES_MAX
from batchmill.store.segments.blocks import open_segments
from batchmill.types import Commit, RowError, Sample, SegmentPlace, SegmentRef
from batchmill.wire.job_spec import JobSpec

GATHER = "batchmill.jobs.results.gathering:gather_offloaded"
GATHER_PARTIAL = "batchmill.jobs.results.gathering:partial_offloaded"
UPLOADED = "upload"  # the name of results on their way to an object store
Committed = list[tuple[int, SegmentRef]]


class CountedRun(Protocol):
    """A run of a job's rows, as publishing sees it."""

    plan: PlanReader
    counted_hooks: list[Callable[[Commit], None]]

    def pause(self, error: Exception) -> None: ...


class Publishing:
    """The results of one job. `follow` a fresh run and they are written as its commits are counted."""

    def __init__(
        self, spec: JobSpec, files: JobFiles, offload: Offload, term: str, nodes: Nodes | None = None, *,
        is_logged: bool = False,
    ) -> None:  # fmt: skip
        """Args: term: see `Term.path`. nodes: of a cluster, which may write parts. is_logged: short results
        are stored with the end of the job, see `store.file_log`.
        """
        self._is_logged = is_logged
        self.held: list[HeldFile] = []  # short results that are to be stored with the end
        self._nodes = nodes
        self._spec, self._files, self._offload, self._term = spec, files, offload, term
        self._is_in_parts = spec.output is not None and is_folder(spec.output)
        self._output = output_of(spec, files)
        self._queue: asyncio.Queue[SegmentRef | None] = asyncio.Queue()
        self._copying: asyncio.Task[Manifest] | None = None

    def follow(self, run: CountedRun, earlier: Sequence[SegmentRef] = ()) -> None:
        """Copy what `run` counts, if its plan keeps the file's order.

        Args: earlier: what the run has counted before, if it has.
        """
        if self._is_in_parts or self._spec.is_small:
            return
        if can_stream(self._output, run.plan.plan) and not load_seal(self._files.dataset).is_columnar:
            run.counted_hooks.append(self._counted)
            self._copying = asyncio.create_task(self._copy(run.plan.plan.rows, earlier))
            self._copying.add_done_callback(lambda task: self._copied(task, run))

    def _copied(self, task: asyncio.Task[Manifest], run: CountedRun) -> None:
        """Handle an error of copying: a full disk pauses the job; after any other error, results are gathered."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, JobPaused):
            run.pause(error)
        elif self._copying is task:
            self._copying = None

    def _counted(self, commit: Commit) -> None:
        self._queue.put_nowait(commit.ref)

    async def _copy(self, rows: int, earlier: Sequence[SegmentRef]) -> Manifest:
        ref = await self._queue.get()  # a job whose rows wait holds no open file
        gather = StreamingGather(open_segments(self._files.segment_place), self._output, self._spec.form, rows)
        try:
            await asyncio.to_thread(gather.offer, earlier)
            while ref is not None:
                await asyncio.to_thread(gather.offer, [ref])
                ref = await self._queue.get()
            return await asyncio.to_thread(gather.finish)
        finally:
            gather.discard()

    async def abandon(self) -> None:
        """Discard copied results: they will be gathered when the job ends."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.cancel()
            await asyncio.wait({copying})

    async def finish(
        self, segments: SegmentPlace, committed: Committed, progress: Callable[[float], None], *,
        unrun: RowError | None = None,
    ) -> Manifest:  # fmt: skip
        """Write the rest of the results, audit and publish them; `unrun` as in `results.GatherOrder`."""
        if self._is_in_parts:
            return await self._finish_parts(segments, committed, progress, unrun)
        manifest = await self._finish_files(segments, committed, progress, unrun)
        if self._spec.output is None or not is_object_url(self._spec.output):
            return manifest
        order = UploadOrder(manifest, self._spec.output, self._spec.form.errors_apart, self._term)
        return msgspec.json.decode(await self._offload(UPLOAD, msgspec.json.encode(order), progress), type=Manifest)

    async def _finish_files(
        self, segments: SegmentPlace, committed: Committed, progress: Callable[[float], None], unrun: RowError | None
    ) -> Manifest:
        """Publish the result files on this machine."""
        if self._copying is not None:
            self._queue.put_nowait(None)
            copying, self._copying = self._copying, None
            return await copying
        if self._spec.is_small and unrun is None and (rows := self._rows_in_order()) is not None:
            refs = [ref for _, ref in committed]
            if self._is_logged and sum(ref.length for ref in refs) <= FILE_BYTES_MAX:  # a thread would take longer
                return self._write(segments, refs, rows, self.held)
            work = asyncio.get_running_loop().run_in_executor(None, self._write, segments, refs, rows)
            return await to_its_end(work)  # whatever comes next writes the same file
        order = gather_order(self._spec, self._files, segments, committed, self._output, unrun=unrun)
        request = msgspec.json.encode(order)
        return msgspec.json.decode(await self._offload(GATHER, request, progress), type=Manifest)

    async def _finish_parts(
        self, segments: SegmentPlace, committed: Committed, progress: Callable[[float], None], unrun: RowError | None
    ) -> Manifest:
        """Publish parts in a folder."""
        order = gather_order(self._spec, self._files, segments, committed, self._output, unrun=unrun)
        # A path forgets its last slash.
        order = msgspec.structs.replace(order, output=self._spec.output)
        return await PartsRun(self._spec, self._files, self._offload, self._term, self._nodes).run(order, progress)

    def hold(
        self, segments: SegmentPlace, committed: Committed, blocks: dict[str, list[tuple[int, bytes]]], plan: Plan
    ) -> Manifest | None:  # fmt: skip
        """Have short results of a small job in `held`; None: `finish` publishes them, and reports what is wrong.

        Args: plan: its first, by which all rows ran.
        """
        refs = [ref for _, ref in committed]
        if not self._is_logged or sum(ref.length for ref in refs) > FILE_BYTES_MAX:
            return None
        try:
            place = msgspec.structs.replace(segments, blocks=blocks)
            return self._write(place, refs, plan.rows, self.held) if can_stream(self._output, plan) else None
        except (BatchmillError, OSError):
            return None

    def _rows_in_order(self) -> int | None:
        """The rows of a job that ran once and in the order of the file; None: another one."""
        if self._files.plan(1).exists():
            return None
        reader = PlanReader(self._files.plan(0))
        return reader.plan.rows if can_stream(self._output, reader.plan) else None

    def _write(
        self, segments: SegmentPlace, refs: list[SegmentRef], rows: int, held: list[HeldFile] | None = None
    ) -> Manifest:  # fmt: skip
        if held is not None:
            held.clear()
        gather = StreamingGather(open_segments(segments), self._output, self._spec.form, rows, held=held)
        try:
            gather.offer(refs)
            return gather.finish()
        finally:
            gather.discard()


def output_of(spec: JobSpec, files: JobFiles) -> Path:
    """The path of the results: the caller's, or in the job's own folder; there, too, until they are uploaded."""
    if spec.output is not None and is_object_url(spec.output) and not is_folder(spec.output):
        kind, packed = output_kind(Path(spec.output))
        return files.home / f"{UPLOADED}.{kind}{packed}"
    return files.output(stored_name(spec.output_format)) if spec.output is None else Path(spec.output)


async def write_partial(
    spec: JobSpec, files: JobFiles, segments: SegmentPlace, committed: Committed, offload: Offload,
    *, is_numbered: bool = False, sample: Sample | None = None,
) -> str:  # fmt: skip
    """Gather the rows counted so far into a new file; return its path. Args: as `ports.jobs.Jobs.partial`."""
    path = files.partial(f"{uuid.uuid4().hex}.jsonl")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not any(files.home.glob("plan-*/plan.json")):  # no row has run
        await asyncio.to_thread(path.touch, 0o600)
        return str(path)
    gathered = gather_order(spec, files, segments, committed, path)
    gathered = msgspec.structs.replace(gathered, is_numbered=is_numbered, sample=sample)
    order = msgspec.json.encode(gathered)
    try:
        await offload(GATHER_PARTIAL, order, lambda _: None, project=spec.project, stores=spec.uses_stores)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return str(path)


def gather_order(
    spec: JobSpec, files: JobFiles, segments: SegmentPlace, committed: Committed, output: Path, *,
    unrun: RowError | None = None,
) -> GatherOrder:  # fmt: skip
    """The order for gathering this job's results."""
    plans = sorted(files.home.glob("plan-*/plan.json"), key=lambda path: int(path.parent.name.partition("-")[2]))
    if not plans:
        raise BatchmillError(f"the job {spec.id} has no plan yet: no row of it has run", code="no_results")
    return GatherOrder(
        dataset=str(files.dataset),
        plans=[str(path.parent) for path in plans],
        segments=segments,
        committed=committed,
        form=spec.form,
        output=str(output),
        unrun=unrun,
    )
