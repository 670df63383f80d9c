"""Calls of a deployment, in LoRAX's own API and in OpenAI's below it, with one reply or as a stream of events.

A request names its adapter; without a name the base model answers. An OpenAI body may contain LoRAX's fields. Errors
have LoRAX's form. Source: LoRAX's router (`lib.rs`, StreamResponse) and predibase 2025.10.3,
`resources/lorax/client.py`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response

from batchmill.dialects.predibase import errors, lorax
from batchmill.dialects.predibase.lorax import (
    Choice,
    Classified,
    Classify,
    Embed,
    Embedded,
    Generate,
    Parameters,
    Token,
    finish_of,
    read_answer,
    tokens_of,
)
from batchmill.dialects.predibase.server_config import context_window
from batchmill.errors import BatchmillError, InvalidInput, UnknownName
from batchmill.server.json_inspection import HANDED_ON_VALUES_MAX
from batchmill.server.operations import Call, Content, Operation
from batchmill.server.replies import EVENTS, PieceReply, rewritten, run_until_disconnect, whole_answer
from batchmill.services.adapters.records import READY
from batchmill.services.directory.rows import ServedModel
from batchmill.services.live_calls import request_of
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Caller, ModelSpec, Scope
from batchmill.wire import fields
from batchmill.wire.json_bytes import encode, shallow, split_object
from batchmill.wire.rows.forms import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS

EVENT_BYTES_MAX = 16 * 1024 * 1024  # limit of one event of the engine
_DATA, _END, _DONE = b"data:", b"\n\n", b"[DONE]"


class StreamDetails(Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None = None


class StreamEvent(Struct, frozen=True):
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None


class TokenReply(PieceReply):
    """A stream of tokens as server-sent events. A late error is an event, because the status has been sent."""

    def __init__(self, pieces: AsyncGenerator[bytes], render_error: Callable[[BatchmillError], bytes]) -> None:
        self._render_error = render_error
        super().__init__(pieces, media=EVENTS)

    def render_late_error(self, error: BatchmillError) -> bytes:
        return b"event:error\ndata:" + self._render_error(error) + _END


async def events_of(request: Generate, parameters: Parameters, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Turn an engine's events into LoRAX's. Raises: BatchmillError if the engine does not finish the answer."""
    generation = _Generation(request, parameters)
    buffer = b""
    try:
        async for piece in pieces:
            *whole, buffer = (buffer + piece).split(_END)
            if len(buffer) > EVENT_BYTES_MAX:
                message = f"the engine sent an event of more than {EVENT_BYTES_MAX:,} bytes"
                raise BatchmillError(message, code="incomplete_generation")
            events = b"".join(generation.read(event) for event in whole)
            if events:
                yield events
    finally:
        await pieces.aclose()
    if not generation.is_done:
        raise BatchmillError("the engine ended its stream before the answer was complete", code="incomplete_generation")


class _Generation:
    """The state of one streamed answer."""

    def __init__(self, request: Generate, parameters: Parameters) -> None:
        self._parameters = parameters
        self._text = request.inputs if parameters.return_full_text else ""
        self._prompt_tokens = self._tokens = 0
        self.is_done = False

    def read(self, event: bytes) -> bytes:
        """Turn one event of the engine into LoRAX's events."""
        data = event.removeprefix(_DATA).strip()
        if not event.startswith(_DATA) or data == _DONE:
            return b""
        try:
            answer = read_answer(data)
        except msgspec.MsgspecError as error:
            raise BatchmillError(f"the engine's answer cannot be read: {error}", code="internal_error") from None
        if answer.error is not None:
            message = answer.error.get("message") if isinstance(answer.error, dict) else answer.error
            raise BatchmillError(f"the engine stopped: {message}", code="generation")
        return b"".join(self._render(choice) for choice in answer.choices)

    def _render(self, choice: Choice) -> bytes:
        tokens = tokens_of(choice)
        self._text += choice.text
        self._tokens += len(tokens)
        self._prompt_tokens = len(choice.prompt_token_ids or ()) or self._prompt_tokens
        if choice.finish_reason is None:
            return b"".join(_event(StreamEvent(token)) for token in tokens)
        *earlier, last = tokens or [Token(0, choice.text, None, special=not choice.text)]
        self.is_done = True
        finish = finish_of(choice)
        details = StreamDetails(finish, self._prompt_tokens, self._tokens, self._parameters.seed)
        final = StreamEvent(last, self._text, details if self._parameters.details else None)
        return b"".join(_event(StreamEvent(token)) for token in earlier) + _event(final)


