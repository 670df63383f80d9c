"""Removes a job that has ended, or sweeps what it needs no more: `python -m fakes.ended_job DATA_DIR remove|sweep`."""

import asyncio
import sys
from pathlib import Path

from fakes.databases import open_database
from fakes.held_clock import HeldClock
from fakes.job_service import job_service

from batchmill.config import RetentionEntry
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.service import JobService
from batchmill.owner_term import Term
from batchmill.ports.clock import Clock

JOB = "job_" + "2" * 20


def service_of(data_dir: Path, clock: Clock | None = None, term: Term | None = None, **entry: int) -> JobService:
    """Args: term: of the owner, instead of that of the database."""
    ledger = Ledger(open_database(data_dir / "batchmill.db"))
    ledger.database.term = term or ledger.database.term
    return job_service(
        data_dir, ledger, LocalExecutor(data_dir / "workers"), clock or HeldClock(), retention=RetentionEntry(**entry)
    )


async def main(data_dir: Path, what: str) -> None:
    service = service_of(data_dir, intermediate_s=0)
    await (service.remove(JOB) if what == "remove" else service.retention.sweep())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
