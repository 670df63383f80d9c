"""Operations that only the machine's user may request from an owner, because they name local paths and code.

These operations exist only in the application of the control socket. A remote caller cannot reach them, because the
server's application has no such routes.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.services.remote.stored import ConnectorRecord, RemoteModel
from batchmill.services.secrets.shown import Rotated, SecretInfo
from batchmill.types import (
    JobOrder,
    JobView,
    LedgerReport,
    ModelSpec,
    Once,
    OutputSchema,
    RetryChange,
    ReuseCount,
    Scope,
    Submitted,
)
from batchmill.types.cluster import ClusterView
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import DeployReply, ModelList, Name
from batchmill.wire.native_models import AdapterInfo, NewAdapter
from batchmill.wire.operations import NOTHING, Endpoint

PREFIX = "/control/v1"
PROJECT = "batchmill-project"  # the header with the project for which the machine's user acts

_JOBS = f"{PREFIX}/jobs"
_USER = Scope.DEPLOY  # there is no key: the socket's file belongs to the machine's user


class LocalFile(Struct, frozen=True):
    """A file on this machine."""

    path: str


class PlannedRows(Struct, frozen=True):
    """Rows that were sealed and planned, and are not run."""

    spec: JobSpec
    dataset: str  # folders
    plan: str


class SecretValue(Struct, frozen=True):
    """The value of a secret."""

    value: str

    def __repr__(self) -> str:
        return "Secret()"


class SecretList(Struct, frozen=True):
    secrets: list[SecretInfo]


class ConnectorFields(Struct, frozen=True):
    """The fields of a new connector, or the fields to change."""

    fields: dict[str, Any]

    def __repr__(self) -> str:  # they may hold credentials
        return "ConnectorFields()"


class ConnectorList(Struct, frozen=True):
    """Connectors, and the models of all projects that use connectors."""

    connectors: list[ConnectorRecord]
    models: list[RemoteModel]


class ChangeConnector(Struct, frozen=True):
    redeploy: bool = False  # undeploy the models that use it during the change


class DeleteConnector(Struct, frozen=True):
    with_models: bool = False  # delete the models that use it, too


class NewRemoteModel(Struct, frozen=True):
    """A new model that uses a connector."""

    name: Name


class ShowCluster(Struct, frozen=True):
    brief: bool = False  # without asking the cluster


class Partial(Struct, frozen=True):
    """How partial results are written."""

    is_numbered: bool = False
    sampled: bool = False  # only the rows of its sample


class ResolvedModel(Struct, frozen=True):
    """A model in the form that jobs use; null: no model has this name."""

    model: ModelSpec | None = None


class ResolvedSchema(Struct, frozen=True):
    """The version of a deployed class, in the form that jobs use."""

    schema: OutputSchema


class LocalRetry(Struct, frozen=True):
    """A retry, and the model that it names, as the machine's user describes it."""

    change: RetryChange
    model: ModelSpec | None = None
    once: Once | None = None


PING = Endpoint("ping", "GET", f"{PREFIX}/ping", "Check that the owner answers", _USER, NOTHING, status=204)
RUN = Endpoint(
    "run", "POST", _JOBS, "Start, resume or join a job of local files", _USER, Submitted, body=JobOrder,
    is_idempotent=True,
)  # fmt: skip
RETRY = Endpoint(
    "retry", "POST", f"{_JOBS}/{{job_id}}/retry", "Run the rows again that failed", _USER, JobView, body=LocalRetry,
    is_idempotent=True,
)  # fmt: skip
PARTIAL = Endpoint(
    "partial",
    "POST",
    f"{_JOBS}/{{job_id}}/partial",
    "Write the finished rows to a new file",
    _USER,
    LocalFile,
    query=Partial,
    is_idempotent=True,
)
REBUILD = Endpoint(
    "rebuild", "POST", f"{_JOBS}/{{job_id}}/rebuild", "Rebuild the ledger", _USER, LedgerReport, is_idempotent=True
)

