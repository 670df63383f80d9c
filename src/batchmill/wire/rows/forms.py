"""Forms read rows and write results: OpenAI batch rows, and rows of a table, with prompt templates.

In a template `{column}` is replaced; `{{` and `}}` are literal braces. A form is part of a job's description. It knows
bytes and JSON only: no files, no engines, no ledger.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import MediaColumn, Outcome, OutputSchema, PromptTemplate, Request, Row, RowError, Usage
from batchmill.wire.json_bytes import append_members, decode, encode, join_object, split_object, text_of
from batchmill.wire.media import content_part, placeholder
from batchmill.wire.rows.rendered_rows import PROMPT, media_of, without_additions
from batchmill.wire.schemas.output_schema import asked_again, columns_of, heads_of, with_schema

Parts = tuple[tuple[str, str | None], ...]  # (literal text, column that follows it or None)


@lru_cache(maxsize=64)
def parse(template: str) -> Parts:
    """Split a template. Braces may hold only a column name: no attributes, indexes or format specs.

    Raises: InvalidInput (`invalid_template`).
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(
            f"the template {template!r} cannot be read: {error}; write {{{{ and }}}} for braces that are text",
            code="invalid_template",
        ) from None
    for _, name, spec, conversion in pieces:
        if name is not None and (spec or conversion or not name.strip()):
            raise InvalidInput(
                f"{{{name}}} in the template {template!r} must be a column name alone; "
                "write {{ and }} for braces that are text",
                code="invalid_template",
            )
    return tuple((text, name) for text, name, _, _ in pieces)


def columns(template: str) -> list[str]:
    """The columns a template needs, each once, in the order of their first use."""
    return list(dict.fromkeys(name for _, name in parse(template) if name is not None))


def render(template: str, values: Mapping[str, str]) -> str:
    """Fill a template. Raises: KeyError for a column that `values` lacks."""
    return "".join(text if name is None else text + values[name] for text, name in parse(template))


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, RERANK, SCORE = "/v1/responses", "/v1/rerank", "/v1/score"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, RERANK, SCORE)
MODERATIONS, MESSAGES = "/v1/moderations", "/v1/messages"  # only OpenAI and only Anthropic have these
CLASSIFY = "/classify"
ERROR_STATUS_MIN = 400
OUTPUT, ERROR, FOLDED_FROM, REUSED_FROM = RESULT_COLUMNS = ("output", "error", "folded_from", "reused_from")
WARNINGS_COLUMN = "warnings"  # of rows whose reply has a flaw
FETCHED = "fetched"  # what the URLs of a row's media led to, as JSON: a list of [digest, ETag, Last-Modified]
ANSWERED_BY = "answered_by"  # of rows that a retry gave to another model or adapter
NULL = Raw(b"null")
TOKENS_MAX = 2**40  # of one row: a larger count of a reply is wrong, and its sums would not fit the ledger


class RowLine(Struct, forbid_unknown_fields=True, gc=False):
    """One line of an OpenAI batch file. Source: OpenAI's Batch API, "the request input object"."""

    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class _Arguments(Struct, gc=False):
    body: dict[str, Any]
    custom_id: Raw


class _Id(Struct):
    custom_id: Raw = Raw(b"null")


class _FailedResponse(Struct):
    status_code: int = 0
    body: Any = None


class _Failed(Struct):
    """The members of an error line that name the cause."""

    response: _FailedResponse | None = None
    error: RowError | None = None


class _Reused(Struct, gc=False):
    """The parts of a result's reply that another row takes over."""

    status_code: int
    request_id: Raw
    body: Raw


class _ReusedLine(Struct, gc=False):
    response: _Reused


class _RepliedLine(Struct, gc=False):
    response: Raw


class _Usage(Struct, gc=False):
    usage: Raw = Raw(b"")


class _TableError(Struct):
    error: str


_line = msgspec.json.Decoder(RowLine)
_arguments = msgspec.json.Decoder(_Arguments)
_id = msgspec.json.Decoder(_Id)
_columns = msgspec.json.Decoder(dict[str, Any])
_failed = msgspec.json.Decoder(_Failed)
_table_error = msgspec.json.Decoder(_TableError)
_reused_line = msgspec.json.Decoder(_ReusedLine)
_replied = msgspec.json.Decoder(_RepliedLine)
_usage = msgspec.json.Decoder(_Usage)


