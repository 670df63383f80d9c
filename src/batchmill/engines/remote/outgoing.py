"""Turns rows into HTTP calls: address, body, headers. Sends nothing."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Struct
from yarl import URL

from batchmill.datasets.media.loading import request_of
from batchmill.engines.connections import check_header
from batchmill.engines.retry import FailureStreak, Fault
from batchmill.errors import InvalidRow, ModelFailed
from batchmill.models.paths import paths_of
from batchmill.types import LiveRequest, ModelSpec, Row, Usage
from batchmill.wire.media_tokens import BYTES_A_TOKEN, MediaTokens
from batchmill.wire.rows.forms import with_model

OPENAI_URL = "https://api.openai.com/v1"

_TARGET = re.compile(r"[!-~]{0,1000}")

# Compression would delay the pieces of a stream.
_STREAMED = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}


class Attempts:
    """The attempts of a call so far; `dispatch` updates it."""

    __slots__ = (
        "attempts", "charged", "fault", "held_bytes", "media_bytes", "sent_at", "since", "streak", "wasted", "within",
    )  # fmt: skip

    def __init__(self) -> None:
        self.attempts = 0  # calls that failed and count
        self.since = 0.0  # monotonic time of the first call; 0 before it
        self.sent_at = 0.0  # monotonic time of the last call
        self.charged = 0.0  # estimated tokens of the last call
        self.fault: Fault | None = None  # the last failure that counts
        self.streak: FailureStreak | None = None  # the streak of failures that includes it
        self.within = 0  # failed attempts in that streak
        self.wasted: Usage | None = None  # tokens of discarded replies
        self.held_bytes = 0  # as `Dispatch` counts them
        self.media_bytes = 0  # as `text_bytes`


def text_bytes(call: RemoteRow | RemoteLiveCall) -> int:
    """What a call counts as in limits of tokens: its bytes, but of its media as many as text of their tokens has."""
    return len(call.body) - call.media_bytes


class RemoteRow(Attempts):
    """One row with all its attempts at a service."""

    __slots__ = ("body", "headers", "row", "url")

    def __init__(self, row: Row, url: URL, body: bytes, headers: dict[str, str] | None) -> None:
        super().__init__()
        self.row = row
        self.url = url
        self.body = body
        self.headers = headers  # in addition to those of every call


class RemoteLiveCall:
    """One live request to a service."""

    __slots__ = ("body", "charged", "headers", "media_bytes", "sent_at", "url")

    def __init__(self, url: URL, body: bytes, headers: dict[str, str] | None) -> None:
        self.media_bytes = 0  # as `text_bytes`
        self.url = url
        self.body = body
        self.headers = headers  # in addition to those of every call
        self.sent_at = 0.0  # monotonic
        self.charged = 0.0  # estimated tokens


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)


class Composer:
    """Builds the calls of one model."""

    def __init__(self, model: ModelSpec, idempotency_header: str | None) -> None:
        self._base = read_base_url(model)
        self._source = model.source
        # A row may use batchmill's name of the model, which the service does not know.
        self._own_name = model.name if model.name not in model.adapters else model.source
        self._key_name = idempotency_header
        self._media = MediaTokens(model) if model.limits.tokens_per_minute is not None else None
        if idempotency_header is not None:
            check_header(idempotency_header, "")
        # All URLs that may be called. A caller's path is only looked up here, never joined to a URL.
        self._urls = {path: self._address(path) for path in paths_of(model) or ()}

    @property
    def host(self) -> str:
        return (self._base.hostname or "").encode("idna").decode()

    @property
    def is_tls(self) -> bool:
        return self._base.scheme == "https"

    @property
    def address(self) -> str:
        """The service, for messages."""
        return f"{self._base.scheme}://{self._base.netloc}"

    def call(self, row: Row) -> RemoteRow:
        """The call for a row.

        Raises: InvalidRow, or an error of msgspec, for a row that cannot be sent.
        """
        request = request_of(row)
        fields = _head.decode(request.body)
        body = self._with_model(request.body, fields)
        if fields.stream:
            raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="unsupported_parameter")
        url = self._url_of(request.url)
        key = None if self._key_name is None else getattr(row.lease, "key", None)
        headers = None
        if key is not None:
            again = b":%d" % len(row.earlier) if row.earlier else b""  # it is another request
            digest = hashlib.sha256(b"%s:%d%s" % (key.encode(), row.number, again)).hexdigest()
            headers = {self._key_name: digest}
        call = RemoteRow(row, url, body, headers)
        call.media_bytes = self._media_bytes(body)
        return call

    def _media_bytes(self, body: bytes) -> int:
        """By how many bytes a body with media counts less, where tokens are limited."""
        if self._media is None:
            return 0
        media = self._media.in_body(body)
        return media.size_bytes - BYTES_A_TOKEN * media.tokens

    def live(self, request: LiveRequest) -> RemoteLiveCall:
        """The call for a live request. Raises as `call`."""
        url = self._url_of(request.url)
        request.body.decode()  # fields that are not parsed must be text too
        body = self._with_model(request.body, _head.decode(request.body))
        call = RemoteLiveCall(url, body, dict(_STREAMED) if request.stream else None)
        call.media_bytes = self._media_bytes(body)
        return call

    def _with_model(self, body: bytes, fields: _Head) -> bytes:
        """The body with the service's name of the model."""
        if not fields.model or (fields.model == self._own_name and fields.model != self._source):
            return with_model(body, self._source)
        if body.count(b'"model"') != 1 or b"\\u00" in body:  # parsers disagree on duplicate names
            return with_model(body, fields.model)
        return body

    def _url_of(self, path: str) -> URL:
        """The URL of a row. Raises: InvalidRow for a path that the model does not have."""
        url = self._urls.get(path)
        if url is None:
            raise InvalidRow(f"`url` is {path[:100]!r}, which this model does not answer", code="invalid_url")
        return url

    def _address(self, path: str) -> URL:
        """The URL of `/v1/…` below the base URL. As in OpenAI's SDKs, the base URL includes `/v1` or its replacement;
        a base URL without a path means `/v1`."""
        base = self._base
        target = (base.path.rstrip("/") or "/v1") + path.removeprefix("/v1") + (f"?{base.query}" if base.query else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        host = host if base.port is None else f"{host}:{base.port}"
        return URL(f"{base.scheme}://{host}{target}", encoded=True)


def read_base_url(model: ModelSpec) -> SplitResult:
    """Parse a base URL. Raises: ModelFailed for an invalid one, or one with a password."""
    text = model.base_url or OPENAI_URL
    try:
        base = urlsplit(text)
        is_usable = base.scheme in ("http", "https") and bool(base.hostname) and (base.port is None or base.port > 0)
        is_usable = is_usable and _TARGET.fullmatch(base.path + base.query) is not None
        (base.hostname or "").encode("idna")
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ModelFailed(
            f"base_url {text!r} is not an address such as http://127.0.0.1:8000/v1", code="invalid_base_url"
        )
    if base.username is not None or base.password is not None:
        raise ModelFailed("base_url contains a user or password: set the key with api_key", code="invalid_base_url")
    return base._replace(fragment="")
