"""Orders that may arrive again: which job such an order is already, decided where the job is stored."""

from __future__ import annotations

import os

import sqlalchemy as sa

from batchmill.errors import Conflict, UnknownName
from batchmill.jobs import job_records, ledger_snapshot
from batchmill.states import JobState
from batchmill.store import removals
from batchmill.store.database import Database
from batchmill.store.tables import submissions
from batchmill.types import JobOrder, Once
from batchmill.wire.job_spec import JobSpec

BLIND_S = 3600.0  # an order without a key of the caller's stands for its job so long, if its reply never went out
KEPT_S = 86_400.0  # and one with a key so long


async def known(database: Database, once: Once, now: float) -> str | None:
    """As `standing`, with every reply counted whose delivery was heard of before this was asked."""
    found = await database.read(standing, once, now)
    if found is None or not once.blind:
        return found
    return await database.write(standing, once, now)  # behind the note of a reply, which may be on its way to the disk


def standing(db: sa.Connection, once: Once, now: float) -> str | None:
    """The job that this order is already; None: it is a new one. Raises: Conflict."""
    found = db.execute(sa.select(submissions).where(submissions.c.key == once.key)).first()
    if found is None:
        return None
    age_s = now - found.created
    is_same = found.fingerprint == once.fingerprint
    if once.blind:
        is_asked_again = once.again_s is not None and age_s <= once.again_s
        was_answered = found.answered is not None and (
            once.arrived is None or found.answered < once.arrived or age_s < 0
        )
        is_open = not was_answered and age_s <= BLIND_S
        return found.job if is_same and (is_open or is_asked_again) else None
    if age_s > KEPT_S:
        return None
    if not is_same:
        raise Conflict(
            f"this idempotency key stands for the job {found.job}, which was ordered with another body or parameters: "
            "use a new key for a new order",
            code="idempotency_key_reused",
        )
    return found.job


def is_anew(record: sa.RowMapping, order: JobOrder) -> bool:
    """Whether an order that is a known job runs it from its beginning again."""
    if record["compacted"] is not None and not os.path.exists(record["output"]):
        return True  # its results are gone, and what they could be written from
    return order.restart or (order.overwrite and record["state"] == JobState.COMPLETED)


def enter(db: sa.Connection, spec: JobSpec, once: Once | None, quota: int | None) -> None:
    """Put a job into the ledger, and what its order is known by: both or neither.

    Args: quota: how many unfinished jobs its project may have; None: whoever runs the machine orders it.

    Raises: OverQuota; UnknownName where a result that it reads has been removed.
    """
    names = [os.path.basename(path) for path in spec.dataset.paths] if spec.origin is not None else []
    for removed in removals.find_all(db, names):
        raise UnknownName(f"No such File object: {removed}", code="unknown_file")
    if quota is not None:
        job_records.refuse_unfinished(db, spec.project, quota)
    ledger_snapshot.insert_job(db, spec)
    if once is not None:
        db.execute(submissions.delete().where(submissions.c.key == once.key))  # it stood for nothing any more
        values = {"key": once.key, "job": spec.id, "fingerprint": once.fingerprint, "created": spec.created}
        db.execute(submissions.insert().values(**values))


def answered(db: sa.Connection, key: str, now: float) -> None:
    """The reply to this order has been delivered."""
    db.execute(submissions.update().where(submissions.c.key == key).values(answered=now))


def forget_old(db: sa.Connection, now: float) -> None:
    """Drop the orders that stand for nothing any more."""
    db.execute(submissions.delete().where(submissions.c.created < now - KEPT_S))
