"""Checks quotas within the transaction that inserts a record.

Only one thread writes, so nothing changes between the count and the insertion.
"""

from __future__ import annotations

import sqlalchemy as sa

from batchmill.errors import OverQuota

_counting: dict[tuple[str, str], sa.Select[tuple[int]]] = {}  # (table, quota) -> its statement, which is built once


def refuse_beyond(
    db: sa.Connection, table: sa.Table, most: int, *, quota: str, project: str, way_out: str,
    where: sa.ColumnElement[bool] | None = None, adding: int = 1,
) -> None:  # fmt: skip
    """Raises: OverQuota if a project has its maximum of records in a table.

    Args:
        quota: the field of `types.Quotas`.
        way_out: what the caller can do: "delete some".
        where: which of its records count. It is the same for each use of a quota.
        adding: how many records will be inserted.
    """
    counting = _counting.get((table.name, quota))
    if counting is None:
        mine = sa.select(sa.func.count()).select_from(table).where(table.c.project == sa.bindparam("of_project"))
        counting = _counting[table.name, quota] = mine if where is None else mine.where(where)
    count = db.execute(counting, {"of_project": project}).scalar_one()
    if count + adding > most:
        raise over_quota(quota, project, f"has {count:,} {quota.replace('_', ' ')}", f"{most:,}", way_out)


def over_quota(quota: str, project: str, has: str, most: str, way_out: str) -> OverQuota:
    """The error of a full quota. `has`: what the project has, like "has 3 keys"; `most`: its maximum."""
    return OverQuota(
        f"the project {project} {has}, and may have {most}: {way_out}, or ask the operator of this server to raise "
        f"quotas.{quota} or projects.{project}.quotas.{quota}"
    )
