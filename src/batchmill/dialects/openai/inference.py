"""Live requests, and the models that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from batchmill.dialects.openai.embeddings import EventReply, encoding_of, recode
from batchmill.dialects.openai.errors import upstream_envelope
from batchmill.errors import UnknownName
from batchmill.server.json_inspection import HANDED_ON_VALUES_MAX
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.server.replies import EVENTS, rewritten, unless_gone, whole_answer
from batchmill.services.model_rows import ServedModel
from batchmill.services.places import Places
from batchmill.services.services import Services
from batchmill.types import Caller, LiveHead, Scope
from batchmill.wire.forms import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE

CLIENT_LEFT = 499  # nobody sees it but the log
SHOWN_CHARS = 80  # of a path that is none, in a message
RESERVED = ("batches", "files", "models", "uploads", "webhook_endpoints")  # first words of paths that no model has
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
# Operation, path, whether its answers may be streams.
_PATHS = (
    ("createChatCompletion", CHAT, "Answer a conversation", True),
    ("createCompletion", COMPLETIONS, "Go on with a text", True),
    ("createResponse", RESPONSES, "Answer an input", True),
    ("createEmbedding", EMBEDDINGS, "Turn texts into vectors", False),
    ("createRerank", RERANK, "Order documents by a query", False),
    ("createScore", SCORE, "Score pairs of texts", False),
    ("callModel", "/v1/{path:path}", "Any other path that a model serves", True),
)


class Inference:
    def __init__(self, services: Services) -> None:
        self._live, self._hide = services.live, Places(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                name, "POST", path, summary, Scope.SUBMIT, self.answer,
                body=_BODY, body_bytes_max=None, values_max=HANDED_ON_VALUES_MAX,
                reply=_STREAMED if may_stream else _REPLY, errors=(404, 503), admits=self.admits,
            )
            for name, path, summary, may_stream in _PATHS
        ]  # fmt: skip

    @staticmethod
    def admits(caller: Caller, path: dict[str, str]) -> None:
        """Raises: UnknownName for a path that no model has."""
        url = path.get("path", "")
        if url.split("/")[0] in RESERVED:
            raise UnknownName(f"Invalid URL (POST /v1/{url[:SHOWN_CHARS]})", code="unknown_url")

    async def answer(self, call: Call) -> Response:
        """The answer of a model. Its errors come as the model's engine words them, in this API's envelope."""
        url = call.request.scope["path"]
        self.admits(call.caller, {"path": url.removeprefix("/v1/")})  # also for what another operation passes on
        answered = await unless_gone(call, self._begin(call, url, call.raw))
        return Response(status_code=CLIENT_LEFT) if answered is None else answered

    async def _begin(self, call: Call, url: str, body: bytes) -> Response:
        head, pieces = await self._live.predict(call.caller, url, body)
        if head.content_type.startswith(EVENTS):
            return EventReply(head, pieces, self._hide)
        return await self._whole(call, head, url, body, await whole_answer(pieces))

    @staticmethod
    async def _whole(call: Call, head: LiveHead, url: str, body: bytes, answer: bytes) -> Response:
        if head.status >= 400:
            return json_reply(upstream_envelope(head.status, answer), head.status)
        if url == EMBEDDINGS and head.status == 200 and (encoding := encoding_of(body)) is not None:
            answer = await rewritten(call, recode, encoding.encode() + b"\n" + answer)
        return Response(answer, head.status, {"content-type": head.content_type})


class Model(Struct, frozen=True):
    id: str
    created: int
    parent: str | None  # of an adapter: the model it belongs to
    owned_by: str = "batchmill"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Models:
    def __init__(self, services: Services) -> None:
        self._directory = services.directory
        self._created = int(services.clock.now())  # the configuration was read with the server's start

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "listModels", "GET", "/v1/models", "Models and adapters", Scope.READ, self.list, reply=ModelList
            ),
            # A name may hold slashes: "org/model".
            Operation(
                "retrieveModel", "GET", "/v1/models/{model:path}", "One model or adapter", Scope.READ, self.retrieve,
                reply=Model, errors=(404,),
            ),
        )  # fmt: skip

    async def list(self, call: Call) -> Response:
        return json_reply(ModelList([self._model(served) for served in self._directory.list(call.caller)]))

    async def retrieve(self, call: Call) -> Response:
        return json_reply(self._model(self._directory.find(call.caller, call.path["model"])))

    def _model(self, served: ServedModel) -> Model:
        return Model(served.name, self._created, served.model.name if served.adapter else None)
