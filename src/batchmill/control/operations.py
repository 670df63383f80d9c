"""What the machine's user alone may ask of an owner: orders that name local paths and code, and what no key reaches.

These operations exist only in the application of the control socket. A remote caller cannot reach them: the application
of the server has no such route.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.services.remote.connector_records import ConnectorRecord
from batchmill.services.remote.model_records import RemoteModel
from batchmill.services.secrets.vault import Rotated, SecretInfo
from batchmill.types import JobOrder, LedgerReport, ModelSpec, Scope, Submitted
from batchmill.wire.native import DeployReply, ModelList, Name
from batchmill.wire.native_models import AdapterInfo, NewAdapter
from batchmill.wire.operations import NOTHING, Endpoint

PREFIX = "/control/v1"
PROJECT = "batchmill-project"  # the header that says for which project the machine's user asks

_JOBS = f"{PREFIX}/jobs"
_USER = Scope.DEPLOY  # nobody is asked for a key here: the socket's file belongs to the machine's user


class LocalFile(Struct, frozen=True):
    """A file on this machine."""

    path: str


class SecretValue(Struct, frozen=True):
    """What a secret is."""

    value: str

    def __repr__(self) -> str:
        return "Secret()"


class SecretList(Struct, frozen=True):
    secrets: list[SecretInfo]


class ConnectorFields(Struct, frozen=True):
    """A connector as it was written, or what is to be changed of one."""

    fields: dict[str, Any]

    def __repr__(self) -> str:  # they may hold credentials
        return "ConnectorFields()"


class ConnectorList(Struct, frozen=True):
    """Connectors, and the models of all projects that go through some."""

    connectors: list[ConnectorRecord]
    models: list[RemoteModel]


class ChangeConnector(Struct, frozen=True):
    redeploy: bool = False  # undeploy the models that use it for as long as it takes


class DeleteConnector(Struct, frozen=True):
    with_models: bool = False  # those that go through it too


class NewRemoteModel(Struct, frozen=True):
    """A model that is to go through a connector."""

    name: Name


class FoundModel(Struct, frozen=True):
    """A model as a job has it; null: there is none that is called so."""

    model: ModelSpec | None = None


PING = Endpoint("ping", "GET", f"{PREFIX}/ping", "Whether the owner answers", _USER, NOTHING, status=204)
RUN = Endpoint(
    "run", "POST", _JOBS, "Start, resume or join a job of local files", _USER, Submitted, body=JobOrder,
    is_idempotent=True,
)  # fmt: skip
PARTIAL = Endpoint(
    "partial",
    "POST",
    f"{_JOBS}/{{job_id}}/partial",
    "Write the rows that are finished to a new file",
    _USER,
    LocalFile,
    is_idempotent=True,
)
REBUILD = Endpoint(
    "rebuild", "POST", f"{_JOBS}/{{job_id}}/rebuild", "Make the ledger anew", _USER, LedgerReport, is_idempotent=True
)

_MODELS = f"{PREFIX}/models"

DEPLOY_ARCHIVE = Endpoint(
    "deployArchive", "POST", _MODELS, "Deploy a function of an archive on this machine", _USER, DeployReply,
    body=LocalFile,
)  # fmt: skip
FIND_MODEL = Endpoint(
    "findModel", "GET", f"{_MODELS}/{{name:path}}", "The deployed model that a name means", _USER, FoundModel
)
LIST_ALL_MODELS = Endpoint(
    "listAllModels", "POST", f"{_MODELS}/list", "Models of a configuration, and what was deployed beside them", _USER,
    ModelList, body=ModelList, is_idempotent=True,
)  # fmt: skip
ADAPT_MODEL = Endpoint(
    "adaptModel", "POST", f"{_MODELS}/adapted", "A model with the adapters that were registered for it", _USER,
    FoundModel, body=FoundModel, is_idempotent=True,
)  # fmt: skip
ADD_ADAPTER = Endpoint(
    "addAdapter", "POST", f"{PREFIX}/adapters", "Register an adapter of any place, and wait for it", _USER, AdapterInfo,
    body=NewAdapter,
)  # fmt: skip

_SECRETS = f"{PREFIX}/secrets"
_SECRET = f"{_SECRETS}/{{name}}"

LIST_SECRETS = Endpoint("listSecrets", "GET", _SECRETS, "Secrets by name", _USER, SecretList)
PUT_SECRET = Endpoint(
    "putSecret", "PUT", _SECRET, "Keep a secret", _USER, NOTHING, body=SecretValue, status=204, is_idempotent=True
)
REMOVE_SECRET = Endpoint("removeSecret", "DELETE", _SECRET, "Forget a secret", _USER, NOTHING, status=204)
ROTATE_SECRETS = Endpoint(
    "rotateSecrets", "POST", f"{_SECRETS}/rotate", "Encrypt all secrets with a new key", _USER, Rotated
)

_CONNECTORS = f"{PREFIX}/connectors"
_CONNECTOR = f"{_CONNECTORS}/{{connector_id}}"

CREATE_CONNECTOR = Endpoint(
    "createConnector", "POST", _CONNECTORS, "Make a connector that may call any address", _USER, ConnectorRecord,
    body=ConnectorFields,
)  # fmt: skip
LIST_CONNECTORS = Endpoint("listConnectors", "GET", _CONNECTORS, "Connectors", _USER, ConnectorList)
SHOW_CONNECTOR = Endpoint("showConnector", "GET", _CONNECTOR, "One connector", _USER, ConnectorRecord)
CHANGE_CONNECTOR = Endpoint(
    "changeConnector", "PATCH", _CONNECTOR, "Change a connector", _USER, ConnectorRecord, query=ChangeConnector,
    body=ConnectorFields,
)  # fmt: skip
DELETE_CONNECTOR = Endpoint(
    "deleteConnector", "DELETE", _CONNECTOR, "Delete a connector", _USER, ConnectorRecord, query=DeleteConnector
)
REGISTER_MODEL = Endpoint(
    "registerModel", "POST", f"{_CONNECTOR}/models", "Make a model of a connector, deployed", _USER, RemoteModel,
    body=NewRemoteModel,
)  # fmt: skip
