"""Modelbit's inference API on the wire: calls of deployments, fast or normal. An error is one text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.responses import Response

from batchmill.dialects.modelbit.metadata import PATHS, DeploymentHandlers, branch_of, is_certain, is_ours
from batchmill.errors import BatchmillError, InvalidRow, ModelFailed, UnknownName
from batchmill.server.auth import base_of
from batchmill.server.bodies import SHOWN_CHARS, InvalidField
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.server.function_replies import Events, answer, reply_of
from batchmill.server.operations import Call, Content, Elsewhere, Operation, json_reply
from batchmill.server.replies import SCHEMA, Envelope, FileReply, text_reply
from batchmill.services.functions.late_replies import LateCall, Order
from batchmill.services.links import SIGNATURE_CHARS_MAX
from batchmill.services.path_redaction import Places
from batchmill.services.services import Services
from batchmill.types import Caller, Scope
from batchmill.wire.calls import ROWS
from batchmill.wire.error_statuses import with_own
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget


STATUSES = with_own({"function_error": 400, "bad_return": 400, "model_failed": 422, "timeout": 422, "paused": 409})
# What stands before our own messages, as the name of an exception does before a function's.
TYPES: dict[str, str] = {
    "timeout": "TimeoutError",
    "memory_limit": "MemoryError",
    "worker_crashed": "WorkerCrashed",
    "bad_return": "BadReturn",
    "rate_limit_exceeded": "RateLimitExceeded",
}
# Source: Modelbit's page on rate limits.
TOO_MANY = "RateLimitExceeded: Concurrency request count limit reached"
TOO_LARGE = "RateLimitExceeded: Concurrency request size limit reached"
LIMITS: dict[str, str] = {"too_many_calls": TOO_MANY, "too_many_bytes": TOO_LARGE}
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*([A-Za-z_]\w*: .+|[A-Z]\w*)")  # as a traceback ends: "KeyError: 'x'"


def text_of(error: BatchmillError, message: str) -> str:
    """`message` so that its last line says what is wrong, and of what kind. It is never empty."""
    if error.code in LIMITS:
        return f"{LIMITS[error.code]}: {message}"
    last = message.rstrip().rpartition("\n")[2]
    if error.code == "function_error" and _EXCEPTION.fullmatch(last):
        return message.rstrip()
    kind = TYPES.get(error.code, type(error).__name__)
    if "\n" not in message.strip():
        return f"{kind}: {message.strip()}"
    return (
        message.rstrip()
        if _EXCEPTION.fullmatch(last) and ": " in last
        else f"{message.rstrip()}\n{kind}: {last.strip()}"
    )


def envelope(error: BatchmillError, message: str) -> Envelope:
    return Envelope(text_of(error, message))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    return text_reply(error, text_of(error, message), STATUSES)


PATH = "/modelbit/links/{file_id}.json"
PURPOSE = "links"  # of the file that holds an answer
ANSWER = "the answer in"  # what a link is for
KEPT_S = 3600.0
_LINKED = Content("application/json", {})


class Signed(Struct, frozen=True, forbid_unknown_fields=True):
    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)] = ""


class _Link(Struct, frozen=True):
    data: str


class Links:
    def __init__(self, services: Services) -> None:
        self._files, self._links = services.files, services.links

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "getLinkedAnswer", "GET", PATH, "Fetch an answer by its link", None, self.fetch,
                query=Signed, reply=_LINKED, also={206: _LINKED, 416: None}, errors=(403, 404, 410),
            )
        ]  # fmt: skip

    async def save(self, project: str, base: str, body: bytes) -> FunctionReply:
        """Keep an answer, and answer with the link to it."""
        writer = await self._files.writer(project)
        try:
            await writer.write(body)
            record = await writer.commit(purpose=PURPOSE, filename="answer.json", expires_s=KEPT_S)
        finally:
            await writer.discard()
        signature = self._links.sign(ANSWER, record.id, project, KEPT_S)
        return FunctionReply(0, encode(_Link(f"{base}{PATH.format(file_id=record.id)}?signature={signature}")))

    async def fetch(self, call: Call) -> Response:
        """As often as it is asked for, while the link lasts."""
        query: Signed = call.query
        file_id = call.path["file_id"]
        link = await self._links.open(query.signature, ANSWER, file_id)
        call.belongs_to(link.project)
        file = await self._files.open(await self._files.get(link.project, file_id))
        return FileReply(call.request, file, filename=file.record.filename, media=_LINKED.media)


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


_JSON = [(b"content-type", b"application/json")]


class FastRows:
    def __init__(self, functions: FunctionCalls) -> None:
        self._functions = functions

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """As `FastHandler.begin`: whatever is wrong with a request is told by its handler."""
        if not is_plain(body):
            return None
        for name, _ in headers:
            if name == b"content-encoding":
                return None
        try:
            target = self._functions.find(caller, path["deployment"], branch_of(path), path["version"])
        except BatchmillError:
            return None
        if target.interface.streams:
            return None

        def on_reply(answered: FunctionReply) -> None:
            if answered.raised is None:
                reply(200, _JSON, answered.body)
            else:
                reply.refuse(answered.raised.error())

        return self._functions.ask_now(caller, target, ROWS, body, b"", on_reply)


FRONTEND = "modelbit"
HEADER = "x-mb-batch-id"


class Later:
    """Concurrency: one for each server; it writes the answers of calls that an earlier one took, too."""

    def __init__(self, services: Services) -> None:
        self._late, self._links = services.late, Links(services)
        self._hide = Places(services.config.data_dir).hide
        self._late.speak(FRONTEND, self.write)

    async def promise(self, caller: Caller, target: VersionTarget, wanted: Wanted, links: str | None) -> str:
        """The id of an answer that will be sent to the webhook. Raises: InvalidInput for one that leads nowhere."""
        assert wanted.webhook is not None
        order = Order(FRONTEND, ROWS, wanted.webhook, HEADER, ignores_timeout=wanted.ignores_timeout, state=links or "")
        return await self._late.promise(caller, target, wanted.body, order)

    async def write(self, call: LateCall, answered: FunctionReply | BatchmillError) -> bytes:
        """The body that the webhook gets: as the reply's would have been."""
        if isinstance(answered, BatchmillError):
            return encode(envelope(answered, self._hide(answered.message)))
        if call.order.state:
            return (await self._links.save(call.project, call.order.state, answered.body)).body
        return answered.body