class OpenAIForm(Struct, frozen=True, tag="openai"):
    """Reads `custom_id`, `method`, `url` and `body`; writes the Batch API's output and error lines."""

    id_prefix: str = "batch_req_"  # + the row's number: unique, and the same each time the file is written
    together: bool = False  # error lines go into the output file, between the others
    schema: OutputSchema | None = None
    overrides: dict[str, Any] = {}  # fields of requests, instead of those that rows have
    is_text: ClassVar[bool] = False

    @property
    def errors_apart(self) -> bool:
        return not self.together

    def request(self, row: Row) -> Request:
        line = _line.decode(row.raw)
        row.custom_id = encode(line.custom_id)
        return Request(line.url, _asking(self, line.url, bytes(line.body), row), line.custom_id)

    def arguments(self, row: Row) -> dict[str, Any]:
        """Return the fields of `body`, for a function."""
        line = _arguments.decode(row.raw)
        row.custom_id = line.custom_id  # type: ignore[assignment]  # Raw has the buffer that % needs
        return line.body

    def write_all(self, outcomes: Sequence[Outcome]) -> list[bytes]:
        """`write` for many outcomes; replies without ids, as of functions, take a shorter path."""
        line, write = _replied_line(self.id_prefix), self.write
        lines = []
        for outcome in outcomes:
            row, body = outcome.row, outcome.body
            if body is None or outcome.error is not None or outcome.request_id is not None or row.custom_id is None:
                lines.append(write(outcome))
            else:
                lines.append(line % (row.number, row.custom_id, outcome.status, row.number, body))
        return lines

    def write(self, outcome: Outcome) -> bytes:
        """Render the line of an output or error file."""
        row, body, number = outcome.row, outcome.body, outcome.row.number
        custom_id = self._custom_id(row.raw) if row.custom_id is None else row.custom_id
        if body is None:
            return _failed_line(self.id_prefix) % (number, custom_id, encode(outcome.error))
        if outcome.error is not None and outcome.status < ERROR_STATUS_MIN:
            reply = (outcome.status, encode(outcome.request_id or f"req_{number}"), body, encode(outcome.error))
            return _refused_line(self.id_prefix) % (number, custom_id, *reply)
        if outcome.request_id is None:
            return _replied_line(self.id_prefix) % (number, custom_id, outcome.status, number, body)
        return _answered_line(self.id_prefix) % (number, custom_id, outcome.status, encode(outcome.request_id), body)

    def follow(self, leader: Row, line: bytes, row: Row) -> bytes:
        """Render the line of a row that shares its leader's outcome: its own ids, usage 0, and `folded_from`."""
        members: dict[str, Any] = dict(split_object(line))
        members["id"] = f"{self.id_prefix}{row.number}"
        members["custom_id"] = Raw(self._custom_id(row.raw))
        response = decode(members["response"], type=dict[str, Raw] | None)
        if response is not None:
            body = decode(response["body"])
            if isinstance(body, dict) and isinstance(body.get("usage"), dict):
                usage = Raw(encode(_zeroed(body["usage"])))
                response["body"] = Raw(join_object({**split_object(bytes(response["body"])), "usage": usage}))
            members["response"] = response
        members["folded_from"] = Raw(self._custom_id(leader.raw))
        members.pop(REUSED_FROM, None)
        return encode(members) + b"\n"

    def take_over(
        self, lines: Sequence[bytes], raws: Sequence[bytes], numbers: Sequence[int], sources: Sequence[bytes]
    ) -> list[bytes]:
        """Render the lines of rows that take over results of other jobs: their own ids, usage 0, `reused_from`.

        Args: lines: those results. raws, numbers: of the rows. sources: JOB/ROW of each result, as JSON.
        """
        line = _taken_line(self.id_prefix)
        replies = [each.response for each in map(_reused_line.decode, lines)]
        bodies = [without_usage(bytes(reply.body)) for reply in replies]
        ids = map(self._custom_id, raws)
        return [
            line % (number, custom_id, reply.status_code, reply.request_id, body, source)
            for number, custom_id, reply, body, source in zip(numbers, ids, replies, bodies, sources, strict=True)
        ]

    def cut_down(self, lines: Sequence[bytes]) -> list[bytes]:
        """The parts of results that `take_over` reads, as lines."""
        return [b'{"response":%b}\n' % each.response for each in map(_replied.decode, lines)]

    def cause(self, line: bytes) -> RowError:
        """Read why a row failed from the line that `write` or `follow` made."""
        members = _failed.decode(line)
        if members.error is not None:
            return members.error
        response = members.response or _FailedResponse()
        body = response.body if isinstance(response.body, dict) else {"error": response.body}
        error = body.get("error")
        source = error if isinstance(error, dict) else body
        names = (source.get("code"), source.get("type"))  # services also put an HTTP status into `code`
        code = next((name for name in names if isinstance(name, str) and name and not name.isdigit()), None)
        message = error if isinstance(error, str) else source.get("message") or source.get("detail")
        return RowError(code or f"http_{response.status_code}", str(message or f"status {response.status_code}"))

    @staticmethod
    def _custom_id(raw: bytes) -> bytes:
        """Return the `custom_id` as its bytes, or null for a line without one."""
        try:
            return bytes(_id.decode(raw).custom_id)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return b"null"


