"""Who is told when a job ends: endpoints of the configuration, and those that a project registered.

Secrets are shown once and kept encrypted. What is sent, when and how often is the outbox's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import Config, WebhookEntry
from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput
from batchmill.models.addresses import read_private
from batchmill.models.secrets import Secret, resolve
from batchmill.ports import Clock
from batchmill.services import events
from batchmill.services import webhook_records as records
from batchmill.services.courier import Answer, Courier
from batchmill.services.secrets.box import SecretBox
from batchmill.services.signing import check_secret, hint_of, new_secret
from batchmill.services.webhook_records import SHOWN_CHARS, Endpoint, endpoint_of
from batchmill.store.database import Database

NAME_CHARS_MAX = 256
KEPT_S = 24 * 3600.0  # how long an old secret still signs, where that was asked for
FROM_FILE = "wf_"  # ids of endpoints of the configuration; those of the API begin with we_


class Listener(Struct, frozen=True):
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
        self.courier = Courier(clock, read_private(config.server.private_hosts))
        self._configured: dict[str, tuple[Endpoint, tuple[Secret, ...]]] = {}
        for entry in config.webhooks:
            endpoint = self._read_entry(entry)
            if endpoint.id in self._configured:
                raise InvalidConfig(f"{_place(entry)} stands there twice")
            self._configured[endpoint.id] = endpoint, _file_keys(entry, config.base)

    def _read_entry(self, entry: WebhookEntry) -> Endpoint:
        try:
            self.courier.check(entry.url)
            types = events.check_types(entry.events or list(events.EVENT_TYPES))
        except InvalidInput as error:
            raise InvalidConfig(f"{_place(entry)}: {error.message}") from None
        made_of = events.digits(entry.project, entry.name, entry.url)
        return Endpoint(FROM_FILE + made_of[:24], entry.project, entry.name, entry.url, types, 0.0, 0.0)

    # -- what a project registers -------------------------------------------------------------------------------------

    async def create(self, project: str, *, name: str, url: str, event_types: list[str]) -> tuple[Endpoint, Secret]:
        """A new endpoint and its secret, which is shown this once."""
        types, now, secret = self._checked(name, url, event_types), self._clock.now(), new_secret()
        made = Endpoint(f"we_{secrets.token_hex(12)}", project, name, url, types, now, now, hint_of(secret))
        sealed = self._sealed(made, [_Key(secret.reveal())])
        await self._database.write(records.insert, made, sealed, self._quotas.of(project).webhook_endpoints)
        return made, secret

    async def get(self, project: str, endpoint_id: str) -> Endpoint:
        return self._shown(await self._database.read(records.find, project, endpoint_id))

    async def list(self, project: str, *, after: str | None, limit: int) -> tuple[list[Endpoint], bool]:
        """A page of endpoints, the newest first, and whether there are more."""
        found = await self._database.read(records.page, project, after, limit + 1)
        return [self._shown(each) for each in found[:limit]], len(found) > limit

    async def update(
        self,
        project: str,
        endpoint_id: str,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: list[str] | None = None,
    ) -> Endpoint:
        """Change what is not None."""
        known = await self.get(project, endpoint_id)
        told = {"name": name, "url": url, "events": event_types}
        asked = replace(known, **{key: value for key, value in told.items() if value is not None})
        asked = replace(asked, events=self._checked(asked.name, asked.url, asked.events))
        if asked != known:
            asked = replace(asked, updated=max(self._clock.now(), known.created, known.updated))
            changed = records.columns_of(asked)
            await self._database.write(records.update, project, endpoint_id, changed)
        return asked

    async def delete(self, project: str, endpoint_id: str) -> None:
        """Forget an endpoint and what was on its way there."""
        await self._database.write(records.delete, project, endpoint_id)

    async def rotate(self, project: str, endpoint_id: str, *, keep_old: bool) -> tuple[Endpoint, Secret]:
        """Give an endpoint a new secret; with `keep_old` deliveries are signed with the old one too, for 24 hours."""
        record = await self._database.read(records.find, project, endpoint_id)
        known, secret = endpoint_of(record), new_secret()
        now = self._clock.now()
        kept = [_Key(each.secret, now + KEPT_S) for each in self._opened(record)[:1]] if keep_old else []
        updated = max(now, known.updated)
        sealed = self._sealed(known, [_Key(secret.reveal()), *kept])
        await self._database.write(records.update, project, endpoint_id, {"secret": sealed, "updated": updated})
        return replace(known, updated=updated, hint=hint_of(secret)), secret

    async def test(self, project: str, endpoint_id: str, event_type: str) -> int:
        """Send a sample event at once; the status the endpoint answered with.

        Raises: InvalidInput (`webhook_unreachable`) where no answer came.
        """
        events.check_types([event_type])
        await self._database.read(records.find, project, endpoint_id)
        listener = await self.listener(endpoint_id)
        assert listener is not None
        sample = events.sample_event(event_type, f"evt_{secrets.token_hex(16)}", self._clock.now())
        answer = await self.deliver(listener, events.message_id(sample, endpoint_id), events.payload_of(sample))
        if answer.status == 0:
            raise InvalidInput(f"the webhook endpoint {endpoint_id}: {answer.failure}", code="webhook_unreachable")
        return answer.status

    def _checked(self, name: str, url: str, event_types: list[str]) -> list[str]:
        if not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise InvalidInput(f"a name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
        self.courier.check(url)
        return events.check_types(event_types)

    def _sealed(self, endpoint: Endpoint, keys: Sequence[_Key]) -> bytes:
        return self._box.seal(msgspec.json.encode(keys), records.owner_of(endpoint.project, endpoint.id))

    def _opened(self, record: sa.RowMapping) -> list[_Key]:
        plain = self._box.open(record["secret"], records.owner_of(record["project"], record["id"]))
        return msgspec.json.decode(plain, type=list[_Key])

    def _shown(self, record: sa.RowMapping) -> Endpoint:
        try:
            return endpoint_of(record, hint_of(Secret(self._opened(record)[0].secret)))
        except InvalidConfig:  # the key file is another: it can be looked at, and given a new secret
            return endpoint_of(record)

    # -- what the outbox asks -----------------------------------------------------------------------------------------

    def listening(self, db: sa.Connection, project: str, event_type: str) -> list[str]:
        """The ids of the endpoints that hear of an event."""
        told = records.events_of(db, project)
        told += [(each.id, each.events) for each, _ in self._configured.values() if each.project == project]
        return [endpoint for endpoint, types in told if event_type in types]

    async def listener(self, endpoint_id: str) -> Listener | None:
        """An endpoint with the secrets that are valid now; None where it is gone.

        Raises: InvalidConfig when its secret cannot be read.
        """
        configured = self._configured.get(endpoint_id)
        if configured is not None:
            endpoint, keys = configured
            return Listener(endpoint_id, endpoint.url, keys)
        record = await self._database.read(records.look_up, endpoint_id)
        if record is None:
            return None
        now = self._clock.now()
        valid = (each for each in self._opened(record) if each.until is None or each.until > now)
        return Listener(endpoint_id, record["url"], tuple(Secret(each.secret) for each in valid))

    async def deliver(self, listener: Listener, message: str, payload: bytes) -> Answer:
        return await self.courier.deliver(listener.url, message, payload, listener.keys)

    def close(self) -> None:
        self.courier.close()


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
