"""The API of OpenSearch ML Commons: its names and error forms. Services do the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.dialects.ml_commons.cluster import Cluster, ClusterHandlers
from batchmill.dialects.ml_commons.cluster_settings import ClusterSettings
from batchmill.dialects.ml_commons.predict import DatasetTasks, PredictHandlers
from batchmill.dialects.ml_commons.resources import Connectors, Groups, MlCommonsModels, Tasks
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.server.replies import error_reply
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.wire.error_statuses import row_of, status_of, with_overrides

# opensearch-py repeats 502, 503 and 504 at once. Errors that only a person can fix have other statuses, or the repeats
# would use up the quota.
STATUSES = with_overrides({"paused": 500, "feature_disabled": 400, "task_under_way": 400, "timeout": 500})
ARGUMENT, PARSE, STATUS = "illegal_argument_exception", "parse_exception", "status_exception"
SECURITY, ILLEGAL_STATE, NOT_FOUND = (
    "security_exception",
    "illegal_state_exception",
    "resource_not_found_exception",
)
TYPES: Mapping[str, str] = {  # by code, then by class, like the statuses
    "internal_error": "exception",
    "invalid_input": ARGUMENT,
    "missing_body": PARSE,
    "invalid_json": PARSE,
    "parsing_exception": "parsing_exception",
    "feature_disabled": ILLEGAL_STATE,
    "task_under_way": ILLEGAL_STATE,
    "unknown_file": NOT_FOUND,
    "no_remote_job": NOT_FOUND,
    "refused": SECURITY,
} | dict.fromkeys(
    ("unknown_name", "too_large", "conflict", "invalid_transition", "request_timeout", "rate_limit_exceeded", "paused",
     "unavailable"),
    STATUS,
)  # fmt: skip
# Messages of OpenSearch that replace ours.
TEXTS = {
    "rate_limit_exceeded": "Request is throttled at user level. If you think there's an issue, please contact your "
    "cluster admin."
}

MODEL_THROTTLED = "Request is throttled at model level."


class Cause(Struct, frozen=True):
    type: str
    reason: str


class Detail(Struct, frozen=True):
    root_cause: list[Cause]
    type: str
    reason: str


class Envelope(Struct, frozen=True):
    error: Detail
    status: int


def status_and_type(error: BatchmillError) -> tuple[int, str]:
    """Return the status and type of an error. An error of a remote service keeps the service's status."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 600:
        return status, STATUS
    return status_of(error, STATUSES), row_of(error, TYPES) or "exception"


def refusal(error: BatchmillError, message: str) -> Response:
    """Return the reply to a failed request; `message` is safe to show to the caller. Never raises."""
    status, kind = status_and_type(error)
    reason = _reason(error, message)
    return error_reply(error, Envelope(Detail([Cause(kind, reason)], kind, reason), status), status)


def _reason(error: BatchmillError, message: str) -> str:
    """Return OpenSearch's message for the error if there is one, otherwise ours."""
    if error.unmatched_request is not None:
        method, path, methods = error.unmatched_request
        route = f"uri [{path}] and method [{method}]"
        if not methods:
            return f"no handler found for {route}"
        return f"Incorrect HTTP method for {route}, allowed: [{', '.join(methods)}]"
    return message if message == MODEL_THROTTLED else TEXTS.get(error.code, message)


def schema() -> dict[str, Any]:
    """Return the JSON schema of the envelope."""
    text = {"type": "string"}
    cause = {"type": "object", "required": ["type", "reason"], "properties": {"type": text, "reason": text}}
    detail = {
        "type": "object",
        "required": ["root_cause", "type", "reason"],
        "properties": {"root_cause": {"type": "array", "items": cause}, "type": text, "reason": text},
    }
    return {
        "type": "object",
        "required": ["error", "status"],
        "properties": {"error": detail, "status": {"type": "integer"}},
    }


class MlCommonsDialect:
    name = "ml_commons"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._hide = PathRedactor(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        services = self._services
        parts = (
            Cluster(services), ClusterSettings(services),
            Connectors(services), MlCommonsModels(services), Groups(services),
            PredictHandlers(services, DatasetTasks(services)), Tasks(services), ClusterHandlers(services),
        )  # fmt: skip
        return [operation for part in parts for operation in part.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return refusal(error, self._hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return schema()
