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
    PauseReason.INPUT_CHANGED: "restore the input, then resume it",
    PauseReason.ENGINE_FAILED: "mend what the engine says, then resume it",
    PauseReason.ROUTE_FAILED: "see to the provider, or give the model another route, then resume it",
}


class ModelAtWork(Struct, frozen=True):
    """A model that the job needs, and what its workers say."""

    name: str
    is_ready: bool  # at least one worker is
    stats: Sequence[EngineStats]
    waits: str = ""  # for what a replica waits that the machine has no room for


def reasons(view: JobView, models: Sequence[ModelAtWork], ahead: int) -> list[str]:
    """One sentence for each thing that the job waits for."""
    match JobState(view.state):
        case JobState.PAUSED:
            return [_paused(view)]
        case JobState.VALIDATING | JobState.PLANNING:
            return [f"its rows are still being checked and put in order{_share(view)}", *_engines(models)]
        case JobState.QUEUED | JobState.RUNNING:
            return [*_engines(models), *_ahead(ahead), *_live(models)]
        case JobState.FINALIZING:
            return [f"every row has run; its results are being written{_share(view)}"]
        case JobState.CANCELLING:
            return [f"it is being ended: rows in flight may still finish, then its results are written{_share(view)}"]
    return []


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
    return found


def _ahead(ahead: int) -> list[str]:
    if not ahead:
        return []
    jobs = "1 other job gets" if ahead == 1 else f"{ahead} other jobs get"
    return [f"{jobs} workers first, by priority, deadline and what each project has had"]


def _live(models: Sequence[ModelAtWork]) -> list[str]:
    live = sum(stats.live for model in models for stats in model.stats)
    return [f"{live} live requests of the same models go first"] if live else []
