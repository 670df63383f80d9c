"""Connectors: made, changed and deleted by those who may; their credentials go to the vault and to nobody else.

The process that owns the data directory holds the one ConnectorService, and all connectors in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from msgspec.structs import replace

from batchmill.children.programs import Programs
from batchmill.errors import Conflict, Forbidden, InvalidInput, UnknownName
from batchmill.models.addresses import Private, read_url
from batchmill.models.connectors.bounded import read_fields
from batchmill.models.connectors.reading import is_reference, read_connector, update_connector
from batchmill.models.connectors.urls import own_url
from batchmill.ports import Clock
from batchmill.services.remote import connector_records as records
from batchmill.services.remote.changes import Changes, new_id
from batchmill.services.remote.connector_records import ConnectorRecord
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.types import Caller, Connector, ProjectQuotas
from batchmill.wire.json_templates import split

PORTS = {"https": 443, "http": 80}


class Endpoints:
    """
    Args:
        trusted: expressions, one of which the whole URL of an action must match; none: the rules of addresses alone.
    """

    def __init__(self, private: Private, trusted: Iterable[str] = ()) -> None:
        self._private, self._trusted = private, [re.compile(each) for each in trusted]

    def check(self, connector: Connector) -> None:
        """Raises: InvalidInput for an action that leads where connectors of callers may not."""
        for action in connector.actions:
            self.check_url(own_url(action.url, connector.parameters))

    def check_url(self, url: str) -> None:
        """Check a URL with the connector's own parameters in it. What calls fill in stands behind its host: `reading`
        makes no connector of which that is not true.

        Raises: InvalidInput.
        """
        if self._trusted and not any(each.fullmatch(url) for each in self._trusted):
            raise InvalidInput(
                "Connector URL is not matching the trusted connector endpoint regex", code="url_not_trusted"
            )
        read_url("".join(piece if isinstance(piece, str) else "x" for piece in split(url)), self._private)


def new_places(old: Connector, new: Connector) -> list[str]:
    """Where a connector leads that did not before: as scheme, host and port, or without the check of certificates."""
    return sorted(_places(new) - _places(old))


def _places(connector: Connector) -> set[str]:
    config = connector.client_config
    how = " without verification" if config is not None and config.skip_ssl_verification else ""
    return {_place(own_url(action.url, connector.parameters)) + how for action in connector.actions}


def _place(url: str) -> str:
    """The part of a URL that no call can change: `reading` makes no connector whose host is open."""
    parts = urlsplit("".join(piece if isinstance(piece, str) else "x" for piece in split(url)))
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{parts.port or PORTS.get(parts.scheme.lower())}"


__all__ = ["ConnectorRecord", "ConnectorService"]

DRY_RUN = "dryRunConnector"
# Secrets of connectors are called connector/ID/KEY, or connector/ID/KEY:NONCE where ended jobs may name the former.
SECRETS = "connector/"
NONCE_CHARS = 8
SPEC_BYTES_MAX = 256 * 1024
SHOWN_CHARS = 80
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# What OpenSearch's security plugin would be asked for. Here a connector belongs to its project.
_ACCESS_FIELDS = ("backend_roles", "add_all_backend_roles", "access_mode")
_KEPT_FIELDS = ("tenant_id", "provisioned_by")
# A dry run asks whether what it says could be; it need not say all. Source: MLCreateConnectorInput of ML Commons.
_UNSAID = {
    "name": DRY_RUN, "version": "1", "protocol": "http", "credential": {"key": "none"},
    "actions": [{"action_type": "predict", "method": "POST", "url": "https://example.com/", "request_body": "{}"}],
}  # fmt: skip


class ConnectorService:
    """Raises, everywhere: UnknownName (`connector_not_found`) for a connector of another project, or of none."""

    def __init__(
        self, database: Database, vault: Vault, endpoints: Endpoints, clock: Clock, programs: Programs
    ) -> None:
        """Args: `endpoints`, where connectors of callers may lead; `programs`, where those are read."""
        self._database, self._vault, self._endpoints, self._clock = database, vault, endpoints, clock
        self._programs = programs
        self._records: dict[str, ConnectorRecord] = {}
        self.changes = Changes()  # of models that use connectors too
        self._listeners: list[Callable[[str], None]] = []

    @property
    def quotas(self) -> ProjectQuotas:
        return self._vault.quotas

    async def load(self) -> None:
        """Read what there is."""
        self._records = {each.id: each for each in await self._database.read(records.read_all)}

    def listen(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` the id of each connector that has changed."""
        self._listeners.append(listener)

    # -- looking ------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, connector_id: str) -> ConnectorRecord:
        found = self._records.get(connector_id)
        if found is None or found.project != caller.project:
            raise unknown_connector(connector_id)
        return found

    def all(self, caller: Caller) -> list[ConnectorRecord]:
        """Those of the caller's project, in the order of their making."""
        return [each for each in self._records.values() if each.project == caller.project]

    def every(self) -> list[ConnectorRecord]:
        """Those of all projects, for whoever runs the machine."""
        return list(self._records.values())

    # -- changing -----------------------------------------------------------------------------------------------------

    async def create(
        self, caller: Caller, fields: Mapping[str, Any], *, dry_run: bool = False, is_trusted: bool = False
    ) -> ConnectorRecord:
        """Make a connector of the fields that ML Commons has for one.

        Args:
            dry_run: read the fields that are there and keep nothing; also where the fields themselves say so.
            is_trusted: whoever runs the machine wrote it.

        Raises: InvalidInput with ML Commons' words; Conflict for an id that is taken.
        """
        access = _access(fields)
        if dry_run or fields.get("dry_run") in (True, "true"):
            connector, _ = await self._read(caller.project, {**_UNSAID, **fields}, DRY_RUN, is_trusted)
            now = self._clock.now()
            return ConnectorRecord(DRY_RUN, caller.project, connector, access, 1, now, now)
        connector_id = _chosen_id(fields)
        connector, plain = await self.read(caller.project, fields, connector_id, is_trusted=is_trusted)
        if "connector_id" in fields:  # jobs of one that was called so before must not find these
            connector = _renamed(connector, plain)
        now = self._clock.now()
        record = ConnectorRecord(connector_id, caller.project, connector, access, 1, now, now)
        return await self.changes.make(self._create(record, plain))

    async def _create(self, record: ConnectorRecord, plain: dict[str, str]) -> ConnectorRecord:
        await self.store(
            lambda db: records.insert(db, record, self.quotas.of(record.project).connectors),
            record.project, plain=plain, new=record.connector,
        )  # fmt: skip
        self._put(record)
        return record

    async def update(
        self, caller: Caller, connector_id: str, fields: Mapping[str, Any], *, is_trusted: bool = False
    ) -> ConnectorRecord:
        """Change what is said and keep the rest. Credentials alone may be changed while models are deployed.

        Raises: InvalidInput, also while deployed models use it; Forbidden for one that only a command may change.
        """
        fields, read = dict(fields), self.get(caller, connector_id).connector
        connector, plain = await self.reread(caller.project, read, fields, is_trusted=is_trusted)
        return await self.changes.make(self._update(caller, read, fields, connector, plain))

    async def _update(
        self, caller: Caller, read: Connector, fields: dict[str, Any], connector: Connector, plain: dict[str, str]
    ) -> ConnectorRecord:
        connector_id = read.id
        old = self.get(caller, connector_id)
        if old.connector != read:
            raise Conflict("the connector was changed by somebody else meanwhile: send the change again")
        access = {**old.access, **_access(fields)}
        if set(fields) - {"credential"}:
            await self._refuse_deployed(connector_id)
        changed = max(self._clock.now(), old.changed)
        new = replace(old, connector=connector, access=access, revision=old.revision + 1, changed=changed)
        await self.store(lambda db: records.update(db, new), old.project, plain=plain, new=connector, old=old.connector)
        self._put(new)
        return new

    async def delete(self, caller: Caller, connector_id: str) -> ConnectorRecord:
        """Raises: Conflict while models, or jobs that have not ended, use it."""
        self.get(caller, connector_id)
        return await self.changes.make(self._delete(caller, connector_id))

    async def _delete(self, caller: Caller, connector_id: str) -> ConnectorRecord:
        record = self.get(caller, connector_id)
        await self.store(lambda db: records.delete(db, connector_id), record.project, old=record.connector)
        del self._records[connector_id]
        return record

    def _put(self, record: ConnectorRecord) -> None:
        self._records[record.id] = record
        for listener in self._listeners:
            listener(record.id)

    async def _refuse_deployed(self, connector_id: str) -> None:
        if users := await self._database.read(records.deployed_users, connector_id):
            raise InvalidInput(
                f"{len(users)} models are still using this connector, please undeploy the models first: "
                f"{records.shown(users)}",
                code="connector_deployed",
            )

    # -- what models with a connector of their own need too -----------------------------------------------------------

    async def read(
        self, project: str, fields: Mapping[str, Any], connector_id: str, *, is_trusted: bool = False
    ) -> tuple[Connector, dict[str, str]]:
        """The connector that fields describe, and its credentials. Raises: InvalidInput, also for where it leads."""
        connector, plain = await self._read(project, fields, connector_id, is_trusted)
        return self._checked(connector), plain

    async def _read(
        self, project: str, fields: Mapping[str, Any], connector_id: str, is_trusted: bool
    ) -> tuple[Connector, dict[str, str]]:
        if is_trusted:
            return read_connector(fields, id=connector_id, is_trusted=True)
        return await read_fields(self._programs, project, fields, id=connector_id)

    async def reread(
        self, project: str, old: Connector, fields: Mapping[str, Any], *, is_trusted: bool = False
    ) -> tuple[Connector, dict[str, str]]:
        """As `read`, of a connector that some fields are to change.

        Raises: Forbidden for one that only a command may change; InvalidInput for credentials that would go where
        whoever gave them did not send them.
        """
        if old.is_trusted and not is_trusted:
            raise Forbidden(
                f"the connector {old.id} belongs to the operator of this server: "
                f"`batchmill connectors update {old.id} FILE` changes it"
            )
        if is_trusted:
            connector, plain = update_connector(old, fields)
        else:
            connector, plain = await read_fields(self._programs, project, fields, old=old)
        if is_trusted and not old.is_trusted:
            _refuse_references(old, plain)
        self._checked(connector)
        if not is_trusted:
            _refuse_carrying(old, connector, plain)
        if new_places(old, connector):  # jobs that have ended know where it led before, and may be tried again
            connector = _renamed(connector, plain)
        return connector, plain

    def _checked(self, connector: Connector) -> Connector:
        records.check_size(connector, SPEC_BYTES_MAX)
        if not connector.is_trusted:
            self._endpoints.check(connector)
        return connector

    async def store(
        self, write: Callable[[sa.Connection], None], project: str, *, plain: Mapping[str, str] | None = None,
        new: Connector | None = None, old: Connector | None = None,
    ) -> None:  # fmt: skip
        """Write down a connector and its credentials, in one transaction: neither is ever there without the other.

        Args:
            project: whose it is.
            plain: credentials that are to be kept, by their keys.
            new, old: the connector as it will be and as it was; credentials that it refers to no more go.

        Raises: Conflict where a job that has not ended needs one of those; OverQuota.
        """
        values = {} if new is None else {_secret_of(new, key): value for key, value in (plain or {}).items()}
        gone = _secrets_of(old) - _secrets_of(new)

        def change(db: sa.Connection) -> None:
            if new is not None and gone:
                records.refuse_unfinished(db, new.id)
            write(db)

        await self._vault.change(values, remove=gone, also=change, project=project)


