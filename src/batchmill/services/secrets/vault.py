"""The secrets that batchmill keeps: put in, never shown again, given to those workers whose model names them.

Names are what people chose, connector/ID/KEY, with :NONCE behind it where jobs may name another such, or
llm/ID/hf_token. How they are encrypted is the secret box's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import InvalidConfig, InvalidInput, ModelFailed, UnknownName
from batchmill.models import redaction
from batchmill.models.addresses import read_private
from batchmill.models.providers import key_meant
from batchmill.models.secrets import SHOWN_CHARS, check_name, flaw_of, missing
from batchmill.ports import Clock
from batchmill.services import webhooks
from batchmill.services.secrets.box import SecretBox
from batchmill.store.database import Database
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import secrets, webhook_endpoints
from batchmill.types import Isolation, ModelSpec, ProjectQuotas, Provision

log = logging.getLogger("batchmill.secrets")

SECRETS_MAX = 10_000
HINT_CHARS = 4
HINT_LENGTH_MIN = 16  # a shorter secret shows nothing of itself
PAGE = 500  # of sealed values in one transaction
PASSES_MAX = 10  # over all of them, until nothing is left under an older key
OWN_NAME = re.compile(r"connector/[A-Za-z0-9_-]{1,64}/[A-Za-z0-9_.:-]{1,120}|llm/[A-Za-z0-9_-]{1,64}/hf_token")

Changed = Callable[[frozenset[str]], None]
Also = Callable[[sa.Connection], Any]
PREFIX, VARIABLE = "secret:", "env:"


class SecretInfo(Struct, frozen=True):
    """A secret as it may be shown. `hint`: its last characters, where it is long enough to show some."""

    name: str
    hint: str
    created: float
    changed: float


class Rotated(Struct, frozen=True):
    """What a rotation did."""

    rewrapped: int  # sealed values
    unreadable: list[str]  # what no key could open before it either: whose they are
    keys_removed: int


class _Place(Struct, frozen=True):
    """A column that holds sealed values. `owner` tells what a record's value is sealed for."""

    table: sa.Table
    key: str
    column: str
    owner: Callable[[sa.RowMapping], str]


def _owner_of(name: str, changed: float) -> str:
    """With the moment: the value that a secret had before cannot be put back either."""
    return f"secret {name} of {changed!r}"


SEALED = (
    _Place(secrets, "name", "sealed", lambda record: _owner_of(record["name"], record["changed"])),
    _Place(
        webhook_endpoints, "id", "secret",
        lambda record: webhooks.owner_of(record["project"], record["id"]),
    ),
)  # fmt: skip


