"""batchmill's own API: its operations and its error envelope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from batchmill.dialects.native.admin import NativeKeys, NativeQuarantine
from batchmill.dialects.native.files import Files
from batchmill.dialects.native.functions import Functions
from batchmill.dialects.native.jobs import JobStreams, NativeJobs
from batchmill.dialects.native.models import Adapters, Llms
from batchmill.dialects.native.orders import Orders, Redactor
from batchmill.dialects.native.previews import Previews
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.server.replies import error_reply
from batchmill.services.services import Services
from batchmill.wire.error_statuses import status_of, with_overrides
from batchmill.wire.native import ErrorDetail, ErrorReply

STATUSES = with_overrides(
    {"deploy_failed": 422, "model_failed": 503, "input_changed": 409, "auth_refused": 409, "quota_exhausted": 409}
)


def refusal(error: BatchmillError, message: str) -> Response:
    """Return the reply to a failed request; `message` is safe to show to the caller. Never raises."""
    detail = ErrorDetail(error.code, message, error.blame, error.retryable, error.request_id)
    return error_reply(error, ErrorReply(detail), status_of(error, STATUSES))


def schema() -> dict[str, Any]:
    """Return the JSON schema of the envelope, without references."""
    (_,), components = msgspec.json.schema_components([ErrorReply])
    return {**components["ErrorReply"], "properties": {"error": components["ErrorDetail"]}}


class NativeDialect:
    name = "native"

    def __init__(self, services: Services) -> None:
        self._redactor = Redactor(services.config.data_dir)
        orders = Orders(services)
        self._groups = (
            Files(services),
            NativeJobs(services, self._redactor, orders),
            JobStreams(services, self._redactor),
            Previews(services, self._redactor, orders),
            NativeKeys(services),
            Functions(services, self._redactor),
            Llms(services, self._redactor),
            Adapters(services, self._redactor),
            NativeQuarantine(services),
        )

    def operations(self) -> Sequence[Operation]:
        return [operation for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return refusal(error, self._redactor.text(error.message))

    def error_schema(self) -> dict[str, Any]:
        return schema()
