"""A server that is given one order, the same each time it starts, and runs it: `python -m fakes.order_server FOLDER`.

It prints how the order was taken, how many jobs there are, and the job's state, finished rows and results.
"""

import asyncio
import sys
from pathlib import Path

from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.service import JobService
from batchmill.store.file_log import FileLog
from batchmill.store.sql.database import Database
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Once


async def main(folder: Path) -> None:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    executor = LocalExecutor(data / "workers")
    executor.sweep()
    database = Database(data / "batchmill.db")
    log = FileLog(database, data)
    async with log.open():
        service = job_service(data, Ledger(database), executor, SystemClock(), log=log)
        await run_order(service, folder)
        await log.sync()
        await service.close()


async def run_order(service: JobService, folder: Path) -> None:
    await service.recover(resume_server_jobs=True)
    order = JobOrder(
        DatasetSpec([str(folder / "in.jsonl")], format="openai"),
        [ModelSpec("double", "function", f"{folder / 'app.py'}:double", allowed=["double"])],
        origin={"frontend": "openai"},
        default_model=False,
        once=Once("blind:1", "0" * 64, blind=True),
    )
    submitted = await service.submit(order)
    while True:
        last = [view async for view in service.watch(submitted.id, 0.05)][-1]
        if last.state != "paused":  # until it is resumed
            break
        await asyncio.sleep(0.01)
    print(submitted.how, len(await service.list()), last.state, last.rows_ok, last.output)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
