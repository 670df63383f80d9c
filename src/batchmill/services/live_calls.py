"""Live calls: resolves the model of a request, checks that the caller may use it, and reports how the call ended.

Knows no dialect and no engine. Takes bodies in OpenAI's form and returns a head and pieces of bytes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.datasets import bodies
from batchmill.errors import BatchmillError, InvalidRow, LedgerBroken, UnknownName
from batchmill.models.paths import answers
from batchmill.ports.clock import Clock
from batchmill.ports.jobs import Live
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ServedModel
from batchmill.store.stored_files import LocalFiles, StoredFiles
from batchmill.types import Caller, LiveHead, LiveRequest, ModelSpec, Usage
from batchmill.wire.calls import ARGUMENTS, form_of_body
from batchmill.wire.features import features_of
from batchmill.wire.rows.forms import usage_of

HOLDER = "live calls"  # of the adapters that engines may load: they stay until this process ends
SHOWN_CHARS = 80  # of an unknown path, in a message
TAIL_BYTES = 64 * 1024  # of a response: `usage` is near its end
_USAGE = b'"usage":'
_decoder = json.JSONDecoder()  # reads one value and ignores the rest


class LiveCall(Struct, frozen=True):
    """A call that has ended, for metrics."""

    model: str  # its name in the directory; of an adapter, the adapter's name
    url: str
    status: int  # 0: no response
    seconds: float
    project: str
    usage: Usage | None = None
    error: str | None = None  # the error code, if no complete response was sent


class _Request(Struct):
    model: str | None = None
    stream: bool | None = None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class LiveCalls:
    def __init__(
        self, live: Live, directory: ModelDirectory, clock: Clock, *, admit: Callable[[str], None] = lambda _: None,
        stored: StoredFiles = LocalFiles(),
    ) -> None:  # fmt: skip
        """Args: `admit`: counts a call of the remote model with this id. Raises: RateLimited."""
        self._stored = stored
        self._live, self._directory, self._clock, self._admit = live, directory, clock, admit
        self._listeners: list[Callable[[LiveCall], None]] = []

    def listen(self, listener: Callable[[LiveCall], None]) -> None:
        """Call `listener` with every call that ends. It must be quick and must not raise."""
        self._listeners.append(listener)

    async def predict(self, caller: Caller, url: str, body: bytes) -> tuple[LiveHead, AsyncGenerator[bytes]]:
        """Answer a request. Returns the head and the body piece by piece. Close the iterator to end the call early.

        Raises: UnknownName (`unknown_url`, `model_not_found`), InvalidRow for a body that does not fit the path,
        and what `ports.jobs.Live.predict` raises.
        """
        served, stream = self._resolve(caller, url, body)
        request = request_of(served, url, body, stream=stream)
        if served.kind == ModelKind.REMOTE:
            self._admit(served.model.name)
            request = msgspec.structs.replace(request, is_admitted=True)
        return await self.call(caller, served, request)

    async def call(
        self, caller: Caller, served: ServedModel, request: LiveRequest
    ) -> tuple[LiveHead, AsyncGenerator[bytes]]:
        """As `predict`, for a resolved model and a request in a form that its engine supports."""
        began = self._clock.monotonic()
        if request.adapter_place and self._stored.is_elsewhere:
            await self._stored.fetch(Path(request.adapter_place), holder=HOLDER)
        request = msgspec.structs.replace(request, project=caller.project)
        pieces = self._live.predict(served.model.live(), request)
        call = LiveCall(served.name, request.url, 0, 0.0, caller.project)
        try:
            head = await anext(pieces, None)
            if not isinstance(head, LiveHead):
                raise LedgerBroken(f"a response of {served.name!r} began without a head", code="internal_error")
        except BaseException as error:
            code = error.code if isinstance(error, BatchmillError) else "abandoned"
            await _close(pieces)
            self._publish(msgspec.structs.replace(call, error=code), began)
            raise
        return head, self._relay_body(pieces, msgspec.structs.replace(call, status=head.status), began)

    def _resolve(self, caller: Caller, url: str, body: bytes) -> tuple[ServedModel, bool]:
        if not self._directory.serves(url, caller):
            raise UnknownName(f"Invalid URL (POST {url[:SHOWN_CHARS]}): no model serves it", code="unknown_url")
        try:
            request = _decode_request(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRow(f"the body is not a valid request: {error}", code="invalid_field") from None
        if not request.model:
            raise InvalidRow("you must provide a model parameter", code="missing_model")
        served = self._directory.find(caller, request.model)
        if not answers(served.model.live(), url):
            raise UnknownName(
                f"Invalid URL (POST {url[:SHOWN_CHARS]}): the model {served.name!r} does not answer it",
                code="unknown_url",
            )
        if not served.model.takes_columns:  # a model that takes columns checks its fields itself
            bodies.check(url, body, may_stream=True, features=features_of(served.model.live()))
        return served, bool(request.stream)

    async def _relay_body(
        self, pieces: AsyncIterator[LiveHead | bytes], call: LiveCall, began: float
    ) -> AsyncGenerator[bytes]:
        usage, failure = UsageReader(), "abandoned"
        try:
            async for piece in pieces:
                assert isinstance(piece, bytes), "a response has one head"
                usage.read(piece)
                yield piece
            failure = ""
        except BatchmillError as error:
            failure = error.code
            raise
        finally:
            await _close(pieces)
            self._publish(msgspec.structs.replace(call, usage=usage.usage(), error=failure or None), began)

    def _publish(self, call: LiveCall, began: float) -> None:
        ended = msgspec.structs.replace(call, seconds=self._clock.monotonic() - began)
        for listener in self._listeners:
            listener(ended)


def request_of(served: ServedModel, url: str, body: bytes, *, stream: bool) -> LiveRequest:
    """Return the request that the model gets for a body in OpenAI's form."""
    form, adapter = _form_of(served.model, url, body), served.adapter
    if adapter is None:
        return LiveRequest(url, body, stream, form)
    adapter_name = served.model.adapter_names.get(adapter, adapter)
    return LiveRequest(
        url, body, stream, form, adapter=adapter_name, adapter_place=served.model.adapters.get(adapter_name, "")
    )


def _form_of(model: ModelSpec, url: str, body: bytes) -> str:
    """Return how a function reads the body. The body's fields decide it, as in a job row."""
    if model.function is None:
        return ARGUMENTS
    return form_of_body(url, _decode_fields(body), model.function.interface)


async def _close(pieces: AsyncIterator[LiveHead | bytes]) -> None:
    """Close the iterator, which ends the call at its worker too."""
    if isinstance(pieces, AsyncGenerator):
        await pieces.aclose()


class UsageReader:
    """Keeps the end of a response and finds the usage in it."""

    def __init__(self) -> None:
        self._tail = bytearray()

    def read(self, piece: bytes) -> None:
        self._tail += piece
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def usage(self) -> Usage | None:
        """Return the last usage that the response reports; None if it reports none."""
        end = len(self._tail)
        while (at := self._tail.rfind(_USAGE, 0, end)) >= 0:
            usage = _object_at(bytes(self._tail[at + len(_USAGE) :]).lstrip())
            if usage is not None:
                return usage_of({"usage": usage})
            end = at
        return None


def _object_at(data: bytes) -> dict | None:
    """Return the JSON object that `data` begins with; None if it begins with something else."""
    if data[:1] != b"{":
        return None
    try:
        return _decoder.raw_decode(data.decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None
