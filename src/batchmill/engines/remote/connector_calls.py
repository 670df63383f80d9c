"""Calls of a connector's `predict`: builds them from rows and requests, sends them and reads their results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from batchmill.children.programs import PATIENCE_S, Programs
from batchmill.engines.connections import Connections
from batchmill.engines.remote.outgoing import Attempts
from batchmill.engines.retry import REPLY_BYTES_MAX, Fault, FaultKind, NoReply, Reply, judge, read_reply
from batchmill.errors import InvalidInput, InvalidRow, ModelFailed, RateLimited, TooComplex
from batchmill.models import secrets
from batchmill.models import secrets as provisions
from batchmill.models.connectors.bounded import Processing
from batchmill.models.connectors.processing import prepare
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.ports.clock import Clock
from batchmill.types import Action, Connector, ModelSpec, Outcome, Row, RowError, Usage
from batchmill.wire.json_bytes import DEPTH_MAX, encode, is_too_deep, oddity
from batchmill.wire.rows.forms import EMBEDDINGS, OpenAIForm, counted

_JSON = re.compile(r"application/(?:[\w.-]+\+)?json|text/json", re.IGNORECASE)
_PAGE = re.compile(r"text/(?:html|event-stream)|application/xhtml\+xml", re.IGNORECASE)  # usually from a proxy
_UNTYPED = ("", "application/octet-stream", "binary/octet-stream")  # types that do not tell the format
_AWS_THROTTLES = ("throttl", "toomanyrequests", "slowdown", "requestlimitexceeded", "provisionedthroughputexceeded")
_SHOWN_CHARS = 100
EMPTY = "Remote service returned empty response body"


class ConnectorReply(Struct, frozen=True, gc=False):
    """A completed call. `reply.body` is JSON on one line; `data` is the body as received."""

    reply: Reply
    data: bytes
    request_id: str | None = None


def settle(
    status: int, headers: Mapping[str, str], data: bytes | None, now: float, *, is_predict: bool = False
) -> ConnectorReply | Fault:
    """Classify a complete reply. `data` None: it was too large.

    Args: `headers`, looked up by names in lower case; `now` in seconds since the epoch, for a header's date;
    `is_predict`: the call is an ML Commons predict, which ignores the content type: a reply that is not JSON is text.
    """
    request_id = headers.get("x-request-id") or headers.get("x-amzn-requestid")
    if data is None:
        text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
        return Fault(FaultKind.PERMANENT, RowError("reply_too_large", text), Reply(0), None, request_id)
    if not 200 <= status < 300:
        return _refusal(read_reply(status, data), headers, now, request_id)
    reply = _read_result(status, headers, data, is_predict)
    if isinstance(reply, RowError):
        return Fault(FaultKind.TRANSIENT, reply, None, None, request_id)
    if reply.error is not None or reply.body is None:
        return judge(reply, headers, now, request_id=request_id)
    if reply.usage is None:
        usage = _usage_in_headers(headers)
        reply = reply if usage is None else replace(reply, usage=usage)
    return ConnectorReply(reply, data, request_id)


def _refusal(reply: Reply, headers: Mapping[str, str], now: float, request_id: str | None) -> Fault:
    """Classify an error reply. AWS names the error in a header, and also throttles with status 400."""
    name = headers.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2]
    if name:
        error = reply.row_error()
        code = error.code if not error.code.startswith("http_") else name
        reply = replace(reply, error=RowError(code, error.message))
    if reply.status == 400 and name.lower().startswith(_AWS_THROTTLES):
        reply = replace(reply, status=429)
    return judge(reply, headers, now, request_id=request_id)


def _read_result(status: int, headers: Mapping[str, str], data: bytes, is_predict: bool) -> Reply | RowError:
    """Read a 2xx reply; an error if its bytes are not what it declares."""
    if not data.strip():
        return RowError("bad_response", EMPTY)
    kind = headers.get("content-type", "").partition(";")[0].strip()
    is_json = kind == "application/json" or kind.lower() in _UNTYPED or _JSON.fullmatch(kind) is not None
    if not is_predict and _PAGE.fullmatch(kind) is not None:
        text = f"the reply has the type {kind[:_SHOWN_CHARS]!r} and is not JSON: it begins {_start(data)!r}"
        return RowError("bad_response", text)
    is_text = is_predict or not is_json
    if data.lstrip()[:1] == b"{":
        reply = read_reply(status, data)
        if reply.body is not None or not is_text:
            return reply
    return _read_value(status, data, is_text)


def _read_value(status: int, data: bytes, is_text: bool) -> Reply | RowError:
    """Read a reply that is not an object. A list is unchanged; anything else becomes the member `response`."""
    if not is_too_deep(data, DEPTH_MAX):
        try:
            value = msgspec.json.decode(data)
            if (odd := oddity(data)) is not None:
                return RowError("bad_response", f"the reply cannot be stored: {odd}")
            body = msgspec.json.format(data, indent=-1) if isinstance(value, list) else encode({"response": value})
            return Reply(status, body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # it may be text
    if not is_text:
        return RowError("bad_response", f"the reply is not JSON: it begins {_start(data)!r}")
    try:
        return Reply(status, encode({"response": data.decode()}))
    except UnicodeDecodeError:
        return RowError("bad_response", f"the reply is not UTF-8 text: it begins {_start(data)!r}")


def _usage_in_headers(headers: Mapping[str, str]) -> Usage | None:
    """The token counts in Bedrock's headers."""
    names = ("x-amzn-bedrock-input-token-count", "x-amzn-bedrock-output-token-count")
    counts = [headers.get(name, "") for name in names]
    if not any(count.isdecimal() for count in counts):
        return None
    used = [int(count[:15]) if count.isdecimal() else 0 for count in counts]
    return counted(used[0], 0, used[1])