@lru_cache(maxsize=64)
def _replied_line(id_prefix: str) -> bytes:
    """Template of a line whose reply has no id of its own: number, custom_id, status, number, body."""
    return _head(id_prefix) + b'"response":{"status_code":%d,"request_id":"req_%d","body":%b},"error":null}\n'


@lru_cache(maxsize=64)
def _refused_line(id_prefix: str) -> bytes:
    """Template of a line whose reply was not accepted: number, custom_id, status, its id as JSON, body, error."""
    return _head(id_prefix) + b'"response":{"status_code":%d,"request_id":%b,"body":%b},"error":%b}\n'


@lru_cache(maxsize=64)
def _answered_line(id_prefix: str) -> bytes:
    """Template of a line: number, custom_id, status, the reply's id as JSON, body."""
    return _head(id_prefix) + b'"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n'


@lru_cache(maxsize=64)
def _taken_line(id_prefix: str) -> bytes:
    """Template of a line that was taken over: number, custom_id, status, the reply's id as JSON, body, source."""
    reply = b'"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null,"reused_from":%b}\n'
    return _head(id_prefix) + reply


@lru_cache(maxsize=64)
def _failed_line(id_prefix: str) -> bytes:
    """Template of a line without a reply: number, custom_id, error."""
    return _head(id_prefix) + b'"response":null,"error":%b}\n'


def _head(id_prefix: str) -> bytes:
    return b'{"id":"' + id_prefix.encode().replace(b"%", b"%%") + b'%d","custom_id":%b,'


