"""Which gRPC status an error has, and how much of its message travels."""

from __future__ import annotations

from grpc import StatusCode

from batchmill import errors
from batchmill.errors import BatchmillError

DETAILS_BYTES_MAX = 4096  # a status travels in a header, of which clients take 8 KiB
# The most particular first: an error has the status of the first kind that it is.
BY_KIND: tuple[tuple[type[BatchmillError], StatusCode], ...] = (
    (errors.UnknownName, StatusCode.NOT_FOUND),
    (errors.TooLarge, StatusCode.RESOURCE_EXHAUSTED),
    (errors.InvalidTransition, StatusCode.FAILED_PRECONDITION),
    (errors.Conflict, StatusCode.ALREADY_EXISTS),
    (errors.InvalidInput, StatusCode.INVALID_ARGUMENT),
    (errors.Unauthenticated, StatusCode.UNAUTHENTICATED),
    (errors.RateLimited, StatusCode.RESOURCE_EXHAUSTED),
    (errors.Refused, StatusCode.PERMISSION_DENIED),
    (errors.StorageFull, StatusCode.RESOURCE_EXHAUSTED),
    (errors.JobPaused, StatusCode.UNAVAILABLE),
    (errors.Unavailable, StatusCode.UNAVAILABLE),
    (errors.ModelFailed, StatusCode.INTERNAL),
    (errors.LedgerBroken, StatusCode.INTERNAL),
    (BatchmillError, StatusCode.INTERNAL),
)
# Codes that say more than their kind.
BY_CODE = {
    "timeout": StatusCode.DEADLINE_EXCEEDED,
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


def status_of(error: BatchmillError) -> StatusCode:
    """By its code, or else by its kind."""
    if error.code in BY_CODE:
        return BY_CODE[error.code]
    return next(status for kind, status in BY_KIND if isinstance(error, kind))


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
