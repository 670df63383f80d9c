"""Statements that change the record of a job, each of which is compiled once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.portable import greatest
from batchmill.store.sql.tables import jobs
from batchmill.store.sql.transactions import Record, note_change

TIMES = ("started", "finalizing", "cancelling", "finished")
_NOTHING: Mapping[str, float] = {}


class Ending(Struct, frozen=True):
    """What ends a job: fields of its record, and running time to add."""

    fields: dict[str, Any]
    errors: dict[str, tuple[int, str]] | None  # replace the error counts: code -> (rows, one message); None: they stay
    spent_s: float


def change_job(
    db: sa.Connection, job_id: str, fields: Mapping[str, object], added: Mapping[str, float] = _NOTHING, *,
    times: Collection[str] = TIMES, returns: bool = True,
) -> Record | None:  # fmt: skip
    """Set fields of a job's record and add to others. Returns it, so that those who poll the job get it unread.

    Args:
        fields: column -> value. It counts more than what is added to the same column.
        added: column -> number.
        times: of the fields those that do not lie before a time that the job has: the clock may have been set back.
        returns: whether to read the record; None is returned, and noted, if not.
    """
    later = frozenset(name for name in times if fields.get(name) is not None)
    statement = _changing(frozenset(fields), later, frozenset(added).difference(fields), returns)
    parameters: dict[str, Any] = {"of_job": job_id}
    parameters.update((f"new_{name}", value) for name, value in fields.items())
    parameters.update((f"more_{name}", value) for name, value in added.items())
    record = None
    if returns:
        record = statement.record(db, parameters)
    else:
        statement.run(db, parameters)
    note_change(db, job_id, record)
    return record


@lru_cache(maxsize=256)
def _changing(fields: frozenset[str], times: frozenset[str], added: frozenset[str], returns: bool) -> CompiledStatement:
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}", type_=jobs.c[name].type) for name in sorted(fields)}
    values |= {name: _after_all(values[name]) for name in sorted(times)}
    for name in sorted(added):
        now = sa.func.coalesce(jobs.c[name], 0.0) if jobs.c[name].nullable else jobs.c[name]
        values[name] = now + sa.bindparam(f"more_{name}", type_=jobs.c[name].type)
    update = jobs.update().where(jobs.c.id == sa.bindparam("of_job")).values(**values)
    return CompiledStatement(update.returning(*jobs.c) if returns else update)


def _after_all(at: object) -> sa.ColumnElement[float]:
    """This time, or the latest time of a job if that is later."""
    return greatest(at, jobs.c.created, *(sa.func.coalesce(jobs.c[name], 0.0) for name in TIMES))
