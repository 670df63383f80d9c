"""The JSON Schema that the replies of a job's rows must fit: how a request asks for it, and how a reply holds it.

Sources: OpenAI's API reference for `response_format` and the `text.format` of /v1/responses, which vLLM takes too;
Anthropic's for a tool that has to be called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import EarlierAnswer, OutputSchema
from batchmill.wire.json_bytes import DEPTH_MAX, decode, encode, is_too_deep, join_object, oddity, split_object

VALIDATION = "batchmill.wire.schemas.schema_validation"  # a heavy module, imported only for jobs with a schema
NAME = "answer"  # of the schema, in requests
ANSWER_TOOL = "batchmill_answer"  # of /v1/messages: its input is the answer
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA_URLS = (CHAT, RESPONSES, MESSAGES)
SCHEMA_ATTEMPTS_MAX = 10
FENCE = re.compile(r"```[A-Za-z]*[ \t]*\r?\n(.*?)```", re.DOTALL)
JSON_BEGINS = (b"{", b"[", b'"', b"-", *(b"%d" % digit for digit in range(10)))
TRUNCATED = "Input data was truncated"  # msgspec's word for a text that ends before its value does
PROBLEMS_BYTES_MAX = 1_500  # of problems that a model reads; a budget reserves a token for each
WORDS_BYTES_MAX = PROBLEMS_BYTES_MAX + 200  # of all that it reads about an answer

_TYPES = {
    "str": "string", "string": "string", "text": "string", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "bool": "boolean", "boolean": "boolean",
}  # fmt: skip
_NAME = re.compile(r"[^\s,:|\[\]?]+")


# -- the schema of a few fields ------------------------------------------------------------------------------------


def schema_of_fields(text: str) -> dict[str, Any]:
    """The schema of an object with these fields: "label: positive|negative, score: float, tags: [str], why?: str".

    A type is str, int, float, bool, values between bars, or one of these in brackets for a list; the value of a name
    with a question mark may be null. Raises: InvalidInput, naming the field.
    """
    properties: dict[str, Any] = {}
    for part in text.split(","):
        name, colon, kind = part.partition(":")
        name, may_be_null = name.strip().removesuffix("?").strip(), name.strip().endswith("?")
        if not colon or _NAME.fullmatch(name) is None:
            raise InvalidInput(f"a field is written NAME: TYPE, not {part.strip()!r}", code="invalid_fields")
        if name in properties:
            raise InvalidInput(f"the field {name!r} is named twice", code="invalid_fields")
        found = _type_of(name, kind.strip())
        properties[name] = {"anyOf": [found, {"type": "null"}]} if may_be_null else found
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _type_of(name: str, kind: str) -> dict[str, Any]:
    if kind.startswith("[") and kind.endswith("]"):
        return {"type": "array", "items": _type_of(name, kind[1:-1].strip())}
    if "|" in kind:
        values = [value.strip() for value in kind.split("|")]
        if "" in values or len(set(values)) < len(values):
            raise InvalidInput(f"the values of the field {name!r} are empty or repeat: {kind!r}", code="invalid_fields")
        return {"type": "string", "enum": values}
    if kind not in _TYPES:
        raise InvalidInput(
            f"the field {name!r} has the type {kind!r}; write str, int, float, bool, a|b|c for one of these values, or "
            "[TYPE] for a list",
            code="invalid_fields",
        )
    return {"type": _TYPES[kind]}


def one_line(document: str, name: str) -> str:
    """A schema as a line of JSON. Raises: InvalidInput, with the name."""
    if is_too_deep(document.encode(errors="replace"), DEPTH_MAX):
        raise InvalidInput(f"the schema {name} is nested deeper than {DEPTH_MAX} levels", code="invalid_schema")
    try:
        decode(document)
        return msgspec.json.format(document, indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"the schema {name} is not JSON: {error}", code="invalid_schema") from None


def needless_schema() -> InvalidInput:
    """The error for a schema beside models whose results are no answers."""
    return InvalidInput("a schema is for the answers of language models", code="needless_schema")


# -- requests ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def names_of(schema: OutputSchema) -> tuple[str, ...]:
    """The fields of the schema's object, in order; they become columns. Empty: its values need not be objects."""
    document = decode(schema.document)
    properties = document.get("properties")
    is_object = document.get("type") == "object" and "$ref" not in document and isinstance(properties, dict)
    return tuple(properties) if is_object else ()


