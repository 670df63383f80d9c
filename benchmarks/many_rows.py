"""Sealing and planning millions of real rows: time must be linear in the rows, and memory constant.

Two kinds of rows: requests to a language model, all different, which are ordered by adapter, shared prefix and cost;
and the arguments of a function, which keep the order of the file. The rows are made on the spot and removed: a request
takes about 300 bytes of disk with its index, 600 while it is sorted.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness

from batchmill.datasets.sealing import SealOrder, seal_with_retry
from batchmill.jobs.ledger import plan
from batchmill.types import DatasetSpec

LIMIT_GIB, LIMIT_GROWTH = 1.0, 1.15  # of the time of a row, from the smallest size to the largest
DISK_BYTES = {"requests": 600, "arguments": 60}  # of a row, at most
ADAPTERS, PROMPTS = 50, 1000
BATCH_ROWS = 100_000
GIB = 1 << 30
COMPLETIONS = "/v1/completions"


def write_rows(path: Path, kind: str, rows: int) -> None:
    """The input file. The same rows each time: the generator has a fixed seed."""
    with path.open("w") as file:
        for piece in requests(rows) if kind == "requests" else arguments(rows):
            file.write(piece)


def requests(rows: int) -> Iterator[str]:
    """Lines of requests: one of many system prompts, 128 bytes long, and a text that no other row has."""
    generator = random.Random(7)
    prompts = [f"prompt {number} ".ljust(128, "p") for number in range(PROMPTS)]
    line = '{"custom_id":"c%d","url":"%s","body":{"model":"a%d","prompt":"%s%d","temperature":0,"max_tokens":%d}}\n'
    for first in range(0, rows, BATCH_ROWS):
        yield "".join(
            line
            % (row, COMPLETIONS, generator.randrange(ADAPTERS), generator.choice(prompts), row, 1 + row * 7919 % 500)
            for row in range(first, min(first + BATCH_ROWS, rows))
        )


def arguments(rows: int) -> Iterator[str]:
    for first in range(0, rows, BATCH_ROWS):
        yield "".join(f'{{"x":{row}}}\n' for row in range(first, min(first + BATCH_ROWS, rows)))


def prepare(kind: str, folder: Path) -> None:
    """Seal and plan, as a child process of an owner does; prints the seconds of each."""
    adapters = [f"a{number}" for number in range(ADAPTERS)] if kind == "requests" else []
    spec = DatasetSpec([str(folder / "in.jsonl")])
    if adapters:
        order = SealOrder(
            dataset=spec, keys=True, fold="deterministic", default=None, urls=[frozenset([COMPLETIONS])],
            targets={name: (0, number) for number, name in enumerate(adapters)},
        )  # fmt: skip
    else:
        order = SealOrder(dataset=spec)
    dataset, home = folder / "dataset", folder / "plan"
    dataset.mkdir()
    home.mkdir()
    began, cpu = time.perf_counter(), processor_s()
    report = seal_with_retry(order, dataset, lambda _: None)
    sealed, sealed_cpu = time.perf_counter(), processor_s()
    targets: list[tuple[int, str | None]] = [(0, name) for name in adapters] or [(0, None)]
    made = plan.make(
        plan.PlanOrder(targets, [plan.ShardRows(1024 if adapters else 65_536, 16_384)], keys=order.keys),
        dataset, home, lambda _: None,
    )  # fmt: skip
    planned = time.perf_counter()
    sizes = {path.name: path.stat().st_size for path in home.iterdir()}
    assert (report.rejected, made.followers, made.leaders) == (0, 0, report.seal.rows), "every row runs"
    assert made.permuted == bool(adapters), "only requests are ordered"
    figures = {
        "seal_s": sealed - began, "seal_cpu_s": sealed_cpu - cpu,
        "plan_s": planned - sealed, "plan_cpu_s": processor_s() - sealed_cpu, "plan_bytes": sum(sizes.values()),
    }  # fmt: skip
    print(json.dumps(figures))


def processor_s() -> float:
    """Processor time of this process and of its children that have ended: the validators."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(kind: str, rows: int) -> tuple[float, int]:
    """(processor seconds of a million rows, peak of the largest process in bytes)."""
    peaks = harness.Peaks()
    with harness.work_folder() as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * rows * DISK_BYTES[kind]:
            raise harness.CommandFailed(
                f"{rows:,} rows of {kind} need {2 * rows * DISK_BYTES[kind] / GIB:,.0f} GiB of free disk to be safe; "
                f"{free / GIB:,.0f} GiB are free: name fewer with --millions"
            )
        write_rows(folder / "in.jsonl", kind, rows)
        command = [sys.executable, __file__, "--prepare", kind, "--folder", folder]
        finished = harness.run_whole(command, log=folder / "log", peaks=peaks)
    figures = json.loads(finished.log)
    cpu = (figures["seal_cpu_s"] + figures["plan_cpu_s"]) * 1e6 / rows
    print(
        f"{rows:,} {kind}: sealed in {figures['seal_s']:.1f} s ({figures['seal_cpu_s']:.1f} s of processor time), "
        f"planned in {figures['plan_s']:.2f} s ({figures['plan_cpu_s']:.2f} s); {cpu:.2f} s a million; "
        f"plan of {figures['plan_bytes']:,} bytes",
        flush=True,
    )
    for name, peak in peaks.largest():
        print(f"  {name or '(ended at once)'}: {peak / 2**20:,.0f} MiB at most", flush=True)
    return cpu, peaks.largest()[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[5, 20], help="rows; default: 5 20")
    parser.add_argument("--kinds", nargs="+", choices=list(DISK_BYTES), default=list(DISK_BYTES))
    parser.add_argument("--prepare", choices=list(DISK_BYTES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.prepare:
        prepare(wanted.prepare, wanted.folder)
        return
    for kind in wanted.kinds:
        found = [measure(kind, int(millions * 1e6)) for millions in wanted.millions]
        harness.print_limit(f"{kind}: largest process", max(peak for _, peak in found) / GIB, LIMIT_GIB, "GiB")
        growth = found[-1][0] / found[0][0]
        harness.print_limit(f"{kind}: time of a row, last size against first", growth, LIMIT_GROWTH, "times")


if __name__ == "__main__":
    main()
