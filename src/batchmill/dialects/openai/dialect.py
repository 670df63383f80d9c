"""OpenAI's API: its operations for models and live inference, and its error envelope."""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response

from batchmill.dialects.openai import errors, files, webhook_endpoints
from batchmill.dialects.openai.batches import BatchHandlers
from batchmill.dialects.openai.errors import envelope, upstream_envelope
from batchmill.errors import BatchmillError, UnknownName
from batchmill.server.json_inspection import HANDED_ON_VALUES_MAX
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.server.replies import EVENTS, PieceReply, rewritten, run_until_disconnect, whole_answer
from batchmill.services.directory.rows import ServedModel
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Caller, LiveHead, Scope
from batchmill.wire.json_bytes import decode, encode, join_object, split_object
from batchmill.wire.rows.forms import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE

ENCODINGS = ("float", "base64")


class _EncodingField(Struct):
    encoding_format: str | None = None


def encoding_of(body: bytes) -> str | None:
    """Return the requested encoding of vectors; None if it is unknown, so that the engine's reply is unchanged."""
    try:
        encoding = decode(body, type=_EncodingField).encoding_format or "float"
    except msgspec.MsgspecError:
        return None
    return encoding if encoding in ENCODINGS else None


def with_encoding(reply: bytes, encoding: str) -> bytes:
    """Encode all vectors of a reply. A reply of another shape is unchanged."""
    try:
        members = split_object(reply)
        items = decode(members["data"], type=list[dict[str, Raw]])
        changed = [_recode_item(item, encoding) for item in items]
    except (msgspec.MsgspecError, KeyError, ValueError, OverflowError, RecursionError):
        return reply
    return join_object({**members, "data": items}) if any(changed) else reply


