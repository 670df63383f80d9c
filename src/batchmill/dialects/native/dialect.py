"""batchmill's own API on the wire: every operation of it, and one envelope for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from batchmill.dialects.native.admin import NativeKeys, QuarantinedRequestsOf
from batchmill.dialects.native.files import Files
from batchmill.dialects.native.functions import Functions
from batchmill.dialects.native.jobs import JobStreams, NativeJobs
from batchmill.dialects.native.models import Adapters, Llms
from batchmill.dialects.native.orders import Orders, Shown
from batchmill.dialects.native.previews import Looking
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.server.replies import error_reply
from batchmill.services.services import Services
from batchmill.wire.error_statuses import status_of, with_own
from batchmill.wire.native import ErrorDetail, ErrorReply

STATUSES = with_own(
    {"deploy_failed": 422, "model_failed": 503, "input_changed": 409, "auth_refused": 409, "quota_exhausted": 409}
)


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` may be shown to the caller. Never raises."""
    detail = ErrorDetail(error.code, message, error.blame, error.retryable, error.request_id)
    return error_reply(error, ErrorReply(detail), status_of(error, STATUSES))


def schema() -> dict[str, Any]:
    """JSON schema of the envelope, in one piece."""
    (_,), components = msgspec.json.schema_components([ErrorReply])
    return {**components["ErrorReply"], "properties": {"error": components["ErrorDetail"]}}


class NativeDialect:
    name = "native"

    def __init__(self, services: Services) -> None:
        self._shown = Shown(services.config.data_dir)
        orders = Orders(services)
        self._groups = (
            Files(services),
            NativeJobs(services, self._shown, orders),
            JobStreams(services, self._shown),
            Looking(services, self._shown, orders),
            NativeKeys(services),
            Functions(services, self._shown),
            Llms(services, self._shown),
            Adapters(services, self._shown),
            QuarantinedRequestsOf(services),
        )

    def operations(self) -> Sequence[Operation]:
        return [operation for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return refusal(error, self._shown.text(error.message))

    def error_schema(self) -> dict[str, Any]:
        return schema()