@lru_cache(maxsize=64)
def columns_of(schema: OutputSchema) -> tuple[str, ...]:
    """The columns of the results that hold the fields."""
    return tuple(f"{schema.prefix}{name}" for name in names_of(schema))


@lru_cache(maxsize=64)
def heads_of(schema: OutputSchema) -> tuple[tuple[str, bytes], ...]:
    """Each field with the beginning of its member in a line of results."""
    return tuple((name, encode(f"{schema.prefix}{name}") + b":") for name in names_of(schema))


def with_schema(url: str, body: Mapping[str, Any], schema: OutputSchema) -> dict[str, Any]:
    """The members of a request that asks for JSON which fits the schema. Raises: InvalidRow if it cannot."""
    if url not in SCHEMA_URLS:
        raise InvalidRow(f"a schema is for {' and '.join(SCHEMA_URLS)}, not for {url}", code="schema_not_supported")
    if encode(body.get("n")) not in (b"null", b"1"):
        raise InvalidRow("a row with a schema has one answer: leave `n` out", code="schema_not_supported")
    if encode(body.get("tools")) not in (b"null", b"[]"):
        raise InvalidRow("the row has tools, and a call of one is no answer to a schema", code="schema_conflict")
    if url == CHAT:
        if "response_format" in body:
            raise InvalidRow("the row has a response_format of its own: leave one of both out", code="schema_conflict")
        return {**body, "response_format": _format_of(schema.document)}
    if url == MESSAGES:
        return _with_tool(body, schema)
    text = body.get("text")
    members: dict[str, Any] = {} if text is None else split_object(encode(text))
    if "format" in members:
        raise InvalidRow("the row has a text.format of its own: leave one of both out", code="schema_conflict")
    return {**body, "text": {**members, "format": _text_format_of(schema.document)}}


def _with_tool(body: Mapping[str, Any], schema: OutputSchema) -> dict[str, Any]:
    """Anthropic's models answer with the input of a tool, which is an object."""
    for name in ("tool_choice", "output_config"):
        if encode(body.get(name)) != b"null":
            raise InvalidRow(f"the row has a {name} of its own: leave one of both out", code="schema_conflict")
    if decode(encode(body.get("thinking")), type=dict | None) not in (None, {"type": "disabled"}):
        raise InvalidRow("the row has `thinking`, and no tool can be forced beside it", code="schema_conflict")
    if decode(schema.document).get("type") != "object":
        raise InvalidRow(f"a schema for {MESSAGES} is one of an object: type object", code="schema_not_supported")
    return {**body, "tools": _tools_of(schema.document), "tool_choice": {"type": "tool", "name": ANSWER_TOOL}}


def answer_tool(schema: Any) -> dict[str, Any]:
    """The tool whose input is the answer."""
    return {"name": ANSWER_TOOL, "description": "Give the answer.", "input_schema": schema}


@lru_cache(maxsize=64)
def _tools_of(document: str) -> Raw:
    return Raw(encode([answer_tool(Raw(document))]))


@lru_cache(maxsize=64)
def _format_of(document: str) -> Raw:
    described = {"name": NAME, "schema": Raw(document), "strict": is_strict(decode(document))}
    return Raw(encode({"type": "json_schema", "json_schema": described}))


@lru_cache(maxsize=64)
def _text_format_of(document: str) -> Raw:
    strict = is_strict(decode(document))
    return Raw(encode({"type": "json_schema", "name": NAME, "schema": Raw(document), "strict": strict}))


