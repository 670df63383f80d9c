"""A worker on Ray as its pool sees it, without a cluster."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchmill.errors import Unavailable
from batchmill.executors.ray import frames
from batchmill.executors.ray.channel import ActorChannel
from batchmill.executors.ray.executor import RayExecutor
from batchmill.executors.ray.frames import KILLED, PIECE_BYTES, Connected, Item, Placement
from batchmill.executors.ray.ray_worker import RECEIVED_BYTES, WAITING_BYTES, RayWorker
from batchmill.types import LiveRequest, ModelSpec
from batchmill.types.cluster import ClusterEntry
from batchmill.wire import messages
from batchmill.wire.messages import AnswerLive, Drain, Ready, ReplyChunk, Start


@pytest.fixture
def executor(tmp_path: Path) -> RayExecutor:
    return RayExecutor(ClusterEntry("ray", "127.0.0.1:1"), tmp_path, lambda model: {})


@pytest.fixture
def worker(executor: RayExecutor, tmp_path: Path) -> RayWorker:
    model = ModelSpec("m", "function", "app.py:m")
    return RayWorker(1, Start("w", model, str(tmp_path)), Placement(), executor)


async def test_messages_that_nobody_read(worker: RayWorker, tmp_path: Path):
    """Beyond the bound nothing more is taken, the worker is killed, and neither its model nor a row is to blame."""
    worker.was_launched = True
    ready = Ready(pid=1)
    item = frames.join([messages.encode(ready)])
    worker.receive(Item(1, item))
    worker.receive(Item(1, bytes(RECEIVED_BYTES)))
    worker.receive(Item(1, item))  # it has room, but comes after a gap
    worker.end(KILLED)
    assert [message async for message in worker.messages()] == [ready]
    assert await worker.wait() == -1 and worker.is_lost
    assert (tmp_path / "w.log").read_text() == (
        f"Ray: its messages were not read: more than {RECEIVED_BYTES} bytes waited\n"
    )


async def test_messages_for_a_worker_that_waits(worker: RayWorker):
    """A worker that waits for its cluster with too many messages is lost, which nobody is blamed for."""
    message = AnswerLive(1, LiveRequest("/v1/x", bytes(WAITING_BYTES // 2)))
    worker.send(message)
    assert not worker.is_lost
    worker.send(message)
    assert await worker.wait() == -1 and worker.is_lost


async def test_the_cluster_is_looked_at_before_any_job_has_run(tmp_path: Path):
    """Also in a new data directory, of which nodes see nothing: an interpreter without Ray is named."""
    entry = ClusterEntry("ray", "local", python=str(Path(sys.prefix, "bin", "python")))
    executor = RayExecutor(entry, tmp_path / "data", lambda model: {})
    executor._store = SimpleNamespace()  # as with [storage]
    with pytest.raises(Unavailable, match=r"has no Ray: .*install 'batchmill\[ray\]'"):
        await executor.inspect()
    await executor.close()
    assert "No module named" in (tmp_path / "data" / "workers" / "ray-driver.log").read_text()


async def test_a_look_at_the_cluster_that_ends_early(executor: RayExecutor):
    """A look that got no reply in time, or whose caller has gone, leaves nothing behind."""
    executor._driving = asyncio.create_task(asyncio.Event().wait())  # no driver is started
    executor.connected = Connected("127.0.0.1:1", "2", "3", "0", False, False, False)
    look = asyncio.create_task(executor.inspect())
    while not executor._inspections:
        await asyncio.sleep(0.001)
    look.cancel()
    await asyncio.wait({look})
    assert executor._inspections == {}
    await executor.close()


@pytest.mark.parametrize("was_launched", [False, True])
async def test_a_worker_that_waits_is_drained_at_once(worker: RayWorker, *, was_launched: bool):
    """It has nothing to record, also if Ray has its actor: neither Ctrl-C nor the end of a job waits for its place."""
    worker.was_launched = was_launched
    worker.send(Drain())
    assert await worker.wait() == 0 and not worker.is_lost
    assert [message async for message in worker.messages()] == []


@pytest.mark.parametrize("size", [0, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_pieces_of_an_item(size: int):
    item, pieces = (b"\0lastmore" * size)[:size], frames.Pieces()
    cut = list(frames.cut(item))
    assert all(len(each) <= PIECE_BYTES for each in cut)
    assert [pieces.take(each) for each in cut] == [None] * (len(cut) - 1) + [item]


def test_pieces_that_no_worker_sends():
    """Nothing on a node is trusted: what a driver holds of an item is bounded."""
    with pytest.raises(frames.BadPiece, match="is missing"):
        [frames.Pieces().take(frames.MORE), (pieces := frames.Pieces()).take(frames.MORE), pieces.take(b"")]
    pieces, most = frames.Pieces(), frames.FRAME_BYTES_MAX // PIECE_BYTES
    with pytest.raises(frames.BadPiece, match="more than"):
        [pieces.take(frames.MORE + bytes(PIECE_BYTES)) for _ in range(most + 1)]


async def test_what_a_worker_sends_needs_no_object_store():
    """However long a message is: Ray puts what is longer than 100 KiB into the store of the worker's node."""
    channel, pieces = ActorChannel(), frames.Pieces()
    replies = [ReplyChunk(n, n * bytes([n])) for n in (1, 50)] + [ReplyChunk(3, bytes(PIECE_BYTES * 4))]
    for reply in [*replies, *replies]:
        channel.send(reply)
    channel.close()
    items = [item async for item in channel.items()]
    assert max(map(len, items)) <= PIECE_BYTES
    wholes = [whole for item in items if (whole := pieces.take(item)) is not None]
    received = [messages.to_owner.decode(data) for whole in wholes for data in frames.split(whole)]
    assert received == [*replies, *replies]