BODY: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"description": "[[id, argument, …], …], or the argument of one call"},
        "timeout_seconds": {"type": ["integer", "null"], "minimum": 1},
        "response_format": {"enum": ["links", None]},
        "response_webhook": {"type": ["string", "null"]},
        "response_webhook_ignore_timeout": {"type": ["boolean", "null"]},
        "row_errors": {"type": "boolean"},
    },
    "additionalProperties": True,
}
_BODY = Content("application/json", BODY)
_REPLY = Content("application/json", {"type": "object"})


class _Named(msgspec.Struct):
    """What a body of another API says."""

    model: str


_named = msgspec.json.Decoder(_Named).decode


class CallHandlers:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions, self._directory = services.functions, services.versions, services.directory
        self._links, self._later = Links(services), Later(services)
        self._hide = Places(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        fast_handler = FastRows(self._functions)
        return [
            Operation(
                f"callDeployment{suffix}", "POST", path, "Call a function once, or for many rows", Scope.SUBMIT,
                self.call, body=_BODY, reply=_REPLY, errors=(404, 409, 422), is_raw=True, claims=is_ours,
                body_bytes_max=None, fast_handler=fast_handler,
            )
            for suffix, path in PATHS.items()
        ]  # fmt: skip

    async def call(self, call: Call) -> Response:
        """The answer; with `response_webhook` it is sent there, and the reply says under which id.

        Of a function that sends events a single call hears them as they come; a batch has a list of them for each row.
        """
        encoding = call.request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise InvalidField(
                "a compressed body is not taken: leave Content-Encoding out", code="unsupported_media_type"
            )
        target = await self._target(call)
        raw = await call.request.body()
        wanted = read_wanted(raw)
        links = base_of(call.request) if wanted.as_link else None
        if wanted.webhook is not None:
            batch_id = await self._later.promise(call.caller, target, wanted, links)
            return json_reply({"batchId": batch_id} | ({"data": []} if is_batch(raw) else {}))
        if target.interface.streams and links is None and not is_batch(raw):
            _, pieces = await self._functions.stream(call.caller, target, ROWS, wanted.body)
            return Events(pieces, self._say)
        answered = await self._answer(call, target, wanted)
        if links is not None and answered.status_code == 200:
            return reply_of(await self._links.save(call.caller.project, links, bytes(answered.body)))
        return answered

    async def _target(self, call: Call) -> VersionTarget:
        """Raises: Elsewhere for a path that some model of the configuration serves, and that body names it: nothing
        else is read for a function that is not there."""
        name, url = call.path["deployment"], call.request.scope["path"]
        try:
            return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])
        except UnknownName:
            is_there = self._versions.get(name) and not self._versions.is_hidden(name, call.caller.project)
            if is_certain(url) or is_there or not self._directory.list(call.caller):
                raise
        raw = await call.request.body()
        if self._is_named(call, raw):
            raise Elsewhere(raw)
        return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])

    def _is_named(self, call: Call, raw: bytes) -> bool:
        try:
            self._directory.find(call.caller, _named(shallow(raw)).model)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UnknownName):
            return False
        return True

    async def _answer(self, call: Call, target: VersionTarget, wanted: Wanted) -> Response:
        """Within the time that the client has, even where the function has to be loaded first."""
        try:
            async with asyncio.timeout(wanted.patience_s):
                return await answer(call, self._functions, target, ROWS, (wanted.body, b""))
        except TimeoutError:
            raise ModelFailed(
                f"no answer within timeout_seconds and a little more: {target.name} was still being loaded, or "
                "behind other calls",
                code="timeout",
            ) from None

    def _say(self, error: BatchmillError) -> bytes:
        return encode(envelope(error, self._hide(error.message)))


class ModelbitDialect:
    name = "modelbit"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._places = Places(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        services = self._services
        return [
            *CallHandlers(services).operations(),
            *DeploymentHandlers(services).operations(),
            *Links(services).operations(),
        ]

    def refusal(self, error: BatchmillError) -> Response:
        return refusal(error, self._places.hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
