"""Parses and checks connectors from the API or from a file of the operator.

Messages are those of ML Commons where it has one. A parsed connector contains only references to credentials; the
credentials themselves are returned separately.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.connectors.headers import HeaderTemplates, check_headers
from batchmill.models.connectors.processing import FILTER, JSON_PATHS, POST_PROCESS, PRE_PROCESS, refuse_processors
from batchmill.models.connectors.urls import UrlTemplate, has_open_host, own_url
from batchmill.optional import require
from batchmill.types.connectors import (
    BATCH_PREDICT,
    BATCH_PREDICT_STATUS,
    CANCEL_BATCH_PREDICT,
    PREDICT,
    Action,
    ClientConfig,
    Connector,
)
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.json_templates import CREDENTIAL, JsonTemplate, Placeholder, find_placeholders, split


def invalid(message: str) -> InvalidInput:
    """An error in a connector."""
    return InvalidInput(message, code="invalid_connector")


def text_of(value: Any) -> str:
    """A JSON value as a parameter: text unchanged, everything else as its JSON."""
    return value if isinstance(value, str) else encode(value).decode()


def read_text(fields: Mapping[str, Any], name: str) -> str | None:
    """A field as text; None if it is missing. Raises: InvalidInput for an object or a list."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, Mapping | list):
        raise invalid(f"`{name}` must be text")
    return _valid_text(name, text_of(value))


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    """A boolean field, as a boolean or as text; false if it is missing. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if value in ("true", "false"):
        return value == "true"
    raise invalid(f"`{name}` must be true or false")


def read_texts(fields: Mapping[str, Any], name: str) -> dict[str, str]:
    """An object with text values; empty if it is missing. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"`{name}` must be an object")
    texts = {key: read_text(value, key) for key in value}
    return {key: text for key, text in texts.items() if text is not None}