class TableForm(Struct, frozen=True, tag="table"):
    """Reads columns; writes the same columns with `output` and `error`.

    With a `prompt` or a `template` each row becomes one call of `url`; without, the columns are a function's arguments
    by name. What a template makes of a row is in the row: sealing has rendered it (`wire/rows/rendered_rows.py`).
    """

    prompt: str | None = None
    template: PromptTemplate | None = None
    media: list[MediaColumn] = []  # become content parts before the text of the user's message
    system: str | None = None
    url: str = CHAT
    params: dict[str, Any] = {}  # further fields of each request's body
    is_text: bool = False  # every cell is a string, because the table was CSV
    schema: OutputSchema | None = None
    overrides: dict[str, Any] = {}  # as in OpenAIForm
    may_be_constant: bool = False  # the templates may name no column
    names_models: bool = False  # a retry named another model: its results say so
    model_column: str | None = None  # holds the name of the row's model; an empty cell: the default
    adapter_column: str | None = None  # holds the name of the row's adapter; an empty cell: none

    errors_apart: ClassVar[bool] = False

    @property
    def makes_requests(self) -> bool:
        """Whether rows become requests to a language model."""
        return self.prompt is not None or self.template is not None

    @property
    def has_additions(self) -> bool:
        """Whether sealing adds members to rows: see `wire/rows/rendered_rows.py`."""
        return self.template is not None or bool(self.media)

    @property
    def reserved(self) -> tuple[str, ...]:
        """The columns that results may add to those of the table, in their order."""
        if not self.makes_requests:
            return RESULT_COLUMNS
        fields = () if self.schema is None else columns_of(self.schema)
        fetched = (FETCHED,) if self.media else ()
        return (*fields, OUTPUT, ERROR, WARNINGS_COLUMN, *fetched, ANSWERED_BY, FOLDED_FROM, REUSED_FROM)

    def columns(self) -> list[str]:
        """Return the columns that prompts and the choice of a model need; a row may lack those of a `template`."""
        media = [each.column for each in self.media]
        return list(dict.fromkeys([*self.template_columns(), *media, *reversed(self.target_columns())]))

    def template_columns(self) -> list[str]:
        """Return the columns that the templates need."""
        needed = [columns(text) for text in (self.system, self.prompt) if text is not None]
        return list(dict.fromkeys(name for names in needed for name in names))

    def target_names(self, cells: Mapping[str, str]) -> list[str]:
        """Return the names of the row's adapter and model, as far as its cells have some; the first one is called."""
        return [cells[name] for name in self.target_columns() if cells[name]]

    def target_columns(self) -> list[str]:
        """Return the columns that name the row's adapter and its model."""
        return [name for name in (self.adapter_column, self.model_column) if name is not None]

    def request(self, row: Row) -> Request:
        if not self.makes_requests:
            raise InvalidRow(
                'a table row is not a request: make its columns one with --prompt "… {column} …"',
                code="missing_prompt",
            )
        members = split_object(row.raw)
        cells = {name: text_of(value) for name, value in members.items()}
        try:
            text = cells[PROMPT] if self.prompt is None else render(self.prompt, cells)
            system = None if self.system is None else render(self.system, cells)
            names = self.target_names(cells)
        except KeyError as missing:
            raise InvalidRow(f"the prompt needs a column {missing} that the row lacks", code="missing_column") from None
        content = self._content(text, members, row) if self.media else text
        body = join_object({**self._input(content, system), **self.params, **({"model": names[0]} if names else {})})
        return Request(self.url, _asking(self, self.url, body, row))

    @staticmethod
    def _content(text: str, members: dict[str, Raw], row: Row) -> str | list[dict[str, Any]]:
        """The user's message with its media; where they are not loaded, digests and URLs stand for their bytes."""
        parts = media_of(members)
        loaded = map(placeholder, parts) if row.media is None else row.media
        media = [content_part(part, each) for part, each in zip(parts, loaded, strict=True)]
        return [*media, {"type": "text", "text": text}] if media else text

    def _input(self, text: str | list[dict[str, Any]], system: str | None) -> dict[str, Any]:
        if self.url == CHAT:
            head = [] if system is None else [{"role": "system", "content": system}]
            return {"messages": [*head, {"role": "user", "content": text}]}
        if self.url == RESPONSES:
            return {"input": text} | ({} if system is None else {"instructions": system})
        return {"prompt" if self.url == COMPLETIONS else "input": text}

    def arguments(self, row: Row) -> dict[str, Any]:
        """Return every column; the function engine passes those that the function has as parameters."""
        return _columns.decode(self._own(row.raw))

    def _own(self, raw: bytes) -> bytes:
        """The columns of the input alone."""
        additions = (self.template is not None) + bool(self.media)
        return without_additions(raw, additions) if additions else raw

    def write_all(self, outcomes: Sequence[Outcome]) -> list[bytes]:
        """`write` for many outcomes."""
        return list(map(self.write, outcomes))

    def write(self, outcome: Outcome) -> bytes:
        """Render the row's columns with `output` and `error`, as one JSON line."""
        error = outcome.error
        text = b"null" if error is None else encode(f"{error.code}: {error.message}")
        members = b'%b"error":%b' % (self._results_of(outcome), text)
        if outcome.warnings:
            members += b',"%b":%b' % (WARNINGS_COLUMN.encode(), encode(",".join(outcome.warnings)))
        if outcome.row.fetched and error is None:
            members += b',"%b":%b' % (FETCHED.encode(), encode(encode(outcome.row.fetched).decode()))
        if self.names_models and (called := self.overrides.get("model")) is not None:
            members += b',"%b":%b' % (ANSWERED_BY.encode(), encode(called))
        raw = outcome.row.raw if error is None else _object_or_empty(outcome.row.raw)
        raw = self._own(raw)
        return append_members(raw, members) + b"\n"

    def _results_of(self, outcome: Outcome) -> bytes:
        """The members before `error`: `output`, or the fields of the schema; a reply that was refused is shown."""
        body = outcome.body if outcome.error is None or outcome.status < ERROR_STATUS_MIN else None
        output = b"null" if body is None else self._output(body) if self.makes_requests else body
        if self.schema is None or not (heads := heads_of(self.schema)):
            return b'"output":%b,' % (output if outcome.answer is None else outcome.answer)
        fields = {} if outcome.answer is None else split_object(outcome.answer)
        members = b"".join([b"%b%b," % (head, fields.get(name, NULL)) for name, head in heads])
        return members if outcome.answer is not None or body is None else members + b'"output":%b,' % output

    def _output(self, body: bytes) -> bytes:
        """Extract the text or the vector of a reply; without either, return the whole reply."""
        try:
            reply = decode(body)
        except RecursionError:  # nested too deep to decode: it is returned unchanged
            return body
        match self.url, reply:
            case "/v1/chat/completions", {"choices": [{"message": {"content": str(text)}}]}:
                return encode(text)
            case "/v1/completions", {"choices": [{"text": str(text)}]}:
                return encode(text)
            case "/v1/embeddings", {"data": [{"embedding": _}]}:
                return _vector(body)
            case "/v1/responses", {"output": [*items]}:
                return encode("".join(_response_texts(items)))
            case _:
                return body

    def cause(self, line: bytes) -> RowError:
        """Read why a row failed from the line that `write` or `follow` made."""
        code, _, message = _table_error.decode(line).error.partition(": ")
        return RowError(code, message)

    def follow(self, leader: Row, line: bytes, row: Row) -> bytes:
        """Render the line of a row that shares its leader's outcome: its own columns and `folded_from`."""
        members = split_object(line)
        schema = () if self.schema is None else columns_of(self.schema)
        names = [
            name for name in (*schema, "output", "error", WARNINGS_COLUMN, FETCHED, ANSWERED_BY) if name in members
        ]
        if not self.makes_requests:
            names = ["output", "error"]
        shared = b"".join(b"%b:%b," % (encode(name), bytes(members[name])) for name in names)
        return append_members(self._own(row.raw), b'%b"folded_from":%d' % (shared, leader.number)) + b"\n"

    def take_over(
        self, lines: Sequence[bytes], raws: Sequence[bytes], numbers: Sequence[int], sources: Sequence[bytes]
    ) -> list[bytes]:
        """As `OpenAIForm.take_over`: the rows' own columns with the results."""
        names = [(name, encode(name)) for name in self._taken_names()]
        taken = []
        for line, raw, source in zip(lines, raws, sources, strict=True):
            members = split_object(line)
            values = b"".join([b"%b:%b," % (text, members[name]) for name, text in names if name in members])
            taken.append(append_members(self._own(raw), b'%b"reused_from":%b' % (values, source)) + b"\n")
        return taken

    def _taken_names(self) -> tuple[str, ...]:
        """The columns that rows take over."""
        return (*(() if self.schema is None else columns_of(self.schema)), OUTPUT, ERROR, FETCHED)

    def cut_down(self, lines: Sequence[bytes]) -> list[bytes]:
        """As `OpenAIForm.cut_down`: without the columns of the input."""
        names = self._taken_names()
        members = [{name: each[name] for name in names if name in each} for each in map(split_object, lines)]
        return [join_object(each) + b"\n" for each in members]