def recode(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Run `with_encoding` on an order: the encoding, a line break and the reply."""
    encoding, _, reply = order.partition(b"\n")
    return with_encoding(reply, encoding.decode())


def _recode_item(item: dict[str, Raw], encoding: str) -> bool:
    """Encode the vector of one item in place. False: it already has this encoding."""
    vector = item["embedding"]
    is_text = bytes(vector).lstrip()[:1] == b'"'
    if is_text == (encoding == "base64"):
        return False
    item["embedding"] = Raw(encode(_floats_of(vector) if is_text else _base64_of(vector)))
    return True


def _base64_of(vector: Raw) -> str:
    return base64.b64encode(_little_endian(array("f", decode(vector, type=list[float]))).tobytes()).decode()


def _floats_of(vector: Raw) -> list[float]:
    numbers = array("f")
    try:
        numbers.frombytes(base64.b64decode(decode(vector, type=str), validate=True))
    except binascii.Error as error:
        raise ValueError("not base64") from error
    return _little_endian(numbers).tolist()


def _little_endian(numbers: array) -> array:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class EventReply(PieceReply):
    """A stream of server-sent events, passed on as the engine sends them."""

    def __init__(self, head: LiveHead, pieces: AsyncGenerator[bytes], hide: Callable[[str], str]) -> None:
        self._hide = hide
        super().__init__(pieces, media=head.content_type, status=head.status)

    def render_late_error(self, error: BatchmillError) -> bytes:
        """Return an error event, which the openai package raises as an exception."""
        return b"data: " + encode(envelope(error, self._hide(error.message))) + b"\n\n"


CLIENT_LEFT = 499  # only the log shows it
SHOWN_CHARS = 80  # of an unknown path, in a message
RESERVED = (
    "batches",
    "files",
    "models",
    "uploads",
    "webhook_endpoints",
)  # first segments of other resources' paths
_BODY = Content(
    "application/json",
    {
        "type": "object",
        "required": ["model"],
        "properties": {"model": {"type": "string"}, "stream": {"type": ["boolean", "null"]}},
        "additionalProperties": True,
    },
)
_REPLY = Content("application/json", {"type": "object"})
_STREAMED = (_REPLY, Content(EVENTS, {"type": "string"}))
# Operation, path, summary, whether it may stream.
_PATHS = (
    ("createChatCompletion", CHAT, "Answer a conversation", True),
    ("createCompletion", COMPLETIONS, "Continue a text", True),
    ("createResponse", RESPONSES, "Answer an input", True),
    ("createEmbedding", EMBEDDINGS, "Turn texts into vectors", False),
    ("createRerank", RERANK, "Order documents by a query", False),
    ("createScore", SCORE, "Score pairs of texts", False),
    ("callModel", "/v1/{path:path}", "Any other path that a model serves", True),
)


class InferenceHandlers:
    def __init__(self, services: Services) -> None:
        self._live, self._hide = services.live, PathRedactor(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                name, "POST", path, summary, Scope.SUBMIT, self.answer,
                body=_BODY, body_bytes_max=None, values_max=HANDED_ON_VALUES_MAX,
                reply=_STREAMED if may_stream else _REPLY, errors=(404, 503), check_access=self.check_access,
            )
            for name, path, summary, may_stream in _PATHS
        ]  # fmt: skip

    @staticmethod
    def check_access(caller: Caller, path: dict[str, str]) -> None:
        """Raises: UnknownName for a path that belongs to another resource."""
        url = path.get("path", "")
        if url.split("/")[0] in RESERVED:
            raise UnknownName(f"Invalid URL (POST /v1/{url[:SHOWN_CHARS]})", code="unknown_url")

    async def answer(self, call: Call) -> Response:
        """Reply with a model's answer. An engine's error keeps its message and gets this API's envelope."""
        url = call.request.scope["path"]
        # Another operation may have passed the call on.
        self.check_access(call.caller, {"path": url.removeprefix("/v1/")})
        response = await run_until_disconnect(call, self._predict(call, url, call.raw))
        return Response(status_code=CLIENT_LEFT) if response is None else response

    async def _predict(self, call: Call, url: str, body: bytes) -> Response:
        head, pieces = await self._live.predict(call.caller, url, body)
        if head.content_type.startswith(EVENTS):
            return EventReply(head, pieces, self._hide)
        return await self._whole_reply(call, head, url, body, await whole_answer(pieces))

    @staticmethod
    async def _whole_reply(call: Call, head: LiveHead, url: str, body: bytes, answer: bytes) -> Response:
        if head.status >= 400:
            return json_reply(upstream_envelope(head.status, answer), head.status)
        if url == EMBEDDINGS and head.status == 200 and (encoding := encoding_of(body)) is not None:
            answer = await rewritten(call, recode, encoding.encode() + b"\n" + answer)
        return Response(answer, head.status, {"content-type": head.content_type})


class Model(Struct, frozen=True):
    id: str
    created: int
    parent: str | None  # an adapter's base model
    owned_by: str = "batchmill"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class ModelListHandlers:
    def __init__(self, services: Services) -> None:
        self._directory = services.directory
        self._created = int(services.clock.now())  # the server reads its configuration at the start

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "listModels", "GET", "/v1/models", "List models and adapters", Scope.READ, self.list, reply=ModelList
            ),
            # A name may contain slashes: "org/model".
            Operation(
                "retrieveModel", "GET", "/v1/models/{model:path}", "Show a model or adapter", Scope.READ, self.retrieve,
                reply=Model, errors=(404,),
            ),
        )  # fmt: skip

    async def list(self, call: Call) -> Response:
        return json_reply(ModelList([self._model(served) for served in self._directory.list(call.caller)]))

    async def retrieve(self, call: Call) -> Response:
        return json_reply(self._model(self._directory.find(call.caller, call.path["model"])))

    def _model(self, served: ServedModel) -> Model:
        return Model(served.name, self._created, served.model.name if served.adapter else None)


class OpenAIDialect:
    name = "openai"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._path_redactor = PathRedactor(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        services = self._services
        return [
            *files.operations(services),
            *files.upload_operations(services),
            *BatchHandlers(services).operations(),
            *ModelListHandlers(services).operations(),
            *webhook_endpoints.operations(services),
            *InferenceHandlers(services).operations(),
        ]

    def refusal(self, error: BatchmillError) -> Response:
        return errors.refusal(error, self._path_redactor.hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return errors.schema()
