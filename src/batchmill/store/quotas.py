"""Checks quotas within the transaction that inserts a record.

Only one thread writes, so nothing changes between the count and the insertion. To count all files of a project with
each upload would take longer than to store one. So of some quotas a bound is kept in memory: no project has more
records than its last count and those that were added since. Only where the bound reaches the quota they are counted,
and many of them not on the event loop: 100,000 files take 3 ms.
"""

from __future__ import annotations

import sqlalchemy as sa

from batchmill.errors import OverQuota
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.transactions import TakesLong, notes_of

ON_LOOP_MAX = 2000  # a larger quota is not counted on the event loop
_counting: dict[tuple[str, str], CompiledStatement] = {}  # (table, quota) -> its statement, which is built once


def refuse_beyond(
    db: sa.Connection, table: sa.Table, most: int, *, quota: str, project: str, way_out: str,
    where: sa.ColumnElement[bool] | None = None, adding: int = 1, is_noted: bool = False,
) -> None:  # fmt: skip
    """Raises: OverQuota if a project has its maximum of records in a table.

    Args:
        quota: the field of `types.Quotas`.
        way_out: what the caller can do: "delete some".
        where: which of its records count. It is the same for each use of a quota.
        adding: how many records will be inserted.
        is_noted: each record that begins to count is noted with `note_added`.
    """
    notes = notes_of(db) if is_noted else None
    if notes is not None:
        bound = notes.bound((quota, project))
        if bound is not None and bound + adding <= most:
            return
        if notes.is_on_loop and most > ON_LOOP_MAX:
            raise TakesLong
    counting = _counting.get((table.name, quota))
    if counting is None:
        mine = sa.select(sa.func.count()).select_from(table).where(table.c.project == sa.bindparam("of_project"))
        counting = CompiledStatement(mine if where is None else mine.where(where))
        _counting[table.name, quota] = counting
    ((count,),) = counting.rows(db, {"of_project": project})
    if notes is not None:
        notes.note_count((quota, project), count)
    if count + adding > most:
        raise over_quota(quota, project, f"has {count:,} {quota.replace('_', ' ')}", f"{most:,}", way_out)


def note_added(db: sa.Connection, quota: str, project: str) -> None:
    """Note that one more record of a project counts toward a quota."""
    if (notes := notes_of(db)) is not None:
        notes.note_added((quota, project))


def forget_counts(db: sa.Connection, quota: str) -> None:
    """Have the records of a quota be counted again: more of them count than were noted."""
    if (notes := notes_of(db)) is not None:
        notes.forget_bounds(quota)


def over_quota(quota: str, project: str, has: str, most: str, way_out: str) -> OverQuota:
    """The error of a full quota. `has`: what the project has, like "has 3 keys"; `most`: its maximum."""
    return OverQuota(
        f"the project {project} {has}, and may have {most}: {way_out}, or ask the operator of this server to raise "
        f"quotas.{quota} or projects.{project}.quotas.{quota}"
    )
