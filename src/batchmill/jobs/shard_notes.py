"""What engines noted with their leases, to find it again after a crash: jobs at providers, most of all.

Functions over one connection; the transactions are the ledger's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import InvalidTransition, UnknownName
from batchmill.store.tables import notes, shards
from batchmill.types import Lease, RemoteJob

NOTES_MAX = 1000  # of one shard; an engine that wants more has lost count
KEY_CHARS_MAX = 128
DATA_BYTES_MAX = 256 * 1024

INTENT, UNKNOWN, SUBMITTED, FORGOTTEN = "intent", "unknown", "submitted", "forgotten"
AT_REST = frozenset({"ended", "collected", FORGOTTEN})  # states of remote jobs that run no more


class ShardNote(Struct, frozen=True):
    """A note as it is handed over: empty `data` takes it back."""

    lease: Lease
    key: str
    data: bytes
    at: float  # seconds since the epoch


def keep(db: sa.Connection, note: ShardNote) -> bool:
    """Write a note down where its lease is still the newest of its shard; False where it is not.

    That the job has ended meanwhile is no matter: a note may say that all it was about has been seen to.
    """
    lease = note.lease
    key = (shards.c.job == lease.job) & (shards.c.generation == lease.generation) & (shards.c.shard == lease.shard)
    if db.execute(sa.select(shards.c.epoch).where(key)).scalar() != lease.epoch:
        return False
    place = _place(lease.job, lease.generation, lease.shard, note.key)
    if not note.data:
        db.execute(notes.delete().where(place))
        return True
    values = {"data": note.data, "changed": note.at}
    if db.execute(notes.update().where(place).values(**values)).rowcount == 0:
        if not _has_room(db, note):
            return False
        db.execute(
            notes.insert().values(job=lease.job, generation=lease.generation, shard=lease.shard, key=note.key, **values)
        )
    return True


def _has_room(db: sa.Connection, note: ShardNote) -> bool:
    lease = note.lease
    place = (notes.c.job == lease.job) & (notes.c.generation == lease.generation) & (notes.c.shard == lease.shard)
    count = db.execute(sa.select(sa.func.count()).where(place)).scalar_one()
    return count < NOTES_MAX and len(note.key) <= KEY_CHARS_MAX and len(note.data) <= DATA_BYTES_MAX


def of_shard(db: sa.Connection, job_id: str, generation: int, shard: int) -> dict[str, bytes]:
    """Key -> what was noted."""
    place = (notes.c.job == job_id) & (notes.c.generation == generation) & (notes.c.shard == shard)
    return {key: bytes(data) for key, data in db.execute(sa.select(notes.c.key, notes.c.data).where(place))}


def remote_jobs(db: sa.Connection, job_id: str, generation: int | None = None) -> list[RemoteJob]:
    """The jobs at providers that a generation's notes tell of, or those of all, in the order of their making.

    One whose shard has all its outcomes has been collected, though nobody may have come to note it.
    """
    at = (shards.c.job == notes.c.job) & (shards.c.generation == notes.c.generation) & (shards.c.shard == notes.c.shard)
    query = sa.select(notes.c.shard, notes.c.data, shards.c.done == shards.c.hi - shards.c.lo).join(shards, at)
    query = query.where(notes.c.job == job_id)
    if generation is not None:
        query = query.where(notes.c.generation == generation)
    found = [_shown(read(bytes(data), shard), is_full=is_full) for shard, data, is_full in db.execute(query)]
    return sorted(filter(None, found), key=lambda job: (job.created, job.shard, job.tag))


def _shown(remote: RemoteJob | None, *, is_full: bool) -> RemoteJob | None:
    is_done = remote is not None and is_full and remote.state in ("submitted", "cancelling", "ended")
    return msgspec.structs.replace(remote, state="collected") if is_done else remote


def read(data: bytes, shard: int) -> RemoteJob | None:
    """A note as the job at a provider that it tells of; None for a note of another kind."""
    try:
        return msgspec.structs.replace(msgspec.json.decode(data, type=RemoteJob), shard=shard)
    except msgspec.MsgspecError:
        return None


def settle(
    db: sa.Connection, job_id: str, generation: int, *, tag: str, remote_id: str | None, now: float
) -> RemoteJob:
    """Write down what somebody says became of an unknown submission. Raises: UnknownName, InvalidTransition."""
    query = sa.select(notes).where(notes.c.job == job_id, notes.c.generation == generation, notes.c.key == tag)
    found = db.execute(query).first()
    if found is None:
        known = [each.tag for each in remote_jobs(db, job_id, generation) if each.state == UNKNOWN]
        told = f"those that are unknown: {', '.join(known)}" if known else "none of its submissions is unknown"
        raise UnknownName(f"the job {job_id} has no submission {tag!r}; {told}", code="unknown_submission")
    remote = read(bytes(found.data), found.shard)
    if remote is None or remote.state != UNKNOWN:
        told = "something else" if remote is None else remote.state
        raise InvalidTransition(f"the submission {tag} is {told}: only one that is unknown is adopted or forgotten")
    settled = _settled(remote, remote_id, now)
    stored = msgspec.json.encode(msgspec.structs.replace(settled, shard=-1))
    db.execute(notes.update().where(_place(job_id, generation, found.shard, tag)).values(data=stored, changed=now))
    return settled


def _settled(remote: RemoteJob, remote_id: str | None, now: float) -> RemoteJob:
    if remote_id is None:
        return msgspec.structs.replace(remote, state=FORGOTTEN, changed=now, message="somebody said that it never was")
    return msgspec.structs.replace(
        remote, state=SUBMITTED, id=remote_id, submitted=now, changed=now, message="somebody said that it is this one"
    )


def uncollected_shards(remotes: Sequence[RemoteJob]) -> frozenset[int]:
    """Shards of which a provider may have outcomes that nobody has read yet."""
    settled = {"collected", FORGOTTEN, UNKNOWN}
    return frozenset(remote.shard for remote in remotes if remote.state not in settled)


def _place(job_id: str, generation: int, shard: int, key: str) -> sa.ColumnElement[bool]:
    of_shard_ = (notes.c.job == job_id) & (notes.c.generation == generation) & (notes.c.shard == shard)
    return of_shard_ & (notes.c.key == key)
