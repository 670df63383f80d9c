"""What a worker is told of a job before it gets rows of it."""

from __future__ import annotations

from collections.abc import Iterable

from batchmill.jobs.job_run import JobRun
from batchmill.jobs.pool_worker import PoolWorker
from batchmill.wire.messages import FailRows, Open


def open_job(run: JobRun, worker: PoolWorker, model: int) -> None:
    """Tell a worker of the job, unless it knows it."""
    spec = run.spec
    if spec.id in worker.opened:
        return
    worker.opened[spec.id] = spec.project
    places = str(run.files.dataset), str(run.files.segments)
    worker.handle.send(Open(spec.id, spec.identity, spec.form, *places, spec.models[model].adapter_set(), spec.project))
    if run.fails_rows:
        worker.handle.send(FailRows(spec.id))
    if run.purse is not None:
        run.purse.open(worker.name, worker.handle.send)


def fail_rows(run: JobRun, workers: Iterable[PoolWorker]) -> None:
    """Rows of it that failed and wait are given up, by workers that have some now and those that get some."""
    run.fails_rows = True
    for worker in workers:
        if run.spec.id in worker.opened:
            worker.handle.send(FailRows(run.spec.id))


def bound(run: JobRun, workers: Iterable[PoolWorker]) -> None:
    """The budget of a job that runs has changed, or it has one now."""
    is_new = run.purse is None
    run.check_budget()
    if is_new and run.purse is not None:
        for worker in workers:
            if run.spec.id in worker.opened:
                run.purse.open(worker.name, worker.handle.send)
