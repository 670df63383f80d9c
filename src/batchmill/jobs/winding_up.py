"""The end of what providers still run of a job whose rows are not to wait for it any more.

Its shards go to workers once more, to collect and to begin nothing; how that comes to its end is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from batchmill.errors import JobPaused
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.shard_notes import AT_REST, INTENT, SUBMITTED, UNKNOWN
from batchmill.states import PauseReason
from batchmill.types import RemoteJob

WIND_UP_S = 3600.0  # for all of a job's shards together; an engine gives up one of them earlier
WAYS_OUT = "resume it to ask them again, or cancel it again to end it without what they have"
OWN_WORDS = frozenset({PauseReason.INTERRUPTED, PauseReason.ASKED})  # whoever asked knows why


async def wind_up(run: JobRun, dispatcher: Dispatcher, *, is_at_once: bool) -> None:
    """Bring a run that is over to its end; what its rows have been answered is counted then.

    Raises: JobPaused where what providers have cannot be collected now.
    """
    dispatcher.add(run)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WIND_UP_S):
                await asyncio.shield(run.ended)
    except JobPaused as error:
        if error.reason in OWN_WORDS:
            raise
        text = f"{error.message}; providers may still have rows of this job, which ends: mend it and {WAYS_OUT}"
        raise JobPaused(text, reason=error.reason) from None
    finally:
        await dispatcher.remove(run, at_once=is_at_once)


def refuse_orphans(remotes: Sequence[RemoteJob]) -> None:
    """Raises: JobPaused where a provider runs, and bills, what it could not be asked to end."""
    if running := [each for each in remotes if each.state in (INTENT, SUBMITTED)]:
        text = "the job is to end, but its providers did not answer: " + "; ".join(leftovers(running))
        raise JobPaused(f"{text}; {WAYS_OUT}", reason=PauseReason.ROUTE_FAILED)


def leftovers(remotes: Sequence[RemoteJob]) -> list[str]:
    """What may still be at a provider, and should be looked after there by somebody."""
    return [
        f"nobody knows what became of the submission {each.tag} to {each.provider}: look for it there"
        if each.state == UNKNOWN
        else f"the job {each.id or each.tag} of {each.provider} may still be there ({each.remote_state or each.state})"
        for each in remotes
        if each.state not in AT_REST
    ]
