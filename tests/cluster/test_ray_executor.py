"""Workers as actors of a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from contract.executor_suite import ROWS, ExecutorSuite
from msgspec.structs import replace
from ray_support import Nodes, ray_nodes, ray_python

from batchmill.engines.llm.launch import SMALL_CPU_CORES
from batchmill.executors.ray.checks import CLOCK_S_MAX
from batchmill.executors.ray.executor import DRIVER_PID, PROBE, UNSENT_BYTES, RayExecutor
from batchmill.executors.ray.frames import Beat
from batchmill.types import Lease, LiveRequest, ModelSpec, Needs, Provision
from batchmill.types.cluster import Check, ClusterEntry
from batchmill.wire.messages import (
    Answered,
    AnswerLive,
    Answers,
    Drain,
    Failed,
    Grant,
    Provide,
    Ready,
    ReplyChunk,
    Start,
)

WAITS = """
import time
from pathlib import Path

def double(n):
    if n == 20:
        Path(__file__).with_name("reached").write_text("yes")
        time.sleep(600)
    return 2 * n
"""
VLLM = """#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi  # it is asked whether it has vLLM
echo "$OMP_NUM_THREADS" > {found}
exit 1
"""
WRONG_CLOCK = Path(__file__).parent.parent / "fakes" / "wrong_clock"
STORE_BYTES = 256 * 1024
LONG_REPLY = 3 * STORE_BYTES  # a worker sends so much before its owner has to answer
SMALL_STORE = {
    "STORE_BYTES": str(STORE_BYTES),
    "RAY_automatic_object_spilling_enabled": "0",
    "RAY_local_fs_capacity_threshold": "0",  # as if the disk were full
}
HOSTILE = Path(__file__).parent.parent / "fakes" / "hostile_actor.py"


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(2, 1) as cluster:
        yield cluster


def entry(nodes: Nodes, *, trusted: bool = True) -> ClusterEntry:
    return ClusterEntry("ray", nodes.address, ray_python(), trusted)


async def flaws_of(executor: RayExecutor) -> list[Check]:
    """The checks of a cluster that fail, once all nodes have replied: those of a busy machine may be late."""
    while True:
        flaws = [each for each in (await executor.view()).checks if not each.is_ok]
        if all(each.name != "nodes reply" for each in flaws):
            return flaws


class TestRayExecutor(ExecutorSuite):
    @pytest.fixture
    async def executor(self, nodes, tmp_path):
        made = RayExecutor(entry(nodes), tmp_path, lambda model: {})
        yield made
        await made.close()

    async def test_what_waits_for_room_says_so(self, executor, start):
        """A worker that no node has room for waits, and says for what; its cluster is described beside it."""
        needs = Needs(cpus=64, resources={"spot": 1})
        worker = await executor.start(replace(start, model=replace(start.model, needs=needs)))
        assert await flaws_of(executor) == []
        while "needs" not in worker.waits:
            await asyncio.sleep(0)
        assert worker.waits == (
            "needs 64 CPUs; no node of the cluster has more than 2 CPUs; "
            "needs 1 of 'spot'; no node of the cluster has more than 0 of 'spot'"
        )
        worker.kill()
        assert await worker.wait() == -9 and not worker.is_lost

    async def test_a_node_without_the_data_directory_is_refused(self, executor, start, tmp_path):
        """A node that does not see the data directory runs nothing, and the user reads what to do."""
        worker = await executor.start(start)
        (probe,) = (tmp_path / "workers").glob(f"{PROBE}*")
        probe.unlink()
        failed = await self.expect(worker, Failed)
        assert failed.code == "data_dir_not_shared" and str(tmp_path) in failed.message
        assert await worker.wait() == 1

    async def test_an_engine_has_the_threads_of_its_cores(self, executor, start, tmp_path):
        """vLLM on a node takes as many cores as its model was given, and without that all, as on this machine."""
        python, found = tmp_path / "python", tmp_path / "found"
        python.write_text(VLLM.format(found=found))
        python.chmod(0o700)
        cores = len(os.sched_getaffinity(0))
        for needs, threads in ((Needs(cpus=1), "1"), (Needs(), str(cores) if cores <= SMALL_CPU_CORES else "")):
            model = ModelSpec("m", "llm", "an/id", python=str(python), needs=needs)
            worker = await executor.start(replace(start, model=model))
            await self.expect(worker, Failed)
            await worker.wait()
            assert found.read_text() == f"{threads}\n"

    async def test_a_worker_leaves_at_a_sigterm(self, executor, start, tmp_path):
        """A worker that gets SIGTERM in the middle of a row ends, and nobody is blamed for it."""
        (tmp_path / "app.py").write_text(WAITS)
        os.mkfifo(tmp_path / "reached")
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        self.open_job(worker, tmp_path)
        worker.send(Grant(Lease("job_1", 0, 0, 1), 0, 0, ROWS))
        await asyncio.to_thread((tmp_path / "reached").read_text)
        os.kill(worker.pid, signal.SIGTERM)
        assert await worker.wait() == -1 and worker.is_lost

    async def test_a_worker_leaves_a_node_that_will_end(self, executor, start, nodes):
        """A worker whose node gets a termination notice ends, and nobody is blamed for it."""
        needs = Needs(resources={"node1": 1})
        worker = await executor.start(replace(start, model=replace(start.model, needs=needs)))
        await self.expect(worker, Ready)
        await asyncio.to_thread(nodes.does, "drain 1")
        assert await worker.wait() == -1 and worker.is_lost
        await asyncio.to_thread(nodes.does, "remove 1")

    async def test_a_placement_that_ray_refuses_fails_alone(self, executor, start):
        """A worker that Ray does not accept ends, with Ray's words in its log; the driver serves the others."""
        needs = Needs(resources={"GPU": 1})
        worker = await executor.start(replace(start, worker="w2", model=replace(start.model, needs=needs)))
        assert await worker.wait() == 1 and not worker.is_lost
        assert "num_gpus" in (Path(start.home) / "w2.log").read_text()
        await self.expect(await executor.start(start), Ready)

    async def test_a_driver_that_fails_says_why(self, executor, start):
        """A bug of the driver is told in its words. Its workers are lost, and the next driver runs others."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        executor.send(Beat())  # nothing that an owner says
        assert await worker.wait() == -1 and worker.is_lost
        while not executor.why:
            await asyncio.sleep(0)
        assert "the driver failed: ValidationError" in executor.why
        await self.expect(await executor.start(replace(start, worker="w2")), Ready)

    async def test_what_a_dead_owner_left_is_swept(self, executor, start):
        """Sweeping ends the driver: its workers are lost, which nobody is blamed for. The next driver runs others."""
        worker = await executor.start(start)
        await self.expect(worker, Ready)
        executor.sweep()
        assert await worker.wait() == -1 and worker.is_lost
        second = await executor.start(replace(start, worker="w2"))
        await self.expect(second, Ready)


@pytest.fixture
async def two_owners(nodes, tmp_path):
    """Two owners of different data directories, each with a worker of the same name, and its messages."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    made = [RayExecutor(entry(nodes), tmp_path / name, lambda model: {}) for name in ("one", "two")]
    workers = []
    for name, executor in zip(("one", "two"), made, strict=True):
        model = ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double")
        workers.append(await executor.start(Start("w", model, str(tmp_path / name / "home"))))
        await ExecutorSuite.expect(workers[-1], Ready)
    yield list(zip(made, workers, strict=True))
    for executor in made:
        await executor.close()


