"""Which gRPC status an error has, and how much of its message travels."""

from __future__ import annotations

from grpc import StatusCode

from batchmill.errors import BatchmillError
from batchmill.wire.error_statuses import row_of, status_of

DETAILS_BYTES_MAX = 4096  # a status travels in a header, of which clients take 8 KiB
# By HTTP status, where a code has no row of its own.
BY_HTTP_STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.UNIMPLEMENTED,
    408: StatusCode.INVALID_ARGUMENT,
    409: StatusCode.ALREADY_EXISTS,
    410: StatusCode.NOT_FOUND,
    413: StatusCode.RESOURCE_EXHAUSTED,
    415: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
BY_CODE = {
    "invalid_transition": StatusCode.FAILED_PRECONDITION,
    "storage_full": StatusCode.RESOURCE_EXHAUSTED,
    "streams_only": StatusCode.UNIMPLEMENTED,
}
# What logs and metrics call it, where every other request has an HTTP status. Source: google.rpc.Code.
HTTP_STATUS = {
    StatusCode.OK: 200,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


def grpc_status_of(error: BatchmillError) -> StatusCode:
    """By its code, or else by the HTTP status that it has everywhere."""
    return row_of(error, BY_CODE) or BY_HTTP_STATUS[status_of(error)]


def details_of(message: str) -> str:
    """The message, without its middle where it is too long: a traceback's last line says most."""
    message = message.encode("utf-8", "replace").decode()  # what is half a character would end the call itself
    if _travelling(message) <= DETAILS_BYTES_MAX:
        return message
    half = DETAILS_BYTES_MAX // 2 - 16
    first, last = _fitting(message, half), _fitting(message[::-1], half)[::-1]
    return f"{first}\n[…]\n{last}"


def _travelling(text: str) -> int:
    """The bytes of a text in a header: whatever is not printable ASCII takes three for each of its own."""
    return sum(_cost(char) for char in text)


def _cost(char: str) -> int:
    return 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())


def _fitting(text: str, bytes_max: int) -> str:
    used = 0
    for at, char in enumerate(text):
        used += _cost(char)
        if used > bytes_max:
            return text[:at]
    return text
