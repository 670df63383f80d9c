"""The socket between owner and worker: whole messages whatever the reads cut, bounded, and an end that is heard."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchmill.executors import channel as channels
from batchmill.executors.channel import open_channel
from batchmill.function_runtime.shared_memory import SIZE_BYTES, MemoryPair
from batchmill.types import FunctionRequest
from batchmill.wire import messages
from batchmill.wire.messages import (
    Answers,
    FunctionReply,
    FunctionRequests,
    Ready,
    ReplyChunk,
    to_owner,
    to_worker,
)


async def both():
    ours, theirs = socket.socketpair()
    return await open_channel(ours, MemoryPair()), await open_channel(theirs, MemoryPair())


async def take(channel, count):
    found = []
    while len(found) < count:
        found += [to_owner.decode(data) for data in await channel.read()]
    return found


async def test_messages_arrive_in_order():
    """What is sent is read, whole and in order, however large."""
    one, two = await both()
    sent = [Ready(1), ReplyChunk(1, b"x" * 3_000_000), Ready(2), *[ReplyChunk(n, b"y") for n in range(1000)]]
    for message in sent:
        one.send(message)
    assert await take(two, len(sent)) == sent
    one.close()
    assert await two.read() == []
    two.send(Ready(3))
    two.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64])
async def test_reads_may_cut_anywhere(size):
    """A message in pieces of any length is the message."""
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours, MemoryPair())
    data = messages.pack(Ready(7)) + messages.pack(ReplyChunk(3, b"abcdef" * 10)) + messages.pack(Ready(8))
    reading = asyncio.create_task(take(channel, 3))
    for at in range(0, len(data), size):
        theirs.sendall(data[at : at + size])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await reading == [Ready(7), ReplyChunk(3, b"abcdef" * 10), Ready(8)]
    theirs.close()
    channel.close()


async def test_who_speaks_another_protocol_is_an_error():
    """A length that no message has ends the channel, with a word on why."""
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours, MemoryPair())
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionError, match="protocol"):
        await channel.read()
    theirs.close()


async def test_a_reader_that_does_not_read_holds_up_the_writer(monkeypatch):
    """What nobody has taken is bounded: beyond that the other side has to wait, until somebody reads."""
    monkeypatch.setattr(channels, "READ_AHEAD_BYTES", 10_000)
    one, two = await both()
    sent = [ReplyChunk(n, b"z" * 100_000) for n in range(400)]
    for message in sent:
        one.send(message)
    draining = asyncio.create_task(one.drain())
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not draining.done()
    assert await take(two, len(sent)) == sent
    await draining
    one.close()
    two.close()


async def test_what_was_said_is_read_after_the_end():
    """When the process on the other side has ended, what lies in the socket is read and then its end, also while
    something else holds that side open and nobody reads what was to be sent."""
    ours, theirs = socket.socketpair()
    channel, other = await open_channel(ours, MemoryPair()), theirs.dup()
    sent = [Ready(1), ReplyChunk(1, b"x" * 200_000), Ready(2)]
    for message in sent:
        theirs.sendall(messages.pack(message))
    theirs.close()
    for _ in range(20):
        channel.send(ReplyChunk(1, b"y" * 3_000_000))  # more than the kernel takes
    channel.finish()
    assert await take(channel, len(sent)) == sent
    assert await channel.read() == []
    with pytest.raises(ConnectionResetError):
        await channel.drain()
    other.close()


async def both_with_memory():
    """Two ends that share memory, and know that they do."""
    ours, theirs = socket.socketpair()
    one, two = MemoryPair(), MemoryPair()
    with one.create(memoryview) as fds:
        two.join([os.dup(fd) for fd in fds], memoryview)
    first = await open_channel(ours, one)
    second = await open_channel(theirs, two, has_joined=True)
    second.send(Ready(1))
    assert await take(first, 1) == [Ready(1)]
    return (first, one), (second, two)


def request(id_, body):
    return FunctionRequest(id_, "tensors", body, b"12")


async def test_large_bodies_go_through_shared_memory():
    """Bodies of calls and replies arrive as they were sent, small ones beside large ones, in both directions."""
    (owner, memory), (worker, _) = await both_with_memory()
    body = bytes(range(256)) * 1024
    for _ in range(100):  # more than the memory holds
        owner.send(FunctionRequests([request(1, b"small"), request(2, body)]))
        [data] = await worker.read()
        assert len(data) < 200
        received = worker.complete(to_worker.decode(data))
        bodies = [(each.id, bytes(each.body), each.place) for each in received.asks]
        assert bodies == [(1, b"small", None), (2, body, None)]
        del received
        worker.send(Answers([FunctionReply(1, b"small"), FunctionReply(2, head=b"4", pieces=[b"text", body])]))
        [data] = await owner.read()
        assert len(data) < 200
        reply = owner.complete(to_owner.decode(data))
        assert [bytes(each.body) for each in reply.answers] == [b"small", b"text" + body]
        del reply
    worker.send(ReplyChunk(3, body))
    assert await take(owner, 1) == [ReplyChunk(3, body)]
    owner.close()
    worker.close()


async def test_bodies_that_find_no_room_go_through_the_socket():
    """While the other side holds all of the memory, messages still arrive; nothing waits and nothing is lost."""
    (owner, _), (worker, _) = await both_with_memory()
    body, held = bytes(SIZE_BYTES // 2), []
    for number in range(3):
        owner.send(FunctionRequests([request(number, body)]))
        held += [worker.complete(to_worker.decode(data)) for data in await worker.read()]
        worker.send(Answers([FunctionReply(number, head=b"4", pieces=[b"text", body])]))
        held += [owner.complete(to_owner.decode(data)) for data in await owner.read()]
    assert [bytes(each.asks[0].body) == body for each in held[::2]] == [True] * 3
    assert [bytes(each.answers[0].body) == b"text" + body for each in held[1::2]] == [True] * 3
    owner.close()
    worker.close()


async def test_bodies_outlive_the_channel():
    """A body that was received can be read after the other side has gone, and the memory is unmapped after it."""
    (owner, _), (worker, _) = await both_with_memory()
    owner.send(FunctionRequests([request(1, b"x" * 100_000)]))
    [data] = await worker.read()
    received = worker.complete(to_worker.decode(data))
    owner.close()
    assert await worker.read() == []
    assert bytes(received.asks[0].body) == b"x" * 100_000
    worker.close()
    del received
    gc.collect()
    await asyncio.sleep(0)
    assert "batchmill-buffers" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("place", [(SIZE_BYTES, 1), (0, SIZE_BYTES + 1), (-5, 10)])
async def test_a_place_outside_the_memory_is_an_error(place):
    """A place that nobody can mean is not read: it ends the channel's work as any broken message does."""
    (owner, _), (worker, _) = await both_with_memory()
    with pytest.raises(ConnectionError, match="of a memory of"):
        worker.complete(FunctionRequests([replace(request(1, b""), place=place)]))
    owner.close()
    worker.close()
    ours, theirs = socket.socketpair()
    plain = await open_channel(ours, MemoryPair())
    with pytest.raises(ConnectionError, match="there is none"):
        plain.complete(FunctionRequests([replace(request(1, b""), place=(0, 1))]))
    theirs.close()
    plain.close()


@pytest.mark.parametrize("word", [channels.SHARED | 10, channels.RETURNED | 1])
async def test_places_without_shared_memory_end_the_channel(word):
    """Who names a place where no memory is shared uses another protocol."""
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours, MemoryPair())
    theirs.sendall(word.to_bytes(4, "little") + bytes(4))
    with pytest.raises(ConnectionError, match="there is none"):
        await channel.read()
    theirs.close()
    channel.close()


async def test_bodies_in_shared_memory_are_read_after_the_end():
    """Replies that a worker sent before it ended arrive, where the owner reads them only after its end."""
    (owner, _), (worker, _) = await both_with_memory()
    for number in (1, 2):
        worker.send(Answers([FunctionReply(number, b"x" * 100_000)]))
    worker.close()
    with pytest.raises(ConnectionResetError):
        while True:
            await owner.drain()
            await asyncio.sleep(0)
    received = [owner.complete(to_owner.decode(data)) for data in await owner.read()]
    assert [(reply.id, len(reply.body)) for each in received for reply in each.answers] == [(1, 100_000), (2, 100_000)]
    assert await owner.read() == []
