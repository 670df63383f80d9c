"""API keys: creates, lists, authenticates and revokes them. A key is shown once; only its digest is stored.

A key can only mint keys with no more permissions than its own. The process that owns the data directory has the only
KeyService, so that a revoked key is refused at once by the owner that revoked it.
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
from batchmill.ports.clock import Clock
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import keys
from batchmill.types import Caller, ProjectQuotas, Scope
from batchmill.wire.native import KeyInfo

_KEY = re.compile(r"bm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
SECRET_BYTES = 32
NAME_CHARS_MAX = 200
MODELS_MAX = 1000
KEYS_MAX = 10_000  # of one server
ENDED_MAX = 1_000  # ended keys of one project that stay listed; the oldest are deleted
MINTERS_MAX = 8  # the length of a chain of keys that minted each other: each one is charged for a request
ANYBODY = Caller("default", Scope.DEPLOY)  # the caller of a server without any key
REFUSAL = "the API key is not valid: it is unknown, revoked or expired"


class KeyRecord(Struct, frozen=True):
    """The record of a key, without its secret."""

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
    minted_by: list[tuple[str, int | None]] = []  # ids and rates of the keys that minted it, the first one first


def key_info(record: KeyRecord) -> KeyInfo:
    """Return a key as users and clients see it."""
    fields = msgspec.structs.asdict(record)
    fields["minted_by"] = [key for key, _ in record.minted_by]
    return KeyInfo(**fields)


class CreatedKey(Struct, frozen=True):
    """A new key with its secret, which is shown only now."""

    key: str
    record: KeyRecord


class Revoked(Struct, frozen=True):
    """A revoked key. `minted`: ids of the valid keys that it minted, directly or not. They are revoked too if the
    caller asked for it."""

    record: KeyRecord
    minted: list[str]


class _CachedKey(Struct, frozen=True):
    digest: str
    caller: Caller
    expires: float | None


class KeyService:
    def __init__(self, database: Database, clock: Clock, quotas: ProjectQuotas = ProjectQuotas()) -> None:
        self._database, self._clock, self._quotas = database, clock, quotas
        self._cache: dict[str, _CachedKey] = {}  # key id -> what authentication needs
        self._ids: set[str] | None = None  # None: not read yet. Only this process creates keys
        self._used: dict[str, float] = {}  # key id -> last use, not stored yet
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
        """Create a key.

        Args: `by`: the key that mints it. The new key's scope, project, models, rate and expiry must lie within its
        own, and requests of the new key count against its rate too. It cannot mint keys with the scope deploy: only
        the operator of the machine can create those.

        Raises: InvalidInput for a value out of range, Forbidden for more than `by` has, OverQuota.
        """
        now = self._clock.now()
        _check(name, project, models, requests_per_minute)
        if expires is not None and expires <= now:
            raise InvalidInput("a key must expire in the future", code="invalid_expiry")
        if by is not None:
            models, requests_per_minute = _check_grant(by, project, scope, models, requests_per_minute)
            expires = _check_expiry(by, expires)
        key_id = secrets.token_hex(8)
        secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
        key = f"bm_{key_id}_{secret}"
        listed = None if models is None else sorted(models)
        record = KeyRecord(
            key_id, name, project, scope, listed, requests_per_minute, now, expires, None, None, _charged_keys(by)
        )
        all_ids = await self._all_ids()
        await self._database.write(_insert, record, _digest(key), self._quotas.of(project).keys)
        all_ids.add(key_id)
        return CreatedKey(key, record)

    async def list(self, project: str | None) -> list[KeyRecord]:
        """Return the keys of a project, or of all projects, newest first. Includes revoked keys."""
        return await self._database.read(_list, project)

    async def revoke(self, key_id: str, project: str | None, *, with_minted: bool = False) -> Revoked:
        """Revoke a key at once. `with_minted`: also every key that it minted, directly or not.

        Raises: UnknownName, also for a key of another project.
        """
        revoked = await self._database.write(_revoke, key_id, project, self._clock.now(), with_minted)
        self._revocations += 1
        for ended in (key_id, *(revoked.minted if with_minted else ())):
            self._cache.pop(ended, None)
        return revoked

    async def authenticate(self, token: str) -> Caller:
        """Return the caller of a key. Raises: Unauthenticated, with the same message for every invalid key."""
        match = _KEY.fullmatch(token)
        if match is None:
            raise Unauthenticated(REFUSAL)
        key_id, digest = match[1], _digest(token)
        cached = self._cache.get(key_id)
        if cached is None and key_id in await self._all_ids():  # a guessed id costs no database query
            cached = await self._look_up(key_id)
        is_right = hmac.compare_digest(digest, cached.digest if cached is not None else _digest(""))
        if cached is None or not is_right or (cached.expires is not None and cached.expires <= self._clock.now()):
            raise Unauthenticated(REFUSAL)
        self._used[key_id] = self._clock.now()
        return cached.caller

    def cached_caller(self, token: str | None) -> Caller | None:
        """As `authenticate`, but only from memory. None: the key is invalid, or not cached.

        A server without any key returns ANYBODY.
        """
        if not self._ids:
            return None if self._ids is None else ANYBODY
        match = None if token is None else _KEY.fullmatch(token)
        cached = None if match is None else self._cache.get(match[1])
        if token is None or match is None or cached is None or not hmac.compare_digest(_digest(token), cached.digest):
            return None
        return self.valid_caller(match[1])

    def valid_caller(self, key_id: str) -> Caller | None:
        """Return the caller of a key that was authenticated before. None: it has ended, or is not cached."""
        cached = self._cache.get(key_id)
        now = self._clock.now()
        if cached is None or (cached.expires is not None and cached.expires <= now):
            return None
        self._used[key_id] = now
        return cached.caller

    async def _look_up(self, key_id: str) -> _CachedKey | None:
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
        cached = _CachedKey(row["hash"], caller, record.expires)
        if self._revocations == before:  # else this key may have been revoked after it was read
            self._cache[key_id] = cached
        return cached

    async def any_exist(self) -> bool:
        """Tell whether a key was ever created. From then on every request needs one, even if all are revoked."""
        return bool(await self._all_ids())

    async def _all_ids(self) -> set[str]:
        if self._ids is None:
            ids = await self._database.read(_all_ids)
            if self._ids is None:  # else another task read them first, and may have added to the set
                self._ids = ids
        return self._ids

    async def write_uses(self) -> None:
        """Store the last uses of keys."""
        used, self._used = self._used, {}
        if used:
            await self._database.write(_store_uses, used)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check(name: str, project: str, models: frozenset[str] | None, requests_per_minute: int | None) -> None:
    if not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
        raise InvalidInput(f"a key's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    if not PROJECT_NAME.fullmatch(project):
        raise InvalidInput(
            f"{project[:80]!r} is not a project name: letters, digits and . _ -, 64 at most", code="invalid_project"
        )
    if models is not None and not 0 < len(models) <= MODELS_MAX:
        raise InvalidInput(f"a key names 1 to {MODELS_MAX} models, or none for all", code="invalid_models")
    rate_max = SERVER_MAX["requests_per_minute"]
    if requests_per_minute is not None and not 0 < requests_per_minute <= rate_max:
        raise InvalidInput(
            f"requests_per_minute must be 1 to {rate_max:,}, not {requests_per_minute}", code="invalid_rate"
        )


def _check_grant(
    by: Caller, project: str, scope: Scope, models: frozenset[str] | None, requests_per_minute: int | None
) -> tuple[frozenset[str] | None, int | None]:
    """Return the models and rate of a new key: the given ones if `by` may grant them, by default its own."""
    if project != by.project:
        raise Forbidden(f"this key can create keys of its own project, {by.project}, only")
    if scope == Scope.DEPLOY:  # refused over HTTP, also to a key with this scope and on a server without keys
        raise Forbidden(
            "a key with the scope deploy cannot be created over the API: its code runs as the server's user. The "
            "operator of the machine creates one beside the data directory: batchmill keys create --scope deploy"
        )
    if not by.may(scope):
        raise Forbidden(f"this key has the scope {by.scope} and cannot create a key with the scope {scope}")
    forbidden = sorted(models - by.models) if models is not None and by.models is not None else []
    if forbidden:
        raise Forbidden(f"this key may not use the model {forbidden[0]!r} and cannot create a key that may")
    rate = by.requests_per_minute
    if rate is not None and (requests_per_minute or 0) > rate:
        raise Forbidden(f"this key has {rate} requests a minute and cannot create a key with more")
    return (by.models if models is None else models), (rate if requests_per_minute is None else requests_per_minute)


def _check_expiry(by: Caller, expires: float | None) -> float | None:
    """Return the expiry of a new key: the given one if `by` may grant it, by default its own."""
    if by.expires is not None and expires is not None and expires > by.expires:
        raise Forbidden("this key expires before that and cannot create a key that expires later")
    return by.expires if expires is None else expires


def _charged_keys(by: Caller | None) -> list[tuple[str, int | None]]:
    """Return the keys that are charged for requests of a key that `by` creates. Raises: Forbidden for too many."""
    if by is None or by.key is None:
        return []
    if len(by.minted_by) >= MINTERS_MAX:
        raise Forbidden(
            f"this key is at the end of a chain of {MINTERS_MAX} keys that minted each other and cannot create more: "
            "use an earlier key of the chain"
        )
    return [*by.minted_by, (by.key, by.requests_per_minute)]


def _insert(db: sa.Connection, record: KeyRecord, digest: str, quota: int) -> None:
    ended = sa.func.coalesce(keys.c.revoked, keys.c.expires) <= record.created
    refuse_beyond(
        db, keys, quota, quota="keys", project=record.project, way_out="revoke some",
        where=sa.and_(keys.c.revoked.is_(None), sa.or_(keys.c.expires.is_(None), keys.c.expires > record.created)),
    )  # fmt: skip
    _delete_ended_beyond(db, record.project, ended)
    if (db.execute(sa.select(sa.func.count()).select_from(keys)).scalar() or 0) >= KEYS_MAX:
        _delete_oldest_ended(db, record.created)
    values: dict[str, Any] = msgspec.structs.asdict(record)
    values["minted_by"] = msgspec.json.encode(record.minted_by).decode() if record.minted_by else None
    listed = values.pop("models")
    values |= {"scopes": values.pop("scope").value, "hash": digest}
    values["models"] = None if listed is None else msgspec.json.encode(listed).decode()
    db.execute(keys.insert().values(values))


def _delete_ended_beyond(db: sa.Connection, project: str, ended: sa.ColumnElement[bool]) -> None:
    """Delete the oldest ended keys of a project beyond ENDED_MAX, never those of other projects."""
    ended_here = sa.and_(keys.c.project == project, ended)
    count = db.execute(sa.select(sa.func.count()).select_from(keys).where(ended_here)).scalar_one()
    if count >= ENDED_MAX:
        at = sa.func.coalesce(keys.c.revoked, keys.c.expires)
        oldest = sa.select(keys.c.id).where(ended_here).order_by(at).limit(count - ENDED_MAX + 1)
        db.execute(keys.delete().where(keys.c.id.in_(oldest)))


def _delete_oldest_ended(db: sa.Connection, now: float) -> None:
    """Delete the key that ended first. Raises: InvalidInput if all keys are valid."""
    ended = sa.func.coalesce(keys.c.revoked, keys.c.expires)
    first = db.execute(sa.select(keys.c.id).where(ended <= now).order_by(ended).limit(1)).scalar()
    if first is None:
        raise InvalidInput(f"there are {KEYS_MAX:,} valid keys, which is the maximum: revoke one", code="too_many_keys")
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
    is_minted = sa.and_(keys.c.minted_by.contains(f'["{key_id}",'), keys.c.project == row["project"])
    is_valid = sa.and_(keys.c.revoked.is_(None), sa.or_(keys.c.expires.is_(None), keys.c.expires > now))
    minted = list(
        db.execute(sa.select(keys.c.id).where(is_minted, is_valid).order_by(keys.c.created, keys.c.id)).scalars()
    )
    if with_minted:
        db.execute(keys.update().where(keys.c.id.in_(minted)).values(revoked=now))
    return Revoked(_record(_row(db, key_id) or row), minted)


def _all_ids(db: sa.Connection) -> set[str]:
    return set(db.execute(sa.select(keys.c.id)).scalars())


def _store_uses(db: sa.Connection, used: dict[str, float]) -> None:
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
