"""Creates, changes and deletes connectors. Their credentials are stored only in the vault.

The process that owns the data directory has the only ConnectorService, with all connectors in memory.
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
from batchmill.ports.clock import Clock
from batchmill.services.remote import connector_records as records
from batchmill.services.remote.changes import Changes, new_id
from batchmill.services.remote.stored import ConnectorRecord
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import Caller, Connector, ProjectQuotas
from batchmill.wire.rows.json_templates import split

PORTS = {"https": 443, "http": 80}


class Endpoints:
    """
    Args:
        trusted: regular expressions. If there are any, one must match the whole URL of each action.
    """

    def __init__(self, private: Private, trusted: Iterable[str] = ()) -> None:
        self._private, self._trusted = private, [re.compile(each) for each in trusted]

    def check(self, connector: Connector) -> None:
        """Raises: InvalidInput for an action with a URL that callers' connectors may not call."""
        for action in connector.actions:
            self.check_url(own_url(action.url, connector.parameters))

    def check_url(self, url: str) -> None:
        """Check a URL that has the connector's own parameters filled in. Calls fill in only parts after the host:
        `reading` refuses other connectors.

        Raises: InvalidInput.
        """
        if self._trusted and not any(each.fullmatch(url) for each in self._trusted):
            raise InvalidInput(
                "Connector URL is not matching the trusted connector endpoint regex", code="url_not_trusted"
            )
        read_url("".join(piece if isinstance(piece, str) else "x" for piece in split(url)), self._private)


def new_origins(old: Connector, new: Connector) -> list[str]:
    """The origins (scheme, host, port, certificate check) of a changed connector that the old one did not call."""
    return sorted(_origins(new) - _origins(old))


def _origins(connector: Connector) -> set[str]:
    config = connector.client_config
    suffix = " without verification" if config is not None and config.skip_ssl_verification else ""
    return {_origin(own_url(action.url, connector.parameters)) + suffix for action in connector.actions}


def _origin(url: str) -> str:
    """The part of a URL that no call can change: `reading` refuses connectors with a placeholder in the host."""
    parts = urlsplit("".join(piece if isinstance(piece, str) else "x" for piece in split(url)))
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{parts.port or PORTS.get(parts.scheme.lower())}"


__all__ = ["ConnectorRecord", "ConnectorService"]

DRY_RUN = "dryRunConnector"
# Secrets of connectors are named connector/ID/KEY, or connector/ID/KEY:NONCE if ended jobs may refer to the former.
SECRETS = "connector/"
NONCE_CHARS = 8
SPEC_BYTES_MAX = 256 * 1024
SHOWN_CHARS = 80
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# Fields for OpenSearch's security plugin. Here a connector belongs to its project.
_ACCESS_FIELDS = ("backend_roles", "add_all_backend_roles", "access_mode")
_STORED_FIELDS = ("tenant_id", "provisioned_by")
# A dry run checks the fields that it has, and may omit others. Source: MLCreateConnectorInput of ML Commons.
_DRY_RUN_DEFAULTS = {
    "name": DRY_RUN, "version": "1", "protocol": "http", "credential": {"key": "none"},
    "actions": [{"action_type": "predict", "method": "POST", "url": "https://example.com/", "request_body": "{}"}],
}  # fmt: skip


