"""Connectors read from what somebody wrote: over the API, or into a file of the operator's.

The messages are ML Commons' own where it has some. No credential leaves here within a connector: it holds references,
and what they stand for is handed over beside it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.connectors import actions as action_rules
from batchmill.models.connectors import client_settings, late
from batchmill.models.connectors.actions import check_action, read_actions
from batchmill.models.connectors.client_settings import read_client_config
from batchmill.models.connectors.fields import invalid, read_parameters, read_text, read_texts
from batchmill.models.connectors.postprocessing import FILTER
from batchmill.models.connectors.preprocessing import refuse_processors
from batchmill.types.connectors import Connector
from batchmill.wire.json_bytes import shallow
from batchmill.wire.placeholders import CREDENTIAL, holes

PROTOCOLS = ("http", "aws_sigv4")
FILE_BYTES_MAX = 4 * 1024 * 1024
CONNECTOR_BYTES_MAX = 2 * 1024 * 1024
NAMES_MAX = 1000  # parameters, and credentials

_KNOWN_PROTOCOLS = ("aws_sigv4", "http", "mcp_sse", "mcp_streamable_http")  # ML Commons'
_SAFE = re.compile(r"[\w\s.,!?():@\-'/\"]*")
_CREDENTIAL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_REFERENCE = re.compile(r"(env|file|secret):.+", re.DOTALL)
_ACCESS = ("backend_roles", "add_all_backend_roles", "access_mode")
# What ML Commons writes into its documents: an exported connector can be read again.
_WITHOUT_EFFECT = frozenset(
    {"connector_id", "created_time", "last_updated_time", "owner", "access", "tenant_id", "provisioned_by", "dry_run"}
)
_FIELDS = ("name", "version", "protocol", "description", "parameters", "credential", "actions", "client_config")


def read_connector(fields: Mapping[str, Any], *, id: str, is_trusted: bool) -> tuple[Connector, dict[str, str]]:
    """A new connector, and its credentials by their secrets' names in it (key -> the credential itself).

    In a trusted one a value "env:…", "file:…" or "secret:…" is a reference, and stays one. Unknown fields are ignored,
    as ML Commons ignores them.

    Raises: InvalidInput.
    """
    connector = Connector(id, "", "", "", [], is_trusted=is_trusted)
    for name in ("name", "version", "protocol"):
        if read_text(fields, name) is None:
            raise invalid(f"Connector {name} is null")
    _check_protocol(read_text(fields, "protocol") or "")
    is_open = is_trusted and read_text(fields, "protocol") == "http"
    if not read_texts(fields, "credential") and not is_open:
        raise invalid("Connector credential is null or empty list")
    if fields.get("actions") is None:
        raise invalid("No actions configured for this connector")
    return update_connector(connector, fields)


def update_connector(old: Connector, fields: Mapping[str, Any]) -> tuple[Connector, dict[str, str]]:
    """A connector as it is after an update, and the credentials that are new in it.

    Parameters and credentials are merged key by key; actions and `client_config` replace what was there.

    Raises: InvalidInput.
    """
    if any(fields.get(name) is not None for name in _ACCESS):
        raise invalid(
            "You cannot specify connector access control parameters because the Security plugin or connector access "
            "control is disabled on your cluster."
        )
    texts = {name: read_text(fields, name) for name in ("name", "version", "protocol", "description")}
    given = {name: text for name, text in texts.items() if text is not None}
    parameters = old.parameters | read_parameters(fields)
    references, secrets = _read_credential(fields, old)
    connector = replace(
        old,
        **given,
        parameters=parameters,
        credential=old.credential | references,
        actions=old.actions if fields.get("actions") is None else read_actions(fields["actions"]),
        client_config=read_client_config(fields.get("client_config")) or old.client_config,
    )
    _check(connector)
    return connector, secrets


def read_file(path: Path) -> Connector:
    """A trusted connector from a JSON file, called after the file. Its credentials are references.

    Raises: InvalidInput.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        fields = msgspec.json.decode(shallow(data), type=dict[str, Any]) if len(data) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise invalid(f"the connector {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"the connector {path} is no JSON object: {error}") from None
    if fields is None:
        raise invalid(f"the connector {path} is larger than {FILE_BYTES_MAX} bytes")
    if not _ID.fullmatch(path.stem):
        raise invalid(f"the connector {path} is called after its file: letters, digits, - and _, then .json")
    refuse_unknown(fields)
    connector, secrets = read_connector(fields, id=path.stem, is_trusted=True)
    if secrets:
        raise InvalidInput(
            f"the connector {path} holds the credential {next(iter(secrets))!r} itself: "
            'name it as "env:NAME", "file:PATH" or "secret:NAME"',
            code="invalid_secret",
        )
    return connector


def _check_protocol(protocol: str) -> None:
    if protocol not in _KNOWN_PROTOCOLS:
        raise invalid(f"Unsupported connector protocol. Please use one of [{', '.join(_KNOWN_PROTOCOLS)}]")
    if protocol not in PROTOCOLS:
        raise InvalidInput(
            f"connectors of the protocol {protocol} are not supported: use http", code="unsupported_field"
        )


def _check(connector: Connector) -> None:
    """What must be true of every connector, however it came to be. Raises: InvalidInput."""
    _check_protocol(connector.protocol)
    flaws = [
        f"Model connector {name} can only contain letters, numbers, spaces, and basic punctuation (.,!?():@-_'/\")"
        for name, text in (("name", connector.name), ("description", connector.description))
        if not _SAFE.fullmatch(text)
    ]
    if flaws:
        listed = "".join(f" {number}: {flaw};" for number, flaw in enumerate(flaws, start=1))
        raise InvalidInput(f"Validation Failed:{listed}", code="unsafe_text")
    if max(len(connector.parameters), len(connector.credential)) > NAMES_MAX:
        raise invalid(f"a connector has at most {NAMES_MAX} parameters and {NAMES_MAX} credentials")
    if len(msgspec.json.encode(connector)) > CONNECTOR_BYTES_MAX:
        raise InvalidInput(f"a connector has at most {CONNECTOR_BYTES_MAX} bytes", code="too_large")
    if connector.protocol == "aws_sigv4":
        _check_aws(connector)
    for name, value in connector.parameters.items():
        if any(hole.scope == CREDENTIAL for hole in holes(value)):
            raise InvalidInput(
                f"the parameter {name!r} holds a credential: credentials stand in headers only",
                code="misplaced_credential",
            )
    refuse_processors(connector.parameters)
    if connector.parameters.get(FILTER):
        late.load("check_filter")(connector.parameters[FILTER])
    for action in connector.actions:
        check_action(action, connector.parameters)


def _check_aws(connector: Connector) -> None:
    either = connector.parameters | connector.credential
    if not {"access_key", "secret_key"} <= set(connector.credential):
        raise invalid("Missing credential")
    if "service_name" not in either:
        raise invalid("Missing service name")
    if "region" not in either:
        raise invalid("Missing region")


def _read_credential(fields: Mapping[str, Any], old: Connector) -> tuple[dict[str, str], dict[str, str]]:
    """The references that a connector holds, and the credentials that were given as themselves."""
    references, secrets = {}, {}
    own = f"secret:connector/{old.id}/"
    for key, value in read_texts(fields, "credential").items():
        if not _CREDENTIAL_NAME.fullmatch(key):
            raise invalid(f"{key[:100]!r} is no name of a credential: it has letters, digits and _ . : - (100 at most)")
        if old.is_trusted and is_reference(value):
            references[key] = value
        else:
            before = old.credential.get(key, "")
            references[key] = before if before.startswith(own) else own + key
            secrets[key] = value
    return references, secrets


def is_reference(value: str) -> bool:
    """It says where a credential lies, in a connector that may."""
    return _REFERENCE.fullmatch(value) is not None


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """A misspelt member of a file is an error: nobody but its author will ever look for it. Raises: InvalidInput."""
    found = [name for name in fields if name not in (*_FIELDS, *_WITHOUT_EFFECT, *_ACCESS)]
    settings = fields.get("client_config")
    found += client_settings.unknown_fields(settings) if isinstance(settings, Mapping) else []
    for action in fields.get("actions") or []:
        found += action_rules.unknown_fields(action) if isinstance(action, Mapping) else []
    if found:
        known = (*_FIELDS, *action_rules.FIELDS, *client_settings.FIELDS)
        near = difflib.get_close_matches(found[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(f"a connector has no field {found[0]!r}{hint}", code="unknown_field")
