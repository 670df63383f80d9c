"""Calls of a deployment: LoRAX's own and OpenAI's below it, answered whole or event by event.

A request names its adapter; no name means the base model. An OpenAI body may carry LoRAX's fields. Errors have LoRAX's
form. Source: LoRAX's router (`lib.rs`, StreamResponse) and predibase 2025.10.3, `resources/lorax/client.py`.
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
from batchmill.dialects.predibase import lorax as lorax_answers
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
from batchmill.server.replies import EVENTS, PieceReply, rewritten, unless_gone, whole_answer
from batchmill.services.adapters.records import READY
from batchmill.services.live_calls import request_of
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.model_rows import ServedModel
from batchmill.services.path_redaction import Places
from batchmill.services.services import Services
from batchmill.types import Caller, ModelSpec, Scope
from batchmill.wire import fields
from batchmill.wire.forms import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS
from batchmill.wire.json_bytes import encode, shallow, split_object

EVENT_BYTES_MAX = 16 * 1024 * 1024  # of one event of the engine
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
    """Tokens as server-sent events. An error after the first is one of them: its status can no longer be sent."""

    def __init__(self, pieces: AsyncGenerator[bytes], say: Callable[[BatchmillError], bytes]) -> None:
        self._say = say
        super().__init__(pieces, media=EVENTS)

    def late(self, error: BatchmillError) -> bytes:
        return b"event:error\ndata:" + self._say(error) + _END


async def events_of(asked: Generate, parameters: Parameters, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """LoRAX's events out of an engine's. Raises: BatchmillError for an answer that the engine broke off."""
    generation = _Generation(asked, parameters)
    waiting = b""
    try:
        async for piece in pieces:
            *whole, waiting = (waiting + piece).split(_END)
            if len(waiting) > EVENT_BYTES_MAX:
                raise BatchmillError("the engine sent an event without an end", code="incomplete_generation")
            events = b"".join(generation.read(event) for event in whole)
            if events:
                yield events
    finally:
        await pieces.aclose()
    if not generation.is_done:
        raise BatchmillError("the engine broke the answer off", code="incomplete_generation")


class _Generation:
    """What has been said of an answer."""

    def __init__(self, asked: Generate, parameters: Parameters) -> None:
        self._parameters = parameters
        self._text = asked.inputs if parameters.return_full_text else ""
        self._prompt_tokens = self._tokens = 0
        self.is_done = False

    def read(self, event: bytes) -> bytes:
        """Our events for one of the engine's."""
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
        return b"".join(self._say(choice) for choice in answer.choices)

    def _say(self, choice: Choice) -> bytes:
        tokens = tokens_of(choice)
        self._text += choice.text
        self._tokens += len(tokens)
        self._prompt_tokens = len(choice.prompt_token_ids or ()) or self._prompt_tokens
        if choice.finish_reason is None:
            return b"".join(_event(StreamEvent(token)) for token in tokens)
        *before, last = tokens or [Token(0, choice.text, None, special=not choice.text)]
        self.is_done = True
        finish = finish_of(choice)
        details = StreamDetails(finish, self._prompt_tokens, self._tokens, self._parameters.seed)
        ended = StreamEvent(last, self._text, details if self._parameters.details else None)
        return b"".join(_event(StreamEvent(token)) for token in before) + _event(ended)


def _event(event: StreamEvent) -> bytes:
    return _DATA + encode(event) + _END


class Asked(Struct, frozen=True):
    """What is left for the engine, and which adapter is meant; None: the base model."""

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


def read_body(raw: bytes) -> Asked:
    """Raises: InvalidInput, naming the field."""
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
    return Asked(fields.translated(rest), adapter, head.adapter_source, bool(head.stream))


