"""Workers as actors of a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from contract.executor_suite import ROWS, ExecutorSuite
from msgspec.structs import replace
from ray_support import Nodes, ray_nodes, ray_python

from batchmill.engines.llm.launch import SMALL_CPU_CORES
from batchmill.executors.ray.executor import UNSENT_BYTES, RayExecutor
from batchmill.executors.ray.frames import Beat
from batchmill.types import Lease, LiveRequest, ModelSpec, Needs, Provision
from batchmill.types.cluster import ClusterEntry
from batchmill.wire.messages import AnswerLive, Failed, Grant, Provide, Ready, Start

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
HOSTILE = Path(__file__).parent.parent / "fakes" / "hostile_actor.py"


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(2, 1) as cluster:
        yield cluster


def entry(nodes: Nodes, *, trusted: bool = True) -> ClusterEntry:
    return ClusterEntry("ray", nodes.address, ray_python(), trusted)


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
        view = await executor.view()
        assert [(each.name, each.message) for each in view.checks if not each.is_ok] == []
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
        (tmp_path / "workers" / "cluster-probe").unlink()
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


async def test_a_driver_that_hangs_is_replaced(nodes, tmp_path):
    """A driver that reads or says nothing counts as lost: the owner holds a bounded number of bytes for it."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    executor = RayExecutor(entry(nodes), tmp_path, lambda model: {}, beat_s=0.5)
    start = Start("w", ModelSpec("double", "function", f"{tmp_path / 'app.py'}:double"), str(tmp_path / "home"))
    message = AnswerLive(1, LiveRequest("/v1/x", bytes(8 * 1024 * 1024)))
    for name, sent in (("full", UNSENT_BYTES // len(message.request.body) + 1), ("silent", 0)):
        worker = await executor.start(replace(start, worker=name))
        await ExecutorSuite.expect(worker, Ready)
        os.kill(int((tmp_path / "workers" / "ray-driver.pid").read_text().split()[0]), signal.SIGSTOP)
        for _ in range(sent):
            worker.send(message)
        assert await worker.wait() == -1 and worker.is_lost
        assert executor.why.endswith("takes no messages" if sent else "said nothing for 7.5 s")
    await executor.close()


async def test_a_node_without_batchmill_is_named(tmp_path):
    """A worker whose node cannot import batchmill fails at once, with the reason and the way out."""
    package = tmp_path / "instead" / "batchmill"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no batchmill is here')")
    with ray_nodes(1, environ={"PYTHONPATH": str(package.parent)}) as nodes:
        executor = RayExecutor(entry(nodes), tmp_path, lambda model: {})
        start = Start("w", ModelSpec("double", "function", "app.py:double"), str(tmp_path / "home"))
        worker = await executor.start(start)
        failed = await ExecutorSuite.expect(worker, Failed)
        assert failed.code == "node_not_set_up"
        assert "ImportError: no batchmill is here; install the same version of Python and batchmill" in failed.message
        assert await worker.wait() == 1
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
    assert [each.name for each in (await executor.view()).checks if not each.is_ok] == ["authentication"]
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