def unknown_connector(connector_id: str) -> UnknownName:
    return UnknownName(
        f"Failed to find connector with the provided connector id: {connector_id[:SHOWN_CHARS]}",
        code="connector_not_found",
    )


def _secrets_of(connector: Connector | None) -> set[str]:
    """The names of the secrets that are a connector's own."""
    if connector is None:
        return set()
    own = f"secret:{SECRETS}{connector.id}/"
    return {each.removeprefix("secret:") for each in connector.credential.values() if each.startswith(own)}


def _refuse_carrying(old: Connector, new: Connector, plain: Mapping[str, str]) -> None:
    """Who may change a connector need not know its credentials, and is not to learn them by sending them elsewhere."""
    places, kept = new_places(old, new), sorted(set(new.credential) - set(plain))
    if places and kept:
        raise InvalidInput(
            f"the connector {old.id} would lead to {places[0][:SHOWN_CHARS]}, where its credentials have never gone: "
            f"give them all again with the same change ({', '.join(kept)[:SHOWN_CHARS]})",
            code="credential_needed",
        )


def _refuse_references(old: Connector, plain: Mapping[str, str]) -> None:
    """In a connector that was made over the API what looks like a reference would be the credential itself."""
    found = next((key for key, value in plain.items() if is_reference(value)), None)
    if found is not None:
        raise InvalidInput(
            f"the connector {old.id} was made over the API and refers to no secret: give the credential {found!r} "
            "itself, or make a connector of your own with `batchmill connectors create`",
            code="invalid_secret",
        )


