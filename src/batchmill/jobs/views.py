"""Views of jobs: the ledger's record, live data of the runner and workers, and why a job waits.

The sentences about waiting are pure: `reasons` takes what is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.jobs.intake import routing
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.resources import hide_names
from batchmill.jobs.runner import JobRunner
from batchmill.states import JobState, PauseReason
from batchmill.store.sql.transactions import Record
from batchmill.types import EngineState, EngineStats, JobView, ModelSpec, Problem, Usage, Wait
from batchmill.wire import sampling
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

NAMES_MAX = 100  # of the models and adapters that rows go to, as they are shown
# Where the job's own message does not say what to do.
WAYS_OUT = {
    PauseReason.SAMPLED: "resume it to run the other rows",
    PauseReason.QUOTA: "see to the account at the service, then resume it",
    PauseReason.AUTH: "mend the credentials, then resume it",
    PauseReason.STORAGE_FULL: "a server resumes it when space is free",
    PauseReason.STORAGE_FAILED: "a server tries it again by itself, less often each time; else resume it",
    PauseReason.DATABASE_UNAVAILABLE: "a server resumes it when the database is back",
    PauseReason.DISK_QUOTA: "it resumes by itself when space is free",
    PauseReason.INPUT_CHANGED: "restore the input, then resume it",
    PauseReason.DATASET_DAMAGED: "run `batchmill ledger rebuild` for it, then resume it",
    PauseReason.INTERNAL_ERROR: "its traceback is in the log: report it, then resume the job",
    PauseReason.ENGINE_FAILED: "mend what the engine says, then resume it",
    PauseReason.ROUTE_FAILED: "see to the provider, or give the model another route, then resume it",
}
SILENT_S = 5.0  # a worker says twice a second that it is there
STILL_S = 10.0  # a job counts as stalled if no row ended for so long


class Silent(Struct, frozen=True):
    """A ready worker that sends no messages."""

    pid: int
    for_s: float
    is_frozen: bool  # a signal has stopped it


class Standstill(Struct, frozen=True):
    """A job that completes no rows."""

    for_s: float  # 0: none was given out yet
    rows_out: int  # with workers
    is_between: bool = False  # it has just been begun or is about to rest: no row of it is given out


class ModelAtWork(Struct, frozen=True):
    """A model of the job, and the state of its workers."""

    name: str
    is_ready: bool  # at least one worker is
    stats: Sequence[EngineStats]
    waits: str = ""  # for what a replica waits that the machine has no room for
    silent: Sequence[Silent] = ()


def view_of(record: Record, errors: dict[str, tuple[int, str]]) -> JobView:
    """The view of a job from the ledger alone."""
    spec = read_spec(record["spec"])
    problems = record.get("problems")  # a list of jobs comes without them
    view = JobView(
        id=record["id"],
        state=record["state"],
        project=record["project"],
        labels=spec.labels,
        origin=spec.origin,
        priority=record["priority"],
        deadline=record["deadline"],
        reason=record["reason"],
        message=record["message"],
        input=spec.dataset.paths,
        output=record["output"],
        errors_output=record["errors_output"],
        added_columns=list(spec.form.reserved) if isinstance(spec.form, TableForm) else [],
        schema=spec.form.schema if isinstance(spec.form, TableForm) and "problems" in record else None,
        model=_names(spec.used if spec.origin is not None else [model.name for model in spec.models]),
        routing=routing.sentences(spec),
        created=record["created"],
        started=record["started"],
        finalizing=record["finalizing"],
        cancelling=record["cancelling"],
        finished=record["finished"],
        generation=record["generation"],
        retries=spec.retries,
        sample=spec.sample,
        work=spec.work,
        reuse_note=spec.reuse_note,
        rows=record["rows"],
        rows_ok=record["rows_ok"],
        rows_failed=record["rows_failed"],
        rows_folded=record["rows_folded"],
        rows_reused=record["rows_reused"],
        rows_rejected=record["rows_rejected"],
        usage=Usage(record["input_tokens"], record["cached_tokens"], record["output_tokens"]),
        cost=record["cost"],
        prices={model.name: model.price for model in _in_use(spec) if model.price is not None},
        errors={code: rows for code, (rows, _) in errors.items()},
        error_samples={code: sample for code, (_, sample) in errors.items()},
        warnings=msgspec.json.decode(record["warnings"] or b"{}", type=dict[str, int]),
        elapsed_s=record["elapsed_s"],
        problems=msgspec.json.decode(problems, type=list[Problem]) if problems else [],
        problems_total=record["problems_total"],
    )
    if spec.sample is None or view.state != JobState.PAUSED:
        return view
    is_handed_over = any(model.is_handed_over for model in spec.models)
    return msgspec.structs.replace(view, outlook=sampling.outlook(view, is_handed_over=is_handed_over))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def _in_use(spec: JobSpec) -> list[ModelSpec]:
    """The models that rows go to, or to adapters of; a frontend's job is given all models, and knows once planned."""
    if spec.origin is None:
        return spec.models
    used = frozenset(spec.used)
    return [model for model in spec.models if model.name in used or not used.isdisjoint(model.adapters)]


