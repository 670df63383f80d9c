"""Who is told when a job ends: endpoints of the configuration, and those that a project registered.

Secrets are shown once and kept encrypted. What is sent, when and how often is the outbox's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import Config, WebhookEntry
from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, UnknownName
from batchmill.models.addresses import read_private
from batchmill.models.secrets import Secret, resolve
from batchmill.ports import Clock
from batchmill.services.secrets.box import SecretBox
from batchmill.services.webhook_sender import DeliveryResult, WebhookSender, check_secret, hint_of, new_secret
from batchmill.states import JobState
from batchmill.store.database import Database
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import outbox, webhook_endpoints

# The frontend that took a job -> the word its events begin with, and the beginning of its ids there.
FRONTENDS = {
    "openai": ("batch", "batch_"), "native": ("job", "job_"), "ml_commons": ("job", "job_"),
    "predibase": ("job", "job_"),
}  # fmt: skip
ENDINGS = {
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "expired",
    JobState.CANCELLED: "cancelled",
}
EVENT_TYPES = tuple(
    f"{noun}.{ending}" for noun in dict.fromkeys(noun for noun, _ in FRONTENDS.values()) for ending in ENDINGS.values()
)
SAMPLE_DIGITS = "0" * 20
ID_DIGITS = 32


class Ended(Struct, frozen=True):
    """A job that came to rest: one generation of it."""

    job: str
    generation: int
    state: str
    created: float  # seconds since the epoch, UTC
    finished: float
    project: str
    frontend: str | None = None
    traceparent: str | None = None  # W3C, of the request that submitted it

    @property
    def type(self) -> str | None:
        """The type of its event; None where nobody is told."""
        noun = FRONTENDS.get(self.frontend or "")
        return f"{noun[0]}.{ENDINGS[JobState(self.state)]}" if noun else None


class _Data(Struct, frozen=True):
    id: str


class Event(Struct, frozen=True):
    """As openai's `webhooks.unwrap` reads it."""

    id: str
    created_at: int
    type: str
    data: _Data
    object: str = "event"


def event_of(ended: Ended) -> Event:
    """The event of an end, always the same for the same end."""
    assert ended.type is not None
    noun = FRONTENDS[ended.frontend or ""]
    shown = noun[1] + ended.job.removeprefix("job_")
    same = digits(ended.job, str(ended.generation), ended.state)
    return Event(f"evt_{same}", int(ended.finished), ended.type, _Data(shown))


def sample_event(event_type: str, event_id: str, now: float) -> Event:
    """An event of a job that never was, for an endpoint to be tried with."""
    start = next(start for noun, start in FRONTENDS.values() if event_type.startswith(f"{noun}."))
    return Event(event_id, int(now), event_type, _Data(start + SAMPLE_DIGITS))


def payload_of(event: Event) -> bytes:
    return msgspec.json.encode(event)


def message_id(event: Event, endpoint: str) -> str:
    """One for each event and endpoint: a receiver knows by it what it has had already."""
    return f"msg_{digits(event.id, endpoint)}"


def check_types(event_types: list[str]) -> list[str]:
    """The types without repetitions. Raises: InvalidInput for one that is never sent, or none at all."""
    for each in event_types:
        if each not in EVENT_TYPES:
            raise InvalidInput(
                f"there are no events of type {each[:80]!r}; there are {', '.join(EVENT_TYPES)}",
                code="unknown_event_type",
            )
    if not event_types:
        raise InvalidInput(f"name one type of event at least, of {', '.join(EVENT_TYPES)}", code="unknown_event_type")
    return list(dict.fromkeys(event_types))


