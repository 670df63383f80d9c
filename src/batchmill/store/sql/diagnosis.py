"""Looks at a PostgreSQL database without changing it, for `batchmill doctor`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.store.sql import pooler, schema
from batchmill.store.sql.owner_row import owners
from batchmill.store.sql.postgres import VERSION_MIN, create_engine, place_of, translate
from batchmill.store.sql.tables import schema as stamp

CLOCK_S_MAX = 2.0
CONNECTIONS = 4


def diagnose(url: sa.URL) -> Iterator[tuple[str, bool, str]]:
    """(what, whether it is in order, what was found). Raises: InvalidConfig, DatabaseUnavailable."""
    place = place_of(url)
    engine = create_engine(url, poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as db:
            version = db.execute(sa.text("SHOW server_version_num")).scalar_one()
            is_standby = db.execute(sa.text("SELECT pg_is_in_recovery()")).scalar_one()
            yield "database", True, f"{place} answers"
            is_new = int(version) >= VERSION_MIN
            yield "PostgreSQL", is_new, f"version {version}" + ("" if is_new else ": use PostgreSQL 13 or newer")
            yield "primary", not is_standby, "it is a standby: name its primary" if is_standby else "it can be written"
            db.rollback()
            yield _durability(db)
            yield _clock(db)
            yield _stamp(db)
            yield _owner(db)
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(engine.connect()) for _ in range(CONNECTIONS)]
            try:
                pooler.refuse(place, connections)
                yield "pooler", True, "each connection has a session of its own"
            except InvalidConfig as error:
                yield "pooler", False, error.message
    except sa.exc.SQLAlchemyError as error:
        raise translate(place, error) from error


def _durability(db: sa.Connection) -> tuple[str, bool, str]:
    """Whether commits outlive a loss of power. batchmill itself sets `synchronous_commit` for its connections."""
    if db.execute(sa.text("SHOW fsync")).scalar_one() == "off":
        return "durability", False, "fsync is off: a loss of power can lose commits and damage the database; set it on"
    if db.execute(sa.text("SHOW full_page_writes")).scalar_one() == "off":
        note = "full_page_writes is off, which is right only on a file system that writes pages whole, such as ZFS"
        return "durability", True, f"commits are synced; {note}"
    return "durability", True, "commits are synced"


def _clock(db: sa.Connection) -> tuple[str, bool, str]:
    before = time.time()
    theirs = db.execute(sa.text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS float)")).scalar_one()
    off_s = theirs - (before + time.time()) / 2
    way_out = "" if abs(off_s) <= CLOCK_S_MAX else ": set both by NTP; deadlines and expiries follow this machine"
    return "clock", abs(off_s) <= CLOCK_S_MAX, f"the database's clock differs by {off_s:+.3f} s{way_out}"


def _stamp(db: sa.Connection) -> tuple[str, bool, str]:
    if not sa.inspect(db).has_table(stamp.name):
        return "schema", True, "it is empty: the first owner creates the tables"
    version = db.execute(sa.select(stamp.c.version)).scalar()
    if version is None or version <= schema.VERSION:
        note = "" if version == schema.VERSION else f": the next owner makes it version {schema.VERSION}"
        return "schema", True, f"version {version}{note}"
    return "schema", False, f"version {version}, and this batchmill knows {schema.VERSION}: use a newer batchmill"


def _owner(db: sa.Connection) -> tuple[str, bool, str]:
    if not sa.inspect(db).has_table(owners.name):
        return "owner", True, "none yet"
    age = sa.func.extract("epoch", sa.func.clock_timestamp() - owners.c.heartbeat)
    found = db.execute(sa.select(owners.c.name, owners.c.address, sa.cast(age, sa.Float))).one()
    if found[2] is None:
        return "owner", True, "none"
    return "owner", True, f"{found.name} {found.address}, heard {found[2]:.1f} s ago".replace("  ", " ")
