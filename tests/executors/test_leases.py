"""A lease as engines see it: notes that are kept or refused, and the end of it."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.errors import JobPaused, SubmitUnknown
from batchmill.executors.leases import OVER, PAUSE, Held, NoteClient, OpenJob
from batchmill.executors.recorder import NO_USAGE, empty_rows
from batchmill.states import PauseReason
from batchmill.types import Lease
from batchmill.wire.messages import Note, Noted
from batchmill.wire.rows.forms import OpenAIForm

LEASE = Lease("job_1", 0, 3, 1)


class Owner:
    """The worker's end of a lease: what the lease asks of it, and the answers a test gives."""

    def __init__(self) -> None:
        self.sent: list[Note] = []
        self.notes = NoteClient(self.sent.append)
        self.left: list[Held] = []
        self.failed: list[JobPaused] = []

    async def note(self, held: Held, key: str, data: bytes) -> Noted:
        return await self.notes.send(held.lease, key, data)

    async def until_owned(self) -> None:
        """The test is the owner."""

    def leave(self, held: Held) -> None:
        self.left.append(held)

    def fail(self, held: Held, error: JobPaused) -> None:
        self.failed.append(error)

    def lease(self) -> Held:
        return Held(
            lease=LEASE, job=OpenJob("job_1", OpenAIForm(), None, None), seq=0, base=0, key="job_1-0", undone=4,
            isolated=False, ok=empty_rows(), failed=empty_rows(), ok_usage=NO_USAGE, failed_usage=NO_USAGE, failures=[],
            unsent=[], rows=4, noted={"old": b"1"}, lease_host=self,
        )  # fmt: skip


@pytest.fixture
def owner():
    return Owner()


async def begun(owner: Owner, held: Held, key: str, data: bytes) -> asyncio.Task[None]:
    task = asyncio.create_task(held.note(key, data))
    await asyncio.sleep(0)
    assert owner.sent[-1] == Note(len(owner.sent), LEASE, key, data)
    return task


async def test_a_note_is_known_once_it_is_durable(owner):
    """Until the owner has said so a note is not among those of the lease; empty, it takes one back."""
    held = owner.lease()
    first, second = await begun(owner, held, "new", b"2"), await begun(owner, held, "old", b"")
    assert held.notes == {"old": b"1"}
    owner.notes.receive(Noted(2, is_kept=True))
    await second
    owner.notes.receive(Noted(1, is_kept=True))
    await first
    assert held.notes == {"new": b"2"}


async def test_a_lease_of_another_ends(owner):
    """A note that is refused says that the lease is another's: it may be left, and fails no job."""
    held = owner.lease()
    task = await begun(owner, held, "new", b"2")
    owner.notes.receive(Noted(1, is_kept=False))
    with pytest.raises(JobPaused, match="belongs to another worker"):
        await task
    assert (held.ending, held.notes) == (PAUSE, {"old": b"1"})
    held.fail(JobPaused("no"))
    assert owner.failed == [] and owner.left == [held]
    with pytest.raises(JobPaused):
        await held.note("new", b"3")
    assert len(owner.sent) == 1


async def test_a_full_disk_is_told_as_such(owner):
    """A note that could not be written leaves the lease as it is, and says why the job has to pause."""
    held = owner.lease()
    task = await begun(owner, held, "new", b"2")
    owner.notes.receive(Noted(1, False, PauseReason.STORAGE_FULL, "no room"))
    with pytest.raises(JobPaused, match="no room") as raised:
        await task
    assert raised.value.reason is PauseReason.STORAGE_FULL and held.ending == ""
    held.fail(raised.value)
    assert owner.failed == [raised.value] and owner.left == [held]


async def test_how_it_ends(owner):
    """Whoever waits for the end hears it; that a job is over has the last word; a lease is left once."""
    held = owner.lease()
    waiting = [asyncio.create_task(held.until_ending()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    held.end(PAUSE)
    assert await waiting[0] == PAUSE and await held.until_ending() == PAUSE
    held.end(OVER)
    held.end(PAUSE)
    assert await held.until_ending() == OVER
    held.leave()
    held.leave()
    held.fail(SubmitUnknown("where?"))
    assert owner.left == [held] and held.waiters == []
