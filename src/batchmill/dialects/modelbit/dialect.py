"""Modelbit's inference API: calls of deployments. An error reply is one text."""

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
from batchmill.server.operations import Call, Content, Operation, TryNextRoute, json_reply
from batchmill.server.replies import SCHEMA, Envelope, FileReply, text_reply
from batchmill.services.functions.late_replies import LateCall, LateCallOptions
from batchmill.services.links import SIGNATURE_CHARS_MAX
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Caller, Scope
from batchmill.wire.calls import ROWS
from batchmill.wire.error_statuses import with_overrides
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget


STATUSES = with_overrides(
    {"function_error": 400, "bad_return": 400, "model_failed": 422, "timeout": 422, "paused": 409}
)
# Error code -> the prefix of our message, like the exception's name in a function's error.
TYPES: dict[str, str] = {
    "timeout": "TimeoutError",
    "memory_limit": "MemoryError",
    "worker_crashed": "WorkerCrashed",
    "gpu_lost": "GpuLost",
    "bad_return": "BadReturn",
    "rate_limit_exceeded": "RateLimitExceeded",
}
# Source: Modelbit's page on rate limits.
TOO_MANY = "RateLimitExceeded: Concurrency request count limit reached"
TOO_LARGE = "RateLimitExceeded: Concurrency request size limit reached"
LIMITS: dict[str, str] = {"too_many_calls": TOO_MANY, "too_many_bytes": TOO_LARGE}
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*([A-Za-z_]\w*: .+|[A-Z]\w*)")  # a traceback's last line: "KeyError: 'x'"


def text_of(error: BatchmillError, message: str) -> str:
    """Return an error's text. Its last line has the kind of the error and the message. It is never empty."""
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
    """Return the reply to a failed request; `message` is safe to show to the caller. Never raises."""
    return text_reply(error, text_of(error, message), STATUSES)


PATH = "/modelbit/links/{file_id}.json"
PURPOSE = "links"  # of the file with an answer
ANSWER = "the answer in"  # the purpose in the link's signature
LINK_S = 3600.0
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
        """Store an answer in a file, and return a reply with a link to it."""
        writer = await self._files.writer(project)
        try:
            await writer.write(body)
            record = await writer.commit(purpose=PURPOSE, filename="answer.json", expires_s=LINK_S)
        finally:
            await writer.discard()
        signature = self._links.sign(ANSWER, record.id, project, LINK_S)
        return FunctionReply(0, encode(_Link(f"{base}{PATH.format(file_id=record.id)}?signature={signature}")))

    async def fetch(self, call: Call) -> Response:
        """Send the file. A link works any number of times until it expires."""
        query: Signed = call.query
        file_id = call.path["file_id"]
        link = await self._links.open(query.signature, ANSWER, file_id)
        call.belongs_to(link.project)
        file = await self._files.open(await self._files.get(link.project, file_id))
        return FileReply(call.request, file, filename=file.record.filename, media=_LINKED.media)


LINKS = "links"
_REPLY_FIELDS = ("response_format", "response_webhook", "response_webhook_ignore_timeout")
TIMEOUT_MAX_S = 86_400.0
GRACE_S = 3.0  # the published client waits five seconds longer than timeout_seconds before it retries

_fields = msgspec.json.Decoder(dict[str, Raw])


class Request(Struct, frozen=True):
    """A request; `body` is the rest, without the fields about the reply."""

    body: bytes
    as_link: bool = False
    webhook: str | None = None
    ignores_timeout: bool = False
    patience_s: float | None = None  # how long its client waits at least; None: unknown


def is_plain(body: bytes) -> bool:
    """True if the body cannot contain fields about the reply or a timeout. Their names might be escaped."""
    return b'"response_' not in body and b'"timeout_seconds"' not in body and b"\\u" not in body