class Vault:
    """Raises, everywhere: InvalidConfig when the key file cannot be used."""

    def __init__(
        self, database: Database, box: SecretBox, clock: Clock, quotas: ProjectQuotas = ProjectQuotas()
    ) -> None:
        self._database, self._clock = database, clock
        self.box, self.quotas = box, quotas
        self._listeners: list[Changed] = []
        self._rotating = asyncio.Lock()

    def listen(self, listener: Changed) -> None:
        """Call `listener` with the names whose values have changed, on the event loop's thread."""
        self._listeners.append(listener)

    async def put(self, name: str, value: str) -> None:
        """Keep a secret, in place of the one of this name. Raises: InvalidInput for a name or value that cannot be."""
        await self.change({name: value})

    async def remove(self, name: str) -> None:
        """Raises: UnknownName."""
        if not await self.change({}, remove=[name]):
            raise UnknownName(f"there is no secret {name[:SHOWN_CHARS]!r}", code="unknown_secret")

    async def change(
        self, values: Mapping[str, str], *, remove: Iterable[str] = (), also: Also | None = None,
        project: str | None = None,
    ) -> frozenset[str]:  # fmt: skip
        """Put and remove secrets, and write what belongs with them, in one transaction; which names have changed.

        Names in `remove` that are not there are left out. `also` is called last, within the transaction.

        Args: project: whose quota the secrets count to; None: whoever runs the machine puts them in.

        Raises: InvalidInput for a name or value that may not be; OverQuota; what `also` raised: nothing changed then.
        """
        for name, value in values.items():
            _check(name, value)
            redaction.learn_named(name, value)
        gone = [name for name in remove if name not in values]
        quota = None if project is None else (project, self.quotas.of(project).secrets)
        changed = await self._database.write(
            _change, self.box, values, gone, now=self._clock.now(), also=also, quota=quota
        )
        if changed:
            log.info("secrets changed: %s", ", ".join(sorted(changed)))
            for listener in self._listeners:
                listener(changed)
        return changed

    async def reveal(self, name: str) -> str:
        """Raises: ModelFailed (`missing_secret`), naming the secret and what sets it."""
        return (await self.reveal_all([name]))[name]

    async def reveal_all(self, names: Iterable[str]) -> dict[str, str]:
        """As `reveal`, for many."""
        wanted = list(dict.fromkeys(names))
        found = await self._database.read(_reveal, self.box, wanted) if wanted else {}
        for name in wanted:
            if name not in found:
                raise missing(name)
            redaction.learn_named(name, found[name])
        return found

    async def list(self) -> list[SecretInfo]:
        """All of them, by name."""
        return await self._database.read(_list)

    async def rotate(self) -> Rotated:
        """Have a new key wrap every secret, and forget the old one. Secrets can be read and put in meanwhile.

        Killed at any moment everything stays readable, and the next rotation removes what this one left.

        Raises: InvalidConfig where the key file is not there but secrets are: it is to be put back, not replaced.
        """
        async with self._rotating:
            if not self.box.exists and await self._database.read(_is_any):
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
                raise InvalidConfig("secrets keep being written under the old key: rotate again when less is going on")
            faults.point("after_rewrap")
            removed = await asyncio.to_thread(self.box.end_rotation)
        log.info("secrets rotated: %d rewrapped, %d keys removed", rewrapped, removed)
        return Rotated(rewrapped, sorted(unreadable), removed)

    async def _rewrap_all(self, unreadable: set[str]) -> int:
        """One pass over everything that is sealed; how many values were under an older key."""
        done = 0
        for place in SEALED:
            after: str | None = ""
            while after is not None:
                count, after = await self._database.write(_rewrap, self.box, place, after, unreadable)
                done += count
                faults.point("in_rewrap")
        return done


def _check(name: str, value: str) -> None:
    if not OWN_NAME.fullmatch(name):
        check_name(name)
    if flaw := flaw_of(value):  # the value itself is not repeated
        raise InvalidInput(f"the secret {name[:SHOWN_CHARS]} cannot be kept: {flaw}", code="invalid_secret")


def _no_key_file(box: SecretBox) -> InvalidConfig:
    return InvalidConfig(
        f"the key file {box.path} is not there, and there are secrets that it encrypted: put it back, or remove them "
        "with `batchmill secrets remove NAME` first",
        code="secret_unreadable",
    )


# -- transactions -----------------------------------------------------------------------------------------------------


def _change(
    db: sa.Connection, box: SecretBox, values: Mapping[str, str], remove: list[str], *, now: float, also: Also | None,
    quota: tuple[str, int] | None,
) -> frozenset[str]:  # fmt: skip
    if values and not box.exists and _is_any(db):
        raise _no_key_file(box)
    changed = {name for name in remove if db.execute(secrets.delete().where(secrets.c.name == name)).rowcount}
    project, fresh = None if quota is None else quota[0], 0
    for name, value in values.items():
        fields = {
            "sealed": box.seal(value.encode(), _owner_of(name, now)), "changed": now,
            "hint": value[-HINT_CHARS:] if len(value) >= HINT_LENGTH_MIN else "",
        }  # fmt: skip
        if not db.execute(secrets.update().where(secrets.c.name == name).values(**fields)).rowcount:
            db.execute(secrets.insert().values(name=name, created=now, project=project, **fields))
            fresh += 1
        changed.add(name)
    count = db.execute(sa.select(sa.func.count()).select_from(secrets)).scalar_one()
    if values and count > SECRETS_MAX:
        raise InvalidInput(f"there are {SECRETS_MAX:,} secrets: remove some first", code="too_many_secrets")
    if quota is not None and fresh:
        way_out = "delete connectors or deployments that have some"
        refuse_beyond(db, secrets, quota[1], quota="secrets", project=quota[0], way_out=way_out, adding=0)
    if also is not None:
        also(db)
    return frozenset(changed)


