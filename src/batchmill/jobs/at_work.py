"""What is known of a job that is being worked on: what its workers say, since when they say nothing, and since when no
row of it has ended."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.drive import Drive
from batchmill.jobs.pool_worker import PoolWorker
from batchmill.jobs.views import add_run
from batchmill.jobs.waits import ModelAtWork, Silent, Standstill
from batchmill.types import EngineState, JobView

SILENT_S = 5.0  # a worker says twice a second that it is there
STILL_S = 10.0  # a job of which no row ended for so long is said to stand still


def view_at_work(view: JobView, drive: Drive, dispatcher: Dispatcher) -> JobView:
    """The view of a job with what only its drive and its workers know."""
    view = msgspec.structs.replace(view, progress=drive.progress)
    stats = [worker.stats for worker in dispatcher.workers_of(drive.models, drive.spec.code)]
    if (run := drive.rows_run) is not None:
        return add_run(view, run, stats)
    waiting = [drive.waits_for] if drive.waits_for else []
    notes = list(dict.fromkeys(each.note for each in stats if each.note))
    return msgspec.structs.replace(view, notes=[*waiting, *notes])


def models_at_work(drive: Drive, dispatcher: Dispatcher, now: float) -> Iterator[ModelAtWork]:
    """Args: now: monotonic seconds."""
    for model in drive.models:
        workers = dispatcher.workers_of([model], drive.spec.code)
        is_ready = any(worker.is_ready for worker in workers)
        engine = dispatcher.engine_of(model, drive.spec.code)
        waits_for = engine.message if engine.state != EngineState.FAILED else ""
        silent = [found for each in workers if (found := _silence(each, now)) is not None]
        yield ModelAtWork(model.name, is_ready, [each.stats for each in workers], waits_for, silent)


def _silence(worker: PoolWorker, now: float) -> Silent | None:
    for_s = now - worker.heard
    if for_s < SILENT_S or not worker.is_ready:  # one that starts may load a model without a word
        return None
    return Silent(worker.handle.pid, for_s, worker.handle.is_frozen())


def standstill_of(drive: Drive, now: float) -> Standstill | None:
    """None: rows of it have ended lately, or workers have just begun."""
    run = drive.rows_run
    if run is None or run.ended.done():
        return Standstill(0.0, 0, is_between=True)
    since = run.moved
    if since is None:
        return Standstill(0.0, 0)
    return Standstill(now - since, run.rows_out) if now - since >= STILL_S else None
