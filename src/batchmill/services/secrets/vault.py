"""The vault of secrets: write-only for users, and given to workers whose model names them.

A name is chosen by a user, or is connector/ID/KEY (with :NONCE appended if jobs may refer to different values), or
llm/ID/hf_token. `SecretBox` encrypts the values.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import InvalidConfig, InvalidInput, ModelFailed, UnknownName
from batchmill.models import redaction
from batchmill.models.addresses import read_private
from batchmill.models.providers import default_key
from batchmill.models.secrets import SHOWN_CHARS, check_name, find_secret_flaw, missing
from batchmill.owner_term import ENDLESS, PrefixTerm
from batchmill.ports.clock import Clock
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.shown import Rotated, SecretInfo
from batchmill.services.webhooks import endpoints as webhooks
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import secrets, webhook_endpoints
from batchmill.types import Isolation, ModelSpec, ProjectQuotas, Provision
from batchmill.types.connectors import Storage

log = logging.getLogger("batchmill.secrets")

SECRETS_MAX = 10_000
HINT_CHARS = 4
HINT_LENGTH_MIN = 16  # a shorter secret has no hint
PAGE = 500  # sealed values per transaction
PASSES_MAX = 10  # over all values, until none is left under an older key
OWN_NAME = re.compile(r"connector/[A-Za-z0-9_-]{1,64}/[A-Za-z0-9_.:-]{1,120}|llm/[A-Za-z0-9_-]{1,64}/hf_token")

Changed = Callable[[frozenset[str]], Awaitable[None]]
Also = Callable[[sa.Connection], Any]
Needed = Callable[[sa.Connection], Set[str]]
PREFIX, VARIABLE = "secret:", "env:"


class _SealedColumn(Struct, frozen=True):
    """A column with sealed values. `owner` returns the owner of a record's value."""

    table: sa.Table
    key: str
    column: str
    owner: Callable[[sa.RowMapping], str]


def _owner_of(name: str, changed: float) -> str:
    """Return the owner text of a secret. It contains the time, so that an older value cannot be restored."""
    return f"secret {name} of {changed!r}"


SEALED = (
    _SealedColumn(secrets, "name", "sealed", lambda record: _owner_of(record["name"], record["changed"])),
    _SealedColumn(
        webhook_endpoints, "id", "secret",
        lambda record: webhooks.owner_of(record["project"], record["id"]),
    ),
)  # fmt: skip


