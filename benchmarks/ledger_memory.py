"""Peak memory of `ledger verify`, `ledger rebuild` and the plan of a retry, by the rows of the job: it is constant.

Each runs in a process of its own, as the child of an owner does. The job is made for it: a dataset that is sealed and
planned, segments with an outcome for every row, of which a sixteenth are errors, and what a ledger has of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import msgspec
from many_rows import arguments, processor_s

from batchmill.datasets.sealing import SealOrder, seal_with_retry
from batchmill.jobs import repair
from batchmill.jobs.intake import retry_plan
from batchmill.jobs.ledger import audit, plan
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.snapshot import CommitRecord, Counters, ShardRecord, Snapshot
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, SegmentHead, error_meta, frame_lines
from batchmill.types import DatasetSpec, ModelSpec, Policy, RowError, SegmentRef, Shard
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

LIMIT_GIB, LIMIT_GROWTH_BYTES = 1.0, 0.5  # bytes of memory for a further row, at most
JOB = "job"
BLOCK_ROWS, BLOCKS_OF_COMMIT, FAILED_BLOCKS = 1024, 16, 16  # one of so many blocks is of errors
ERROR = RowError("function_error", "ValueError: no")
STEPS = {
    "verify": audit.verify_offloaded, "rebuild": repair.rebuild_offloaded, "retry": retry_plan.plan_retry_offloaded,
}  # fmt: skip


def make_job(folder: Path, rows: int) -> None:
    """Write the files of a job that has ended, and the orders of the steps."""
    source, files = folder / "in.jsonl", JobFiles(folder / "data", JOB)
    with source.open("w") as file:
        for piece in arguments(rows):
            file.write(piece)
    for place in (files.dataset, files.segments, files.plan(0)):
        place.mkdir(parents=True)
    spec = JobSpec(
        id=JOB, dataset=DatasetSpec([str(source)]), models=[ModelSpec("m", "function", "app.py:f")], form=OpenAIForm(),
        policy=Policy(), output=None, identity="identity", code={}, created=1.0,
    )  # fmt: skip
    seal_with_retry(SealOrder(dataset=spec.dataset), files.dataset, lambda _: None)
    plan.make(
        plan.PlanOrder([(0, None)], [plan.ShardRows(65_536, 16_384)]), files.dataset, files.plan(0), lambda _: None
    )
    shards = plan.PlanReader(files.plan(0)).shards()
    commits = list(write_segments(files, shards))
    failed = sum(commit.rows_failed for commit in commits)
    counted: dict[int, int] = {}
    for commit in commits:
        counted[commit.shard] = counted.get(commit.shard, 0) + 1
    before = Snapshot(
        "completed", 0, Counters(rows=rows, rows_ok=rows - failed, rows_failed=failed),
        [record_of(shard, counted[shard.number]) for shard in shards], commits, errors=failed,
    )  # fmt: skip
    audited = audit.AuditOrder(spec, str(files.data_dir), files.segment_place, before)
    blocks = [(0, SegmentRef(commit.segment, commit.offset, commit.length)) for commit in commits]
    retried = retry_plan.RetryOrder(spec, str(files.data_dir), None, files.segment_place, blocks, 1)
    (folder / "audit.json").write_bytes(msgspec.json.encode(audited))
    (folder / "retry.json").write_bytes(msgspec.json.encode(retried))


def record_of(shard: Shard, commits: int) -> ShardRecord:
    n = shard.hi - shard.lo
    bitmap = ((1 << n) - 1).to_bytes(-(-n // 8), "little")
    return ShardRecord(0, shard.number, shard.lo, shard.hi, 1, commits, n, bitmap)


def write_segments(files: JobFiles, shards: plan.Shards) -> Iterator[CommitRecord]:
    """Write an outcome for every row, and yield what the ledger has of it."""
    file, number = SegmentFile(files.segments, SegmentHead(JOB, "identity", "w1")), 0
    for shard in shards:
        step = BLOCK_ROWS * BLOCKS_OF_COMMIT
        for seq, first in enumerate(range(shard.lo, shard.hi, step)):
            blocks, failed = [], 0
            for lo in range(first, min(first + step, shard.hi), BLOCK_ROWS):
                rows, number = range(lo, min(lo + BLOCK_ROWS, shard.hi)), number + 1
                is_ok = number % FAILED_BLOCKS != 0
                failed += 0 if is_ok else len(rows)
                blocks.append(block(rows, shard.number, is_ok))
            ref, n = file.append(b"".join(blocks)), min(first + step, shard.hi) - first
            yield CommitRecord(0, shard.number, seq, 1, ref.segment, ref.offset, ref.length, n - failed, failed, None)
    file.close()


def block(rows: range, shard: int, is_ok: bool) -> bytes:
    kind = "result" if is_ok else "error"
    lines = "".join(f'{{"custom_id":"{row}","{kind}":{row}}}\n' for row in rows).encode()
    meta = BlockMeta() if is_ok else error_meta([ERROR] * len(rows), BlockMeta().usage)
    return frame_lines(lines, None, rows, rows, generation=0, shard=shard, epoch=1, ok=is_ok, meta=meta)


def run_step(step: str, folder: Path) -> None:
    """Do one step, and print what it cost."""
    order = (folder / ("retry.json" if step == "retry" else "audit.json")).read_bytes()
    began = processor_s()
    answer = msgspec.json.decode(STEPS[step](order, lambda _: None))
    assert not answer.get("broken") and not answer.get("damaged"), f"the job is sound, but {answer}"
    print(json.dumps({"cpu_s": processor_s() - began, "peak_bytes": harness.read_status(os.getpid())}))


def measure(rows: int) -> dict[str, int]:
    """Step -> the peak of its process."""
    peaks = {}
    with harness.work_folder() as folder:
        command = [sys.executable, __file__, "--folder", folder]
        harness.run_whole([*command, "--make", rows], log=folder / "log")
        for step in STEPS:
            began = time.perf_counter()
            figures = json.loads(harness.run_whole([*command, "--step", step], log=folder / "log").log)
            peaks[step] = figures["peak_bytes"]
            print(
                f"{step} of {rows:,} rows: {peaks[step] / 2**20:,.0f} MiB at most, {figures['cpu_s']:.1f} s of "
                f"processor time, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[2, 20], help="rows; default: 2 20")
    parser.add_argument("--make", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.make:
        make_job(wanted.folder, wanted.make)
    elif wanted.step:
        run_step(wanted.step, wanted.folder)
    else:
        report([int(millions * 1e6) for millions in wanted.millions])


def report(sizes: list[int]) -> None:
    found = [measure(rows) for rows in sizes]
    for step in STEPS:
        harness.print_limit(f"{step}: its process", max(peaks[step] for peaks in found) / 2**30, LIMIT_GIB, "GiB")
        if len(sizes) > 1:
            growth = (found[-1][step] - found[0][step]) / (sizes[-1] - sizes[0])
            harness.print_limit(f"{step}: memory of a further row", growth, LIMIT_GROWTH_BYTES, "bytes")


if __name__ == "__main__":
    main()