def view_at_work(view: JobView, runner: JobRunner, dispatcher: Dispatcher) -> JobView:
    """The view of a running job, with data of its runner and its workers."""
    if view.state == JobState.FINALIZING:  # no row is left for the workers
        return msgspec.structs.replace(view, progress=runner.progress)
    models = runner.models
    workers = dispatcher.workers_of(models, runner.spec.code)
    stats, is_served = [worker.stats for worker in workers], len(models) == 1 and any(each.is_ready for each in workers)
    waiting = [] if is_served else _waiting_models(models, runner, dispatcher)
    if (run := runner.rows_run) is not None:
        return msgspec.structs.replace(view, progress=runner.progress, **_of_run(view, run, stats, waiting))
    waiting = [runner.waits_for, *waiting] if runner.waits_for else waiting
    notes = list(dict.fromkeys(each.note for each in stats if each.note))
    return msgspec.structs.replace(view, progress=runner.progress, notes=[*waiting, *notes])


def _of_run(view: JobView, run: JobRun, workers: Sequence[EngineStats], waiting: Sequence[str]) -> dict[str, Any]:
    """Rates, remaining time and notes of a view. Args: waiting: what models without a worker wait for."""
    rates = run.rates.now()
    rows_per_s, input_per_s, output_per_s = rates or (None, None, None)
    return {
        "elapsed_s": view.elapsed_s + run.elapsed_s,
        "rows_per_s": rows_per_s,
        "input_tokens_per_s": input_per_s,
        "output_tokens_per_s": output_per_s,
        "remaining_s": run.rows_left / rows_per_s if rows_per_s else None,
        "in_flight": sum(stats.in_flight for stats in workers),
        "notes": [
            *waiting,
            *dict.fromkeys(stats.note for stats in workers if stats.note),
            *(run.job_budget.notes if run.job_budget else []),
        ],
    }


def _waiting_models(models: Sequence[ModelSpec], runner: JobRunner, dispatcher: Dispatcher) -> list[str]:
    """Why no worker of a model runs, of those that wait for room or for their cluster. For any caller: others' models
    have no names.
    """
    engines = [(model.name, dispatcher.engine_of(model, runner.spec.code)) for model in models]
    return [
        hide_names(f"the model {name!r} waits: {engine.message}", lambda _: False)
        for name, engine in engines
        if engine.message and not engine.ready and engine.state != EngineState.FAILED
    ]


def _models_at_work(runner: JobRunner, dispatcher: Dispatcher, now: float) -> Iterator[ModelAtWork]:
    """Args: now: monotonic seconds."""
    for model in runner.models:
        workers = dispatcher.workers_of([model], runner.spec.code)
        is_ready = any(worker.is_ready for worker in workers)
        engine = dispatcher.engine_of(model, runner.spec.code)
        waits_for = engine.message if engine.state != EngineState.FAILED else ""
        silent = [found for each in workers if (found := _silent(each, now)) is not None]
        yield ModelAtWork(model.name, is_ready, [each.stats for each in workers], waits_for, silent)


def _silent(worker: PoolWorker, now: float) -> Silent | None:
    for_s = now - worker.last_message_at
    if for_s < SILENT_S or not worker.is_ready:  # one that starts may load a model without a word
        return None
    return Silent(worker.handle.pid, for_s, worker.handle.is_frozen())


def _standstill_of(runner: JobRunner, now: float) -> Standstill | None:
    """Whether the job is stalled; None if rows completed lately or workers have just started."""
    run = runner.rows_run
    if run is None or run.ended.done():
        return Standstill(0.0, 0, is_between=True)
    since = run.progressed_at
    if since is None:
        return Standstill(0.0, 0)
    return Standstill(now - since, run.rows_out) if now - since >= STILL_S else None