# Keywords of a schema that OpenAI's strict mode knows, by what they hold.
_PLAIN = frozenset(
    {
        *("type", "required", "enum", "const", "description", "title", "$ref", "format", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
    }
)
_NAMED = ("properties", "$defs", "definitions")  # name -> schema


def is_strict(schema: Any) -> bool:
    """Whether OpenAI's strict mode takes a schema: objects name all of their fields and require them."""
    if not isinstance(schema, dict):
        return False
    if not schema.keys() <= {*_PLAIN, *_NAMED, "items", "anyOf", "additionalProperties"}:
        return False
    properties = schema.get("properties", {})
    if "properties" in schema or "object" in str(schema.get("type")):
        required = schema.get("required", [])
        is_closed = schema.get("additionalProperties") is False and isinstance(required, list)
        if not is_closed or not isinstance(properties, dict) or set(map(str, required)) != set(properties):
            return False
    parts = [each for name in _NAMED for each in _values(schema.get(name, {}))]
    parts += [schema["items"]] if "items" in schema else []
    choices = schema.get("anyOf", [])
    return isinstance(choices, list) and all(map(is_strict, [*parts, *choices]))


def _values(named: Any) -> list[Any]:
    return list(named.values()) if isinstance(named, dict) else [named]


def words_of(answer: EarlierAnswer) -> str:
    """What the model reads about an answer that does not fit."""
    problems = "\n".join(f"- {problem}" for problem in answer.problems).encode(errors="replace")
    listed = problems[:PROBLEMS_BYTES_MAX].decode(errors="ignore")
    return (
        f"Your answer does not fit the JSON Schema that was asked for:\n{listed}\n"
        "Answer again, with the whole corrected JSON and nothing else."
    )


def asked_again(url: str, body: bytes, earlier: Sequence[EarlierAnswer]) -> bytes:
    """The request with the answers so far, and what was wrong with each."""
    said: list[dict[str, str]] = []
    for each in earlier:
        answer = [{"role": "assistant", "content": each.text}] if each.text else []  # services refuse empty turns
        said += [*answer, {"role": "user", "content": words_of(each)}]
    members = split_object(body)
    if url in (CHAT, MESSAGES):
        messages = decode(members["messages"], type=list[Raw])
        return join_object({**members, "messages": [*messages, *said]})
    before = decode(members["input"], type=str | list[Raw])
    turns: list[Any] = [{"role": "user", "content": before}] if isinstance(before, str) else before
    return join_object({**members, "input": [*turns, *said]})


# -- replies -------------------------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """The JSON of a model's answer."""

    text: str
    value: Any
    is_whole: bool  # the answer is this JSON alone


def read_json(text: str) -> Answer:
    """The JSON of an answer: all of it, in a fenced block, or as a string of JSON.

    Raises: ValueError, which says what is wrong.
    """
    problem = ""
    for number, found in enumerate(_candidates(text)):
        try:
            value = _decoded(found)
            if isinstance(value, str) and value[:1] in ("{", "["):
                return Answer(value, _decoded(value), False)
            return Answer(found, value, not number)
        except ValueError as error:
            problem = problem or str(error)
    raise ValueError(problem)


def _candidates(text: str) -> Iterator[str]:
    yield text
    for block in FENCE.finditer(text):
        yield block[1]


def _decoded(text: str) -> Any:
    data = text.encode(errors="surrogatepass")
    if is_too_deep(data, DEPTH_MAX):
        raise ValueError(f"it is nested deeper than {DEPTH_MAX} levels")
    try:
        value = decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {_problem(data, error)}") from None
    # A name that is used twice is decoded once, and an escaped quote is encoded otherwise: most texts have neither.
    is_plain = b"u0022" not in data and encode(value).count(b'"') == data.count(b'"')
    if not is_plain and (odd := oddity(data)) is not None:
        raise ValueError(odd)
    return value


def _problem(data: bytes, error: Exception) -> str:
    """What is wrong with an answer, for people and for the model that it goes back to."""
    data = data.strip()
    if not data:
        return "it is empty"
    if not data.startswith(JSON_BEGINS):
        return "it is plain text"
    text = str(error)
    return "it ends too early" if text == TRUNCATED else text.removeprefix("JSON is malformed: ")
