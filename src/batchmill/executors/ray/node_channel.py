"""NodeChannel: the channel of a worker on a node that does not see the data directory.

It brings what a message names before the worker gets it. Messages of other jobs do not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, JobPaused, StorageFailed, to_storage_error
from batchmill.executors.ray.channel import ActorChannel
from batchmill.executors.ray.frames import split
from batchmill.executors.ray.node_files import LIVE, NodeFiles
from batchmill.models import redaction
from batchmill.wire import messages
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import Answered, AnswerLive, Failed, Open, Provide, Released, Revoke


class _Lease(Struct, frozen=True):
    job: str = ""


class _Address(Struct, frozen=True):
    """What a message is, and of which job, without the rest of it."""

    type: str
    job: str = ""
    lease: _Lease = _Lease()


_addresses = msgspec.msgpack.Decoder(_Address)


class NodeChannel(ActorChannel):
    """
    Args:
        files: what this worker has of the data directory.
    """

    is_on_node = True

    def __init__(self, files: NodeFiles) -> None:
        super().__init__()
        self._files = files
        # Jobs whose files are brought -> their messages meanwhile: few, as a worker gets only rows that it requests.
        self._opening: dict[str, list[memoryview]] = {}
        self._refused: set[str] = set()  # jobs whose files could not be brought, until the owner takes them back
        self._bringing: set[asyncio.Task[None]] = set()
        self._answering = asyncio.Lock()

    def receive(self, item: bytes) -> None:
        for data in split(item):
            self._receive(data)

    def _receive(self, data: memoryview) -> None:
        address = _addresses.decode(data)
        job = address.job or address.lease.job
        if job in self._refused:
            self._refuse(job, address.type)
        elif job in self._opening:
            self._opening[job].append(data)
        elif address.type in (Open.__struct_config__.tag, AnswerLive.__struct_config__.tag):
            self._receive_files(messages.to_worker.decode(data))
        elif address.type == Provide.__struct_config__.tag:
            message = messages.to_worker.decode(data)
            self._admit(messages.encode(Provide(self._files.provision(message.provision))))
        else:
            self._admit(data)

    def send(self, message: Struct) -> None:
        if isinstance(message, Released):
            self._files.release(message.job)
        super().send(message)

    def _admit(self, data: memoryview | bytes) -> None:
        self._inbox.append(memoryview(data))
        self._changed.set()

    def _receive_files(self, message: Struct) -> None:
        match message:
            case Open(job=job):
                self._opening[job] = []
                self._begin(self._open(message))
            case AnswerLive(files=files) if files and (self._answering.locked() or not self._files.has(LIVE, files)):
                self._begin(self._answer(message))
            case AnswerLive():
                self._admit_live(message)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._bringing.add(task)
        task.add_done_callback(self._bringing.discard)

    async def _open(self, message: Open) -> None:
        try:
            placed = await self._placed(message)
            while not self._files.has(message.job, message.files):  # an earlier run of the job was released meanwhile
                placed = await self._placed(message)
            self._admit(messages.encode(placed))
        except (BatchmillError, OSError) as error:
            failure = _paused(error)
            self.send(Failed(failure.code, redaction.mask(failure.message), failure.reason, message.job))
            self._refused.add(message.job)
        for data in self._opening.pop(message.job):
            self._receive(data)

    async def _placed(self, message: Open) -> Open:
        return await self._files.with_class(await asyncio.to_thread(self._files.open, message))

    async def _answer(self, message: AnswerLive) -> None:
        async with self._answering:  # one at a time holds what live requests name
            try:
                await asyncio.to_thread(self._files.bring, LIVE, message.files)
            except (BatchmillError, OSError) as error:
                self.send(Answered(message.id, Raised.of(_paused(error))))
            else:
                self._admit_live(message)

    def _admit_live(self, message: AnswerLive) -> None:
        """Admit a request whose files are held."""
        try:
            self._admit(messages.encode(self._files.live(message)))
        except StorageFailed as error:
            self.send(Answered(message.id, Raised.of(error)))

    def _refuse(self, job: str, kind: str) -> None:
        """A message of a job that could not be opened: its owner has paused it, and takes it back."""
        if kind == Revoke.__struct_config__.tag:
            self._refused.discard(job)
            self.send(Released(job))


def _paused(error: BatchmillError | OSError) -> JobPaused:
    """Why files could not be brought, as what pauses a job."""
    if isinstance(error, OSError):
        error = to_storage_error(error) or StorageFailed(f"files cannot be brought to a node: {error}")
    return error if isinstance(error, JobPaused) else StorageFailed(error.message, code=error.code)


__all__ = ["NodeChannel"]
