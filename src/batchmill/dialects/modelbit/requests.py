"""What a body asks for besides an answer: where it is to be sent, or left. Everything else is the form's to read.

Source: Modelbit's pages on async and large REST responses.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidRow
from batchmill.server.bodies import SHOWN_CHARS
from batchmill.wire.json_bytes import shallow

LINKS = "links"
_OURS = ("response_format", "response_webhook", "response_webhook_ignore_timeout")
TIMEOUT_MAX_S = 86_400.0
LATE_S = 3.0  # the published client waits five seconds longer than it asks the function to take, and then asks again

_fields = msgspec.json.Decoder(dict[str, Raw])


class Wanted(Struct, frozen=True):
    """`body` is what is left for the form."""

    body: bytes
    as_link: bool = False
    webhook: str | None = None
    ignores_timeout: bool = False
    patience_s: float | None = None  # how long its client waits at least; None: it does not say


def is_plain(body: bytes) -> bool:
    """It wants nothing but an answer, as far as its bytes can tell. A name may be written with escapes, too."""
    return b'"response_' not in body and b'"timeout_seconds"' not in body and b"\\u" not in body


def read_wanted(body: bytes) -> Wanted:
    """Raises: InvalidRow for a value that none of these fields may have."""
    if is_plain(body):
        return Wanted(body)
    try:
        fields = _fields.decode(shallow(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Wanted(body)  # the form says what is wrong with it
    asked = {name: _read(name, fields.pop(name)) for name in _OURS if name in fields}
    as_link, webhook = _format(asked.get(_OURS[0])), _webhook(asked.get(_OURS[1]))
    ignores = asked.get(_OURS[2])
    if ignores is not None and not isinstance(ignores, bool):
        raise _wrong(_OURS[2], ignores, "true or false")
    if ignores is not None and webhook is None:
        raise InvalidRow(
            "The response_webhook parameter is required when using response_webhook_ignore_timeout.",
            code="invalid_field",
        )
    rest = msgspec.json.encode(fields) if asked else body
    return Wanted(rest, as_link, webhook, bool(ignores), _patience(fields))


def is_batch(body: bytes) -> bool:
    """Its data is a list of lists, as far as its beginning tells: rows with ids."""
    try:
        data = bytes(_fields.decode(body).get("data", b""))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return data[:1] == b"[" and data[1:].lstrip()[:1] == b"["


def _read(name: str, raw: Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRow(f"{name} cannot be read: {error}", code="invalid_field") from None


def _format(value: object) -> bool:
    if value is None or value == LINKS:
        return value == LINKS
    raise _wrong(_OURS[0], value, f"{LINKS!r}, or leave it out")


def _webhook(value: object) -> str | None:
    """Where it leads is for the courier to judge."""
    if value is not None and not isinstance(value, str):
        raise _wrong(_OURS[1], value, "an https URL")
    return value


def _wrong(name: str, value: object, wanted: str) -> InvalidRow:
    return InvalidRow(f"{name} must be {wanted}, not {str(value)[:SHOWN_CHARS]!r}", code="invalid_field")


def _patience(fields: dict[str, Raw]) -> float | None:
    """How long a caller with `timeout_seconds` waits. What is no number of seconds is for the form to refuse."""
    if "timeout_seconds" not in fields:
        return None
    try:
        seconds = msgspec.json.decode(fields["timeout_seconds"], type=float)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return min(max(seconds, 0.0), TIMEOUT_MAX_S) + LATE_S
