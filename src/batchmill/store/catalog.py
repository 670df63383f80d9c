"""Which objects of the store hold which path of the data directory. Each function runs in its caller's transaction.

An object is either named by a path, or listed as unnamed: being written, or to be deleted. So a crash leaves nothing
that the next owner does not know of, and an owner that was replaced can name nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from msgspec import Struct

from batchmill.store.sql.tables import stored_files, unnamed_objects

PAGE = 500  # of paths or objects in one statement


class Stored(Struct, frozen=True):
    """A published path. `object` is what the names of its objects begin with."""

    path: str  # below the data directory
    object: str
    bytes: int


_FIELDS = [stored_files.c[name] for name in Stored.__struct_fields__]


def find(db: sa.Connection, paths: Sequence[str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for first in range(0, len(paths), PAGE):
        rows = db.execute(sa.select(*_FIELDS).where(stored_files.c.path.in_(paths[first : first + PAGE])))
        found |= {row.path: Stored(*row) for row in rows}
    return found


def below(db: sa.Connection, folder: str) -> list[Stored]:
    """The published paths below a folder, and the folder itself."""
    path = stored_files.c.path
    after = chr(ord("/") + 1)  # a range, which the index answers, and which knows upper and lower case
    where = sa.or_(path == folder, sa.and_(path > f"{folder}/", path < f"{folder}{after}"))
    return [Stored(*row) for row in db.execute(sa.select(*_FIELDS).where(where).order_by(path))]


def begin(db: sa.Connection, objects: Sequence[str]) -> None:
    """Note objects that are about to be written. It may be repeated: the reply to a commit may be lost."""
    _note(db, objects)


def name(db: sa.Connection, published: Sequence[Stored]) -> list[str]:
    """Name written objects. Returns those that nothing names any more, which are now unnamed."""
    before = find(db, [each.path for each in published])
    db.execute(unnamed_objects.delete().where(unnamed_objects.c.object.in_([each.object for each in published])))
    db.execute(stored_files.delete().where(stored_files.c.path.in_(list(before))))
    db.execute(
        stored_files.insert(),
        [{"path": each.path, "object": each.object, "bytes": each.bytes} for each in published],
    )
    return _unname(db, {each.object for each in before.values()})


def link(db: sa.Connection, source: str, target: str) -> tuple[Stored, list[str]] | None:
    """Name the objects of `source` as `target` too, unless it has none. Returns what `target` is, and as `name`."""
    found = find(db, [source]).get(source)
    if found is None:
        return None
    linked = Stored(target, found.object, found.bytes)
    return linked, name(db, [linked])


def remove(db: sa.Connection, folders: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    """Forget these paths and all below them. Returns the objects to delete: theirs, unless another path names them,
    and `prefixes`, which no path ever named."""
    gone: dict[str, Stored] = {}
    for folder in folders:
        gone |= {each.path: each for each in below(db, folder)}
    paths = list(gone)
    for first in range(0, len(paths), PAGE):
        db.execute(stored_files.delete().where(stored_files.c.path.in_(paths[first : first + PAGE])))
    unnamed = _unname(db, {each.object for each in gone.values()})
    return unnamed + _note(db, prefixes)


def unnamed(db: sa.Connection) -> list[str]:
    return list(db.execute(sa.select(unnamed_objects.c.object)).scalars())


def forget(db: sa.Connection, objects: Sequence[str]) -> None:
    """Objects that were deleted."""
    for first in range(0, len(objects), PAGE):
        db.execute(unnamed_objects.delete().where(unnamed_objects.c.object.in_(objects[first : first + PAGE])))


def _unname(db: sa.Connection, objects: set[str]) -> list[str]:
    """Note those of `objects` that no path names."""
    named = db.execute(sa.select(stored_files.c.object).where(stored_files.c.object.in_(objects))).scalars()
    return _note(db, sorted(objects - set(named)))


def _note(db: sa.Connection, objects: Sequence[str]) -> list[str]:
    known = set(db.execute(sa.select(unnamed_objects.c.object).where(unnamed_objects.c.object.in_(objects))).scalars())
    new = [each for each in objects if each not in known]
    if new:
        db.execute(unnamed_objects.insert(), [{"object": each} for each in new])
    return list(objects)
