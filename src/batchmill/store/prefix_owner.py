"""Which database the prefix of `[storage] objects` belongs to: the object `owner.json` names the id of its ledger.

Two databases at one prefix would each remove what the other has named. The id is in the database, so a process that
opens it, on whatever machine or from a backup, owns the prefix too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill import owner_clock
from batchmill.errors import BatchmillError, Conflict, InvalidConfig
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import ledger

NAME = "owner.json"
RETRY_S = 10.0
OWNER_BYTES_MAX = 64 * 1024

log = logging.getLogger("batchmill.owner")


class PrefixOwner(Struct, frozen=True):
    """The content of the object. `database`: where the database was when it claimed the prefix, for people."""

    ledger: str
    database: str


async def claim(database: Database, url: str, place: str) -> None:
    """Make a prefix that has no owner this database's. Where the store cannot be read, a prefix that was claimed before
    is taken for this database's still: a server starts without it, and its jobs wait.

    Args: place: see `PrefixOwner.database`.

    Raises: InvalidConfig (`other_storage_owner`) for a prefix of another database; StorageFailed, AuthRefused,
        Unavailable.
    """
    found = await database.read(find_ledger) or await database.write(_make_ledger)
    own_id, claimed = found
    store = ObjectStore(
        parse_url(url), retry_s=RETRY_S, may_write=lambda: owner_clock.check_left(database.owned_s())
    )  # fmt: skip
    try:
        owner = await asyncio.to_thread(_claim, store, PrefixOwner(own_id, place))
    except InvalidConfig:
        raise
    except BatchmillError as error:
        if claimed != url:
            raise
        log.warning("%s could not be read: %s", f"{store.url}/{NAME}", error.message)
        return
    if owner.ledger != own_id:
        raise InvalidConfig(refusal(store.url, owner), code="other_storage_owner")
    if claimed != url:
        await database.write(_note_claimed, url)


def refusal(url: str, owner: PrefixOwner) -> str:
    """Why a database may not use a prefix, and the way out."""
    return (
        f"{url} belongs to another ledger ({owner.ledger}, of {owner.database}): set [storage] objects to another "
        f"prefix. If that database is lost, or this one replaces it for good, delete the object {url}/{NAME} first: "
        "the next start then claims the prefix"
    )


def find_ledger(db: sa.Connection) -> tuple[str, str | None] | None:
    """The id of the ledger, and the prefix that it has claimed; None: it has no id yet."""
    found = db.execute(sa.select(ledger.c.id, ledger.c.objects)).first()
    return None if found is None else (found.id, found.objects)


def find_owner(store: ObjectStore) -> PrefixOwner | None:
    """The owner of a prefix; None: it has none. Raises: InvalidConfig for one that cannot be understood."""
    if (info := store.find(NAME)) is None:
        return None
    try:
        if not 0 < info.size_bytes <= OWNER_BYTES_MAX:
            raise msgspec.ValidationError(f"it has {info.size_bytes:,} bytes")
        return msgspec.json.decode(bytes(store.get_range(info, 0, info.size_bytes)), type=PrefixOwner)
    except msgspec.MsgspecError as error:
        raise InvalidConfig(
            f"{store.url}/{NAME} does not say whom the prefix belongs to ({error}): set [storage] objects to another "
            "prefix, or, if nothing else uses this one, delete that object",
            code="other_storage_owner",
        ) from None


def examine(url: str, engine: sa.Engine | None) -> tuple[str, bool, str]:
    """What `batchmill doctor` says: label, whether it is right, and what was found. Changes nothing.

    Args: engine: of the database; None: there is none yet.
    """
    label = "object store: owner"
    store = ObjectStore(parse_url(url), retry_s=RETRY_S)
    try:
        if (owner := find_owner(store)) is None:
            return label, True, f"{url} has no owner yet: the next start claims it for this database"
        own = None
        if engine is not None:
            with engine.connect() as db:
                own = find_ledger(db) if sa.inspect(db).has_table(ledger.name) else None
    except sa.exc.SQLAlchemyError as error:
        return label, False, f"the database that {url} may belong to cannot be read: {getattr(error, 'orig', error)}"
    except BatchmillError as error:
        return label, False, error.message
    if own is None or own[0] != owner.ledger:
        return label, False, refusal(store.url, owner)
    return label, True, f"{url} belongs to this database"


def _claim(store: ObjectStore, own: PrefixOwner) -> PrefixOwner:
    """The owner of a prefix, which is `own` if there was none."""
    if (owner := find_owner(store)) is None:
        with contextlib.suppress(Conflict):  # another database was faster
            store.put(NAME, msgspec.json.encode(own))
        owner = find_owner(store)  # also where a store has no conditional put: the last one that was written counts
    return own if owner is None else owner


def _make_ledger(db: sa.Connection) -> tuple[str, str | None]:
    """As `find_ledger`; gives it an id. The transaction may be repeated."""
    if (found := find_ledger(db)) is not None:
        return found
    own_id = secrets.token_hex(16)
    db.execute(ledger.insert().values(id=own_id))
    return own_id, None


def _note_claimed(db: sa.Connection, url: str) -> None:
    db.execute(ledger.update().values(objects=url))
