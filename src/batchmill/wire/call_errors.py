"""How a call of a function fails: a body that cannot be read, and rows that have no result, as errors of ours."""

from __future__ import annotations

from typing import Any

import msgspec

from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.wire.calls import CallError
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep

# Codes of a CallError that are ours; any other is the type of an exception that user code raised.
MODEL_CODES = frozenset(["timeout", "worker_crashed", "memory_limit", "bad_return", "model_failed"])
CALLER_CODES = frozenset(
    ["missing_argument", "unknown_argument", "invalid_argument", "invalid_json", "nesting_too_deep", "invalid_encoding"]
)
FUNCTION_ERROR = "function_error"


def parse(decoder: msgspec.json.Decoder, data: Any, what: str = "the body") -> Any:
    """What the decoder reads. Raises: InvalidInput, and nothing else, whatever the bytes are."""
    if is_too_deep(data):
        raise InvalidInput(f"{what} is nested too deep: more than {DEPTH_MAX} levels", code="nesting_too_deep")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{what} is not as it should be: {error}", code="invalid_field") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} is not UTF-8: {error}", code="invalid_encoding") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{what} is not JSON: {error}", code="invalid_json") from None


def check_text(body: bytes | memoryview) -> None:
    """Raises: InvalidInput where a body that is only cut, not decoded, is no UTF-8."""
    data = bytes(body)
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the body is not UTF-8: {error}", code="invalid_encoding") from None


def last_line(error: CallError) -> str:
    """`Type: message` in one line, as a traceback ends."""
    message = " ".join(error.message.split())
    return f"{error.code}: {message}" if message else error.code


def failure(error: CallError, place: str = "") -> BatchmillError:
    """A row's error as that of the whole request. `place` names the row where there are others: "row 3 of 10"."""
    where = f"{place}: " if place else ""
    if error.code in CALLER_CODES:
        return InvalidInput(where + error.message, code=error.code)
    if error.code in MODEL_CODES:
        return ModelFailed(where + error.message, code=error.code)
    lines = [f"in {place}"] if place else []
    trace, last = error.trace.rstrip(), last_line(error)
    if trace:
        lines.append(trace)
    if not trace.rsplit("\n", 1)[-1].endswith(last):  # before the type there may be its module
        lines.append(last)
    return ModelFailed("\n".join(lines), code=FUNCTION_ERROR)