def read_parameters(fields: Mapping[str, Any], name: str = "parameters") -> dict[str, str]:
    """An object of parameters, each as text. Raises: InvalidInput."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"`{name}` must be an object")
    return {key: _valid_text(key, text_of(each)) for key, each in value.items()}


def _valid_text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"`{name}` has half of a surrogate pair") from None
    return text


ACTION_TYPES = (PREDICT, "EXECUTE", BATCH_PREDICT, CANCEL_BATCH_PREDICT, BATCH_PREDICT_STATUS)
METHODS = ("POST", "GET", "PUT", "DELETE")
ACTIONS_MAX = 64
NAME_CHARS_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9_-]+")
FIELDS = Action.__struct_fields__


def read_actions(value: Any) -> list[Action]:
    """Parse the actions of a connector, without `check_action`. Raises: InvalidInput."""
    if not value:
        raise invalid("No actions configured for this connector")
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise invalid("`actions` must be a list of objects")
    if len(value) > ACTIONS_MAX:
        raise invalid(f"a connector may have {ACTIONS_MAX} actions, not {len(value)}")
    return [_read_action(each) for each in value]


def _read_action(fields: Mapping[str, Any]) -> Action:
    kind = read_text(fields, "action_type")
    name = read_text(fields, "name")
    url, method = read_text(fields, "url"), read_text(fields, "method")
    if kind is None:
        raise invalid("action type can't be null")
    if kind.upper() not in ACTION_TYPES:
        raise invalid(f"No enum constant org.opensearch.ml.common.connector.ConnectorAction.ActionType.{kind.upper()}")
    if url is None:
        raise invalid("url can't be null")
    if method is None:
        raise invalid("method can't be null")
    if method.upper() not in METHODS:
        raise invalid(f"unsupported http method: {method[:20]}")
    _check_name(name)
    return Action(
        kind.upper(),
        method.upper(),
        url.strip(),
        headers=read_texts(fields, "headers"),
        request_body=read_text(fields, "request_body"),
        pre_process_function=read_text(fields, "pre_process_function") or None,
        post_process_function=read_text(fields, "post_process_function") or None,
        name=name,
        supports_structured_output=read_flag(fields, "supports_structured_output"),
    )


def unknown_fields(fields: Mapping[str, Any]) -> Iterable[str]:
    """The unknown fields of an action."""
    return [name for name in fields if name not in FIELDS]


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if any(ord(each) < 32 for each in name):
        raise invalid("Action name must not contain control characters")
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"Action name exceeds maximum length of {NAME_CHARS_MAX} characters")
    if not _NAME.fullmatch(name):
        raise invalid(
            "Action name contains invalid characters. "
            "Only alphanumeric characters, hyphens, and underscores are allowed"
        )
    if name.upper() in ACTION_TYPES:
        raise invalid(f"name can't be one of action type [{', '.join(ACTION_TYPES)}]")


def check_action(action: Action, parameters: Mapping[str, str]) -> None:
    """Check everything about an action that can be checked before a call. Raises: InvalidInput."""
    kind = action.action_type
    _refuse_credentials(action.url, f"the url of the action {kind}")
    _refuse_credentials(action.request_body or "", f"the request_body of the action {kind}")
    check_headers(action.headers)
    url = own_url(action.url, parameters)
    if has_open_host(url):
        raise InvalidInput(
            f"the url of the action {kind} needs a fixed scheme, host and port: {url[:200]}; "
            "only the connector's own parameters can fill them",
            code="invalid_url",
        )
    # With its remaining placeholders filled, it must be a URL.
    UrlTemplate("".join("x" if isinstance(part, Placeholder) else part for part in split(url)), {})
    HeaderTemplates(action.headers, parameters)
    JsonTemplate(action.request_body or "", parameters)
    _check_function(action.pre_process_function, PRE_PROCESS, f"the pre_process_function of the action {kind}")
    _check_function(action.post_process_function, POST_PROCESS, f"the post_process_function of the action {kind}")


def _refuse_credentials(text: str, subject: str) -> None:
    misplaced = next((placeholder for placeholder in find_placeholders(text) if placeholder.scope == CREDENTIAL), None)
    if misplaced is not None:
        raise InvalidInput(
            f"{subject} has {misplaced.text}: only headers, which are not logged, may have credentials",
            code="misplaced_credential",
        )


def _check_function(name: str | None, builtin_names: Iterable[str], subject: str) -> None:
    if name is None or name in builtin_names:
        return
    if not re.fullmatch(r"[A-Za-z0-9_.]{1,100}", name):
        raise InvalidInput(
            f"{subject} is a Painless script, and scripts are not run here: use one of the built-in functions "
            f"({', '.join(builtin_names)}), `response_filter`, or a template without a function",
            code="painless_not_supported",
        )
    close_names = difflib.get_close_matches(name, builtin_names, n=1)
    hint = f"; did you mean {close_names[0]!r}?" if close_names else f"; choose one of {', '.join(builtin_names)}"
    raise InvalidInput(f"{subject} is {name!r}, which is not a built-in function{hint}", code="painless_not_supported")


POLICIES = ("constant", "exponential_equal_jitter", "exponential_full_jitter")
# Field -> its minimum and maximum.
_BOUNDS = {
    "max_connection": (1, 10_000),
    "connection_timeout": (1, 86_400),
    "read_timeout": (1, 86_400),
    "retry_backoff_millis": (0, 3_600_000),
    "retry_timeout_seconds": (0, 86_400),
    "max_retry_times": (-1, 1_000_000),
}
CLIENT_FIELDS = (*ClientConfig.__struct_fields__, "mutual_tls_enabled", "keystore_type")


def read_client_config(value: Any) -> ClientConfig | None:
    """Parse the settings, with defaults for missing ones; None if there are no settings. Raises: InvalidInput."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid("`client_config` must be an object")
    if read_flag(value, "mutual_tls_enabled"):
        raise InvalidInput(
            "`client_config.mutual_tls_enabled` is not supported: connectors cannot send client certificates",
            code="unsupported_field",
        )
    policy = (read_text(value, "retry_backoff_policy") or "constant").lower()
    if policy not in POLICIES:
        raise invalid("Unsupported retry backoff policy")
    numbers = {name: _number(value[name], name) for name in _BOUNDS if value.get(name) is not None}
    return ClientConfig(
        **numbers,
        retry_backoff_policy=policy,
        skip_ssl_verification=read_flag(value, "skip_ssl_verification"),
    )


def unknown_client_fields(value: Mapping[str, Any]) -> list[str]:
    return [name for name in value if name not in CLIENT_FIELDS]


def _number(value: Any, name: str) -> int:
    low, high = _BOUNDS[name]
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high or (isinstance(value, float) and value != number):
        raise invalid(f"`client_config.{name}` must be a whole number from {low} to {high}, not {str(value)[:80]!r}")
    return number


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
# Fields of ML Commons' documents, so that an exported connector can be imported.
_WITHOUT_EFFECT = frozenset(
    {"connector_id", "created_time", "last_updated_time", "owner", "access", "tenant_id", "provisioned_by", "dry_run"}
)
_FIELDS = ("name", "version", "protocol", "description", "parameters", "credential", "actions", "client_config")


