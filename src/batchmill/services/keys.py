"""Keys: made, shown once, looked up and revoked. Only a digest is kept, and no key makes one that may do more.

The process that owns the data directory holds the one KeyService, so that a revoked key is refused at once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.config import PROJECT_NAME, SERVER_MAX
from batchmill.errors import Forbidden, InvalidInput, Unauthenticated, UnknownName
from batchmill.ports import Clock
from batchmill.store.database import Database
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import keys
from batchmill.types import Caller, ProjectQuotas, Scope
from batchmill.wire.native import KeyInfo

_KEY = re.compile(r"bm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
SECRET_BYTES = 32
NAME_CHARS_MAX = 200
MODELS_MAX = 1000
KEYS_MAX = 10_000  # of one server
ENDED_MAX = 1_000  # of one project, that are still listed; those that ended first are forgotten
MINTERS_MAX = 8  # a key that a key minted that a key minted …: each of them pays for a request
ANYBODY = Caller("default", Scope.DEPLOY)  # where no key was ever made
REFUSAL = "the API key is not valid: it is unknown, revoked or expired"


class KeyRecord(Struct, frozen=True):
    """A key without the key."""

    id: str
    name: str
    project: str
    scope: Scope
    models: list[str] | None
    requests_per_minute: int | None
    created: float
    expires: float | None
    revoked: float | None
    last_used: float | None
    minted_by: list[tuple[str, int | None]] = []  # ids and rates of the keys that minted it, the first of them first


def key_info(record: KeyRecord) -> KeyInfo:
    """A key as people and clients see it."""
    fields = msgspec.structs.asdict(record)
    fields["minted_by"] = [key for key, _ in record.minted_by]
    return KeyInfo(**fields)


class CreatedKey(Struct, frozen=True):
    """A key on the one occasion on which it is shown."""

    key: str
    record: KeyRecord


class Revoked(Struct, frozen=True):
    """A key that was ended. `minted`: ids of keys that it minted, or one of those did, and that were valid until then:
    they have ended too where that was asked for."""

    record: KeyRecord
    minted: list[str]


class _Known(Struct, frozen=True):
    digest: str
    caller: Caller
    expires: float | None


class KeyService:
    def __init__(self, database: Database, clock: Clock, quotas: ProjectQuotas = ProjectQuotas()) -> None:
        self._database, self._clock, self._quotas = database, clock, quotas
        self._known: dict[str, _Known] = {}  # key id -> what a request with it needs
        self._ids: set[str] | None = None  # None: not looked yet; nobody else makes keys while this process owns them
        self._used: dict[str, float] = {}  # key id -> last use, until it is written down
        self._revocations = 0

    async def create(
        self,
        *,
        name: str,
        project: str,
        scope: Scope,
        models: frozenset[str] | None = None,
        requests_per_minute: int | None = None,
        expires: float | None = None,
        by: Caller | None = None,
    ) -> CreatedKey:
        """A new key. `by`: a key mints only keys whose scope, project, models, rate and end lie within its own, and
        pays for their requests with its own rate. It mints none with the scope deploy: those are for whoever runs the
        machine to make.

        Raises: InvalidInput for a value out of range, Forbidden for more than `by` has, OverQuota.
        """
        now = self._clock.now()
        _check(name, project, models, requests_per_minute)
        if expires is not None and expires <= now:
            raise InvalidInput("a key's end must lie in the future", code="invalid_expiry")
        if by is not None:
            models, requests_per_minute = _within(by, project, scope, models, requests_per_minute)
            expires = _end_within(by, expires)
        key_id = secrets.token_hex(8)
        secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
        key = f"bm_{key_id}_{secret}"
        listed = None if models is None else sorted(models)
        record = KeyRecord(
            key_id, name, project, scope, listed, requests_per_minute, now, expires, None, None, _minters(by)
        )
        known = await self._all_ids()
        await self._database.write(_insert, record, _digest(key), self._quotas.of(project).keys)
        known.add(key_id)
        return CreatedKey(key, record)

    async def list(self, project: str | None) -> list[KeyRecord]:
        """Keys of a project, or of all, the newest first; revoked ones too."""
        return await self._database.read(_list, project)

    async def revoke(self, key_id: str, project: str | None, *, with_minted: bool = False) -> Revoked:
        """End a key, at once and for good; `with_minted`: and every key that it minted, or one of those did.

        Raises: UnknownName, also for the key of another project.
        """
        revoked = await self._database.write(_revoke, key_id, project, self._clock.now(), with_minted)
        self._revocations += 1
        for ended in (key_id, *(revoked.minted if with_minted else ())):
            self._known.pop(ended, None)
        return revoked

    async def authenticate(self, token: str) -> Caller:
        """Who a key stands for. Raises: Unauthenticated, in the same words whatever is wrong with it."""
        match = _KEY.fullmatch(token)
        if match is None:
            raise Unauthenticated(REFUSAL)
        key_id, digest = match[1], _digest(token)
        known = self._known.get(key_id)
        if known is None and key_id in await self._all_ids():  # whoever guesses keeps the database from nobody
            known = await self._look_up(key_id)
        is_right = hmac.compare_digest(digest, known.digest if known is not None else _digest(""))
        if known is None or not is_right or (known.expires is not None and known.expires <= self._clock.now()):
            raise Unauthenticated(REFUSAL)
        self._used[key_id] = self._clock.now()
        return known.caller

    def known(self, token: str | None) -> Caller | None:
        """As `authenticate`, of keys that were used before; None where nothing can be said without looking further.

        Where no key was ever made: everybody.
        """
        if not self._ids:
            return None if self._ids is None else ANYBODY
        match = None if token is None else _KEY.fullmatch(token)
        known = None if match is None else self._known.get(match[1])
        if token is None or match is None or known is None or not hmac.compare_digest(_digest(token), known.digest):
            return None
        return self.still(match[1])

    def still(self, key_id: str) -> Caller | None:
        """Whom a key stands for that was seen to be right before; None where it may have ended since."""
        known = self._known.get(key_id)
        now = self._clock.now()
        if known is None or (known.expires is not None and known.expires <= now):
            return None
        self._used[key_id] = now
        return known.caller

    async def _look_up(self, key_id: str) -> _Known | None:
        before = self._revocations
        row = await self._database.read(_row, key_id)
        if row is None or row["revoked"] is not None:
            return None
        record = _record(row)
        models = None if record.models is None else frozenset(record.models)
        caller = Caller(
            record.project, record.scope, key_id, models, record.requests_per_minute, tuple(record.minted_by),
            record.expires,
        )  # fmt: skip
        known = _Known(row["hash"], caller, record.expires)
        if self._revocations == before:  # else this key may have been revoked since it was read
            self._known[key_id] = known
        return known

    async def any_exist(self) -> bool:
        """A key was ever made here: from then on every request needs one. Revoking the last opens nothing."""
        return bool(await self._all_ids())

    async def _all_ids(self) -> set[str]:
        if self._ids is None:
            found = await self._database.read(_all_ids)
            if self._ids is None:  # else somebody else was quicker, and may have added to it
                self._ids = found
        return self._ids

    async def write_uses(self) -> None:
        """Write down when keys were used last."""
        used, self._used = self._used, {}
        if used:
            await self._database.write(_note_uses, used)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check(name: str, project: str, models: frozenset[str] | None, requests_per_minute: int | None) -> None:
    if not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
        raise InvalidInput(f"a key's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    if not PROJECT_NAME.fullmatch(project):
        raise InvalidInput(
            f"{project[:80]!r} is no project's name: letters, digits and . _ -, 64 at most", code="invalid_project"
        )
    if models is not None and not 0 < len(models) <= MODELS_MAX:
        raise InvalidInput(f"a key names 1 to {MODELS_MAX} models, or none for all", code="invalid_models")
    most = SERVER_MAX["requests_per_minute"]
    if requests_per_minute is not None and not 0 < requests_per_minute <= most:
        raise InvalidInput(f"requests_per_minute must be 1 to {most:,}, not {requests_per_minute}", code="invalid_rate")


def _within(
    by: Caller, project: str, scope: Scope, models: frozenset[str] | None, requests_per_minute: int | None
) -> tuple[frozenset[str] | None, int | None]:
    """Models and rate of a key that `by` may make: its own where nothing was said."""
    if project != by.project:
        raise Forbidden(f"this key makes keys of its own project, {by.project}, only")
    if scope == Scope.DEPLOY:  # nobody that asks over HTTP, be it with such a key or where there are none
        raise Forbidden(
            "a key with the scope deploy cannot be created over the API: its code runs as the server's user. The "
            "operator of the machine creates one beside the data directory: batchmill keys create --scope deploy"
        )
    if not by.may(scope):
        raise Forbidden(f"this key has the scope {by.scope}: it makes none with {scope}")
    beyond = sorted(models - by.models) if models is not None and by.models is not None else []
    if beyond:
        raise Forbidden(f"this key may not use the model {beyond[0]!r}, and makes no key that may")
    own = by.requests_per_minute
    if own is not None and (requests_per_minute or 0) > own:
        raise Forbidden(f"this key has {own} requests a minute, and makes no key with more")
    return (by.models if models is None else models), (own if requests_per_minute is None else requests_per_minute)


def _end_within(by: Caller, expires: float | None) -> float | None:
    """The end of a key that `by` may make: its own where nothing was said."""
    if by.expires is not None and expires is not None and expires > by.expires:
        raise Forbidden("this key ends before that, and makes no key that outlives it")
    return by.expires if expires is None else expires


def _minters(by: Caller | None) -> list[tuple[str, int | None]]:
    """Who pays for a key that `by` makes. Raises: Forbidden where it would be too many."""
    if by is None or by.key is None:
        return []
    if len(by.minted_by) >= MINTERS_MAX:
        raise Forbidden(
            f"this key was minted by a key that a key minted, and so on, {MINTERS_MAX} times: it mints none. Make the "
            "key with one of those before it"
        )
    return [*by.minted_by, (by.key, by.requests_per_minute)]


def _insert(db: sa.Connection, record: KeyRecord, digest: str, quota: int) -> None:
    ended = sa.func.coalesce(keys.c.revoked, keys.c.expires) <= record.created
    refuse_beyond(
        db, keys, quota, quota="keys", project=record.project, way_out="revoke some",
        where=sa.and_(keys.c.revoked.is_(None), sa.or_(keys.c.expires.is_(None), keys.c.expires > record.created)),
    )  # fmt: skip
    _forget_ended(db, record.project, ended)
    if (db.execute(sa.select(sa.func.count()).select_from(keys)).scalar() or 0) >= KEYS_MAX:
        _make_room(db, record.created)
    values: dict[str, Any] = msgspec.structs.asdict(record)
    values["minted_by"] = msgspec.json.encode(record.minted_by).decode() if record.minted_by else None
    listed = values.pop("models")
    values |= {"scopes": values.pop("scope").value, "hash": digest}
    values["models"] = None if listed is None else msgspec.json.encode(listed).decode()
    db.execute(keys.insert().values(values))


def _forget_ended(db: sa.Connection, project: str, ended: sa.ColumnElement[bool]) -> None:
    """A project that makes and revokes keys without end forgets its own, not those of others."""
    mine = sa.and_(keys.c.project == project, ended)
    count = db.execute(sa.select(sa.func.count()).select_from(keys).where(mine)).scalar_one()
    if count >= ENDED_MAX:
        at = sa.func.coalesce(keys.c.revoked, keys.c.expires)
        some = sa.select(keys.c.id).where(mine).order_by(at).limit(count - ENDED_MAX + 1)
        db.execute(keys.delete().where(keys.c.id.in_(some)))


def _make_room(db: sa.Connection, now: float) -> None:
    """Forget the key that ended first. Raises: InvalidInput where all are valid."""
    ended = sa.func.coalesce(keys.c.revoked, keys.c.expires)
    first = db.execute(sa.select(keys.c.id).where(ended <= now).order_by(ended).limit(1)).scalar()
    if first is None:
        raise InvalidInput(
            f"there are {KEYS_MAX:,} valid keys, the most that there can be: revoke one", code="too_many_keys"
        )
    db.execute(keys.delete().where(keys.c.id == first))


def _list(db: sa.Connection, project: str | None) -> list[KeyRecord]:
    query = sa.select(keys).order_by(keys.c.created.desc(), keys.c.id)
    if project is not None:
        query = query.where(keys.c.project == project)
    return [_record(row) for row in db.execute(query).mappings()]


def _row(db: sa.Connection, key_id: str) -> sa.RowMapping | None:
    return db.execute(sa.select(keys).where(keys.c.id == key_id)).mappings().first()


def _revoke(db: sa.Connection, key_id: str, project: str | None, now: float, with_minted: bool) -> Revoked:
    row = _row(db, key_id)
    if row is None or (project is not None and row["project"] != project):
        raise UnknownName(f"no key has the id {key_id[:80]!r}", code="unknown_key")
    if row["revoked"] is None:
        db.execute(keys.update().where(keys.c.id == key_id).values(revoked=now))
    below = sa.and_(keys.c.minted_by.contains(f'["{key_id}",'), keys.c.project == row["project"])
    valid = sa.and_(keys.c.revoked.is_(None), sa.or_(keys.c.expires.is_(None), keys.c.expires > now))
    minted = list(db.execute(sa.select(keys.c.id).where(below, valid).order_by(keys.c.created, keys.c.id)).scalars())
    if with_minted:
        db.execute(keys.update().where(keys.c.id.in_(minted)).values(revoked=now))
    return Revoked(_record(_row(db, key_id) or row), minted)


def _all_ids(db: sa.Connection) -> set[str]:
    return set(db.execute(sa.select(keys.c.id)).scalars())


def _note_uses(db: sa.Connection, used: dict[str, float]) -> None:
    for key_id, at in used.items():
        db.execute(keys.update().where(keys.c.id == key_id).values(last_used=at))


def _record(row: sa.RowMapping) -> KeyRecord:
    models = None if row["models"] is None else msgspec.json.decode(row["models"], type=list[str])
    return KeyRecord(
        id=row["id"], name=row["name"], project=row["project"], scope=Scope(row["scopes"]), models=models,
        requests_per_minute=row["requests_per_minute"], created=row["created"], expires=row["expires"],
        revoked=row["revoked"], last_used=row["last_used"], minted_by=_minters_of(row["minted_by"]),
    )  # fmt: skip


def _minters_of(column: str | None) -> list[tuple[str, int | None]]:
    return [] if column is None else msgspec.json.decode(column, type=list[tuple[str, int | None]])