def _start(data: bytes) -> str:
    return data[:_SHOWN_CHARS].decode(errors="replace").strip()


VECTOR = "sentence_embedding"  # the name of each vector in post-processed results


class _Tensor(Struct, gc=False):
    name: str
    data: Raw


class _Result(Struct, gc=False):
    output: list[_Tensor]


class _Named(Struct, gc=False):
    model: str | None = None


_result = msgspec.json.Decoder(_Result).decode
_named = msgspec.json.Decoder(_Named).decode


def embeddings_of(result: bytes, reply: Reply, model: str) -> bytes:
    """Convert a result whose tensors are all vectors to OpenAI's form, with exact digits; leave others unchanged.

    Args: model: the model in the reply if the service names none.
    """
    try:
        output = _result(result).output
    except msgspec.MsgspecError:
        return result
    if not output or any(each.name != VECTOR for each in output):
        return result
    used = 0 if reply.usage is None else reply.usage.input_tokens
    fields: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each.data} for at, each in enumerate(output)],
        "model": _model(reply) or model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }
    return encode(fields)


def _model(reply: Reply) -> str | None:
    try:
        return _named(reply.body or b"{}").model
    except msgspec.MsgspecError:
        return None


class Credentials:
    """The credentials of a connector, in `values` by name. `generation` changes with the values."""

    def __init__(self, references: Mapping[str, str]) -> None:
        self._references = references
        self.values: dict[str, str] = {}
        self.generation = 0
        self._version = -1  # of the secrets when they were read

    def load(self) -> None:
        """Read all credentials. Raises: ModelFailed for a missing one."""
        self._version = provisions.version()
        values = {name: secrets.resolve(reference, key=name).reveal() for name, reference in self._references.items()}
        if values != self.values:
            self.values = values
            self.generation += 1

    def refresh(self) -> None:
        """Read the credentials again if the owner has sent new secrets. Raises: as `load`."""
        if provisions.version() != self._version:
            self.load()

    def has_newer(self, generation: int) -> bool:
        """Whether a call that was refused with this generation may be retried with newer credentials.

        Reads variables and files again, so that a rotated key needs no restart.
        """
        if generation == self.generation:
            try:
                self.load()
            except ModelFailed:  # a credential is missing now; the refusal is the better error
                return False
        return generation != self.generation


