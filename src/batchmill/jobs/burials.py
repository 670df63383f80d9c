"""What a dead worker had finished is counted; the rest of its shards goes to others."""

from __future__ import annotations

from collections.abc import Callable

from batchmill.errors import BatchmillError
from batchmill.jobs import recovery
from batchmill.jobs.commits import Books
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.pool_worker import PoolWorker
from batchmill.types import Commit


async def bury(
    books: Books, worker: PoolWorker, run: JobRun, *, died: bool, told: Callable[[Commit, float | None], None]
) -> list[Commit]:
    """Adopt for one job; returns what was adopted, of which `told` hears. One that did not die is nobody's fault."""
    shards = run.held_by(worker.name)
    if died:
        recovery.note_suspect(run, worker.home / f"{worker.name}.suspect")
    try:
        found = await books.call(
            recovery.adopt, books.ledger, run.spec, run.generation, run.plan, run.files, worker.name
        )
    except BatchmillError as error:
        run.pause(error)
        return []
    for commit, cost in found:
        told(commit, cost)
    for shard in shards:
        run.put_back(shard, died=died)
    return [commit for commit, _ in found]
