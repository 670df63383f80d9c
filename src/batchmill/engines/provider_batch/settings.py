"""Reads the arguments of the provider_batch engine: `engine_args` of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from batchmill.engines.connections import check_header
from batchmill.engines.provider_batch.provider import BatchLimits
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import redaction, secrets
from batchmill.models import secrets as provisions
from batchmill.models.connectors.rendering import Renderer
from batchmill.models.providers import PROVIDERS, Provider, default_key
from batchmill.types import Limits, ModelSpec
from batchmill.types.connectors import BATCH_PREDICT, Connector

GRACE_S = 3600.0  # how long after its window a provider's job counts as stuck


class ProviderSettings(Struct, frozen=True):
    """The times and limits of the engine. Every number is an engine argument of the same name."""

    poll_s: float = 5.0  # between two polls of a job, at first
    poll_max_s: float = 60.0
    jobs_max: int = 4  # shards at the provider at once
    tries_max: int = 3  # submissions of a row before it counts as lost by the provider
    stuck_after_s: float = 0.0  # without progress; 0: the provider's window and an hour
    cancel_wait_s: float = 800.0  # for the end of a cancelled job; its owner waits 900 s
    note_s: float = 30.0  # between two notes that only record progress
    keep_files: bool = False  # uploads are not deleted at the provider


SHARED = frozenset(ProviderSettings.__struct_fields__) | {"rows_max", "bytes_max", "window_s", "idle_timeout_s"}


def read_settings(model: ModelSpec, further: frozenset[str]) -> ProviderSettings:
    """The settings of a model. `further`: the arguments that its provider reads itself.

    Raises: ModelFailed for an unknown argument or an invalid value.
    """
    for name in model.engine_args:
        if name not in SHARED and name not in further and not name.startswith("header."):
            names = ", ".join(sorted(SHARED | further))
            text = f"the provider_batch engine has no argument {name!r} here; its arguments are header.NAME, {names}"
            raise ModelFailed(text, code="unknown_argument")
    tries = (
        model.limits.attempts_max
        if model.limits.attempts_max != Limits().attempts_max
        else ProviderSettings().tries_max
    )
    defaults = ProviderSettings(stuck_after_s=find_provider(model).window_s + GRACE_S, tries_max=tries)
    numbers: dict[str, float] = {
        name: argument(model, name, getattr(defaults, name), least=least) for name, least in _LEAST.items()
    }
    counts = {name: count(model, name, getattr(defaults, name), least=1) for name in ("jobs_max", "tries_max")}
    settings = ProviderSettings(**numbers, **counts, keep_files=flag(model, "keep_files"))
    if settings.poll_max_s < settings.poll_s:
        raise ModelFailed("poll_max_s is less than poll_s", code="invalid_argument")
    return settings


_LEAST = {
    "poll_s": 0.001,
    "poll_max_s": 0.001,
    "stuck_after_s": 0.001,
    "cancel_wait_s": 0.0,
    "note_s": 0.0,
}


def find_provider(model: ModelSpec) -> Provider:
    """The provider of a model. Raises: ModelFailed for an unknown one."""
    name = model.provider or "openai"
    if name not in PROVIDERS:
        raise ModelFailed(f"there is no provider {name!r}; choose from {', '.join(PROVIDERS)}", code="unknown_provider")
    return PROVIDERS[name]


def read_limits(
    model: ModelSpec,
    *,
    inputs_max: int | None = None,
    head: bytes = b"",
    between: bytes = b"\n",
    tail: bytes = b"\n",
) -> BatchLimits:
    """The provider's limits, changed by the model's arguments. Raises: ModelFailed."""
    provider = find_provider(model)
    return BatchLimits(
        rows_max=count(model, "rows_max", provider.rows_max, least=1),
        bytes_max=count(model, "bytes_max", provider.bytes_max, least=1),
        window_s=argument(model, "window_s", provider.window_s, least=1),
        inputs_max=inputs_max,
        head=head,
        between=between,
        tail=tail,
    )


def argument(model: ModelSpec, name: str, default: float, *, least: float) -> float:
    """A numeric engine argument. Raises: ModelFailed if it is not a number, or less than `least`."""
    value = model.engine_args.get(name)
    if value is None:
        return default
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ModelFailed(f"{name} must be a number of at least {least:g}, not {value!r}", code="invalid_argument")
    return number


def count(model: ModelSpec, name: str, default: int, *, least: int) -> int:
    """As `argument`, for a whole number."""
    number = argument(model, name, default, least=least)
    if number != int(number):
        raise ModelFailed(f"{name} must be a whole number, not {model.engine_args[name]!r}", code="invalid_argument")
    return int(number)


def flag(model: ModelSpec, name: str, *, default: bool = False) -> bool:
    """A boolean engine argument. Raises: ModelFailed for anything else."""
    value = model.engine_args.get(name, default)
    if value in (True, "true"):
        return True
    if value in (False, "false", None):
        return False
    raise ModelFailed(f"{name} must be true or false, not {value!r}", code="invalid_argument")


def text(model: ModelSpec, name: str, default: str) -> str:
    """A text engine argument."""
    value = model.engine_args.get(name)
    return default if value is None else str(value)


REFERENCES = ("env:", "file:", "secret:")


class Access:
    """Access to a model's provider: its base URL without a trailing slash, query, and headers."""

    def __init__(self, model: ModelSpec, *, header: str = "Authorization", prefix: str = "Bearer ") -> None:
        """`header` carries the model's key after `prefix`, unless the model calls through a connector.

        Raises: ModelFailed if no address is provider.
        """
        self._model = model
        self._header, self._prefix = header, prefix
        self._version = -1
        self._headers: dict[str, str] = {}
        self.secrets: list[bytes] = []  # no message and no result may contain them
        self.base_url, self.query = _base_url(model)

    def headers(self) -> Mapping[str, str]:
        """The headers of a call. Raises: ModelFailed, naming a missing secret."""
        if self._version != provisions.version():
            self.renew()
        return self._headers

    def renew(self) -> bool:
        """Read the secrets again; return whether one has changed. Raises: ModelFailed."""
        before = self._headers
        self._version = provisions.version()
        self.secrets = []
        headers = self._of_connector(self._model.connector) if self._model.connector is not None else self._of_key()
        for name, value in self._model.engine_args.items():
            if name.startswith("header."):
                reference = str(value)
                headers[name[7:]] = self._reveal(reference) if reference.startswith(REFERENCES) else reference
        for name, value in headers.items():
            check_header(name, value)
        self._headers = headers
        return headers != before

    def _of_key(self) -> dict[str, str]:
        reference = self._model.api_key or default_key(self._model)
        if reference is None:
            return {}
        return {self._header: self._prefix + self._reveal(reference)}

    def _of_connector(self, connector: Connector) -> dict[str, str]:
        action = connector.action(BATCH_PREDICT)
        assert action is not None, "_base_url has looked"
        credentials = {name: self._reveal(reference, name) for name, reference in connector.credential.items()}
        # Only the head of the call is used; the engine builds the body.
        bare = Renderer(connector, replace(action, request_body="{}"))
        headers = bare.compose({}, credentials).headers
        return {name: value for name, value in headers.items() if name.lower() != "content-type"}

    def _reveal(self, reference: str, name: str = "") -> str:
        secret = secrets.resolve(reference, key=name).reveal()
        if name not in redaction.OPEN:
            self.secrets.append(secret.encode())
        return secret


def _base_url(model: ModelSpec) -> tuple[str, dict[str, str]]:
    provider = find_provider(model)
    if model.connector is not None:
        action = model.connector.action(BATCH_PREDICT)
        if action is None:
            text = f"the connector {model.connector.name!r} has no batch_predict action"
            raise ModelFailed(text, code="missing_action")
        try:
            rendered = Renderer(model.connector, replace(action, request_body="{}", headers={})).compose({}, {})
        except InvalidInput as error:
            raise ModelFailed(f"the connector's batch_predict: {error.message}", code="invalid_connector") from None
        base = rendered.url
    else:
        base = model.base_url or provider.base_url or ""
    if not base:
        raise ModelFailed(f"the provider {provider.name} has no address: set base_url", code="invalid_base_url")
    base, _, query = base.partition("?")
    if model.connector is not None:
        base = base.rstrip("/").removesuffix("/batches")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ModelFailed(f"base_url {base!r} is not an address such as https://HOST/v1", code="invalid_base_url")
    return base.rstrip("/"), dict(parse_qsl(query))
