"""Records of removals: by whom, and when. Each function runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Gone
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.portable import insert_missing
from batchmill.store.sql.tables import jobs, removals

REMEMBERED_S = 90 * 86_400.0  # how long removals are remembered after their job was deleted
ELSEWHERE = "somebody outside of batchmill"


class Removal(Struct, frozen=True):
    """A removed result file or job."""

    id: str
    project: str
    job: str
    by: str  # in words: "the key k1"
    at: float  # seconds since the epoch, UTC
    pending: bool = False  # some of its files are still on the disk

    def error(self) -> Gone:
        when = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        what = "the job" if self.id == self.job else f"a result of the job {self.job},"
        error = Gone(f"{what} {self.id} was deleted by {self.by} at {when}")
        error.project = self.project
        return error


_FIELDS = [removals.c[name] for name in Removal.__struct_fields__]
_FIND_ALL = sa.select(*_FIELDS).where(removals.c.id.in_(sa.bindparam("ids", expanding=True)))
_FIND = CompiledStatement(sa.select(*_FIELDS).where(removals.c.id == sa.bindparam("removed")))


def insert(db: sa.Connection, removal: Removal) -> None:
    """Insert a removal, unless there is one already."""
    insert_missing(db, removals, msgspec.structs.asdict(removal))


def find(db: sa.Connection, removed_id: str) -> Removal | None:
    row = _FIND.row(db, {"removed": removed_id})
    return None if row is None else Removal(*row)


def find_all(db: sa.Connection, ids: Sequence[str]) -> dict[str, Removal]:
    if len(ids) == 1:
        return {} if (found := find(db, ids[0])) is None else {found.id: found}
    rows = db.execute(_FIND_ALL, {"ids": list(ids)})
    return {removal.id: removal for removal in (Removal(*row) for row in rows)}


def forget_old(db: sa.Connection, now: float) -> None:
    """Delete old removals. Removed results of existing jobs are always remembered."""
    job_exists = sa.select(jobs.c.id).where(jobs.c.id == removals.c.job).exists()
    db.execute(removals.delete().where(removals.c.at < now - REMEMBERED_S, ~removals.c.pending, ~job_exists))
