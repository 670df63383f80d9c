"""Where a provider's API lies, and the headers that open it: read from references, and again when these change."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from msgspec.structs import replace

from batchmill.engines.outgoing import check_header
from batchmill.engines.provider_batch.settings import provider_of
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import provisions, redaction, secrets
from batchmill.models.connectors.rendering import Renderer
from batchmill.models.providers import key_meant
from batchmill.types import ModelSpec
from batchmill.types.connectors import BATCH_PREDICT, Connector

REFERENCES = ("env:", "file:", "secret:")


class Access:
    """Of a model: its base URL without a slash at its end, what every call asks after a `?`, and its headers."""

    def __init__(self, model: ModelSpec, *, header: str = "Authorization", prefix: str = "Bearer ") -> None:
        """`header` carries the model's key after `prefix`, unless the model calls through a connector.

        Raises: ModelFailed where no address is known.
        """
        self._model = model
        self._header, self._prefix = header, prefix
        self._version = -1
        self._found: dict[str, str] = {}
        self.secrets: list[bytes] = []  # what no message and no result may repeat
        self.base_url, self.query = _base_url(model)

    def headers(self) -> Mapping[str, str]:
        """The headers of a call made now. Raises: ModelFailed, naming the secret that is missing."""
        if self._version != provisions.version():
            self.renew()
        return self._found

    def renew(self) -> bool:
        """Read the secrets again; whether one has changed. Raises: ModelFailed."""
        before = self._found
        self._version = provisions.version()
        self.secrets = []
        found = self._of_connector(self._model.connector) if self._model.connector is not None else self._of_key()
        for name, value in self._model.engine_args.items():
            if name.startswith("header."):
                told = str(value)
                found[name[7:]] = self._reveal(told) if told.startswith(REFERENCES) else told
        for name, value in found.items():
            check_header(name, value)
        self._found = found
        return found != before

    def _of_key(self) -> dict[str, str]:
        reference = self._model.api_key or key_meant(self._model)
        if reference is None:
            return {}
        return {self._header: self._prefix + self._reveal(reference)}

    def _of_connector(self, connector: Connector) -> dict[str, str]:
        action = connector.action(BATCH_PREDICT)
        assert action is not None, "_base_url has looked"
        credentials = {name: self._reveal(reference, name) for name, reference in connector.credential.items()}
        # Only the head of the call is wanted: the body is the engine's own.
        bare = Renderer(connector, replace(action, request_body="{}"))
        headers = bare.compose({}, credentials).headers
        return {name: value for name, value in headers.items() if name.lower() != "content-type"}

    def _reveal(self, reference: str, name: str = "") -> str:
        secret = secrets.resolve(reference, key=name).reveal()
        if name not in redaction.OPEN:
            self.secrets.append(secret.encode())
        return secret


def _base_url(model: ModelSpec) -> tuple[str, dict[str, str]]:
    known = provider_of(model)
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
        base = model.base_url or known.base_url or ""
    if not base:
        raise ModelFailed(f"the provider {known.name} has no address: give base_url", code="invalid_base_url")
    base, _, query = base.partition("?")
    if model.connector is not None:
        base = base.rstrip("/").removesuffix("/batches")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ModelFailed(f"base_url {base!r} is no address such as https://HOST/v1", code="invalid_base_url")
    return base.rstrip("/"), dict(parse_qsl(query))