def read_connector(fields: Mapping[str, Any], *, id: str, is_trusted: bool) -> tuple[Connector, dict[str, str]]:
    """Parse a new connector. Also returns its credentials: key -> value.

    In a trusted connector, a value "env:…", "file:…" or "secret:…" is a reference and stays one. Unknown fields are
    ignored, as in ML Commons.

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
    """Apply an update to a connector. Also returns the new credentials: key -> value.

    Parameters and credentials are merged key by key; actions and `client_config` are replaced.

    Raises: InvalidInput.
    """
    if any(fields.get(name) is not None for name in _ACCESS):
        raise invalid(
            "You cannot specify connector access control parameters because the Security plugin or connector access "
            "control is disabled on your cluster."
        )
    texts = {name: read_text(fields, name) for name in ("name", "version", "protocol", "description")}
    changes = {name: text for name, text in texts.items() if text is not None}
    parameters = old.parameters | read_parameters(fields)
    references, secrets = _read_credential(fields, old)
    connector = replace(
        old,
        **changes,
        parameters=parameters,
        credential=old.credential | references,
        actions=old.actions if fields.get("actions") is None else read_actions(fields["actions"]),
        client_config=read_client_config(fields.get("client_config")) or old.client_config,
    )
    _check(connector)
    return connector, secrets


def read_file(path: Path) -> Connector:
    """Read a trusted connector from a JSON file. The file's name is its id, which no stored connector can have, and its
    credentials are references.

    Raises: InvalidInput.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        fields = msgspec.json.decode(shallow(data), type=dict[str, Any]) if len(data) <= FILE_BYTES_MAX else None
    except OSError as error:
        raise invalid(f"the connector {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"the connector {path} is not a JSON object: {error}") from None
    if fields is None:
        raise invalid(f"the connector {path} is larger than {FILE_BYTES_MAX} bytes")
    if not _ID.fullmatch(path.stem) or path.suffix != ".json":
        raise invalid(f"the name of the connector file {path} must be letters, digits, - and _, then .json")
    refuse_unknown(fields)
    connector, secrets = read_connector(fields, id=path.name, is_trusted=True)
    if secrets:
        raise InvalidInput(
            f"the connector {path} has the value of the credential {next(iter(secrets))!r}: "
            'give it as "env:NAME", "file:PATH" or "secret:NAME"',
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
    """Check a connector after it was created or updated. Raises: InvalidInput."""
    _check_protocol(connector.protocol)
    flaws = [
        f"Model connector {name} can only contain letters, numbers, spaces, and basic punctuation (.,!?():@-_'/\")"
        for name, text in (("name", connector.name), ("description", connector.description))
        if not _SAFE.fullmatch(text)
    ]
    if flaws:
        problems = "".join(f" {number}: {flaw};" for number, flaw in enumerate(flaws, start=1))
        raise InvalidInput(f"Validation Failed:{problems}", code="unsafe_text")
    if max(len(connector.parameters), len(connector.credential)) > NAMES_MAX:
        raise invalid(f"a connector may have {NAMES_MAX} parameters and {NAMES_MAX} credentials at most")
    if len(msgspec.json.encode(connector)) > CONNECTOR_BYTES_MAX:
        raise InvalidInput(f"a connector may have {CONNECTOR_BYTES_MAX} bytes at most", code="too_large")
    if connector.protocol == "aws_sigv4":
        _check_aws(connector)
    for name, value in connector.parameters.items():
        if any(placeholder.scope == CREDENTIAL for placeholder in find_placeholders(value)):
            raise InvalidInput(
                f"the parameter {name!r} has a credential: only headers may have credentials",
                code="misplaced_credential",
            )
    refuse_processors(connector.parameters)
    if connector.parameters.get(FILTER):
        require(JSON_PATHS, "a filter").check(connector.parameters[FILTER])
    for action in connector.actions:
        check_action(action, connector.parameters)


def _check_aws(connector: Connector) -> None:
    settings = connector.parameters | connector.credential
    if not {"access_key", "secret_key"} <= set(connector.credential):
        raise invalid("Missing credential")
    if "service_name" not in settings:
        raise invalid("Missing service name")
    if "region" not in settings:
        raise invalid("Missing region")


def _read_credential(fields: Mapping[str, Any], old: Connector) -> tuple[dict[str, str], dict[str, str]]:
    """Parse the field `credential` into references for the connector, and credentials that were given as values."""
    references, secrets = {}, {}
    prefix = f"secret:connector/{old.id}/"
    for key, value in read_texts(fields, "credential").items():
        if not _CREDENTIAL_NAME.fullmatch(key):
            raise invalid(
                f"{key[:100]!r} is not a name of a credential: it has letters, digits and _ . : - (100 at most)"
            )
        if old.is_trusted and is_reference(value):
            references[key] = value
        else:
            old_reference = old.credential.get(key, "")
            references[key] = old_reference if old_reference.startswith(prefix) else prefix + key
            secrets[key] = value
    return references, secrets


def is_reference(value: str) -> bool:
    """Whether a value of a trusted connector is a reference to a credential."""
    return _REFERENCE.fullmatch(value) is not None


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse unknown fields of a file, which are most often misspelt. Raises: InvalidInput."""
    unknown = [name for name in fields if name not in (*_FIELDS, *_WITHOUT_EFFECT, *_ACCESS)]
    settings = fields.get("client_config")
    unknown += unknown_client_fields(settings) if isinstance(settings, Mapping) else []
    for action in fields.get("actions") or []:
        unknown += unknown_fields(action) if isinstance(action, Mapping) else []
    if unknown:
        known_names = (*_FIELDS, *FIELDS, *CLIENT_FIELDS)
        close_names = difflib.get_close_matches(unknown[0], known_names, n=1)
        hint = f"; did you mean {close_names[0]!r}?" if close_names else ""
        raise InvalidInput(f"a connector has no field {unknown[0]!r}{hint}", code="unknown_field")