def digits(*parts: str) -> str:
    """An id's digits that follow from what it is the id of."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:ID_DIGITS]


SHOWN_CHARS = 80


class WebhookRecord(Struct, frozen=True):
    """Where events go. `hint` tells its secret from another without showing it."""

    id: str
    project: str
    name: str
    url: str
    events: list[str]
    created: float
    updated: float
    hint: str | None = None


def owner_of(project: str, endpoint_id: str) -> str:
    """What its secret is sealed for."""
    return f"webhook_endpoint {endpoint_id} of {project}"


def endpoint_of(record: sa.RowMapping, hint: str | None = None) -> WebhookRecord:
    fields: dict[str, Any] = {name: record[name] for name in ("id", "project", "name", "url", "created", "updated")}
    return WebhookRecord(**fields, events=msgspec.json.decode(record["events"], type=list[str]), hint=hint)


def find(db: sa.Connection, project: str, endpoint_id: str) -> sa.RowMapping:
    query = sa.select(webhook_endpoints).where(
        webhook_endpoints.c.id == endpoint_id, webhook_endpoints.c.project == project
    )
    found = db.execute(query).mappings().first()
    if found is None:
        raise UnknownName(
            f"there is no webhook endpoint {endpoint_id[:SHOWN_CHARS]!r}", code="unknown_webhook_endpoint"
        )
    return found


def look_up(db: sa.Connection, endpoint_id: str) -> sa.RowMapping | None:
    return db.execute(sa.select(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)).mappings().first()


def page(db: sa.Connection, project: str, after: str | None, limit: int) -> Sequence[sa.RowMapping]:
    columns = webhook_endpoints.c
    query = sa.select(webhook_endpoints).where(columns.project == project)
    if after is not None:
        mark = find(db, project, after)
        query = query.where(sa.tuple_(columns.created, columns.id) < (mark["created"], mark["id"]))
    return db.execute(query.order_by(columns.created.desc(), columns.id.desc()).limit(limit)).mappings().all()


def insert(db: sa.Connection, made: WebhookRecord, sealed: bytes, quota: int) -> None:
    """Raises: OverQuota."""
    refuse_beyond(db, webhook_endpoints, quota, quota="webhook_endpoints", project=made.project, way_out="delete one")
    db.execute(webhook_endpoints.insert().values(id=made.id, project=made.project, secret=sealed, **columns_of(made)))


def update(db: sa.Connection, project: str, endpoint_id: str, values: dict[str, Any]) -> None:
    find(db, project, endpoint_id)
    db.execute(webhook_endpoints.update().where(webhook_endpoints.c.id == endpoint_id).values(**values))


def columns_of(endpoint: WebhookRecord) -> dict[str, Any]:
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "events": msgspec.json.encode(endpoint.events).decode(),
        "created": endpoint.created,
        "updated": endpoint.updated,
    }


def delete(db: sa.Connection, project: str, endpoint_id: str) -> None:
    find(db, project, endpoint_id)
    db.execute(webhook_endpoints.delete().where(webhook_endpoints.c.id == endpoint_id))
    db.execute(outbox.delete().where(outbox.c.endpoint == endpoint_id))


def events_of(db: sa.Connection, project: str) -> list[tuple[str, list[str]]]:
    """The ids of a project's endpoints, and the types of events each hears of."""
    columns = webhook_endpoints.c
    found = db.execute(sa.select(columns.id, columns.events).where(columns.project == project))
    return [(each.id, msgspec.json.decode(each.events, type=list[str])) for each in found]


NAME_CHARS_MAX = 256
KEPT_S = 24 * 3600.0  # how long an old secret still signs, where that was asked for
FROM_FILE = "wf_"  # ids of endpoints of the configuration; those of the API begin with we_


class DeliveryTarget(Struct, frozen=True):
    """An endpoint as a delivery needs it."""

    id: str
    url: str
    keys: tuple[Secret, ...]


class _Key(Struct):
    """One secret as it is kept. `until` None: it has no end."""

    secret: str
    until: float | None = None