def _reveal(db: sa.Connection, box: SecretBox, names: list[str]) -> dict[str, str]:
    found = db.execute(sa.select(secrets).where(secrets.c.name.in_(names))).mappings()
    return {each["name"]: box.open(each["sealed"], _owner_of(each["name"], each["changed"])).decode() for each in found}


def _list(db: sa.Connection) -> list[SecretInfo]:
    columns = secrets.c
    found = db.execute(sa.select(columns.name, columns.hint, columns.created, columns.changed).order_by(columns.name))
    return [SecretInfo(*each) for each in found]


def _is_any(db: sa.Connection) -> bool:
    return db.execute(sa.select(secrets.c.name).limit(1)).first() is not None


def _rewrap(
    db: sa.Connection, box: SecretBox, place: _Place, after: str, unreadable: set[str]
) -> tuple[int, str | None]:
    """Rewrap a page of values whose key is above `after`; how many it concerned, and where the next page begins."""
    key = place.table.c[place.key]
    found = db.execute(sa.select(place.table).where(key > after).order_by(key).limit(PAGE)).mappings().all()
    done = 0
    for record in found:
        sealed, owner = record[place.column], place.owner(record)
        if box.is_current(sealed) or owner in unreadable:
            continue
        try:
            fresh = box.rewrap(sealed, owner)
        except InvalidConfig:  # it could not be read before either: another key file's
            unreadable.add(owner)
            continue
        db.execute(place.table.update().where(key == record[place.key]).values({place.column: fresh}))
        done += 1
    return done, found[-1][place.key] if len(found) == PAGE else None


class OwnerProvisions:
    """`ports.Provisions` of the process that owns the secrets.

    Args:
        environ: where "env:NAME" is looked up for workers, whose own environment does not have it; None: it has.
    """

    def __init__(
        self, vault: Vault, private_hosts: Sequence[str], environ: Mapping[str, str] | None = None,
        isolation: Isolation | None = None,
    ) -> None:  # fmt: skip
        """Raises: InvalidConfig for a host that cannot be one."""
        read_private(private_hosts)
        self._vault, self._private_hosts, self._environ = vault, list(private_hosts), environ or {}
        self.isolation = isolation

    async def of(self, model: ModelSpec) -> Provision:
        """For a worker of this model. Raises: ModelFailed, naming the secret that is missing or cannot be read."""
        references_used = references(model)
        names = [each.removeprefix(PREFIX) for each in references_used if each.startswith(PREFIX)]
        try:
            found = await self._vault.reveal_all(names)
        except InvalidConfig as error:
            raise ModelFailed(error.message, code="missing_secret") from None
        given = {PREFIX + name: value for name, value in found.items()}
        for each in references_used:
            name = each.removeprefix(VARIABLE)
            if name != each and name in self._environ:  # the worker says so where it is missing
                given[each] = self._environ[name]
        isolation = self.isolation if model.traits.isolates else None
        return Provision(given, self._private_hosts, isolation)


def references(model: ModelSpec) -> list[str]:
    """Every "secret:NAME" and "env:NAME" that a model names, or means where it names no key; of routes that are still
    to be chosen from, all of theirs."""
    named = (value for value in _values(model) if isinstance(value, str) and value.startswith((PREFIX, VARIABLE)))
    return list(dict.fromkeys(named))


def _values(model: ModelSpec) -> Iterator[object]:
    key = model.api_key or key_meant(model)
    places: list[Iterable[object]] = [(key,), model.engine_args.values(), model.secrets.values()]
    if model.connector is not None:
        places.append(model.connector.credential.values())
    if model.function is not None:
        places.append(model.function.secrets.values())
    for each in places:
        yield from each
    for route in model.routes if model.needs_route else ():
        yield from _values(route)
