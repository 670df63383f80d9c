"""What 100 Ray actors on three nodes cost their owner and its driver: processor time an hour, and a message.

    BATCHMILL_RAY_PYTHON=.venv-ray/bin/python python benchmarks/ray_actors.py

Each actor hosts a worker of the `http` engine, whose endpoint answers a row in a second, so that each commits about
once a second; then nobody has a row. This process is the owner's side of Ray: the real executor, whose messages are
counted, without ledger and database, which `owner_commits.py` measures. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import harness
from local_endpoint import running_endpoint
from processor_time import own_cpu_s

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
from ray_support import Nodes, ray_nodes, ray_python  # noqa: E402

from batchmill.datasets.orders import SealOrder  # noqa: E402
from batchmill.datasets.sealing import seal  # noqa: E402
from batchmill.executors.ray.executor import RayExecutor, RayWorker  # noqa: E402
from batchmill.types import DatasetSpec, Lease, Limits, ModelSpec, SegmentPlace  # noqa: E402
from batchmill.types.cluster import ClusterEntry  # noqa: E402
from batchmill.wire.messages import Grant, Open, Ready, Record, RequestRows, Revoke, Start  # noqa: E402
from batchmill.wire.rows.forms import OpenAIForm  # noqa: E402

NODES = 3
JOB = "job_1"
SHARD_ROWS, DELAY_MS = 64, 1000.0
STARTING_MAX = 6  # at a time: what starts takes a whole core
HOUR_S, MANY = 3600.0, 1000
DRIVER = "batchmill.executors.ray.driver"


@dataclass
class Used:
    """What was used since the last look."""

    seconds: float
    processor_s: dict[str, float]  # by who
    messages: int
    commits: int


class Owner:
    """Grants rows to every worker that asks, and counts messages and commits."""

    def __init__(self, executor: RayExecutor, opened: Open) -> None:
        self._executor, self._opened = executor, opened
        self._shards = itertools.count()
        self.ready = self.messages = self.commits = 0
        self.grants = True

    async def serve(self, worker: RayWorker) -> None:
        async for message in worker.messages():
            self.messages += 1
            match message:
                case Ready():
                    self.ready += 1
                    self._send(worker, self._opened)
                    self._grant(worker)
                case RequestRows(_, grants):
                    for _ in range(grants):
                        self._grant(worker)
                case Record():
                    self.commits += 1  # as an owner, it answers none that carries no blocks

    def _grant(self, worker: RayWorker) -> None:
        if self.grants:
            shard = next(self._shards)
            first = shard * SHARD_ROWS
            self._send(worker, Grant(Lease(JOB, 0, shard, 1), 0, first, SHARD_ROWS, first, first))

    def _send(self, worker: RayWorker, message: object) -> None:
        self.messages += 1
        worker.send(message)

    def revoke(self, workers: list[RayWorker]) -> None:
        self.grants = False
        for worker in workers:
            self._send(worker, Revoke(JOB))


def sealed(folder: Path, rows: int) -> Open:
    with (folder / "in.jsonl").open("w") as file:
        for number in range(rows):
            body = {"model": "m", "messages": [{"role": "user", "content": f"text {number}"}]}
            row = {"custom_id": str(number), "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    for name in ("dataset", "segments"):
        (folder / name).mkdir()
    seal(SealOrder(DatasetSpec([str(folder / "in.jsonl")])), folder / "dataset", lambda _: None)
    return Open(JOB, "same", OpenAIForm(), str(folder / "dataset"), SegmentPlace(str(folder / "segments")))


def processor_s(driver: int, nodes: Nodes) -> dict[str, float]:
    """Seconds of processor time so far, by who."""
    found: Counter[str] = Counter(owner=time.process_time(), driver=own_cpu_s(driver))
    for pid in harness.tree_of(nodes.pid)[1:]:
        name = harness.name_of(pid)
        kind = {"gcs_server": "head", "raylet": "raylets"}.get(name, "actors" if name.startswith("ray::") else "agents")
        found[kind] += own_cpu_s(pid)
    return dict(found)


async def watch(owner: Owner, driver: int, nodes: Nodes, seconds: float) -> Used:
    before, began = processor_s(driver, nodes), time.monotonic()
    messages, commits = owner.messages, owner.commits
    await asyncio.sleep(seconds)
    after, took = processor_s(driver, nodes), time.monotonic() - began
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    return Used(took, used, owner.messages - messages, owner.commits - commits)


def show(what: str, used: Used, actors: int) -> None:
    print(f"{what}: {used.messages / used.seconds:,.0f} messages/s, {used.commits / used.seconds:,.1f} commits/s")
    for name in ("owner", "driver", "head", "raylets", "agents", "actors"):
        seconds = used.processor_s.get(name, 0.0)
        share = seconds / used.seconds
        message_us = seconds / max(used.messages, 1) * 1e6
        print(
            f"  {name}: {share * HOUR_S:,.0f} s of processor time an hour, {message_us:,.0f} us a message; "
            f"{MANY:,} such actors: {share * MANY / actors:.2f} cores"
        )


async def measure(folder: Path, nodes: Nodes, base_url: str, arguments: argparse.Namespace) -> None:
    opened = sealed(folder, arguments.rows)
    executor = RayExecutor(ClusterEntry("ray", nodes.address, ray_python()), folder, lambda model: {})
    owner = Owner(executor, opened)
    model = ModelSpec("m", "http", "remote", base_url=base_url, limits=Limits(in_flight_max=1))
    began = time.monotonic()
    workers: list[RayWorker] = []
    serving: list[asyncio.Task[None]] = []
    for number in range(arguments.actors):
        worker = await executor.start(Start(f"w{number}", model, str(folder / "home"), number))
        workers.append(worker)
        serving.append(asyncio.create_task(owner.serve(worker)))
        while owner.ready + STARTING_MAX <= len(workers) or (number == arguments.actors - 1 and owner.ready <= number):
            if any(each.done() for each in serving):
                raise harness.CommandFailed(f"a worker has ended; see {folder}/home")
            await asyncio.sleep(0.1)
    print(f"{len(workers)} actors on {NODES} nodes were ready after {time.monotonic() - began:.0f} s", flush=True)
    driver = int((folder / "workers" / "ray-driver.pid").read_text().split()[0])
    show("working", await watch(owner, driver, nodes, arguments.seconds), len(workers))
    owner.revoke(workers)
    await asyncio.sleep(5.0)
    show("idle", await watch(owner, driver, nodes, arguments.seconds), len(workers))
    resident = [harness.read_status(pid) or 0 for pid in harness.tree_of(nodes.pid) if is_actor(pid)]
    largest = f"{max(resident) / 2**20:,.0f} MiB"
    print(f"resident: an actor at most {largest}, the driver {mib(driver)}, this process {mib(os.getpid())}")
    for task in serving:
        task.cancel()
    await executor.close()


def is_actor(pid: int) -> bool:
    return harness.name_of(pid).startswith("ray::HostedWorker")


def mib(pid: int) -> str:
    return f"{(harness.read_status(pid) or 0) / 2**20:,.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two measurements")
    arguments = parser.parse_args()
    # Those that a worker runs in a second, twice over, and two shards ahead of it.
    arguments.rows = int(arguments.actors * (4 * arguments.seconds + 900 + 2 * SHARD_ROWS))
    share = -(-arguments.actors // NODES)
    with harness.work_folder() as folder, ExitStack() as stack:
        endpoint = stack.enter_context(running_endpoint(folder, DELAY_MS))
        nodes = stack.enter_context(ray_nodes(0, *[share] * NODES))
        asyncio.run(measure(folder, nodes, endpoint.base_url, arguments))


if __name__ == "__main__":
    main()
