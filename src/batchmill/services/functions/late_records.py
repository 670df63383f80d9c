"""The records of calls that are answered later: what the table `late_calls` says. One function, one transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Unavailable
from batchmill.store.quotas import refuse_beyond
from batchmill.store.service_tables import late_calls

CALLS_MAX = 10_000  # that wait at once, of all projects
BYTES_MAX = 4 * 1024**3  # of them
PROJECT_BYTES_MAX = 1024**3  # of those of one project


class Order(Struct, frozen=True):
    """How a call is asked, and how its answer is told."""

    door: str  # whose words the answer has
    form: str  # of the body
    url: str
    header: str  # that holds the id of the call
    ignores_timeout: bool = False  # a URL that takes long to answer has heard it
    told: str = ""  # the door's own


class LateCall(Struct, frozen=True):
    """A call as it was written down."""

    id: str
    project: str
    key: str | None
    name: str
    branch: str
    number: int
    order: Order
    body: bytes
    reply: bytes | None = None
    created: float = 0.0
    begun: float | None = None
    attempts: int = 0


_COLUMNS = [late_calls.c[name] for name in LateCall.__struct_fields__]


def insert(db: sa.Connection, call: LateCall, quota: int) -> None:
    """Raises: OverQuota; Unavailable when too many wait, of all projects."""
    way_out = "come again when some have been answered"
    refuse_beyond(db, late_calls, quota, quota="late_calls", project=call.project, way_out=way_out)
    mine = sa.select(sa.func.coalesce(sa.func.sum(late_calls.c.bytes), 0)).where(late_calls.c.project == call.project)
    if (bytes_ := db.execute(mine).scalar_one()) + len(call.body) > PROJECT_BYTES_MAX:
        raise Unavailable(f"{bytes_:,} bytes of this project's calls are to be answered later", code="too_many_bytes")
    waiting, held = db.execute(sa.select(sa.func.count(), sa.func.sum(late_calls.c.bytes))).one()
    if waiting >= CALLS_MAX:
        raise Unavailable(f"{waiting:,} calls are to be answered later; try again", code="too_many_calls")
    if (held or 0) + len(call.body) > BYTES_MAX:
        raise Unavailable(f"{held:,} bytes of calls are to be answered later; try again", code="too_many_bytes")
    values = {name: getattr(call, name) for name in LateCall.__struct_fields__ if name != "order"}
    order = msgspec.json.encode(call.order)
    db.execute(late_calls.insert().values(**values, order=order, bytes=len(call.body), due=call.created))


def due(db: sa.Connection, now: float, taken: Sequence[str], full: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """The ids of calls to go on with and their projects, the longest due first, apart from those in hand.

    Args: full: projects that have their share in hand.
    """
    columns = late_calls.c
    wanted = (columns.due <= now, columns.id.not_in(taken), columns.project.not_in(full))
    query = sa.select(columns.id, columns.project).where(*wanted).order_by(columns.due).limit(limit)
    return [tuple(found) for found in db.execute(query)]


def find(db: sa.Connection, call_id: str) -> LateCall | None:
    found = db.execute(sa.select(*_COLUMNS).where(late_calls.c.id == call_id)).mappings().first()
    if found is None:
        return None
    return LateCall(**{**found, "order": msgspec.json.decode(found["order"], type=Order)})


def begin(db: sa.Connection, call_id: str, now: float | None) -> None:
    """It is being asked; None: it was not, after all."""
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(begun=now))


def answer(db: sa.Connection, call_id: str, reply: bytes, now: float) -> None:
    values = {"reply": reply, "body": b"", "bytes": len(reply), "due": now, "attempts": 0}
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(**values))


def put_off(db: sa.Connection, call_id: str, attempts: int, due: float) -> None:
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(attempts=attempts, due=due))


def forget(db: sa.Connection, call_id: str) -> None:
    """It was told, or given up."""
    db.execute(late_calls.delete().where(late_calls.c.id == call_id))


def count(db: sa.Connection) -> int:
    return db.execute(sa.select(sa.func.count()).select_from(late_calls)).scalar_one()
