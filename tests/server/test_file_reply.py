"""Ranges, and names to save under."""

from __future__ import annotations

import asyncio

import pytest
from services.file_room import FileRoom
from starlette.requests import Request

from batchmill.server.replies import NOTHING, ContentRange, FileReply, disposition, parse_range
from batchmill.services.files.files import READ_BYTES


class Client:
    """The other end of a reply: takes a message when it is told to, and may leave."""

    def __init__(self) -> None:
        self.room, self.left = asyncio.Semaphore(0), asyncio.Event()
        self.taken: list[dict] = []
        self.offered = 0

    async def send(self, message: dict) -> None:
        self.offered += 1
        if not self.left.is_set():
            await self.room.acquire()
        self.taken.append(message)

    async def receive(self) -> dict:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
async def replying(tmp_path):
    """A reply of ten pieces on its way to a client, and its file."""
    room, client = FileRoom(tmp_path), Client()
    file = await room.files.open(await room.upload(b"x" * (10 * READ_BYTES)))
    scope = {"type": "http", "method": "GET", "headers": []}
    reply = FileReply(Request(scope), file, filename="rows.jsonl")
    task = asyncio.create_task(reply(scope, client.receive, client.send))
    yield client, task, file
    assert task.done()
    room.close()


async def until(look) -> None:
    async with asyncio.timeout(30):
        while not look():
            await asyncio.sleep(0)


async def test_a_reader_that_stands_still(replying):
    """Nothing is read ahead for a client that takes nothing: one piece is held, and the rest waits on the disk."""
    client, task, _ = replying
    client.room.release()
    for piece in range(1, 4):
        await until(lambda piece=piece: client.offered == piece + 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.offered == piece + 1 and not task.done()
        client.room.release()
    for _ in range(20):
        client.room.release()
    await task
    assert sum(len(message.get("body", b"")) for message in client.taken) == 10 * READ_BYTES
    assert client.taken[-1]["more_body"] is False


async def test_a_reader_that_leaves(replying):
    """When the client has left, reading ends and the file is closed, although sending to nobody goes on to succeed."""
    client, task, file = replying
    client.room.release()
    await until(lambda: client.offered == 2)
    client.left.set()
    client.room.release()
    await task
    assert client.offered <= 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        await file.read(0, 1)


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=0-3", ContentRange(0, 4)),
        ("bytes=0-0", ContentRange(0, 1)),
        ("bytes=4-", ContentRange(4, 10)),
        ("bytes=0-", ContentRange(0, 10)),
        ("bytes=7-99", ContentRange(7, 10)),
        ("bytes=-3", ContentRange(7, 10)),
        ("bytes=-99", ContentRange(0, 10)),
        ("Bytes=1-2", ContentRange(1, 3)),
        ("bytes=10-", NOTHING),
        ("bytes=10-12", NOTHING),
        ("bytes=-0", NOTHING),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=0-1,4-5", None),
        ("rows=0-1", None),
        ("", None),
        ("bytes=" + "9" * 19 + "-", None),
    ],
)
def test_ranges(asked, span):
    """One range of bytes is understood by the grammar; what is none is ignored, what lies beyond is refused."""
    assert parse_range(asked, 10) == span


def test_an_empty_file_has_no_ranges():
    """No byte of an empty file can be asked for."""
    assert [parse_range(request, 0) for request in ("bytes=0-", "bytes=0-0", "bytes=-1")] == [NOTHING] * 3


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("rows.jsonl", 'attachment; filename="rows.jsonl"'),
        ("../../etc/passwd", 'attachment; filename="passwd"'),
        ("C:\\boot.ini", 'attachment; filename="boot.ini"'),
        (".bashrc", 'attachment; filename="bashrc"'),
        ("..", 'attachment; filename="file"'),
        ("a/", 'attachment; filename="file"'),
        ('a"b', "attachment; filename=\"a_b\"; filename*=UTF-8''a%22b"),
        ("zwölf.jsonl", "attachment; filename=\"zw_lf.jsonl\"; filename*=UTF-8''zw%C3%B6lf.jsonl"),
    ],
)
def test_names_to_save_under(name, header):
    """A file is saved under a plain name in one folder, whatever it is called."""
    assert disposition(name) == header