def read_request(body: bytes) -> Request:
    """Read the fields about the reply. Raises: InvalidRow for an invalid value."""
    if is_plain(body):
        return Request(body)
    try:
        fields = _fields.decode(shallow(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Request(body)  # the form reports the error
    values = {name: _read(name, fields.pop(name)) for name in _REPLY_FIELDS if name in fields}
    as_link, webhook = _read_format(values.get(_REPLY_FIELDS[0])), _read_webhook(values.get(_REPLY_FIELDS[1]))
    ignores = values.get(_REPLY_FIELDS[2])
    if ignores is not None and not isinstance(ignores, bool):
        raise _invalid(_REPLY_FIELDS[2], ignores, "true or false")
    if ignores is not None and webhook is None:
        raise InvalidRow(
            "The response_webhook parameter is required when using response_webhook_ignore_timeout.",
            code="invalid_field",
        )
    rest = msgspec.json.encode(fields) if values else body
    return Request(rest, as_link, webhook, bool(ignores), _patience(fields))


def is_batch(body: bytes) -> bool:
    """True if the data begins like a list of lists: rows with ids."""
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


def _read_format(value: object) -> bool:
    if value is None or value == LINKS:
        return value == LINKS
    raise _invalid(_REPLY_FIELDS[0], value, f"{LINKS!r}, or leave it out")


def _read_webhook(value: object) -> str | None:
    """Check the type of the URL. The webhook sender checks its address."""
    if value is not None and not isinstance(value, str):
        raise _invalid(_REPLY_FIELDS[1], value, "an https URL")
    return value


def _invalid(name: str, value: object, expected: str) -> InvalidRow:
    return InvalidRow(f"{name} must be {expected}, not {str(value)[:SHOWN_CHARS]!r}", code="invalid_field")


def _patience(fields: dict[str, Raw]) -> float | None:
    """Return how long a caller with `timeout_seconds` waits. The form refuses a value that is not a number."""
    if "timeout_seconds" not in fields:
        return None
    try:
        seconds = msgspec.json.decode(fields["timeout_seconds"], type=float)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return min(max(seconds, 0.0), TIMEOUT_MAX_S) + GRACE_S


_JSON = [(b"content-type", b"application/json")]


class FastRows:
    """Answers plain requests without a task of their own."""

    def __init__(self, functions: FunctionCalls) -> None:
        self._functions = functions

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """See `FastHandler.begin`. The normal handler reports what is wrong with a request."""
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

        def on_reply(result: FunctionReply) -> None:
            if result.raised is None:
                reply(200, _JSON, result.body)
            else:
                reply.refuse(result.raised.error())

        return self._functions.call_nowait(caller, target, ROWS, body, b"", on_reply)


FRONTEND = "modelbit"
HEADER = "x-mb-batch-id"


class WebhookReplies:
    """Replies to webhooks. A server has one, which also writes the replies of calls from before a restart."""

    def __init__(self, services: Services) -> None:
        self._late, self._links = services.late, Links(services)
        self._hide = PathRedactor(services.config.data_dir).hide
        self._late.set_writer(FRONTEND, self.write)

    async def enqueue(self, caller: Caller, target: VersionTarget, request: Request, links: str | None) -> str:
        """Store a call and return the id of its reply to the webhook. Raises: InvalidInput for a forbidden URL."""
        assert request.webhook is not None
        order = LateCallOptions(
            FRONTEND, ROWS, request.webhook, HEADER, ignores_timeout=request.ignores_timeout, state=links or ""
        )
        return await self._late.store_call(caller, target, request.body, order)

    async def write(self, call: LateCall, result: FunctionReply | BatchmillError) -> bytes:
        """Return the body for the webhook, which is the same as a reply's."""
        if isinstance(result, BatchmillError):
            return encode(envelope(result, self._hide(result.message)))
        if call.order.state:
            return (await self._links.save(call.project, call.order.state, result.body)).body
        return result.body


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


class _ModelField(msgspec.Struct):
    """The model that a body of OpenAI's API names."""

    model: str


_read_model = msgspec.json.Decoder(_ModelField).decode


class CallHandlers:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions, self._directory = services.functions, services.versions, services.directory
        self._links, self._webhook_replies = Links(services), WebhookReplies(services)
        self._hide = PathRedactor(services.config.data_dir).hide

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
        """Reply with the answer. With `response_webhook`, the answer goes there and the reply has its id.

        A single call of a streaming function replies with events; in a batch, each row has a list of its values.
        """
        encoding = call.request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise InvalidField(
                "a compressed body is not supported: leave Content-Encoding out", code="unsupported_media_type"
            )
        target = await self._target(call)
        raw = await call.request.body()
        request = read_request(raw)
        links = base_of(call.request) if request.as_link else None
        if request.webhook is not None:
            batch_id = await self._webhook_replies.enqueue(call.caller, target, request, links)
            return json_reply({"batchId": batch_id} | ({"data": []} if is_batch(raw) else {}))
        if target.interface.streams and links is None and not is_batch(raw):
            _, pieces = await self._functions.stream(call.caller, target, ROWS, request.body)
            return Events(pieces, self._render_error)
        response = await self._answer(call, target, request)
        if links is not None and response.status_code == 200:
            return reply_of(await self._links.save(call.caller.project, links, bytes(response.body)))
        return response

    async def _target(self, call: Call) -> VersionTarget:
        """Find the function of a path.

        Raises: TryNextRoute if there is no such function and the body names a model, which may serve this path.
        """
        name, url = call.path["deployment"], call.request.scope["path"]
        try:
            return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])
        except UnknownName:
            exists = self._versions.get(name) and not self._versions.is_hidden(name, call.caller.project)
            if is_certain(url) or exists or not self._directory.list(call.caller):
                raise
        raw = await call.request.body()
        if self._names_model(call, raw):
            raise TryNextRoute(raw)
        return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])

    def _names_model(self, call: Call, raw: bytes) -> bool:
        try:
            self._directory.find(call.caller, _read_model(shallow(raw)).model)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UnknownName):
            return False
        return True

    async def _answer(self, call: Call, target: VersionTarget, request: Request) -> Response:
        """Answer within the client's time, also if the function must be loaded first."""
        try:
            async with asyncio.timeout(request.patience_s):
                return await answer(call, self._functions, target, ROWS, (request.body, b""))
        except TimeoutError:
            raise ModelFailed(
                f"no answer within timeout_seconds: {target.name} was still loading, or was busy with other calls",
                code="timeout",
            ) from None

    def _render_error(self, error: BatchmillError) -> bytes:
        return encode(envelope(error, self._hide(error.message)))


class ModelbitDialect:
    name = "modelbit"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._path_redactor = PathRedactor(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        services = self._services
        return [
            *CallHandlers(services).operations(),
            *DeploymentHandlers(services).operations(),
            *Links(services).operations(),
        ]

    def refusal(self, error: BatchmillError) -> Response:
        return refusal(error, self._path_redactor.hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