COUNT_REUSED = Endpoint(
    "countReused", "POST", f"{_JOBS}/reused", "Count planned rows whose results earlier jobs have", _USER, ReuseCount,
    body=PlannedRows, is_idempotent=True, is_long=True,
)  # fmt: skip

SHOW_CLUSTER = Endpoint(
    "showCluster", "GET", f"{PREFIX}/cluster", "Show the cluster and what runs there", _USER, ClusterView,
    query=ShowCluster, is_long=True,
)  # fmt: skip

_MODELS = f"{PREFIX}/models"

DEPLOY_ARCHIVE = Endpoint(
    "deployArchive", "POST", _MODELS, "Deploy a function from an archive on this machine", _USER, DeployReply,
    body=LocalFile,
)  # fmt: skip
FIND_MODEL = Endpoint(
    "findModel", "GET", f"{_MODELS}/{{name:path}}", "Find the deployed model with a name", _USER, ResolvedModel
)
FIND_SCHEMA = Endpoint(
    "findSchema", "GET", f"{PREFIX}/schemas/{{name:path}}", "Find the version of a deployed class", _USER,
    ResolvedSchema,
)  # fmt: skip
LIST_ALL_MODELS = Endpoint(
    "listAllModels", "POST", f"{_MODELS}/list", "List configured and deployed models", _USER,
    ModelList, body=ModelList, is_idempotent=True,
)  # fmt: skip
ADAPT_MODEL = Endpoint(
    "adaptModel", "POST", f"{_MODELS}/adapted", "Add the registered adapters to a model", _USER,
    ResolvedModel, body=ResolvedModel, is_idempotent=True,
)  # fmt: skip
ADD_ADAPTER = Endpoint(
    "addAdapter", "POST", f"{PREFIX}/adapters", "Register an adapter from any source, and wait for it", _USER,
    AdapterInfo, body=NewAdapter,
)  # fmt: skip

_SECRETS = f"{PREFIX}/secrets"
_SECRET = f"{_SECRETS}/{{name}}"

LIST_SECRETS = Endpoint("listSecrets", "GET", _SECRETS, "List the names of secrets", _USER, SecretList)
PUT_SECRET = Endpoint(
    "putSecret", "PUT", _SECRET, "Store a secret", _USER, NOTHING, body=SecretValue, status=204, is_idempotent=True
)
REMOVE_SECRET = Endpoint("removeSecret", "DELETE", _SECRET, "Delete a secret", _USER, NOTHING, status=204)
ROTATE_SECRETS = Endpoint(
    "rotateSecrets", "POST", f"{_SECRETS}/rotate", "Encrypt all secrets with a new key", _USER, Rotated
)

_CONNECTORS = f"{PREFIX}/connectors"
_CONNECTOR = f"{_CONNECTORS}/{{connector_id}}"

CREATE_CONNECTOR = Endpoint(
    "createConnector", "POST", _CONNECTORS, "Create a connector that may call any address", _USER, ConnectorRecord,
    body=ConnectorFields,
)  # fmt: skip
LIST_CONNECTORS = Endpoint("listConnectors", "GET", _CONNECTORS, "List connectors", _USER, ConnectorList)
SHOW_CONNECTOR = Endpoint("showConnector", "GET", _CONNECTOR, "Show a connector", _USER, ConnectorRecord)
CHANGE_CONNECTOR = Endpoint(
    "changeConnector", "PATCH", _CONNECTOR, "Change a connector", _USER, ConnectorRecord, query=ChangeConnector,
    body=ConnectorFields,
)  # fmt: skip
DELETE_CONNECTOR = Endpoint(
    "deleteConnector", "DELETE", _CONNECTOR, "Delete a connector", _USER, ConnectorRecord, query=DeleteConnector
)
REGISTER_MODEL = Endpoint(
    "registerModel", "POST", f"{_CONNECTOR}/models", "Register and deploy a model of a connector", _USER, RemoteModel,
    body=NewRemoteModel,
)  # fmt: skip
