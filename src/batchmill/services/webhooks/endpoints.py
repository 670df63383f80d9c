"""Webhook endpoints, of the configuration and of projects, that get an event when a job ends.

Secrets are shown once and stored encrypted. The outbox decides what is sent, when and how often.
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
from batchmill.ports.clock import Clock
from batchmill.services.secrets.box import SecretBox
from batchmill.services.webhooks.sender import DeliveryResult, WebhookSender, check_secret, hint_of, new_secret
from batchmill.states import JobState
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import outbox, webhook_endpoints

# The frontend of a job -> the prefix of its event types, and the prefix of its ids in that frontend.
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


class EndedJob(Struct, frozen=True):
    """A job that has ended, in one generation."""

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
        """Return the type of its event; None if its frontend has no events."""
        names = FRONTENDS.get(self.frontend or "")
        return f"{names[0]}.{ENDINGS[JobState(self.state)]}" if names else None


class _Data(Struct, frozen=True):
    id: str


class Event(Struct, frozen=True):
    """An event in the form that `webhooks.unwrap` of the openai package reads."""

    id: str
    created_at: int
    type: str
    data: _Data
    object: str = "event"


def event_of(ended: EndedJob) -> Event:
    """Return the event of an ended job. The same job and generation always give the same event."""
    assert ended.type is not None
    names = FRONTENDS[ended.frontend or ""]
    shown_id = names[1] + ended.job.removeprefix("job_")
    id_digits = digits(ended.job, str(ended.generation), ended.state)
    return Event(f"evt_{id_digits}", int(ended.finished), ended.type, _Data(shown_id))


def sample_event(event_type: str, event_id: str, now: float) -> Event:
    """Return an event of a made-up job, to test an endpoint with."""
    start = next(start for noun, start in FRONTENDS.values() if event_type.startswith(f"{noun}."))
    return Event(event_id, int(now), event_type, _Data(start + SAMPLE_DIGITS))


def payload_of(event: Event) -> bytes:
    return msgspec.json.encode(event)


def message_id(event: Event, endpoint: str) -> str:
    """Return an id for each event and endpoint, by which a receiver recognizes repeated deliveries."""
    return f"msg_{digits(event.id, endpoint)}"


def check_types(event_types: list[str]) -> list[str]:
    """Return the types without duplicates. Raises: InvalidInput for an unknown type, or if there are none."""
    for each in event_types:
        if each not in EVENT_TYPES:
            raise InvalidInput(
                f"there is no event type {each[:80]!r}: use {', '.join(EVENT_TYPES)}",
                code="unknown_event_type",
            )
    if not event_types:
        raise InvalidInput(f"name at least one event type of {', '.join(EVENT_TYPES)}", code="unknown_event_type")
    return list(dict.fromkeys(event_types))


def digits(*parts: str) -> str:
    """Return the digits of an id, derived from these parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:ID_DIGITS]


SHOWN_CHARS = 80


class WebhookRecord(Struct, frozen=True):
    """An endpoint. `hint` tells its secret from others without showing it."""

    id: str
    project: str
    name: str
    url: str
    events: list[str]
    created: float
    updated: float
    hint: str | None = None


def owner_of(project: str, endpoint_id: str) -> str:
    """Return the owner text that its secret is sealed with."""
    return f"webhook_endpoint {endpoint_id} of {project}"


def endpoint_of(record: sa.RowMapping, hint: str | None = None) -> WebhookRecord:
    fields: dict[str, Any] = {name: record[name] for name in ("id", "project", "name", "url", "created", "updated")}
    return WebhookRecord(**fields, events=msgspec.json.decode(record["events"], type=list[str]), hint=hint)


def find(db: sa.Connection, project: str, endpoint_id: str) -> sa.RowMapping:
    query = sa.select(webhook_endpoints).where(
        webhook_endpoints.c.id == endpoint_id, webhook_endpoints.c.project == project
    )
    row = db.execute(query).mappings().first()
    if row is None:
        raise UnknownName(
            f"there is no webhook endpoint {endpoint_id[:SHOWN_CHARS]!r}", code="unknown_webhook_endpoint"
        )
    return row


def look_up(db: sa.Connection, endpoint_id: str) -> sa.RowMapping | None:
    return db.execute(sa.select(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)).mappings().first()


def page(db: sa.Connection, project: str, after: str | None, limit: int) -> Sequence[sa.RowMapping]:
    columns = webhook_endpoints.c
    query = sa.select(webhook_endpoints).where(columns.project == project)
    if after is not None:
        after_row = find(db, project, after)
        query = query.where(sa.tuple_(columns.created, columns.id) < (after_row["created"], after_row["id"]))
    return db.execute(query.order_by(columns.created.desc(), columns.id.desc()).limit(limit)).mappings().all()


