"""Answers in the results of remote jobs that do not fit their schema: what each has cost is counted once.

The commit that counts their usage also adds their positions to the note of the remote job, in one transaction. A worker
that reads the results again finds there what is counted. Blocks have the usage of each answer, so it is counted once
where two blocks have it: a worker that lost its lease may have written one, and its successor another with a part of
the same answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from batchmill.store.segments.format import Block
from batchmill.store.sql.tables import notes
from batchmill.types import Commit, RemoteJob, Usage
from batchmill.types.position_runs import Runs, numbers_of, runs_of

Place = tuple[int, int, str]  # generation, shard, tag of a remote job


def add_all(db: sa.Connection, counted: Iterable[Commit]) -> None:
    """Add the misfits of counted commits to the notes of their remote jobs."""
    for commit in counted:
        lease = commit.lease
        for tag, runs in commit.misfits.items():
            add(db, lease.job, (lease.generation, lease.shard, tag), runs)


def add(db: sa.Connection, job_id: str, place: Place, runs: Runs) -> None:
    """Add misfits to the note of a remote job. A ledger that lost its notes has none: then its rows run anew."""
    generation, shard, tag = place
    key = (notes.c.job == job_id) & (notes.c.generation == generation) & (notes.c.shard == shard) & (notes.c.key == tag)
    data = db.execute(sa.select(notes.c.data).where(key)).scalar()
    if data is None:
        return
    remote = msgspec.json.decode(bytes(data), type=RemoteJob)
    more = replace(remote, misfits=runs_of(numbers_of(remote.misfits) | numbers_of(runs)))
    db.execute(notes.update().where(key).values(data=msgspec.json.encode(more)))


def noted(db: sa.Connection, job_id: str, generation: int, shards: Iterable[int]) -> dict[Place, Runs]:
    """The misfits in the notes of some shards."""
    query = sa.select(notes.c.shard, notes.c.key, notes.c.data).where(
        notes.c.job == job_id, notes.c.generation == generation, notes.c.shard.in_(list(shards))
    )
    found: dict[Place, Runs] = {}
    for shard, tag, data in db.execute(query):
        try:
            remote = msgspec.json.decode(bytes(data), type=RemoteJob)
        except msgspec.MsgspecError:
            continue  # a note of another kind
        if remote.misfits:
            found[generation, shard, tag] = remote.misfits
    return found


def runs_in(block: Block) -> dict[str, Runs]:
    """Tag of a remote job -> the positions of the misfits of a block."""
    return {tag: runs_of(position for position, *_ in misfits) for tag, misfits in block.meta.misfits.items()}


class CountedMisfits:
    """Which misfits are counted."""

    def __init__(self, known: Mapping[Place, Runs]) -> None:
        self._known: defaultdict[Place, set[int]] = defaultdict(set)
        for place, runs in known.items():
            self._known[place] = numbers_of(runs)

    def has(self, block: Block) -> bool:
        """Whether all misfits of a block are counted; of a block without any it is False."""
        return bool(block.meta.misfits) and all(
            position in self._known[block.generation, block.shard, tag]
            for tag, misfits in block.meta.misfits.items()
            for position, *_ in misfits
        )

    def usage_of(self, block: Block) -> Usage:
        """What a block adds to the usage of its job: that of misfits which are not counted yet, or all of its own."""
        new = [
            Usage(*tokens)
            for tag, misfits in block.meta.misfits.items()
            for position, *tokens in misfits
            if position not in self._known[block.generation, block.shard, tag]
        ]
        return sum(new, Usage()) if block.meta.misfits else block.meta.usage

    def take(self, block: Block) -> None:
        """Count those of a block."""
        for tag, misfits in block.meta.misfits.items():
            self._known[block.generation, block.shard, tag].update(position for position, *_ in misfits)

    @property
    def all(self) -> dict[Place, Runs]:
        return {place: runs_of(numbers) for place, numbers in self._known.items() if numbers}
