"""How this API says that something is wrong: `{"error": "<text>"}`.

Its published client repeats 429, 500, 502, 503 and 504 four times, POSTs too, and shows the text of the last reply. So
those statuses are for what a repetition may mend.
"""

from __future__ import annotations

from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server import text_errors

# Where this API differs from others with such errors. Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], int], ...] = (
    (errors.Conflict, 409),
    (errors.InvalidTransition, 409),
    (errors.StorageFull, 503),
    (errors.JobPaused, 409),
    (errors.ModelFailed, 422),
    *text_errors.BY_CLASS,
)
BY_CODE: dict[str, int] = {
    "link_expired": 410,
    "deleted": 410,
    "link_used": 410,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "unsupported_media_type": 415,
}


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    return text_errors.text_refusal(error, message, BY_CODE, BY_CLASS)
