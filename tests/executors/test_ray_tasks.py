"""Pieces of work on a cluster, as the owner sees them, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from batchmill import __version__
from batchmill.errors import BatchmillError, StorageFailed, Unavailable
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import EndTask, RunTask, TaskEnded, TaskReply
from batchmill.executors.ray.node_tasks import run_task
from batchmill.executors.ray.shared_store import SharedStore
from batchmill.executors.ray.tasks import TASKS_MAX, RayTasks
from batchmill.store.stored_files import LocalFiles
from batchmill.types.cluster import TASK_FAILED, TASK_LOST, NodePlace, NodeWork
from batchmill.types.connectors import Storage

WORK = NodeWork("batchmill.jobs:nothing", b"order", [], "term")


class Cluster:
    """What `RayTasks` sees of an executor."""

    def __init__(self, *, is_trusted: bool = True, why: str = "") -> None:
        self.may_send_secrets, self.why = is_trusted, why
        self.sent: list[msgspec.Struct] = []

    async def reach(self) -> None:
        if self.why:
            raise Unavailable(self.why, code="cluster_unavailable")

    def send(self, frame: msgspec.Struct) -> None:
        self.sent.append(frame)


def tasks_of(cluster: Cluster, folder: Path, storage: Storage = Storage("file:///store")) -> RayTasks:
    return RayTasks(cluster, SharedStore(LocalFiles(), storage, "/cache", 1000, folder))


async def begun(tasks: RayTasks, cluster: Cluster, count: int = 1) -> list[asyncio.Task[bytes]]:
    """So many pieces of work, of which the driver has as many as it may."""
    running = [asyncio.create_task(tasks.run(WORK, project=str(n % 4))) for n in range(count)]
    while len(cluster.sent) < min(count, TASKS_MAX):
        await asyncio.sleep(0)
    return running


async def test_the_driver_has_a_bounded_number(tmp_path: Path) -> None:
    """The next begins when one has ended, however it ended."""
    cluster = Cluster()
    tasks = tasks_of(cluster, tmp_path)
    running = await begun(tasks, cluster, TASKS_MAX + 2)
    assert len(cluster.sent) == TASKS_MAX
    tasks.receive(TaskEnded(cluster.sent[0].id, frames.encode(TaskReply(b"answer"))))
    assert await running[0] == b"answer"
    running[1].cancel()
    await asyncio.wait([running[1]])
    assert EndTask(cluster.sent[1].id) in cluster.sent
    while sum(isinstance(frame, RunTask) for frame in cluster.sent) < TASKS_MAX + 2:
        await asyncio.sleep(0)
    tasks.lose("the head is lost")
    for each in running[2:]:
        with pytest.raises(Unavailable, match="the head is lost") as raised:
            await each
        assert raised.value.code == TASK_LOST


async def test_what_comes_from_a_node_is_not_trusted(tmp_path: Path) -> None:
    """A reply that is none, a task that failed, and a reply to nobody end nothing but the work."""
    cluster = Cluster()
    tasks = tasks_of(cluster, tmp_path)
    tasks.receive(TaskEnded(7, b"to nobody"))
    for ended in (b"\xc1", frames.encode(TaskReply(flaw="it has no disk")), b""):
        (running,) = await begun(tasks, cluster)
        tasks.receive(TaskEnded(cluster.sent.pop().id, ended))
        with pytest.raises(BatchmillError) as raised:
            await running
        assert raised.value.code == TASK_FAILED
    (running,) = await begun(tasks, cluster)
    tasks.receive(TaskEnded(cluster.sent.pop().id, why="RuntimeError: \x1b[2J\n2026-01-01 another line of the log"))
    with pytest.raises(Unavailable) as raised:
        await running
    assert raised.value.message.isprintable()


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_credentials_go_where_they_may(tmp_path: Path, is_trusted: bool) -> None:
    """Of an open cluster the nodes get where the store is, and nothing to reach it with; profiles of this machine go
    nowhere.
    """
    key, place = "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"
    cluster = Cluster(is_trusted=is_trusted)
    storage = Storage("s3://b", {place: "http://store"}, {key: "secret", "AWS_PROFILE": "mine"})
    running = await begun(tasks_of(cluster, tmp_path, storage), cluster)
    order = frames.task_orders.decode(cluster.sent[0].order)
    assert order.node.storage.environ == {place: "http://store"}
    assert order.node.storage.credentials == ({key: "secret"} if is_trusted else {})
    assert "secret" not in repr(order)
    running[0].cancel()


async def test_work_that_no_node_can_do(tmp_path: Path) -> None:
    """A cluster that is away is told at once; a file that is not in the store is named. Nothing is sent."""
    cluster = Cluster(why="the cluster is away")
    with pytest.raises(Unavailable, match="the cluster is away"):
        await tasks_of(cluster, tmp_path).run(WORK)
    cluster.why = ""
    missing = msgspec.structs.replace(WORK, paths=[f"{tmp_path}/jobs/a/dataset"])
    with pytest.raises(StorageFailed, match=f"{tmp_path}/jobs/a/dataset is not in the object store"):
        await tasks_of(cluster, tmp_path).run(missing)
    assert not cluster.sent


def echo(order: bytes, place: NodePlace) -> bytes:
    """Work that writes to its folder."""
    scratch = Path(place.scratch)
    (scratch / "file").write_bytes(order)
    if order == b"fails":
        raise ValueError("it cannot")
    return str(scratch).encode()


@pytest.mark.parametrize(("order", "flaw"), [(b"works", ""), (b"fails", "ValueError: it cannot")])
def test_a_task_on_its_node(tmp_path: Path, order: bytes, flaw: str) -> None:
    """Nothing of it stays, whether it works or fails; a failure is told as text alone."""
    cache = tmp_path / "cache"
    storage = frames.NodeStore(Storage(f"file://{tmp_path}/store"), str(cache), 1000, "/data-of-the-owner")
    sent = frames.TaskOrder(f"{__name__}:echo", order, [], storage, __version__)
    reply = frames.task_replies.decode(run_task(frames.encode(sent), ""))
    assert reply.flaw == flaw
    assert flaw or Path(reply.answer.decode()).is_relative_to(cache)
    assert not list(cache.glob("*/workers/*")) and not list(cache.glob("*/tasks/*"))
    other = msgspec.structs.replace(sent, version="0.0.0")
    reply = frames.task_replies.decode(run_task(frames.encode(other), ""))
    assert "install the same version on every node" in reply.flaw
