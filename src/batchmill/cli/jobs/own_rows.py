"""Follows a job until the rows that one caller asked for have run. Others may have the same job run a sample of theirs,
after which it pauses: when an owner ends, the next one may be their process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchmill.client.job_ends import is_sampled
from batchmill.errors import InvalidTransition
from batchmill.states import JobState
from batchmill.types import JobOrder, JobView, Once, Sample, Submitted

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient


class Followed(Struct, frozen=True):
    """The last view of a job, and whether the caller was interrupted: then nothing goes on."""

    view: JobView
    was_interrupted: bool = False


async def follow_own_rows(
    submitted: Submitted,
    sample: Sample | None,
    *,
    follow: Callable[[Submitted], Awaitable[Followed]],
    go_on: Callable[[], Awaitable[Submitted]] | None,
) -> Followed:
    """Follow a job until it has ended, or pauses for another reason than another caller's sample.

    Args:
        sample: which the caller asked for; None: all rows.
        follow: shows the job until it is paused or has ended.
        go_on: has it run the caller's rows. None: at a server, where each order is a job of its own.
    """
    followed = await follow(submitted)
    while go_on is not None and not followed.was_interrupted and _ran_for_others(followed.view, sample):
        followed = await follow(await go_on())
    return followed


def _ran_for_others(view: JobView, sample: Sample | None) -> bool:
    return is_sampled(view) and view.sample != sample


def order_once(order: JobOrder) -> JobOrder:
    """The order with a key, by which an owner knows the job that it is already: it is not begun again."""
    return replace(order, once=order.once or new_key("submit"))


def new_key(verb: str) -> Once:
    """The key of one request to an owner."""
    return Once(f"{verb}:{os.urandom(16).hex()}", fingerprint="")


def again(order: JobOrder) -> JobOrder:
    """An order whose job goes on: what it started over stays, also once its key is forgotten."""
    return replace(order, restart=False)


async def resumed(jobs: JobsClient, submitted: Submitted) -> Submitted:
    """Have a job that rests run all of its rows."""
    with contextlib.suppress(InvalidTransition):  # it has gone on, or ended, meanwhile
        await jobs.steer(submitted.id, "resume")
    return submitted


def sample_to_resume(view: JobView) -> Sample | None:
    """The rows that a job runs for who resumes it: the rest of a sample that was interrupted, otherwise all.

    Args: view: of the job before that. One that runs, runs another caller's sample.
    """
    is_interrupted = JobState(view.state) == JobState.PAUSED and not is_sampled(view)
    return view.sample if is_interrupted else None