def reasons(
    view: JobView, models: Sequence[ModelAtWork], ahead: int, standstill: Standstill | None = None
) -> list[str]:
    """One sentence for each thing that the job waits for; at least one if it is stalled."""
    match JobState(view.state):
        case JobState.PAUSED:
            return [_paused(view)]
        case JobState.VALIDATING | JobState.PLANNING:
            return [f"its rows are still being checked and put in order{_share(view)}", *_engines(models)]
        case JobState.QUEUED | JobState.RUNNING:
            known = [*_engines(models), *_ahead(ahead), *_live(models)]
            return known if standstill is None else [*known, *_standstill(standstill, is_known=bool(known))]
        case JobState.FINALIZING:
            return [f"every row has run; its results are being written{_share(view)}"]
        case JobState.CANCELLING:
            return [f"it is being ended: rows in flight may still finish, then its results are written{_share(view)}"]
    return []


def wait_with_runner(view: JobView, runner: JobRunner, dispatcher: Dispatcher, now: float) -> Wait:
    """Why a job with a runner is not done yet. Args: now: monotonic seconds."""
    ahead = dispatcher.ahead_of(view.id)
    first = [runner.waits_for] if runner.waits_for else []
    if runner.stop_reason is not None:
        first.append("it is being paused: rows in flight may still finish")
    found = reasons(view, list(_models_at_work(runner, dispatcher, now)), ahead, _standstill_of(runner, now))
    return Wait(view.id, view.state, [*first, *found, *view.routing], ahead)


def wait_without_runner(view: JobView, *, is_stranded: bool) -> Wait:
    """Why a job without a runner is not done; `is_stranded`: its interruption could not be stored."""
    state = JobState(view.state)
    if state is JobState.PAUSED or state.is_at_rest:
        found = reasons(view, [], 0)
    elif is_stranded:
        found = ["nothing works on it: the disk has no room to write that down; it continues when space is free"]
    else:
        found = ["nothing works on it: the process that did has ended, or it is about to begin"]
    return Wait(view.id, view.state, [*found, *view.routing], 0)


def _paused(view: JobView) -> str:
    message = f": {view.message}" if view.message else ""
    way_out = WAYS_OUT.get(view.reason) if view.message else "resume it to continue"
    return f"it is paused ({view.reason}){message.rstrip('.')}" + (f"; {way_out}" if way_out else "")


def _share(view: JobView) -> str:
    return "" if view.progress is None else f" ({view.progress:.0%} done)"


def _engines(models: Sequence[ModelAtWork]) -> list[str]:
    found = []
    for model in models:
        notes = list(dict.fromkeys(stats.note for stats in model.stats if stats.note))
        if model.waits:
            more = "another copy of " if model.is_ready else ""
            found.append(f"{more}the model {model.name!r} waits for room: {model.waits}")
        if not model.is_ready and not model.waits:
            found.append(f"the model {model.name!r} is still starting" + (f": {'; '.join(notes)}" if notes else ""))
        else:
            found += [f"the model {model.name!r}: {note}" for note in notes]
        found += [_silence(model.name, each) for each in model.silent]
    return found


def _silence(model: str, worker: Silent) -> str:
    message = f"a worker of the model {model!r} (process {worker.pid}) has said nothing for {worker.for_s:,.0f} s"
    if worker.is_frozen:
        return f"{message}: a signal has stopped it; `kill -CONT {worker.pid}` continues it"
    return f"{message}: its code keeps it from speaking; `kill {worker.pid}` has another worker take its rows"


def _standstill(standstill: Standstill, *, is_known: bool) -> list[str]:
    if standstill.for_s and standstill.rows_out:
        rows = "1 row is" if standstill.rows_out == 1 else f"{standstill.rows_out:,} rows are"
        return [f"no row of it has ended for {standstill.for_s:,.0f} s; {rows} with its workers"]
    if standstill.for_s:
        return [f"no row of it has ended for {standstill.for_s:,.0f} s; its rows wait until a worker has room for them"]
    if is_known:
        return []
    if standstill.is_between:
        return ["it has just begun to run or is about to rest: what its workers had finished is being counted"]
    return ["its rows wait until a worker has room for them"]


def _ahead(ahead: int) -> list[str]:
    if not ahead:
        return []
    jobs = "1 other job gets" if ahead == 1 else f"{ahead} other jobs get"
    return [f"{jobs} workers first, by priority, deadline and what each project has had"]


def _live(models: Sequence[ModelAtWork]) -> list[str]:
    live = sum(stats.live for model in models for stats in model.stats)
    return [f"{live} live requests of the same models go first"] if live else []