FILTER = "response_filter"
BAD_FILTER = "invalid_response_filter"  # of a call's filter; a connector's own filter was checked when it was created
_DOCUMENTS = ("text_docs", "query_text")
ROW_PATIENCE_S = 3600.0  # a row waits longer than a caller for post-processing


class ConnectorCall(Attempts):
    """One call with all its attempts."""

    __slots__ = (
        "body",
        "generation",
        "is_admitted",
        "is_predict",
        "is_typed",
        "parameters",
        "rendered",
        "row",
        "url",
    )

    def __init__(self, row: Row | None, parameters: Mapping[str, Any], *, is_typed: bool) -> None:
        super().__init__()
        self.row = row  # None for a live request
        self.parameters = parameters
        self.is_typed = is_typed  # its parameters have their intended types: see `Renderer`
        self.is_admitted = False  # it has passed its rate limit
        self.is_predict = False  # an ML Commons predict
        self.url = ""  # the requested path, if its replies have a special form
        self.rendered: Rendered | None = None
        self.generation = 0  # of the credentials in `rendered`
        self.body = b""  # its length gives the estimate of the call's tokens


class ActionCaller:
    """Makes the calls of one action."""

    def __init__(
        self, connector: Connector, action: Action, connections: Connections, credentials: Credentials, clock: Clock,
        programs: Programs,
    ) -> None:  # fmt: skip
        """Raises: InvalidInput for templates that can never be filled."""
        self._connector = connector
        self._action = action
        self._connections = connections
        self._credentials = credentials
        self._clock = clock
        self._processing = Processing(connector, programs)
        self._renderers = {is_typed: Renderer(connector, action, is_typed=is_typed) for is_typed in (True, False)}
        self._model = connector.parameters.get("model") or connector.name
        self.embeds = (action.post_process_function or "").endswith(".embedding") or ".embedding." in (
            action.post_process_function or ""
        )
        self._processes = action.post_process_function is not None or FILTER in connector.parameters

    def compose(self, call: ConnectorCall) -> None:
        """Fill the templates. Raises: InvalidInput."""
        credentials = self._credentials
        call.rendered = self._renderers[call.is_typed].compose(call.parameters, credentials.values)
        call.generation = credentials.generation
        call.body = call.rendered.body or b""

    async def send(self, call: ConnectorCall) -> ConnectorReply | Fault:
        """Make one attempt with the current secrets; retry at once if a refused secret was replaced."""
        result = await self._attempt(call)
        is_refused = isinstance(result, Fault) and result.kind is FaultKind.AUTH
        if is_refused and self._credentials.has_newer(call.generation):
            return await self._attempt(call)
        return result

    async def begin(self, call: ConnectorCall) -> aiohttp.ClientResponse:
        """Make a call and return the head of its reply. Raises: NoReply."""
        signed = self._sign(call)
        if isinstance(signed, Fault):
            raise NoReply(signed)
        return await self._connections.begin(signed.method, signed.url, signed.body, signed.headers)

    async def _attempt(self, call: ConnectorCall) -> ConnectorReply | Fault:
        signed = self._sign(call)
        if isinstance(signed, Fault):
            return signed
        try:
            response, data = await self._connections.exchange(signed.method, signed.url, signed.body, signed.headers)
        except NoReply as lost:
            return lost.fault
        return settle(response.status, response.headers, data, self._clock.now(), is_predict=call.is_predict)

    def _sign(self, call: ConnectorCall) -> Rendered | Fault:
        """The signed call."""
        try:
            self._credentials.refresh()
            if call.rendered is None or call.generation != self._credentials.generation:
                self.compose(call)
            assert call.rendered is not None
            at = datetime.fromtimestamp(self._clock.now(), UTC)
            return self._renderers[call.is_typed].sign(call.rendered, self._credentials.values, at)
        except ModelFailed as missing:
            return Fault(FaultKind.AUTH, RowError(missing.code, missing.message))
        except InvalidInput as wrong:
            return Fault(FaultKind.PERMANENT, RowError(wrong.code, wrong.message))

    # results

    async def result(
        self, call: ConnectorCall, answer: ConnectorReply, who: str, patience_s: float = PATIENCE_S
    ) -> bytes:
        """The result: the reply itself, or the output of post-processing.

        Raises: InvalidInput for a reply that the post-processing cannot handle, TooComplex if it takes too long,
        RateLimited.
        """
        assert answer.reply.body is not None
        if not self._processes and FILTER not in call.parameters:
            return answer.reply.body
        result = await self._processing.result_json(
            self._action, answer.data, call.parameters, who=who, patience_s=patience_s
        )
        if call.url == EMBEDDINGS and self.embeds:
            return embeddings_of(result, answer.reply, self._model)
        return result

    async def output(self, call: ConnectorCall, answer: ConnectorReply, who: str) -> bytes:
        """The `output` of ML Commons, as JSON. Raises: as `result`."""
        return await self._processing.output_json(self._action, answer.data, call.parameters, who=who)

    def documents(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parameters of the calls for an ML Commons predict body. Raises: InvalidInput."""
        return prepare(self._connector, self._action, body)


class ConnectorRows:
    """Turns rows into calls, and replies into outcomes."""

    def __init__(self, model: ModelSpec, caller: ActionCaller) -> None:
        self._names = frozenset(model.targets())
        self._caller = caller

    def call(self, row: Row) -> ConnectorCall:
        """The call of a row. Raises: InvalidRow, or an error of msgspec, for a row that cannot be sent."""
        try:
            call = ConnectorCall(row, self.parameters(_members(row)), is_typed=True)
            if self._caller.embeds and isinstance(row.form, OpenAIForm):
                call.url = row.form.request(row).url
            self._caller.compose(call)
        except InvalidRow:
            raise
        except InvalidInput as wrong:
            raise InvalidRow(wrong.message, code=wrong.code) from None
        return call

    def parameters(self, members: dict[str, Any]) -> dict[str, Any]:
        """The parameters in a request's members, or from its documents. Raises: InvalidInput."""
        name = members.get("model")
        if name is None or name == "" or (isinstance(name, str) and name in self._names):
            members = {key: value for key, value in members.items() if key != "model"}
        documents = {key: members[key] for key in _DOCUMENTS if key in members}
        if documents:
            members = {key: value for key, value in members.items() if key not in documents}
        if members.keys() == {"parameters"} and isinstance(members["parameters"], dict):
            members = members["parameters"]
        if not documents:
            return members
        calls = self._caller.documents({**documents, "parameters": members})
        if len(calls) != 1:
            text = f"its documents need {len(calls)} calls, and a row is one call: make each document a row"
            raise InvalidRow(text, code="too_many_documents")
        return calls[0]

    async def send(self, call: ConnectorCall) -> Outcome | Fault:
        """One attempt of a row's call, for `dispatch`."""
        assert call.row is not None
        answer = await self._caller.send(call)
        if isinstance(answer, Fault):
            return answer
        reply = answer.reply
        try:
            body = await self._caller.result(call, answer, _who(call.row), ROW_PATIENCE_S)
        except (TooComplex, RateLimited) as stopped:
            return Fault(FaultKind.PERMANENT, RowError(stopped.code, stopped.message), reply, None, answer.request_id)
        except InvalidInput as wrong:
            if wrong.code == BAD_FILTER:
                return Fault(FaultKind.PERMANENT, RowError(wrong.code, wrong.message), reply, None, answer.request_id)
            # a retry may get a better reply
            return Fault(FaultKind.GARBLED, RowError(wrong.code, wrong.message), reply, None, answer.request_id)
        return Outcome(call.row, body, None, reply.status, reply.usage, answer.request_id)


def _who(row: Row) -> str:
    """The name that resource limits count a row's reply for: its job."""
    return "rows" if row.lease is None else f"job {row.lease.key}"


def _members(row: Row) -> dict[str, Any]:
    """The members of a row's body, its columns, or the members of the request that its form builds."""
    form = row.form
    if isinstance(form, OpenAIForm) or not form.makes_requests:
        members = form.arguments(row)
    else:
        members = msgspec.json.decode(form.request(row).body)
    if members.get("stream") is True:
        raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="unsupported_parameter")
    return members