def insert(db: sa.Connection, endpoint: WebhookRecord, sealed: bytes, quota: int) -> None:
    """Raises: OverQuota."""
    refuse_beyond(
        db, webhook_endpoints, quota, quota="webhook_endpoints", project=endpoint.project, way_out="delete one"
    )
    db.execute(
        webhook_endpoints.insert().values(
            id=endpoint.id, project=endpoint.project, secret=sealed, **columns_of(endpoint)
        )
    )


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
    """Return the ids of a project's endpoints, with the event types of each."""
    columns = webhook_endpoints.c
    rows = db.execute(sa.select(columns.id, columns.events).where(columns.project == project))
    return [(each.id, msgspec.json.decode(each.events, type=list[str])) for each in rows]


NAME_CHARS_MAX = 256
KEPT_S = 24 * 3600.0  # how long an old secret still signs after a rotation with `keep_old`
FROM_FILE = "wf_"  # begins ids of endpoints of the configuration; those of the API begin with we_


class DeliveryTarget(Struct, frozen=True):
    """An endpoint as a delivery needs it."""

    id: str
    url: str
    keys: tuple[Secret, ...]


class _Key(Struct):
    """One stored secret. `until` None: it does not expire."""

    secret: str
    until: float | None = None


class WebhookService:
    """Raises, everywhere: UnknownName (`unknown_webhook_endpoint`) for an endpoint that the project does not have."""

    def __init__(self, database: Database, clock: Clock, config: Config, box: SecretBox) -> None:
        """Raises: InvalidConfig for an invalid endpoint of the configuration."""
        self._database, self._clock, self._box, self._quotas = database, clock, box, config.project_quotas
        self.webhook_sender = WebhookSender(clock, read_private(config.server.private_hosts))
        self._configured: dict[str, tuple[WebhookRecord, tuple[Secret, ...]]] = {}
        for entry in config.webhooks:
            endpoint = self._read_entry(entry)
            if endpoint.id in self._configured:
                raise InvalidConfig(f"{_entry_name(entry)} is listed twice")
            self._configured[endpoint.id] = endpoint, _read_keys(entry, config.base)

    def _read_entry(self, entry: WebhookEntry) -> WebhookRecord:
        try:
            self.webhook_sender.check(entry.url)
            types = check_types(entry.events or list(EVENT_TYPES))
        except InvalidInput as error:
            raise InvalidConfig(f"{_entry_name(entry)}: {error.message}") from None
        id_digits = digits(entry.project, entry.name, entry.url)
        return WebhookRecord(FROM_FILE + id_digits[:24], entry.project, entry.name, entry.url, types, 0.0, 0.0)

    # -- endpoints of a project ---------------------------------------------------------------------------------------

    async def create(
        self, project: str, *, name: str, url: str, event_types: list[str]
    ) -> tuple[WebhookRecord, Secret]:
        """Create an endpoint. Returns it and its secret, which is shown only this once."""
        types, now, secret = self._check_fields(name, url, event_types), self._clock.now(), new_secret()
        endpoint = WebhookRecord(f"we_{secrets.token_hex(12)}", project, name, url, types, now, now, hint_of(secret))
        sealed = self._seal_keys(endpoint, [_Key(secret.reveal())])
        await self._database.write(insert, endpoint, sealed, self._quotas.of(project).webhook_endpoints)
        return endpoint, secret

    async def get(self, project: str, endpoint_id: str) -> WebhookRecord:
        return self._shown(await self._database.read(find, project, endpoint_id))

    async def list(self, project: str, *, after: str | None, limit: int) -> tuple[list[WebhookRecord], bool]:
        """Return a page of endpoints, newest first, and whether there are more."""
        rows = await self._database.read(page, project, after, limit + 1)
        return [self._shown(each) for each in rows[:limit]], len(rows) > limit

    async def update(
        self,
        project: str,
        endpoint_id: str,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: list[str] | None = None,
    ) -> WebhookRecord:
        """Change the fields that are not None."""
        endpoint = await self.get(project, endpoint_id)
        fields = {"name": name, "url": url, "events": event_types}
        new = replace(endpoint, **{key: value for key, value in fields.items() if value is not None})
        new = replace(new, events=self._check_fields(new.name, new.url, new.events))
        if new != endpoint:
            new = replace(new, updated=max(self._clock.now(), endpoint.created, endpoint.updated))
            await self._database.write(update, project, endpoint_id, columns_of(new))
        return new

    async def delete(self, project: str, endpoint_id: str) -> None:
        """Delete an endpoint and its pending events."""
        await self._database.write(delete, project, endpoint_id)

    async def rotate(self, project: str, endpoint_id: str, *, keep_old: bool) -> tuple[WebhookRecord, Secret]:
        """Give an endpoint a new secret. With `keep_old`, the old one signs deliveries too for 24 hours."""
        record = await self._database.read(find, project, endpoint_id)
        endpoint, secret = endpoint_of(record), new_secret()
        now = self._clock.now()
        old_keys = [_Key(each.secret, now + KEPT_S) for each in self._open_keys(record)[:1]] if keep_old else []
        updated = max(now, endpoint.updated)
        sealed = self._seal_keys(endpoint, [_Key(secret.reveal()), *old_keys])
        await self._database.write(update, project, endpoint_id, {"secret": sealed, "updated": updated})
        return replace(endpoint, updated=updated, hint=hint_of(secret)), secret

    async def test(self, project: str, endpoint_id: str, event_type: str) -> int:
        """Send a sample event now. Returns the status of the reply.

        Raises: InvalidInput (`webhook_unreachable`) if there was no reply.
        """
        check_types([event_type])
        await self._database.read(find, project, endpoint_id)
        target = await self.delivery_target(endpoint_id)
        assert target is not None
        sample = sample_event(event_type, f"evt_{secrets.token_hex(16)}", self._clock.now())
        result = await self.deliver(target, message_id(sample, endpoint_id), payload_of(sample))
        if result.status == 0:
            raise InvalidInput(f"the webhook endpoint {endpoint_id}: {result.failure}", code="webhook_unreachable")
        return result.status

    def _check_fields(self, name: str, url: str, event_types: list[str]) -> list[str]:
        if not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise InvalidInput(f"a name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
        self.webhook_sender.check(url)
        return check_types(event_types)

    def _seal_keys(self, endpoint: WebhookRecord, keys: Sequence[_Key]) -> bytes:
        return self._box.seal(msgspec.json.encode(keys), owner_of(endpoint.project, endpoint.id))

    def _open_keys(self, record: sa.RowMapping) -> list[_Key]:
        plain = self._box.open(record["secret"], owner_of(record["project"], record["id"]))
        return msgspec.json.decode(plain, type=list[_Key])

    def _shown(self, record: sa.RowMapping) -> WebhookRecord:
        try:
            return endpoint_of(record, hint_of(Secret(self._open_keys(record)[0].secret)))
        except InvalidConfig:  # the key file changed: the endpoint can still be shown and get a new secret
            return endpoint_of(record)

    # -- for the outbox -----------------------------------------------------------------------------------------------

    def endpoints_for(self, db: sa.Connection, project: str, event_type: str) -> list[str]:
        """Return the ids of the endpoints that get events of this type."""
        listeners = events_of(db, project)
        listeners += [(each.id, each.events) for each, _ in self._configured.values() if each.project == project]
        return [endpoint for endpoint, types in listeners if event_type in types]

    async def delivery_target(self, endpoint_id: str) -> DeliveryTarget | None:
        """Return an endpoint with the secrets that are valid now; None if it was deleted.

        Raises: InvalidConfig if its secret cannot be read.
        """
        configured = self._configured.get(endpoint_id)
        if configured is not None:
            endpoint, keys = configured
            return DeliveryTarget(endpoint_id, endpoint.url, keys)
        record = await self._database.read(look_up, endpoint_id)
        if record is None:
            return None
        now = self._clock.now()
        valid = (each for each in self._open_keys(record) if each.until is None or each.until > now)
        return DeliveryTarget(endpoint_id, record["url"], tuple(Secret(each.secret) for each in valid))

    async def deliver(self, target: DeliveryTarget, message: str, payload: bytes) -> DeliveryResult:
        return await self.webhook_sender.deliver(target.url, message, payload, target.keys)

    def close(self) -> None:
        self.webhook_sender.close()


def _entry_name(entry: WebhookEntry) -> str:
    return f"webhooks {entry.name or entry.url[:SHOWN_CHARS]!r}"


def _read_keys(entry: WebhookEntry, base: Path) -> tuple[Secret, ...]:
    """Return the secrets of an endpoint of the configuration: one, or several separated by spaces during a rotation."""
    kind, _, name = entry.secret.partition(":")
    try:
        secret = resolve(f"file:{base / Path(name).expanduser()}" if kind == "file" else entry.secret)
        keys = tuple(Secret(each) for each in secret.reveal().split())
        for key in keys:
            check_secret(key)
    except BatchmillError as error:
        raise InvalidConfig(f"{_entry_name(entry)}: {error.message}") from None
    return keys
