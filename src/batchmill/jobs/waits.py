"""Why a job is not going faster than it does, in sentences for people. Pure: what is known goes in."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from batchmill.states import JobState, PauseReason
from batchmill.types import EngineStats, JobView

# Where the job's own message does not say what to do.
WAYS_OUT = {
    PauseReason.QUOTA: "see to the account at the service, then resume it",
    PauseReason.AUTH: "mend the credentials, then resume it",
    PauseReason.STORAGE_FULL: "a server goes on by itself when there is room",
    PauseReason.STORAGE_FAILED: "a server tries it again by itself, less often each time; else resume it",
    PauseReason.DISK_QUOTA: "it goes on by itself when there is room",
    PauseReason.INPUT_CHANGED: "restore the input, then resume it",
    PauseReason.DATASET_DAMAGED: "run `batchmill ledger rebuild` for it, then resume it",
    PauseReason.ENGINE_FAILED: "mend what the engine says, then resume it",
    PauseReason.ROUTE_FAILED: "see to the provider, or give the model another route, then resume it",
}


class Silent(Struct, frozen=True):
    """A worker that is ready and says nothing."""

    pid: int
    for_s: float
    is_frozen: bool  # a signal has stopped it


class Standstill(Struct, frozen=True):
    """A job of which no row ends."""

    for_s: float  # 0: none was given out yet
    rows_out: int  # with workers
    is_between: bool = False  # it has just been begun or is about to rest: no row of it is given out


class ModelAtWork(Struct, frozen=True):
    """A model that the job needs, and what its workers say."""

    name: str
    is_ready: bool  # at least one worker is
    stats: Sequence[EngineStats]
    waits: str = ""  # for what a replica waits that the machine has no room for
    silent: Sequence[Silent] = ()


def reasons(
    view: JobView, models: Sequence[ModelAtWork], ahead: int, standstill: Standstill | None = None
) -> list[str]:
    """One sentence for each thing that the job waits for; at least one for a job that stands still."""
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


def unattended(view: JobView, is_stranded: bool) -> list[str]:
    """The same of a job that nothing works on; `is_stranded`: it could not be written down that it was interrupted."""
    state = JobState(view.state)
    if state is JobState.PAUSED or state.is_at_rest:
        return reasons(view, [], 0)
    if is_stranded:
        return ["nothing works on it: the disk has no room to write that down; it goes on once there is room"]
    return ["nothing works on it: the process that did has ended, or it is about to begin"]


def _paused(view: JobView) -> str:
    told = f": {view.message}" if view.message else ""
    way_out = WAYS_OUT.get(view.reason) if view.message else "resume it when it is to go on"
    return f"it is paused ({view.reason}){told.rstrip('.')}" + (f"; {way_out}" if way_out else "")


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
    told = f"a worker of the model {model!r} (process {worker.pid}) has said nothing for {worker.for_s:,.0f} s"
    if worker.is_frozen:
        return f"{told}: a signal has stopped it; `kill -CONT {worker.pid}` lets it go on"
    return f"{told}: its code keeps it from speaking; `kill {worker.pid}` has another worker take its rows"


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
