"""An order that makes a job: the same order again is the job that it made, and costs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from batchmill.server.operations import Call
from batchmill.services.job_desk import JobDesk
from batchmill.types import Once


async def take(call: Call, desk: JobDesk, once: Once, submit: Callable[[], Awaitable[str]]) -> str:
    """The id of the job that an order is or becomes; from then on it is stored, and nothing may fail.

    An order that is known already is answered whatever has become of its input, its model or the key's rate.
    """
    job = await desk.ordered(once)
    if job is None:
        call.spend()
        job = await submit()
    call.on_delivered(lambda: desk.answered(once.key))
    return job