async def answers(worker) -> bool:
    worker.send(AnswerLive(7, LiveRequest("/v1/x", b'{"n": 21}')))
    said = [message async for message in ExecutorSuite.until(worker, Answered)]
    return said[-1].raised is None


async def test_two_owners_share_a_cluster(two_owners, tmp_path):
    """What an owner drains, kills, sweeps and closes is its own: the worker of another owner goes on."""
    (one, first), (two, second) = two_owners
    assert [len((await each.view()).workers) for each in (one, two)] == [1, 1]
    first.kill()
    assert await first.wait() == -9 and await answers(second)
    third = await one.start(first.start)
    await ExecutorSuite.expect(third, Ready)
    third.send(Drain())
    assert await third.wait() == 0 and await answers(second)
    RayExecutor(one._entry, tmp_path / "one", lambda model: {}).sweep()  # the next owner of this data directory
    await one.close()
    assert await answers(second) and not second.is_lost


@pytest.fixture
async def late_node(nodes):
    """The number of a node whose clock is an hour behind."""
    number = await asyncio.to_thread(nodes.add, 1, PYTHONPATH=str(WRONG_CLOCK), CLOCK_OFF_S="-3600")
    yield number
    await asyncio.to_thread(nodes.does, f"remove {number}")


async def test_a_node_whose_clock_is_wrong(nodes, late_node, tmp_path):
    """A worker says times by its owner's clock, wherever its node's is, and `batchmill doctor` names the node."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    executor = RayExecutor(entry(nodes), tmp_path, lambda model: {})
    needs = Needs(resources={f"node{late_node}": 1})
    model = ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double", needs=needs)
    worker = await executor.start(Start("w", model, str(tmp_path / "home")))
    await ExecutorSuite.expect(worker, Ready)
    began = time.time()
    assert await answers(worker)
    stats = None
    while stats is None:
        stats = (await ExecutorSuite.expect(worker, Answers)).stats
    assert began - CLOCK_S_MAX < stats.last_at < time.time() + CLOCK_S_MAX
    flaws = [""]
    while not any("run NTP" in each for each in flaws):  # a busy machine may not answer in time
        flaws = [each.message for each in (await executor.view()).checks if not each.is_ok]
    assert re.search(r"is -(3599|3600|3601)\.\d s off: run NTP on the nodes$", flaws[-1])
    await executor.close()


async def test_a_driver_that_hangs_is_replaced(nodes, tmp_path):
    """A driver that reads or says nothing counts as lost: the owner holds a bounded number of bytes for it."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    executor = RayExecutor(entry(nodes), tmp_path, lambda model: {}, beat_s=0.5)
    start = Start("w", ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double"), str(tmp_path / "home"))
    message = AnswerLive(1, LiveRequest("/v1/x", bytes(8 * 1024 * 1024)))
    for name, sent in (("full", UNSENT_BYTES // len(message.request.body) + 1), ("silent", 0)):
        worker = await executor.start(replace(start, worker=name))
        await ExecutorSuite.expect(worker, Ready)
        os.kill(int((tmp_path / "workers" / DRIVER_PID).read_text().split()[0]), signal.SIGSTOP)
        for _ in range(sent):
            worker.send(message)
        assert await worker.wait() == -1 and worker.is_lost
        assert executor.why.endswith("takes no messages" if sent else "said nothing for 7.5 s")
    await executor.close()


async def test_a_replaced_owner_leaves_what_its_successor_has_written(nodes, tmp_path):
    """Who its driver is, and what nodes are to see. The driver of one that is killed would run on otherwise."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    model, folder = ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double"), tmp_path / "workers"
    executors = [RayExecutor(entry(nodes), tmp_path, lambda model: {}) for _ in range(2)]
    for number, executor in enumerate(executors):
        worker = await executor.start(Start(f"w{number}", model, str(tmp_path / "home")))
        await ExecutorSuite.expect(worker, Ready)
    left = {path.name: path.read_text() for path in (folder / DRIVER_PID, executors[1]._probe)}
    await executors[0].close()
    assert {path.name: path.read_text() for path in folder.iterdir() if path.name in left} == left
    await executors[1].close()
    assert not list(folder.glob(f"{PROBE}*")) and not (folder / DRIVER_PID).exists()


async def test_a_full_object_store_is_waited_for(tmp_path):
    """A message that Ray's object store has no room for waits, and its worker says so. Short ones need no room, and
    replies of any length need none.
    """
    (tmp_path / "app.py").write_text("def repeat(n):\n    return 'y' * n\n")
    with ray_nodes(1, environ=SMALL_STORE) as nodes:
        executor = RayExecutor(entry(nodes), tmp_path, lambda model: {})
        model = ModelSpec("repeat", "function", f"{tmp_path / 'app.py'}:repeat")
        worker = await executor.start(Start("w", model, str(tmp_path / "home")))
        await ExecutorSuite.expect(worker, Ready)
        for length in (21, LONG_REPLY):
            worker.send(AnswerLive(length, LiveRequest("/v1/x", b'{"n": %d}' % length)))
            reply = [message async for message in ExecutorSuite.until(worker, Answered)]
            data = b"".join(message.data for message in reply if isinstance(message, ReplyChunk))
            assert data == b'"%b"' % (length * b"y") and reply[-1] == Answered(length)
        worker.send(AnswerLive(1, LiveRequest("/v1/x", bytes(STORE_BYTES))))
        while "is full" not in worker.waits:
            await asyncio.sleep(0)
        worker.kill()
        assert await worker.wait() == -9 and not worker.is_lost
        await executor.close()


NO_IMPORT = "raise ImportError('no batchmill is here')"
EXITS = "import os, sys; print('no licence', file=sys.stderr, flush=True); {}"


async def test_a_node_without_batchmill_is_named(tmp_path):
    """A worker whose node cannot import batchmill fails at once, with the reason and the way out. If importing it ends
    the process without an exit code that Ray knows, the worker died, and its log has what the process wrote.
    """
    package = tmp_path / "instead" / "batchmill"
    package.mkdir(parents=True)
    code = package / "__init__.py"
    code.write_text(NO_IMPORT)
    with ray_nodes(1, environ={"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}) as nodes:
        executor = RayExecutor(entry(nodes), tmp_path, lambda model: {})
        start = Start("w", ModelSpec("double", "function", "app.py:double"), str(tmp_path / "home"))
        for text, why in (
            (NO_IMPORT, "ImportError: no batchmill is here"),
            (EXITS.format("sys.exit(9)"), "a process there ended with exit code 9 .*, and wrote 'no licence'"),
        ):
            code.write_text(text)
            worker = await executor.start(start)
            failed = await ExecutorSuite.expect(worker, Failed)
            assert failed.code == "node_not_set_up"
            assert re.search(f"{why}; install the same version of Python and batchmill", failed.message)
            assert await worker.wait() == 1
        code.write_text(EXITS.format("os._exit(7)"))
        worker = await executor.start(replace(start, worker="w2"))
        assert [message async for message in worker.messages()] == []
        assert await worker.wait() == -9 and worker.ending.startswith("Ray knows no exit code: it crashed")
        assert "its process wrote:\nno licence\nRay: ACTOR_DIED" in (tmp_path / "home" / "w2.log").read_text()
        await executor.close()


async def test_an_open_cluster_gets_no_secret(nodes, tmp_path):
    """Without token and TLS no secret leaves: neither with a worker's start nor afterwards."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    executor = RayExecutor(entry(nodes, trusted=False), tmp_path, lambda model: {})
    start = Start("w", ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double"), str(tmp_path / "home"))
    provision = Provision({"secret:key": "value"})
    worker = await executor.start(replace(start, provision=provision))
    failed = await ExecutorSuite.expect(worker, Failed)
    assert failed.code == "cluster_not_trusted" and "RAY_AUTH_MODE" in failed.message
    later = await executor.start(start)
    later.send(Provide(provision))
    assert (await ExecutorSuite.expect(later, Failed)).code == "cluster_not_trusted"
    assert [each.name for each in await flaws_of(executor)] == ["authentication"]
    await executor.close()


def test_a_driver_reads_no_pickle(nodes, tmp_path):
    """What a hostile actor returns, yields or raises runs nothing in the driver."""
    trap = tmp_path / "read"
    command = [ray_python(), "-P", str(HOSTILE), nodes.address, str(trap)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "returned NOT_BYTES",
        "raised TASK_EXECUTION_EXCEPTION",
        "handle NOT_BYTES",
        "yielded b'bytes'",
        "yielded NOT_BYTES",
        "yielded NOT_BYTES",  # the end of a stream, which Ray reports as a pickled None
    ], done.stderr
    assert not trap.exists()