class WebhookService:
    """Raises, everywhere: UnknownName (`unknown_webhook_endpoint`) for an endpoint of another project, or of none."""

    def __init__(self, database: Database, clock: Clock, config: Config, box: SecretBox) -> None:
        """Raises: InvalidConfig for an endpoint of the file that cannot work."""
        self._database, self._clock, self._box, self._quotas = database, clock, box, config.project_quotas
        self.webhook_sender = WebhookSender(clock, read_private(config.server.private_hosts))
        self._configured: dict[str, tuple[WebhookRecord, tuple[Secret, ...]]] = {}
        for entry in config.webhooks:
            endpoint = self._read_entry(entry)
            if endpoint.id in self._configured:
                raise InvalidConfig(f"{_place(entry)} stands there twice")
            self._configured[endpoint.id] = endpoint, _file_keys(entry, config.base)

    def _read_entry(self, entry: WebhookEntry) -> WebhookRecord:
        try:
            self.webhook_sender.check(entry.url)
            types = check_types(entry.events or list(EVENT_TYPES))
        except InvalidInput as error:
            raise InvalidConfig(f"{_place(entry)}: {error.message}") from None
        made_of = digits(entry.project, entry.name, entry.url)
        return WebhookRecord(FROM_FILE + made_of[:24], entry.project, entry.name, entry.url, types, 0.0, 0.0)

    # -- what a project registers -------------------------------------------------------------------------------------

    async def create(
        self, project: str, *, name: str, url: str, event_types: list[str]
    ) -> tuple[WebhookRecord, Secret]:
        """A new endpoint and its secret, which is shown this once."""
        types, now, secret = self._checked(name, url, event_types), self._clock.now(), new_secret()
        made = WebhookRecord(f"we_{secrets.token_hex(12)}", project, name, url, types, now, now, hint_of(secret))
        sealed = self._sealed(made, [_Key(secret.reveal())])
        await self._database.write(insert, made, sealed, self._quotas.of(project).webhook_endpoints)
        return made, secret

    async def get(self, project: str, endpoint_id: str) -> WebhookRecord:
        return self._shown(await self._database.read(find, project, endpoint_id))

    async def list(self, project: str, *, after: str | None, limit: int) -> tuple[list[WebhookRecord], bool]:
        """A page of endpoints, the newest first, and whether there are more."""
        found = await self._database.read(page, project, after, limit + 1)
        return [self._shown(each) for each in found[:limit]], len(found) > limit

    async def update(
        self,
        project: str,
        endpoint_id: str,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: list[str] | None = None,
    ) -> WebhookRecord:
        """Change what is not None."""
        known = await self.get(project, endpoint_id)
        fields = {"name": name, "url": url, "events": event_types}
        asked = replace(known, **{key: value for key, value in fields.items() if value is not None})
        asked = replace(asked, events=self._checked(asked.name, asked.url, asked.events))
        if asked != known:
            asked = replace(asked, updated=max(self._clock.now(), known.created, known.updated))
            changed = columns_of(asked)
            await self._database.write(update, project, endpoint_id, changed)
        return asked

    async def delete(self, project: str, endpoint_id: str) -> None:
        """Forget an endpoint and what was on its way there."""
        await self._database.write(delete, project, endpoint_id)

    async def rotate(self, project: str, endpoint_id: str, *, keep_old: bool) -> tuple[WebhookRecord, Secret]:
        """Give an endpoint a new secret; with `keep_old` deliveries are signed with the old one too, for 24 hours."""
        record = await self._database.read(find, project, endpoint_id)
        known, secret = endpoint_of(record), new_secret()
        now = self._clock.now()
        kept = [_Key(each.secret, now + KEPT_S) for each in self._opened(record)[:1]] if keep_old else []
        updated = max(now, known.updated)
        sealed = self._sealed(known, [_Key(secret.reveal()), *kept])
        await self._database.write(update, project, endpoint_id, {"secret": sealed, "updated": updated})
        return replace(known, updated=updated, hint=hint_of(secret)), secret

    async def test(self, project: str, endpoint_id: str, event_type: str) -> int:
        """Send a sample event at once; the status the endpoint answered with.

        Raises: InvalidInput (`webhook_unreachable`) where no answer came.
        """
        check_types([event_type])
        await self._database.read(find, project, endpoint_id)
        listener = await self.listener(endpoint_id)
        assert listener is not None
        sample = sample_event(event_type, f"evt_{secrets.token_hex(16)}", self._clock.now())
        answer = await self.deliver(listener, message_id(sample, endpoint_id), payload_of(sample))
        if answer.status == 0:
            raise InvalidInput(f"the webhook endpoint {endpoint_id}: {answer.failure}", code="webhook_unreachable")
        return answer.status

    def _checked(self, name: str, url: str, event_types: list[str]) -> list[str]:
        if not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise InvalidInput(f"a name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
        self.webhook_sender.check(url)
        return check_types(event_types)

    def _sealed(self, endpoint: WebhookRecord, keys: Sequence[_Key]) -> bytes:
        return self._box.seal(msgspec.json.encode(keys), owner_of(endpoint.project, endpoint.id))

    def _opened(self, record: sa.RowMapping) -> list[_Key]:
        plain = self._box.open(record["secret"], owner_of(record["project"], record["id"]))
        return msgspec.json.decode(plain, type=list[_Key])

    def _shown(self, record: sa.RowMapping) -> WebhookRecord:
        try:
            return endpoint_of(record, hint_of(Secret(self._opened(record)[0].secret)))
        except InvalidConfig:  # the key file is another: it can be looked at, and given a new secret
            return endpoint_of(record)

    # -- what the outbox asks -----------------------------------------------------------------------------------------

    def listening(self, db: sa.Connection, project: str, event_type: str) -> list[str]:
        """The ids of the endpoints that hear of an event."""
        listeners = events_of(db, project)
        listeners += [(each.id, each.events) for each, _ in self._configured.values() if each.project == project]
        return [endpoint for endpoint, types in listeners if event_type in types]

    async def listener(self, endpoint_id: str) -> DeliveryTarget | None:
        """An endpoint with the secrets that are valid now; None where it is gone.

        Raises: InvalidConfig when its secret cannot be read.
        """
        configured = self._configured.get(endpoint_id)
        if configured is not None:
            endpoint, keys = configured
            return DeliveryTarget(endpoint_id, endpoint.url, keys)
        record = await self._database.read(look_up, endpoint_id)
        if record is None:
            return None
        now = self._clock.now()
        valid = (each for each in self._opened(record) if each.until is None or each.until > now)
        return DeliveryTarget(endpoint_id, record["url"], tuple(Secret(each.secret) for each in valid))

    async def deliver(self, listener: DeliveryTarget, message: str, payload: bytes) -> DeliveryResult:
        return await self.webhook_sender.deliver(listener.url, message, payload, listener.keys)

    def close(self) -> None:
        self.webhook_sender.close()


def _place(entry: WebhookEntry) -> str:
    return f"webhooks {entry.name or entry.url[:SHOWN_CHARS]!r}"


def _file_keys(entry: WebhookEntry, base: Path) -> tuple[Secret, ...]:
    """The secrets of an endpoint of the file: one, or while they are rotated several, separated by spaces."""
    kind, _, name = entry.secret.partition(":")
    try:
        found = resolve(f"file:{base / Path(name).expanduser()}" if kind == "file" else entry.secret)
        keys = tuple(Secret(each) for each in found.reveal().split())
        for key in keys:
            check_secret(key)
    except BatchmillError as error:
        raise InvalidConfig(f"{_place(entry)}: {error.message}") from None
    return keys
