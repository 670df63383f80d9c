"""How this protocol says that something is wrong: the statuses of our codes, and Triton's own words where it has some.

Source: the Open Inference Protocol; Triton's statuses where it leaves them open.
"""

from __future__ import annotations

from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.text_errors import text_refusal

# Whatever a model did is a 500, which this protocol's clients do not repeat by themselves.
STATUS = {"method_not_allowed": 405, "unsupported_media_type": 415, "request_timeout": 408, "timeout": 504}
WORDS = {"unknown_url": "Not Found", "method_not_allowed": "Method Not Allowed"}  # all that Triton says


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed. Never raises."""
    return text_refusal(error, WORDS.get(error.code, message), STATUS)