def _renamed(connector: Connector, plain: Mapping[str, str]) -> Connector:
    """The connector with its new credentials under names that no other has had."""
    nonce = new_id()[:NONCE_CHARS]
    names = {key: f"secret:{SECRETS}{connector.id}/{key}:{nonce}" for key in plain}
    return replace(connector, credential=connector.credential | names)


def _secret_of(connector: Connector, key: str) -> str:
    return connector.credential[key].removeprefix("secret:")


def _chosen_id(fields: Mapping[str, Any]) -> str:
    chosen = fields.get("connector_id")
    if chosen is None:
        return new_id()
    if not isinstance(chosen, str) or not _ID.fullmatch(chosen) or chosen == DRY_RUN:
        raise InvalidInput(
            f"connector_id must be 1 to 64 letters, digits, - and _, and begin with a letter or digit; "
            f"{str(chosen)[:SHOWN_CHARS]!r} is not",
            code="invalid_id",
        )
    return chosen


def _access(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept for whoever asks for the connector again. Raises: InvalidInput for what has no meaning here."""
    if any(fields.get(name) not in (None, False, []) for name in _ACCESS_FIELDS):
        raise InvalidInput(
            "You cannot specify connector access control parameters because the Security plugin or connector access "
            "control is disabled on your cluster.",
            code="no_access_control",
        )
    return {name: fields[name] for name in _KEPT_FIELDS if isinstance(fields.get(name), str)}