def _event(event: StreamEvent) -> bytes:
    return _DATA + encode(event) + _END


class OpenAIRequest(Struct, frozen=True):
    """An OpenAI body: `members` go to the engine; `adapter` is the requested adapter, None for the base model."""

    members: dict[str, Raw]
    adapter: str | None = None
    adapter_source: str | None = None
    stream: bool = False


class _Head(Struct, frozen=True):
    model: str | None = None
    adapter_id: str | None = None
    adapter_source: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head).decode


def read_body(raw: bytes) -> OpenAIRequest:
    """Read an OpenAI body that may contain LoRAX's fields. Raises: InvalidInput, naming the field."""
    try:
        head, members = _head(shallow(raw)), split_object(raw)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the body is not a valid request: {error}", code="invalid_field") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", code="invalid_json") from None
    if head.adapter_id and head.model and head.adapter_id != head.model:
        message = f"`model` names {head.model[:80]!r} and `adapter_id` {head.adapter_id[:80]!r}: name one adapter"
        raise InvalidInput(message, code="invalid_field")
    rest = {name: value for name, value in members.items() if name not in ("model", "adapter_id", "adapter_source")}
    adapter = head.adapter_id or head.model or None
    return OpenAIRequest(fields.translate_fields(rest), adapter, head.adapter_source, bool(head.stream))