class Vault:
    """Raises, everywhere: InvalidConfig if the key file cannot be used."""

    def __init__(
        self, database: Database, box: SecretBox, clock: Clock, quotas: ProjectQuotas = ProjectQuotas()
    ) -> None:
        self._database, self._clock = database, clock
        self.box, self.quotas = box, quotas
        self._listeners: list[Changed] = []
        self._rotating = asyncio.Lock()

    def listen(self, listener: Changed) -> None:
        """Await `listener` with the names of changed secrets, before the change returns."""
        self._listeners.append(listener)

    async def put(self, name: str, value: str) -> None:
        """Store a secret, replacing one of the same name. Raises: InvalidInput for an invalid name or value."""
        await self.change({name: value})

    async def remove(self, name: str) -> None:
        """Raises: UnknownName."""
        if not await self.change({}, remove=[name]):
            raise UnknownName(f"there is no secret {name[:SHOWN_CHARS]!r}", code="unknown_secret")

    async def change(
        self, values: Mapping[str, str], *, remove: Iterable[str] = (), unless: Needed | None = None,
        also: Also | None = None, project: str | None = None,
    ) -> frozenset[str]:  # fmt: skip
        """Store and remove secrets in one transaction, with related writes. Returns the names that changed.

        Unknown names in `remove` are ignored. `also` is called last, in the transaction.

        Args:
            unless: names the secrets that are not removed, in the transaction.
            project: the project whose quota the secrets count against; None: the operator stores them.

        Raises: InvalidInput for an invalid name or value; OverQuota; what `also` raises. Then nothing has changed.
        """
        for name, value in values.items():
            _check(name, value)
            redaction.learn_named(name, value)
        removed = [name for name in remove if name not in values]
        quota = None if project is None else (project, self.quotas.of(project).secrets)
        changed = await self._database.write(
            _change, self.box, values, removed, unless, now=self._clock.now(), also=also, quota=quota
        )
        if changed:
            log.info("secrets changed: %s", ", ".join(sorted(changed)))
            for listener in self._listeners:
                await listener(changed)
        return changed

    async def reveal(self, name: str) -> str:
        """Return the value of a secret. Raises: ModelFailed (`missing_secret`), with the command that sets it."""
        return (await self.reveal_all([name]))[name]

    async def reveal_all(self, names: Iterable[str]) -> dict[str, str]:
        """As `reveal`, for several secrets."""
        unique_names = list(dict.fromkeys(names))
        values = await self._database.read(_reveal, self.box, unique_names) if unique_names else {}
        for name in unique_names:
            if name not in values:
                raise missing(name)
            redaction.learn_named(name, values[name])
        return values

    async def list(self) -> list[SecretInfo]:
        """Return all secrets, by name."""
        return await self._database.read(_list)

    async def rotate(self) -> Rotated:
        """Wrap every secret with a new key, and remove the old keys. Secrets can be read and stored meanwhile.

        After a kill at any moment all secrets stay readable, and the next rotation removes the keys that are left.

        Raises: InvalidConfig if there are secrets but no key file: it must be restored, not replaced.
        """
        async with self._rotating:
            if not self.box.exists and await self._database.read(_has_secrets):
                raise _no_key_file(self.box)
            await asyncio.to_thread(self.box.begin_rotation)
            faults.point("after_new_key")
            rewrapped, unreadable = 0, set[str]()
            for _ in range(PASSES_MAX):
                done = await self._rewrap_all(unreadable)
                rewrapped += done
                if not done:
                    break
            else:
                raise InvalidConfig(
                    "secrets are still being written under the old key: rotate again when there is less load"
                )
            faults.point("after_rewrap")
            removed = await asyncio.to_thread(self.box.end_rotation)
        log.info("secrets rotated: %d rewrapped, %d keys removed", rewrapped, removed)
        return Rotated(rewrapped, sorted(unreadable), removed)

    async def _rewrap_all(self, unreadable: set[str]) -> int:
        """Rewrap all sealed values once. Returns how many were under an older key."""
        done = 0
        for column in SEALED:
            after: str | None = ""
            while after is not None:
                count, after = await self._database.write(_rewrap, self.box, column, after, unreadable)
                done += count
                faults.point("in_rewrap")
        return done


def _check(name: str, value: str) -> None:
    if not OWN_NAME.fullmatch(name):
        check_name(name)
    if flaw := find_secret_flaw(value):  # the message does not contain the value
        raise InvalidInput(f"the secret {name[:SHOWN_CHARS]} cannot be stored: {flaw}", code="invalid_secret")


def _no_key_file(box: SecretBox) -> InvalidConfig:
    return InvalidConfig(
        f"the key file {box.path} is missing, but there are secrets that it encrypted: restore it, or remove them "
        "with `batchmill secrets remove NAME` first",
        code="secret_unreadable",
    )


# -- transactions -----------------------------------------------------------------------------------------------------


def _change(
    db: sa.Connection, box: SecretBox, values: Mapping[str, str], remove: list[str], unless: Needed | None, *,
    now: float, also: Also | None, quota: tuple[str, int] | None,
) -> frozenset[str]:  # fmt: skip
    if values and not box.exists and _has_secrets(db):
        raise _no_key_file(box)
    if remove and unless is not None:
        needed = unless(db)
        remove = [name for name in remove if name not in needed]
    changed = {name for name in remove if db.execute(secrets.delete().where(secrets.c.name == name)).rowcount}
    project, created_count = None if quota is None else quota[0], 0
    for name, value in values.items():
        fields = {
            "sealed": box.seal(value.encode(), _owner_of(name, now)), "changed": now,
            "hint": value[-HINT_CHARS:] if len(value) >= HINT_LENGTH_MIN else "",
        }  # fmt: skip
        if not db.execute(secrets.update().where(secrets.c.name == name).values(**fields)).rowcount:
            db.execute(secrets.insert().values(name=name, created=now, project=project, **fields))
            created_count += 1
        changed.add(name)
    count = db.execute(sa.select(sa.func.count()).select_from(secrets)).scalar_one()
    if values and count > SECRETS_MAX:
        raise InvalidInput(f"there are {SECRETS_MAX:,} secrets: remove some first", code="too_many_secrets")
    if quota is not None and created_count:
        way_out = "delete connectors or deployments with secrets"
        refuse_beyond(db, secrets, quota[1], quota="secrets", project=quota[0], way_out=way_out, adding=0)
    if also is not None:
        also(db)
    return frozenset(changed)


