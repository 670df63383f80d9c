"""Leases the shards that are being granted to workers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from batchmill import faults
from batchmill.errors import BatchmillError
from batchmill.jobs.ledger.commits import SHORT_MAX, CommitLog
from batchmill.jobs.ledger.ledger import LeasedShard
from batchmill.jobs.pools.pool_worker import Claim, PoolWorker
from batchmill.types import Shard


class Match(Struct, frozen=True, eq=False):
    """A shard that is being granted to a worker."""

    worker: PoolWorker
    claim: Claim
    shard: Shard


async def lease(commit_log: CommitLog, matches: Sequence[Match]) -> list[LeasedShard | None]:
    """Lease shards, except those whose first lease their job was stored with. None: the job has paused over it."""
    if commit_log.ledger.database.term.is_over():  # another process may own the database, and have leased them
        return await _lease_now(commit_log, matches)
    first = [match.claim.run.take_first_lease(match.shard.number) for match in matches]
    rest = [match for match, leased in zip(matches, first, strict=True) if leased is None]
    others = iter(await _lease_now(commit_log, rest) if rest else ())
    return [next(others) if leased is None else leased for leased in first]


async def _lease_now(commit_log: CommitLog, matches: Sequence[Match]) -> list[LeasedShard | None]:
    """Lease in one transaction; if that fails, in one for each shard, so that one job's error stays its own."""
    shards = [(each.claim.run.spec.id, each.claim.run.generation, each.shard) for each in matches]
    try:
        write = commit_log.write_short if len(shards) <= SHORT_MAX else commit_log.write
        leased = await write(commit_log.ledger.lease_each, shards)
        faults.point("after_lease")
        return list(leased)
    except BatchmillError as error:
        if len(matches) == 1:
            matches[0].claim.run.pause(error)
            return [None]
    return [(await _lease_now(commit_log, [match]))[0] for match in matches]