Form = OpenAIForm | TableForm


def added_columns(
    form: Form, *, has_failed: bool, is_flawed: bool, folds: bool, reuses: bool = False
) -> tuple[str, ...]:
    """The columns that results of a table have besides those of the input, in order.

    Args: has_failed: of some rows; is_flawed: so are some replies; folds: some rows share another's outcome; reuses:
    some took over that of another job.
    """
    fields = () if form.schema is None or isinstance(form, OpenAIForm) else columns_of(form.schema)
    is_named = isinstance(form, TableForm) and form.names_models
    named = {
        OUTPUT: has_failed or not fields, ERROR: True, WARNINGS_COLUMN: is_flawed,
        FETCHED: isinstance(form, TableForm) and bool(form.media), ANSWERED_BY: is_named,
        FOLDED_FROM: folds, REUSED_FROM: reuses,
    }  # fmt: skip
    return (*fields, *(name for name, is_there in named.items() if is_there))


def _asking(form: Form, url: str, body: bytes, row: Row) -> bytes:
    """The body of a request with what the job adds: changed fields, its schema, and answers that did not fit it."""
    if form.overrides:
        body = join_object({**split_object(body), **form.overrides})
    if form.schema is None:
        return body
    body = join_object(with_schema(url, split_object(body), form.schema))
    return asked_again(url, body, row.earlier) if row.earlier else body


