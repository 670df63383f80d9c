"""How a job ends before all of its rows have run: cancelled, or because its deadline has passed.

Batches that providers still run are cancelled there. Workers get its shards once more, only to collect results.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from msgspec import Struct

from batchmill.errors import JobPaused
from batchmill.jobs.ledger.ledger import AT_REST, INTENT, SUBMITTED, UNKNOWN
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.job_run import JobRun
from batchmill.states import EXPIRED, JobState, PauseReason
from batchmill.store.sql.transactions import Record
from batchmill.types import RemoteJob, RowError

REMOTE_CANCELLATION_S = 3600.0  # for all of a job's shards; an engine gives up on one shard earlier
WAYS_OUT = "resume it to try again, or cancel it again to end it without their results"
REQUESTED = frozenset({PauseReason.INTERRUPTED, PauseReason.REQUESTED})  # the caller knows why the job paused


ENDS_EARLY = frozenset({JobState.VALIDATING, JobState.QUEUED})  # where an early end interrupts what a job waits for


class EndsEarly(Exception):
    """The job must end before its rows run."""


class EarlyEnd(Struct, frozen=True):
    """The final state of a job that ends early, and the error of the rows that never ran."""

    state: JobState
    reason: str | None  # while it is CANCELLING
    why: str  # in words
    unrun: RowError


# Source: OpenAI's Batch API, "the request output object".
CANCELLED = EarlyEnd(
    JobState.CANCELLED,
    None,
    "the job was cancelled",
    RowError("batch_cancelled", "This request was not executed because the batch was cancelled."),
)
PAST_DEADLINE = EarlyEnd(
    JobState.EXPIRED,
    EXPIRED,
    "the deadline of the job has passed",
    RowError("batch_expired", "This request could not be executed before the completion window expired."),
)


def early_end_of(record: Record) -> EarlyEnd:
    """How a CANCELLING job ends: a cancellation after the deadline counts as expiry."""
    cancelling, deadline = record["cancelling"], record["deadline"]
    is_late = cancelling is not None and deadline is not None and cancelling >= deadline
    return PAST_DEADLINE if is_late else CANCELLED


def begins_at(early: EarlyEnd, deadline: float | None, now: float) -> float:
    """When the early end begins: never before the deadline if that is the reason, even if the clock is set back."""
    return max(now, deadline) if early is PAST_DEADLINE and deadline is not None else now


async def cancel_remote(run: JobRun, dispatcher: Dispatcher, *, is_at_once: bool) -> None:
    """Cancel the remote jobs of a run that is over, and count the outcomes that providers already have.

    Raises: JobPaused if their results cannot be collected now.
    """
    dispatcher.add(run)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOTE_CANCELLATION_S):
                await asyncio.shield(run.ended)
    except JobPaused as error:
        if error.reason in REQUESTED:
            raise
        text = f"{error.message}; the job is ending, but providers may still have rows of it: fix this, then {WAYS_OUT}"
        raise JobPaused(text, reason=error.reason) from None
    finally:
        await dispatcher.remove(run, at_once=is_at_once)


def refuse_uncancelled(remotes: Sequence[RemoteJob]) -> None:
    """Raises: JobPaused if a provider still runs, and bills, a batch that could not be cancelled."""
    if running := [each for each in remotes if each.state in (INTENT, SUBMITTED)]:
        text = "the job is ending, but its providers did not reply: " + "; ".join(leftovers(running))
        raise JobPaused(f"{text}; {WAYS_OUT}", reason=PauseReason.ROUTE_FAILED)


def leftovers(remotes: Sequence[RemoteJob]) -> list[str]:
    """Batches that may still be at a provider, for a person to check."""
    return [
        f"the submission {each.tag} to {each.provider} has an unknown state: look for it there"
        if each.state == UNKNOWN
        else f"the job {each.id or each.tag} of {each.provider} may still be there ({each.remote_state or each.state})"
        for each in remotes
        if each.state not in AT_REST
    ]
