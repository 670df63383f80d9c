"""The socket between owner and worker: whole messages whatever the reads cut, bounded, and an end that is heard."""

from __future__ import annotations

import asyncio
import socket

import pytest

from batchmill.executors import channel as channels
from batchmill.executors.channel import open_channel
from batchmill.function_runtime.shared_memory import MemoryPair
from batchmill.wire import messages
from batchmill.wire.messages import Ready, ReplyChunk, to_owner


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
