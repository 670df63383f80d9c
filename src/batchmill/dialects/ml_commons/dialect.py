"""OpenSearch ML Commons on the wire. It knows what its clients call things; what they mean is done by services."""

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
from batchmill.services.path_redaction import Places
from batchmill.services.services import Services
from batchmill.wire.error_statuses import row_of, status_of, with_own

# opensearch-py repeats 502, 503 and 504 blindly: what a person must mend would burn the quota.
STATUSES = with_own({"paused": 500, "feature_disabled": 400, "task_under_way": 400, "timeout": 500})
ARGUMENT, PARSE, STATUS = "illegal_argument_exception", "parse_exception", "status_exception"
SECURITY, ILLEGAL_STATE, NOT_FOUND = (
    "security_exception",
    "illegal_state_exception",
    "resource_not_found_exception",
)
TYPES: Mapping[str, str] = {  # by code, and then by class, as the statuses
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
# What this API says, whatever we would.
TEXTS = {
    "rate_limit_exceeded": "Request is throttled at user level. If you think there's an issue, please contact your "
    "cluster admin."
}

OF_MODEL = "Request is throttled at model level."


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
    """The code's own row, or its class's. What a remote service answered has its status."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 600:
        return status, STATUS
    return status_of(error, STATUSES), row_of(error, TYPES) or "exception"


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` may be shown to the caller. Never raises."""
    status, kind = status_and_type(error)
    reason = _reason(error, message)
    return error_reply(error, Envelope(Detail([Cause(kind, reason)], kind, reason), status), status)


def _reason(error: BatchmillError, message: str) -> str:
    """Our message, or the words that OpenSearch has for it."""
    if error.asked is not None:
        method, path, methods = error.asked
        place = f"uri [{path}] and method [{method}]"
        known = ", ".join(methods)
        return f"Incorrect HTTP method for {place}, allowed: [{known}]" if known else f"no handler found for {place}"
    return message if message == OF_MODEL else TEXTS.get(error.code, message)


def schema() -> dict[str, Any]:
    """JSON schema of the envelope."""
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
        self._hide = Places(services.config.data_dir).hide

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
