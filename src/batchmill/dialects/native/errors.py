"""How this API says that something is wrong: one envelope, whose struct the SDK reads."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.replies import error_reply
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