def usage_of(reply: dict[str, Any]) -> Usage | None:
    """Return the token usage that an OpenAI-style reply reports (chat, completions, embeddings, responses), or None."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return counted(
        _count(usage, "prompt_tokens", "input_tokens"),
        _count(details, "cached_tokens") if isinstance(details, dict) else 0,
        _count(usage, "completion_tokens", "output_tokens"),
    )


def counted(input_tokens: int, cached_tokens: int, output_tokens: int) -> Usage:
    """Make a valid Usage from a reply's counts: each from 0 to TOKENS_MAX, and cached input at most all input."""
    inside = min(max(input_tokens, 0), TOKENS_MAX)
    return Usage(inside, min(max(cached_tokens, 0), inside), min(max(output_tokens, 0), TOKENS_MAX))


def with_model(body: bytes, model: str) -> bytes:
    """Return the request body with this model; every other field keeps its exact bytes."""
    return join_object({**split_object(body), "model": model})


def _count(counts: dict[str, Any], *names: str) -> int:
    for name in names:
        value = counts.get(name)
        if type(value) is int and value > 0:  # true is an int too
            return value
    return 0


def _zeroed(usage: Any) -> Any:
    if isinstance(usage, dict):
        return {name: _zeroed(value) for name, value in usage.items()}
    return 0 if isinstance(usage, int | float) else usage


@lru_cache(maxsize=4096)
def _zeroed_usage(usage: bytes) -> bytes:
    return encode(_zeroed(decode(usage)))


def without_usage(body: bytes) -> bytes:
    """The body of a reply that costs nothing: its usage is 0."""
    if b'"usage"' not in body:
        return body
    try:
        usage = bytes(_usage.decode(body).usage)
    except msgspec.ValidationError:  # a reply that is no object
        return body
    if usage[:1] != b"{":
        return body
    zeroed = _zeroed_usage(usage)
    if body.count(usage) == 1:
        return body.replace(usage, zeroed)
    return join_object({**split_object(body), "usage": Raw(zeroed)})


class _Embedding(Struct):
    embedding: Raw


class _Embeddings(Struct):
    data: list[_Embedding]


def _vector(body: bytes) -> bytes:
    return bytes(decode(body, type=_Embeddings).data[0].embedding)


def _response_texts(items: list[Any]) -> list[str]:
    contents = [item.get("content") for item in items if isinstance(item, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [text for part in parts if (text := _output_text(part)) is not None]


def _output_text(part: Any) -> str | None:
    match part:
        case {"type": "output_text", "text": str(text)}:
            return text
    return None


def _object_or_empty(raw: bytes) -> bytes:
    """Return `raw` if it is a JSON object, otherwise an empty object."""
    try:
        split_object(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return b"{}"
    return raw