def _reveal(db: sa.Connection, box: SecretBox, names: list[str]) -> dict[str, str]:
    rows = db.execute(sa.select(secrets).where(secrets.c.name.in_(names))).mappings()
    return {each["name"]: box.open(each["sealed"], _owner_of(each["name"], each["changed"])).decode() for each in rows}


def _list(db: sa.Connection) -> list[SecretInfo]:
    columns = secrets.c
    rows = db.execute(sa.select(columns.name, columns.hint, columns.created, columns.changed).order_by(columns.name))
    return [SecretInfo(*each) for each in rows]


def _has_secrets(db: sa.Connection) -> bool:
    return db.execute(sa.select(secrets.c.name).limit(1)).first() is not None


def _rewrap(
    db: sa.Connection, box: SecretBox, column: _SealedColumn, after: str, unreadable: set[str]
) -> tuple[int, str | None]:
    """Rewrap a page of values with keys above `after`. Returns how many, and the `after` of the next page."""
    key = column.table.c[column.key]
    rows = db.execute(sa.select(column.table).where(key > after).order_by(key).limit(PAGE)).mappings().all()
    done = 0
    for record in rows:
        sealed, owner = record[column.column], column.owner(record)
        if box.is_current(sealed) or owner in unreadable:
            continue
        try:
            rewrapped = box.rewrap(sealed, owner)
        except InvalidConfig:  # it was unreadable before, because another key file sealed it
            unreadable.add(owner)
            continue
        db.execute(column.table.update().where(key == record[column.key]).values({column.column: rewrapped}))
        done += 1
    return done, rows[-1][column.key] if len(rows) == PAGE else None


class OwnerProvisions:
    """`ports.executors.Provisions` of the process that owns the secrets.

    Args:
        environ: the values of "env:NAME" for workers whose environment lacks them; None: workers have them.
    """

    def __init__(
        self, vault: Vault, private_hosts: Sequence[str], environ: Mapping[str, str] | None = None,
        isolation: Isolation | None = None, storage: Storage | None = None,
        storage_term: PrefixTerm = PrefixTerm(ENDLESS, math.inf),
    ) -> None:  # fmt: skip
        """Raises: InvalidConfig for an invalid host."""
        read_private(private_hosts)
        self._vault, self._private_hosts, self._environ = vault, list(private_hosts), environ or {}
        self.isolation, self._storage, self.storage_term = isolation, storage, storage_term
        self._restore: Callable[[ModelSpec], Awaitable[None]] | None = None

    def restore_with(self, restore: Callable[[ModelSpec], Awaitable[None]]) -> None:
        """Call `restore` before a worker of a model is started: it brings what the worker reads."""
        self._restore = restore

    async def of(self, model: ModelSpec) -> Provision:
        """Return the secrets for a worker of this model. Raises: ModelFailed for a missing or unreadable secret."""
        if self._restore is not None:
            await self._restore(model)
        references_used = references(model)
        names = [each.removeprefix(PREFIX) for each in references_used if each.startswith(PREFIX)]
        try:
            values = await self._vault.reveal_all(names)
        except InvalidConfig as error:
            raise ModelFailed(error.message, code="missing_secret") from None
        provided = {PREFIX + name: value for name, value in values.items()}
        for each in references_used:
            name = each.removeprefix(VARIABLE)
            if name != each and name in self._environ:  # else the worker reports that it is missing
                provided[each] = self._environ[name]
        return Provision(provided, self._private_hosts, self.isolation, self._storage)


def references(model: ModelSpec) -> list[str]:
    """Return every "secret:NAME" and "env:NAME" of a model, with its default key if it names none, and those of all its
    routes if the route is not chosen yet."""
    named = (value for value in _values(model) if isinstance(value, str) and value.startswith((PREFIX, VARIABLE)))
    return list(dict.fromkeys(named))


def _values(model: ModelSpec) -> Iterator[object]:
    key = model.api_key or default_key(model)
    value_groups: list[Iterable[object]] = [(key,), model.engine_args.values(), model.secrets.values()]
    if model.connector is not None:
        value_groups.append(model.connector.credential.values())
    if model.function is not None:
        value_groups.append(model.function.secrets.values())
    for each in value_groups:
        yield from each
    for route in model.routes if model.needs_route else ():
        yield from _values(route)