class ConnectorService:
    """All methods raise UnknownName (`connector_not_found`) for a connector that is unknown or of another project."""

    def __init__(
        self, database: Database, vault: Vault, endpoints: Endpoints, clock: Clock, programs: Programs
    ) -> None:
        """
        Args:
            endpoints: checks the URLs of callers' connectors.
            programs: child processes that parse callers' connectors.
        """
        self._database, self._vault, self._endpoints, self._clock = database, vault, endpoints, clock
        self._programs = programs
        self._records: dict[str, ConnectorRecord] = {}
        self.changes = Changes()  # also for models and groups
        self._listeners: list[Callable[[str], None]] = []

    @property
    def quotas(self) -> ProjectQuotas:
        return self._vault.quotas

    async def load(self) -> None:
        """Read all connectors."""
        self._records = {each.id: each for each in await self._database.read(records.read_all)}

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the id of each connector that changes."""
        self._listeners.append(listener)

    # -- lookup -------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, connector_id: str) -> ConnectorRecord:
        record = self._records.get(connector_id)
        if record is None or record.project != caller.project:
            raise unknown_connector(connector_id)
        return record

    def all(self, caller: Caller) -> list[ConnectorRecord]:
        """The connectors of the caller's project, the oldest first."""
        return [each for each in self._records.values() if each.project == caller.project]

    def list_all(self) -> list[ConnectorRecord]:
        """The connectors of all projects, for the operator of the machine."""
        return list(self._records.values())

    # -- changing -----------------------------------------------------------------------------------------------------

    async def create(
        self, caller: Caller, fields: Mapping[str, Any], *, dry_run: bool = False, is_trusted: bool = False
    ) -> ConnectorRecord:
        """Create a connector from ML Commons' fields.

        Args:
            dry_run: check the given fields and store nothing. The field `dry_run` does the same.
            is_trusted: the operator of the machine wrote the connector.

        Raises: InvalidInput with ML Commons' message; Conflict for an id that is taken.
        """
        access = _access(fields)
        if dry_run or fields.get("dry_run") in (True, "true"):
            connector, _ = await self._read(caller.project, {**_DRY_RUN_DEFAULTS, **fields}, DRY_RUN, is_trusted)
            now = self._clock.now()
            return ConnectorRecord(DRY_RUN, caller.project, connector, access, 1, now, now)
        connector_id = _id_for(fields)
        connector, plain = await self.read(caller.project, fields, connector_id, is_trusted=is_trusted)
        if "connector_id" in fields:  # jobs of an earlier connector with this id must not find these secrets
            connector = _with_new_secret_names(connector, plain)
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
        """Change the given fields. While deployed models use the connector, only its credentials may change.

        Raises: InvalidInput, also while deployed models use it; Forbidden for a connector that only a command may
        change.
        """
        fields, base = dict(fields), self.get(caller, connector_id).connector
        connector, plain = await self.read_update(caller.project, base, fields, is_trusted=is_trusted)
        return await self.changes.make(self._update(caller, base, fields, connector, plain))

    async def _update(
        self, caller: Caller, base: Connector, fields: dict[str, Any], connector: Connector, plain: dict[str, str]
    ) -> ConnectorRecord:
        connector_id = base.id
        old = self.get(caller, connector_id)
        if old.connector != base:
            raise Conflict("another request changed the connector meanwhile: send the change again")
        access = {**old.access, **_access(fields)}
        if set(fields) - {"credential"}:
            await self._refuse_if_deployed(connector_id)
        changed = max(self._clock.now(), old.changed)
        new = replace(old, connector=connector, access=access, revision=old.revision + 1, changed=changed)
        await self.store(lambda db: records.update(db, new), old.project, plain=plain, new=connector, old=old.connector)
        self._put(new)
        return new

    async def delete(self, caller: Caller, connector_id: str) -> ConnectorRecord:
        """Delete a connector. Raises: Conflict while models or unfinished jobs use it."""
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

    async def _refuse_if_deployed(self, connector_id: str) -> None:
        if users := await self._database.read(records.deployed_users, connector_id):
            raise InvalidInput(
                f"{len(users)} models are still using this connector, please undeploy the models first: "
                f"{records.format_ids(users)}",
                code="connector_deployed",
            )

    # -- also for models with a connector of their own ----------------------------------------------------------------

    async def read(
        self, project: str, fields: Mapping[str, Any], connector_id: str, *, is_trusted: bool = False
    ) -> tuple[Connector, dict[str, str]]:
        """Parse fields into a connector and its credentials. Raises: InvalidInput, also for URLs that are refused."""
        connector, plain = await self._read(project, fields, connector_id, is_trusted)
        return self._check(connector), plain

    async def _read(
        self, project: str, fields: Mapping[str, Any], connector_id: str, is_trusted: bool
    ) -> tuple[Connector, dict[str, str]]:
        if is_trusted:
            return read_connector(fields, id=connector_id, is_trusted=True)
        return await read_fields(self._programs, project, fields, id=connector_id)

    async def read_update(
        self, project: str, old: Connector, fields: Mapping[str, Any], *, is_trusted: bool = False
    ) -> tuple[Connector, dict[str, str]]:
        """As `read`, for fields that change an existing connector.

        Raises: Forbidden for a connector that only a command may change; InvalidInput if its old credentials would go
        to a new origin.
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
        self._check(connector)
        if not is_trusted:
            _refuse_moved_credentials(old, connector, plain)
        if new_origins(old, connector):  # ended jobs have the old origin, and may be retried
            connector = _with_new_secret_names(connector, plain)
        return connector, plain

    def _check(self, connector: Connector) -> Connector:
        records.check_size(connector, SPEC_BYTES_MAX)
        if not connector.is_trusted:
            self._endpoints.check(connector)
        return connector

    async def store(
        self, write: Callable[[sa.Connection], None], project: str, *, plain: Mapping[str, str] | None = None,
        new: Connector | None = None, old: Connector | None = None,
    ) -> None:  # fmt: skip
        """Store a connector and its credentials in one transaction.

        Args:
            write: writes the record of the connector or model.
            plain: credentials to store, by key.
            new, old: the connector after and before the change. Secrets that only `old` refers to are deleted.

        Raises: Conflict if an unfinished job needs a deleted secret; OverQuota.
        """
        values = {} if new is None else {_secret_of(new, key): value for key, value in (plain or {}).items()}
        removed = _secrets_of(old) - _secrets_of(new)

        def change(db: sa.Connection) -> None:
            if new is not None and removed:
                records.refuse_unfinished(db, new.id)
            write(db)

        await self._vault.change(values, remove=removed, also=change, project=project)


def unknown_connector(connector_id: str) -> UnknownName:
    return UnknownName(
        f"Failed to find connector with the provided connector id: {connector_id[:SHOWN_CHARS]}",
        code="connector_not_found",
    )


def _secrets_of(connector: Connector | None) -> set[str]:
    """The names of the secrets that belong to a connector."""
    if connector is None:
        return set()
    prefix = f"secret:{SECRETS}{connector.id}/"
    return {each.removeprefix("secret:") for each in connector.credential.values() if each.startswith(prefix)}


def _refuse_moved_credentials(old: Connector, new: Connector, plain: Mapping[str, str]) -> None:
    """Refuse to send stored credentials to a new origin, where the sender of the change could read them."""
    origins, kept_keys = new_origins(old, new), sorted(set(new.credential) - set(plain))
    if origins and kept_keys:
        raise InvalidInput(
            f"the connector {old.id} would send its credentials to {origins[0][:SHOWN_CHARS]}, which is new: "
            f"give them all again in the same change ({', '.join(kept_keys)[:SHOWN_CHARS]})",
            code="credential_needed",
        )


def _refuse_references(old: Connector, plain: Mapping[str, str]) -> None:
    """Refuse references in a connector that was created through the API, where the text would be the credential."""
    key_of_reference = next((key for key, value in plain.items() if is_reference(value)), None)
    if key_of_reference is not None:
        raise InvalidInput(
            f"the connector {old.id} was created through the API and cannot refer to a secret: give the value of the "
            f"credential {key_of_reference!r}, or create another connector with `batchmill connectors create`",
            code="invalid_secret",
        )


def _with_new_secret_names(connector: Connector, plain: Mapping[str, str]) -> Connector:
    """The connector with its new credentials under secret names that were never used before."""
    nonce = new_id()[:NONCE_CHARS]
    names = {key: f"secret:{SECRETS}{connector.id}/{key}:{nonce}" for key in plain}
    return replace(connector, credential=connector.credential | names)


def _secret_of(connector: Connector, key: str) -> str:
    return connector.credential[key].removeprefix("secret:")


def _id_for(fields: Mapping[str, Any]) -> str:
    connector_id = fields.get("connector_id")
    if connector_id is None:
        return new_id()
    if not isinstance(connector_id, str) or not _ID.fullmatch(connector_id) or connector_id == DRY_RUN:
        raise InvalidInput(
            "connector_id must be 1 to 64 letters, digits, - and _, and start with a letter or digit, not "
            f"{str(connector_id)[:SHOWN_CHARS]!r}",
            code="invalid_id",
        )
    return connector_id


def _access(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are stored only to return them. Raises: InvalidInput for unsupported access control."""
    if any(fields.get(name) not in (None, False, []) for name in _ACCESS_FIELDS):
        raise InvalidInput(
            "You cannot specify connector access control parameters because the Security plugin or connector access "
            "control is disabled on your cluster.",
            code="no_access_control",
        )
    return {name: fields[name] for name in _STORED_FIELDS if isinstance(fields.get(name), str)}