PATH = "/{tenant}/deployments/v2/llms/{name}"
CLIENT_LEFT = 499  # only the log shows it
SHOWN_CHARS = 80
SOURCES = ("pbase", "hub")  # the adapter sources that a request may name
WINDOWS_MAX = 1_000
_WINDOW = re.compile(r"max_model_len=(\d{1,9})\b")
_JSON = Content("application/json", {"type": "object", "additionalProperties": True})
_GENERATED = Content("application/json", {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": 1})
_STREAMED = Content(EVENTS, {"type": "string"})
_OPENAI = (
    ("Chat", CHAT, "Answer a conversation with a deployment"),
    ("Completion", COMPLETIONS, "Continue a text with a deployment"),
    ("Embedding", EMBEDDINGS, "Turn texts into vectors with a deployment"),
)


class Serving:
    def __init__(self, services: Services) -> None:
        self._services, self._live = services, services.live
        self._hide = PathRedactor(services.config.data_dir).hide
        self._windows: dict[str, int] = {}  # engine -> its window in tokens, from its error message

    def operations(self) -> Sequence[Operation]:
        limits: dict[str, Any] = {"body_bytes_max": None, "check_access": self._check_access}
        own = [
            Operation(
                "loraxGenerate", "POST", PATH, "Continue a text with a deployment, in LoRAX's API", Scope.SUBMIT,
                self._handler(self._generate), body=Generate, reply=(_GENERATED, _STREAMED),
                errors=errors.LORAX_DOCUMENTED, **limits,
            ),
            Operation(
                "loraxClassify", "POST", f"{PATH}/classify", "Classify texts with a deployment", Scope.SUBMIT,
                self._handler(self._classify), body=Classify, reply=Classified, errors=errors.LORAX_DOCUMENTED,
                **limits,
            ),
            Operation(
                "loraxEmbed", "POST", f"{PATH}/embed", "Turn a text into a vector with a deployment", Scope.SUBMIT,
                self._handler(self._embed), body=Embed, reply=Embedded, errors=errors.LORAX_DOCUMENTED, **limits,
            ),
        ]  # fmt: skip
        return own + [
            Operation(
                f"deployment{name}", "POST", f"{PATH}{url}", summary, Scope.SUBMIT,
                self._handler(partial(self._openai, url), is_openai=True), body=_JSON,
                reply=_JSON if url == EMBEDDINGS else (_JSON, _STREAMED), errors=errors.LORAX_DOCUMENTED,
                body_bytes_max=None, values_max=HANDED_ON_VALUES_MAX,
                check_access=partial(self._check_access, is_openai=True),
            )
            for name, url, summary in _OPENAI
        ]  # fmt: skip

    def _handler(
        self, answer: Callable[[Call], Coroutine[Any, Any, Response]], *, is_openai: bool = False
    ) -> Callable[[Call], Awaitable[Response]]:
        """Return a handler that stops when its client disconnects and replies with LoRAX's errors."""

        async def handler(call: Call) -> Response:
            try:
                reply = await run_until_disconnect(call, answer(call))
            except BatchmillError as error:
                return errors.lorax_refusal(error, self._hide(error.message), is_openai=is_openai)
            return Response(status_code=CLIENT_LEFT) if reply is None else reply

        return handler

    async def _generate(self, call: Call) -> Response:
        request: Generate = call.body
        parameters = lorax.check(request)
        served = await self._served(call, parameters.adapter_id, parameters.adapter_source)
        if request.stream:
            pieces = await self._completion(call, served, request, parameters)
            return TokenReply(events_of(request, parameters, pieces), self._render_error)
        answer = await whole_answer(await self._completion(call, served, request, parameters))
        order = lorax.pack(request, answer, await self._alternatives(call, served, parameters, answer))
        return Response(await rewritten(call, lorax.write, order), media_type="application/json")

    async def _completion(
        self, call: Call, served: ServedModel, request: Generate, parameters: Parameters
    ) -> AsyncGenerator[bytes]:
        """Call the engine. If the whole window is requested and its length is unknown, the engine's error gives it."""
        window = self._window(served)
        try:
            body = lorax.body_of(request, parameters, window)
            return await self._call_engine(call, served, COMPLETIONS, body, stream=request.stream)
        except errors.EngineRefused as error:
            match = _WINDOW.search(error.message)
            if match is None or parameters.max_new_tokens is not None or int(match[1]) == window:
                raise
        window = self._remember_window(served, int(match[1]))
        body = lorax.body_of(request, parameters, window)
        return await self._call_engine(call, served, COMPLETIONS, body, stream=request.stream)

    async def _alternatives(self, call: Call, served: ServedModel, parameters: Parameters, completion: bytes) -> bytes:
        """Get each token's alternatives in a second call, because vLLM returns a chosen number only for a prompt."""
        count = parameters.return_k_alternatives
        answer = None if count is None else lorax.read_answer(completion)
        if count is None or answer is None or not answer.choices:
            return b""
        best = lorax.best_first(answer.choices)[0]
        body = lorax.alternatives_body(best, count, self._window(served))
        return await whole_answer(await self._call_engine(call, served, COMPLETIONS, body))

    async def _classify(self, call: Call) -> Response:
        request: Classify = call.body
        body = lorax.classify_body(request)
        served = await self._served(call, request.model, None)
        answer = await whole_answer(await self._call_engine(call, served, CLASSIFY, body))
        return Response(await rewritten(call, lorax.classified, answer), media_type="application/json")

    async def _embed(self, call: Call) -> Response:
        body = lorax.embed_body(call.body)
        served = await self._served(call, None, None)
        answer = await whole_answer(await self._call_engine(call, served, EMBEDDINGS, body))
        return Response(await rewritten(call, lorax.embedded, answer), media_type="application/json")

    async def _openai(self, url: str, call: Call) -> Response:
        request = read_body(call.raw)
        served = await self._served(call, request.adapter, request.adapter_source)
        pieces = await self._call_engine(call, served, url, request.members, stream=request.stream)
        if request.stream:
            return TokenReply(pieces, partial(self._render_error, is_openai=True))
        return Response(await whole_answer(pieces), media_type="application/json")

    async def _call_engine(
        self, call: Call, served: ServedModel, url: str, body: Mapping[str, Any], *, stream: bool = False
    ) -> AsyncGenerator[bytes]:
        """Return the pieces of an answer. Raises: EngineRefused, and the errors of `LiveCalls.call`."""
        request = request_of(served, url, encode(body), stream=stream)
        head, pieces = await self._live.call(call.caller, served, request)
        if head.status >= 400:
            raise errors.refused_by_engine(head.status, await whole_answer(pieces))
        return pieces

    def _deployment(self, caller: Caller, path: dict[str, str]) -> tuple[LlmDeployment, ServedModel]:
        """Return the deployment of a path and its model. Raises: UnknownName."""
        if path["tenant"] != caller.project:
            message = f"the key belongs to the tenant {caller.project!r}, not to {path['tenant'][:SHOWN_CHARS]!r}"
            raise UnknownName(message, code="unknown_tenant")
        return self._services.llms.get(caller, path["name"]), self._services.directory.find(caller, path["name"])

    def _check_access(self, caller: Caller, path: dict[str, str], *, is_openai: bool = False) -> None:
        """Check the path before the body is read. Raises: LoraxRefused, so that the reply has LoRAX's form."""
        try:
            self._deployment(caller, path)
        except BatchmillError as error:
            raise errors.LoraxRefused(error, is_openai=is_openai) from None

    async def _served(self, call: Call, adapter: str | None, source: str | None) -> ServedModel:
        """Return the model of the path with the requested adapter; an adapter of a model hub is fetched first.

        Raises: UnknownName; InvalidInput if the adapter cannot be used.
        """
        caller, name = call.caller, call.path["name"]
        deployment, served = self._deployment(caller, call.path)
        if not adapter or adapter in (name, deployment.settings.base_model):
            return served
        if source is not None and source not in SOURCES:
            why = f"it must be one of {', '.join(SOURCES)}; register other adapters, and use the registered name"
            raise InvalidInput(f"`adapter_source` is {source[:SHOWN_CHARS]!r}: {why}", code="invalid_parameter")
        if not (deployment.settings.takes_adapters or deployment.is_configured):
            raise InvalidInput(f"the deployment {name!r} takes no adapters (disableAdapters)", code="invalid_parameter")
        directory, base = self._services.directory, deployment.settings.base_model
        adapted = directory.find_adapter(caller, served.model, adapter, base)
        if adapted is None and any(fnmatchcase(adapter, pattern) for pattern in served.model.adapter_patterns):
            token = served.model.secrets.get("HF_TOKEN")
            record = (await self._services.adapters.ensure(caller.project, base, [adapter], token=token))[adapter]
            if record.state != READY:
                raise InvalidInput(f"the adapter {adapter!r} cannot be used: {record.message}", code="bad_adapter")
            adapted = directory.find_adapter(caller, directory.find(caller, name).model, adapter, base)
        if adapted is None:
            message = f"there is no adapter {adapter[:SHOWN_CHARS]!r} for the deployment {name!r} that you may use"
            raise UnknownName(f"{message}: register it first", code="unknown_adapter")
        return adapted

    def _window(self, served: ServedModel) -> int | None:
        """Return the limit of prompt and answer together, in tokens; None if unknown."""
        return self._windows.get(_engine_of(served.model)) or context_window(served.model)

    def _remember_window(self, served: ServedModel, window: int) -> int:
        if len(self._windows) >= WINDOWS_MAX:
            self._windows.clear()
        self._windows[_engine_of(served.model)] = window
        return window

    def _render_error(self, error: BatchmillError, *, is_openai: bool = False) -> bytes:
        """Return the JSON of an error that is sent as an event."""
        return encode(errors.lorax_envelope(error, self._hide(error.message), is_openai=is_openai))


def _engine_of(model: ModelSpec) -> str:
    """Return a key for the settings that determine the window."""
    return f"{model.source} {sorted(model.engine_args.items())}"