PLACE = "/{tenant}/deployments/v2/llms/{name}"
CLIENT_LEFT = 499  # nobody sees it but the log
SHOWN_CHARS = 80
SOURCES = ("pbase", "hub")  # of adapters that a request may name
WINDOWS_MAX = 1_000
_WINDOW = re.compile(r"max_model_len=(\d{1,9})\b")
_JSON = Content("application/json", {"type": "object", "additionalProperties": True})
_GENERATED = Content("application/json", {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": 1})
_STREAMED = Content(EVENTS, {"type": "string"})
_OPENAI = (
    ("Chat", CHAT, "Answer a conversation by a deployment"),
    ("Completion", COMPLETIONS, "Go on with a text by a deployment"),
    ("Embedding", EMBEDDINGS, "Turn texts into vectors by a deployment"),
)


class Serving:
    def __init__(self, services: Services) -> None:
        self._services, self._live = services, services.live
        self._hide = Places(services.config.data_dir).hide
        self._windows: dict[str, int] = {}  # of models whose engine has told it

    def operations(self) -> Sequence[Operation]:
        limits: dict[str, Any] = {"body_bytes_max": None, "admits": self._admits}
        own = [
            Operation(
                "loraxGenerate", "POST", PLACE, "Go on with a text by a deployment, as LoRAX does", Scope.SUBMIT,
                self._said(self._generate), body=Generate, reply=(_GENERATED, _STREAMED),
                errors=errors.LORAX_DOCUMENTED, **limits,
            ),
            Operation(
                "loraxClassify", "POST", f"{PLACE}/classify", "Classify texts by a deployment", Scope.SUBMIT,
                self._said(self._classify), body=Classify, reply=Classified, errors=errors.LORAX_DOCUMENTED, **limits,
            ),
            Operation(
                "loraxEmbed", "POST", f"{PLACE}/embed", "Turn a text into a vector by a deployment", Scope.SUBMIT,
                self._said(self._embed), body=Embed, reply=Embedded, errors=errors.LORAX_DOCUMENTED, **limits,
            ),
        ]  # fmt: skip
        return own + [
            Operation(
                f"deployment{name}", "POST", f"{PLACE}{url}", summary, Scope.SUBMIT,
                self._said(partial(self._openai, url), is_openai=True), body=_JSON,
                reply=_JSON if url == EMBEDDINGS else (_JSON, _STREAMED), errors=errors.LORAX_DOCUMENTED,
                body_bytes_max=None, values_max=HANDED_ON_VALUES_MAX, admits=partial(self._admits, is_openai=True),
            )
            for name, url, summary in _OPENAI
        ]  # fmt: skip

    def _said(
        self, answer: Callable[[Call], Coroutine[Any, Any, Response]], *, is_openai: bool = False
    ) -> Callable[[Call], Awaitable[Response]]:
        """A handler that ends with its client, and says what is wrong as LoRAX does."""

        async def handler(call: Call) -> Response:
            try:
                answered = await unless_gone(call, answer(call))
            except BatchmillError as error:
                return errors.lorax_refusal(error, self._hide(error.message), is_openai=is_openai)
            return Response(status_code=CLIENT_LEFT) if answered is None else answered

        return handler

    async def _generate(self, call: Call) -> Response:
        asked: Generate = call.body
        parameters = lorax.check(asked)
        served = await self._served(call, parameters.adapter_id, parameters.adapter_source)
        if asked.stream:
            pieces = await self._completion(call, served, asked, parameters)
            return TokenReply(events_of(asked, parameters, pieces), self._say)
        answer = await whole_answer(await self._completion(call, served, asked, parameters))
        order = lorax_answers.pack(asked, answer, await self._alternatives(call, served, parameters, answer))
        written = await rewritten(call, lorax_answers.write, order)
        return Response(written, media_type="application/json")

    async def _completion(
        self, call: Call, served: ServedModel, asked: Generate, parameters: Parameters
    ) -> AsyncGenerator[bytes]:
        """The engine's answer. Where all of its window may be used and nobody knows how long that is, it says so."""
        window = self._window(served)
        try:
            return await self._ask(
                call, served, COMPLETIONS, lorax.body_of(asked, parameters, window), stream=asked.stream
            )
        except errors.EngineRefused as error:
            match = _WINDOW.search(error.message)
            if match is None or parameters.max_new_tokens is not None or int(match[1]) == window:
                raise
        window = self._learn(served, int(match[1]))
        return await self._ask(call, served, COMPLETIONS, lorax.body_of(asked, parameters, window), stream=asked.stream)

    async def _alternatives(self, call: Call, served: ServedModel, parameters: Parameters, written: bytes) -> bytes:
        """The answer to what else each token might have been: vLLM tells that by number of a prompt alone."""
        count = parameters.return_k_alternatives
        answer = None if count is None else lorax_answers.read_answer(written)
        if count is None or answer is None or not answer.choices:
            return b""
        best = lorax_answers.best_first(answer.choices)[0]
        body = lorax_answers.alternatives_body(best, count, self._window(served))
        return await whole_answer(await self._ask(call, served, COMPLETIONS, body))

    async def _classify(self, call: Call) -> Response:
        asked: Classify = call.body
        body = lorax_answers.classify_body(asked)
        served = await self._served(call, asked.model, None)
        answer = await whole_answer(await self._ask(call, served, CLASSIFY, body))
        return Response(await rewritten(call, lorax_answers.classified, answer), media_type="application/json")

    async def _embed(self, call: Call) -> Response:
        body = lorax_answers.embed_body(call.body)
        served = await self._served(call, None, None)
        answer = await whole_answer(await self._ask(call, served, EMBEDDINGS, body))
        return Response(await rewritten(call, lorax_answers.embedded, answer), media_type="application/json")

    async def _openai(self, url: str, call: Call) -> Response:
        asked = read_body(call.raw)
        served = await self._served(call, asked.adapter, asked.adapter_source)
        pieces = await self._ask(call, served, url, asked.members, stream=asked.stream)
        if asked.stream:
            return TokenReply(pieces, partial(self._say, is_openai=True))
        return Response(await whole_answer(pieces), media_type="application/json")

    async def _ask(
        self, call: Call, served: ServedModel, url: str, body: Mapping[str, Any], *, stream: bool = False
    ) -> AsyncGenerator[bytes]:
        """The pieces of an answer. Raises: EngineRefused, and what `LiveCalls.ask` raises."""
        request = request_of(served, url, encode(body), stream=stream)
        head, pieces = await self._live.ask(call.caller, served, request)
        if head.status >= 400:
            raise errors.refused_by_engine(head.status, await whole_answer(pieces))
        return pieces

    def _deployed(self, caller: Caller, path: dict[str, str]) -> tuple[LlmDeployment, ServedModel]:
        """The deployment of a path. Raises: UnknownName."""
        if path["tenant"] != caller.project:
            message = f"the key belongs to the tenant {caller.project!r}, not to {path['tenant'][:SHOWN_CHARS]!r}"
            raise UnknownName(message, code="unknown_tenant")
        return self._services.llms.get(caller, path["name"]), self._services.directory.find(caller, path["name"])

    def _admits(self, caller: Caller, path: dict[str, str], *, is_openai: bool = False) -> None:
        """Raises: Said, with what LoRAX says of a deployment that is not there."""
        try:
            self._deployed(caller, path)
        except BatchmillError as error:
            raise errors.LoraxRefused(error, is_openai=is_openai) from None

    async def _served(self, call: Call, adapter: str | None, source: str | None) -> ServedModel:
        """The deployment of the path with the adapter that is meant; one of a model hub is fetched first.

        Raises: UnknownName; InvalidInput for an adapter that cannot be used.
        """
        caller, name = call.caller, call.path["name"]
        deployment, served = self._deployed(caller, call.path)
        if not adapter or adapter in (name, deployment.settings.base_model):
            return served
        if source is not None and source not in SOURCES:
            why = f"it is one of {', '.join(SOURCES)}: register the adapter, and name it as it is registered"
            raise InvalidInput(f"`adapter_source` is {source[:SHOWN_CHARS]!r}: {why}", code="invalid_parameter")
        if not (deployment.settings.takes_adapters or deployment.is_configured):
            raise InvalidInput(f"the deployment {name!r} takes no adapters (disableAdapters)", code="invalid_parameter")
        directory, base = self._services.directory, deployment.settings.base_model
        found = directory.find_adapter(caller, served.model, adapter, base)
        if found is None and any(fnmatchcase(adapter, pattern) for pattern in served.model.adapter_patterns):
            token = served.model.secrets.get("HF_TOKEN")
            record = (await self._services.adapters.ensure(caller.project, base, [adapter], token=token))[adapter]
            if record.state != READY:
                raise InvalidInput(f"the adapter {adapter!r} cannot be used: {record.message}", code="bad_adapter")
            found = directory.find_adapter(caller, directory.find(caller, name).model, adapter, base)
        if found is None:
            message = f"there is no adapter {adapter[:SHOWN_CHARS]!r} for the deployment {name!r} that you may use"
            raise UnknownName(f"{message}: register it first", code="unknown_adapter")
        return found

    def _window(self, served: ServedModel) -> int | None:
        """Tokens of prompt and answer together, where that is known."""
        return self._windows.get(_engine_of(served.model)) or context_window(served.model)

    def _learn(self, served: ServedModel, window: int) -> int:
        if len(self._windows) >= WINDOWS_MAX:
            self._windows.clear()
        self._windows[_engine_of(served.model)] = window
        return window

    def _say(self, error: BatchmillError, *, is_openai: bool = False) -> bytes:
        """The JSON of an error that comes as an event."""
        return encode(errors.lorax_envelope(error, self._hide(error.message), is_openai=is_openai))


def _engine_of(model: ModelSpec) -> str:
    """What decides how long its window is."""
    return f"{model.source} {sorted(model.engine_args.items())}"
