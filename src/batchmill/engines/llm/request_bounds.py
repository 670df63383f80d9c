"""Limits of each field of a request for an engine server.

The size of a body and the model's context bound texts and messages. Every other field, known here or not, must be
small, and its numbers must be within the engine's ranges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidRow
from batchmill.types import Limits
from batchmill.wire.rows.forms import COMPLETIONS

PATTERN_CHARS_MAX = 16_384
PATTERN_SIZE_MAX = 10_000  # pieces, with their repetitions
NESTED_REPEATS_MAX = 1_000  # of nested repetitions: their automaton costs more than their pieces
GROUP_DEPTH_MAX = 64
GRAMMAR_CHARS_MAX = 65_536
GRAMMAR_REPEATS_MAX = 10_000  # including the rules that a rule refers to
GRAMMAR_SIZE_MAX = 100_000  # pieces of all rules, with their repetitions
RULE_DEPTH_MAX = 128
COUNT_DIGITS_MAX = 9
CODE, BAD = "structured_output_too_large", "invalid_field"

# These expressions hardly backtrack, and an unclosed token ends with its line, so matching takes linear time. What may
# fail midway is not repeated possessively: before Python 3.11.5 that matches what it should not.
_COUNT = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?+\}")
_ESCAPE = re.compile(r"\\(?:[pPuxN]\{[^}]{0,100}+\}|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?+\]?(?:\\.|[^\]\\])*+\]", re.DOTALL)
_TOKENS = r"""(?P<comment>\#[^\n]*+|//[^\n]*+)
    |(?P<text>"(?:\\.|[^"\\\n])*+"?+|'(?:\\.|[^'\\\n])*+'?+)
    |(?P<regex>/(?![/*\s])(?:\\.|[^/\\\n])++/?+[a-z]*+)
    |(?P<rule>[?!]?+[A-Za-z_][\w.-]*+
        (?:\{[^}\n]{0,200}+\}|\[(?:"(?:\\.|[^"\\\n])*+"|\s++|[^\]"\s]){0,200}\]|)\s*+(?:::=|:(?![:=])))
    |(?P<directive>%\w++)
    |(?P<name>[A-Za-z_][\w.-]*+)
    |(?P<count>\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?+\}|~\s*+\d++(?:\s*+\.\.\s*+\d++|))"""
# `[` begins a character class in EBNF, and an optional part in Lark.
_SYNTAXES = (
    re.compile(r"(?P<class>\[\^?+\]?+(?:\\.|[^\]\\\n])*+\]?+)|(?P<open>\()|(?P<close>\))|" + _TOKENS, re.X | re.DOTALL),
    re.compile(r"(?P<open>[(\[])|(?P<close>[)\]])|" + _TOKENS, re.X | re.DOTALL),
)
_RULE_NAME = re.compile(r"[?!]?+([A-Za-z_][\w.-]*+)")
_PRIORITY = re.compile(r"\.-?\d+\Z")  # of a Lark terminal; references omit it
_DIRECTIVES = frozenset(["%ignore", "%import", "%llguidance"])  # others contain a schema or another language


def check_pattern(text: str, where: str) -> int:
    """Count the pieces of a regular expression. Raises: InvalidRow if it is too long, deep or large."""
    if len(text) > PATTERN_CHARS_MAX:
        raise too_large(f"{where} is a pattern of {len(text):,} characters, of {PATTERN_CHARS_MAX:,} at most")
    stack = [_Group()]
    at = 0
    while at < len(text):
        char = text[at]
        group = stack[-1]
        if char == "\\":
            match = _ESCAPE.match(text, at)
            group.add(1)
        elif char == "[":
            match = _CLASS.match(text, at)
            if match is None:
                raise InvalidRow(f"{where} has an unclosed character class at character {at:,}", code=BAD)
            group.add(1)
        elif char == "{" and (match := _COUNT.match(text, at)) is not None and any(match.groups()):
            group.repeat(_largest(match.groups()), where)
        elif char == "(":
            match = None
            stack.append(_Group())
            if len(stack) > GROUP_DEPTH_MAX:
                raise too_large(f"{where} nests groups deeper than {GROUP_DEPTH_MAX}")
        elif char == ")" and len(stack) > 1:
            match = None
            inner = stack.pop()
            stack[-1].add(max(1, inner.size), inner.repeats)
        else:
            match = None
            if char not in "*+?|^$":
                group.add(1)
        at = at + 1 if match is None else match.end()
    return sum(group.size for group in stack)


class _Group(Struct):
    """A group that is being parsed: its pieces so far, and the last piece, which a repetition applies to."""

    size: int = 0
    repeats: int = 1  # the longest product of counts in it
    last: int = 0
    last_repeats: int = 1

    def add(self, size: int, repeats: int = 1) -> None:
        self.size += size
        self.repeats = max(self.repeats, repeats)
        self.last, self.last_repeats = size, repeats

    def repeat(self, count: int, where: str) -> None:
        is_nested = self.last_repeats > 1
        self.size += self.last * (count - 1)
        self.last *= count
        self.last_repeats *= max(1, count)
        self.repeats = max(self.repeats, self.last_repeats)
        if self.size > PATTERN_SIZE_MAX:
            raise too_large(f"{where} repeats its pieces {self.size:,} times, and {PATTERN_SIZE_MAX:,} is the most")
        if is_nested and self.last_repeats > NESTED_REPEATS_MAX:
            raise too_large(
                f"{where} has repetitions in repetitions, {self.last_repeats:,} in all, and {NESTED_REPEATS_MAX:,} "
                "is the most"
            )


class _Atom(Struct):
    """A piece of a rule: its reference, and its repetitions."""

    name: str = ""
    inner: list[_Atom] = []
    count: int = 1


def check_grammar(text: str, where: str) -> int:
    """Count the characters of an EBNF or Lark grammar. Raises: InvalidRow if it repeats too much."""
    if len(text) > GRAMMAR_CHARS_MAX:
        raise too_large(f"{where} is a grammar of {len(text):,} characters, of {GRAMMAR_CHARS_MAX:,} at most")
    for syntax in _SYNTAXES if "[" in text else _SYNTAXES[:1]:
        _check_rules(_rules(text, syntax, where), where)
    return len(text)


def _check_rules(rules: dict[str, list[_Atom]], where: str) -> None:
    repeats: dict[str, int] = {}
    for name in rules:
        if _repeats(rules, name, repeats, (), where) > GRAMMAR_REPEATS_MAX:
            raise too_large(
                f"{where}: the rule {name!r} repeats what it refers to {repeats[name]:,} times, and "
                f"{GRAMMAR_REPEATS_MAX:,} is the most"
            )
    written = sum(_size(atoms) for atoms in {id(atoms): atoms for atoms in rules.values()}.values())
    if written > GRAMMAR_SIZE_MAX:
        raise too_large(f"{where} repeats its pieces {written:,} times in all, and {GRAMMAR_SIZE_MAX:,} is the most")


def _size(atoms: list[_Atom]) -> int:
    """The number of pieces of a rule, with their repetitions."""
    return sum(atom.count * max(1, _size(atom.inner)) for atom in atoms)


def _rules(text: str, syntax: re.Pattern[str], where: str) -> dict[str, list[_Atom]]:
    rules: dict[str, list[_Atom]] = {}
    stack: list[list[_Atom]] = [[]]
    for match in syntax.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "rule":
            stack = [_rule(rules, token)]
        elif kind == "open":
            stack[-1].append(_Atom(inner=[]))
            stack.append(stack[-1][-1].inner)
            if len(stack) > GROUP_DEPTH_MAX:
                raise too_large(f"{where} nests groups deeper than {GROUP_DEPTH_MAX}")
        elif kind == "close" and len(stack) > 1:
            stack.pop()
        elif kind == "count" and stack[-1]:
            stack[-1][-1].count *= max(1, _largest(re.findall(r"\d+", token)))
        elif kind == "directive" and token not in _DIRECTIVES:
            raise InvalidRow(
                f"{where} has the directive {token}, which is not supported: put a schema into `json`, a pattern into "
                "`regex`",
                code="parameter_not_allowed",
            )
        elif kind == "regex":
            check_pattern(token[1 : token.rindex("/") or None], where)
            stack[-1].append(_Atom())
        elif kind in ("text", "class", "name"):
            stack[-1].append(_Atom(token if kind == "name" else ""))
    return rules


def _rule(rules: dict[str, list[_Atom]], token: str) -> list[_Atom]:
    """Add a rule and return the list for its atoms."""
    match = _RULE_NAME.match(token)
    assert match is not None, "a rule begins with its name"
    name = match[1]
    atoms = rules.setdefault(name, [])
    if (plain := _PRIORITY.sub("", name)) != name:
        rules.setdefault(plain, []).append(_Atom(name))
    return atoms


def _repeats(
    rules: dict[str, list[_Atom]], name: str, known: dict[str, int], parents: tuple[str, ...], where: str
) -> int:
    """The largest product of a rule's repetitions. A reference to itself counts once. `known`: results so far."""
    if name in known:
        return known[name]
    if len(parents) > RULE_DEPTH_MAX:
        raise too_large(f"{where} has rules that refer to rules more than {RULE_DEPTH_MAX} deep")
    if name in parents:
        return 1

    def of(atoms: list[_Atom]) -> int:
        most = 1
        for atom in atoms:
            inner = of(atom.inner)
            if atom.name in rules:
                inner = max(inner, _repeats(rules, atom.name, known, (*parents, name), where))
            most = max(most, inner * atom.count)
        return most

    known[name] = of(rules[name])
    return known[name]


def _largest(counts: tuple[str | None, ...] | list[str]) -> int:
    """The largest number of `{n,m}`; one with more than `COUNT_DIGITS_MAX` digits counts as 10**COUNT_DIGITS_MAX."""
    numbers = [int(each) if len(each) <= COUNT_DIGITS_MAX else 10**COUNT_DIGITS_MAX for each in counts if each]
    return max(numbers, default=1)


def too_large(text: str) -> InvalidRow:
    return InvalidRow(text, code=CODE)


DEPTH_MAX = 64  # levels of objects and lists; vLLM's limit
REFERENCE_DEPTH_MAX = 128  # including the levels of reference targets
NAMES_MAX = 1_000  # of one object: the engine's work for optional names is quadratic
# The size of the whole schema with its repetitions, and the sum of all different text lengths, may each be at most this
# many times the limit of one repetition.
SIZE_FACTOR = 10
VALUE_MAX = 2.0**63
SHOWN_CHARS = 120  # of a field's path, in a message

VALUES = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
LENGTHS = frozenset(["minLength", "maxLength"])  # of texts, which contain nothing to repeat
DATA = frozenset(["const", "enum", "default", "example", "examples", "choice", "required", "title", "description"])
NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"])
PATTERNS = frozenset(["pattern", "regex", "whitespace_pattern", "guided_regex"])
GRAMMARS = frozenset(["grammar", "ebnf", "lark", "definition", "guided_grammar"])
SCHEMA_TEXTS = frozenset(
    ["json", "structural_tag", "schema", "json_schema", "parameters", "guided_json"]
)  # JSON in a string
REFERENCES = frozenset(["$ref", "$dynamicRef", "$recursiveRef"])


class SchemaLimits(Struct, frozen=True):
    """See `types.Limits`."""

    bytes_max: int
    nodes_max: int
    repetitions_max: int

    @classmethod
    def of(cls, limits: Limits) -> SchemaLimits:
        return cls(limits.schema_bytes_max, limits.schema_nodes_max, limits.schema_repetitions_max)

    @property
    def size_max(self) -> int:
        return SIZE_FACTOR * self.repetitions_max


class SchemaWalk:
    """Checks one request. The sizes of all its fields are added."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._bytes = self._nodes = 0
        self._lengths: set[int | float] = set()  # the engine builds each length once, for all texts that have it
        self._roots: list[Any] = []  # schemas that references may be relative to, the innermost last
        self._target_sizes: dict[int, int] = {}  # id of a reference target -> its size
        self._measuring: set[int] = set()  # ids of targets being measured: a recursive reference repeats nothing
        self._decoded_values: list[Any] = []  # keeps all decoded values alive, so that their ids stay unique

    def check(self, field: str, raw: bytes) -> None:
        """Check a schema. Raises: InvalidRow (`structured_output_too_large`), naming keyword, value and limit."""
        self._bytes += len(raw)
        if self._bytes > self._limits.bytes_max:
            raise too_large(
                f"{field} and the other fields that shape the answer have {self._bytes:,} bytes; "
                f"limits.schema_bytes_max is {self._limits.bytes_max:,}"
            )
        self._check(self._size(self._decoded(field, raw), field, field, 0), field)

    def _decoded(self, field: str, raw: bytes) -> Any:
        try:
            value = msgspec.json.decode(raw)
        except RecursionError:
            raise too_large(f"{field} nests deeper than {DEPTH_MAX} levels") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRow(f"{field} cannot be read as JSON: {error}", code="invalid_field") from None
        self._decoded_values.append(value)
        return value

    def _check(self, size: int, path: str) -> int:
        if size > self._limits.size_max:
            raise too_large(
                f"{path[:SHOWN_CHARS]} has {size:,} parts with its repetitions and references; "
                f"{self._limits.size_max:,} is the most ({SIZE_FACTOR} x limits.schema_repetitions_max)"
            )
        return size

    def _size(self, value: Any, key: str, path: str, depth: int) -> int:
        """The number of parts of a value. `key`: the keyword that it belongs to; empty if it belongs to a name."""
        self._nodes += not self._measuring  # a referenced part is counted where it is defined
        if self._nodes > self._limits.nodes_max:
            raise too_large(
                f"{path[:SHOWN_CHARS]} has more than {self._limits.nodes_max:,} parts (limits.schema_nodes_max)"
            )
        if depth > REFERENCE_DEPTH_MAX or (not self._measuring and depth > DEPTH_MAX):
            raise too_large(f"{path[:SHOWN_CHARS]} nests deeper than {DEPTH_MAX} levels")
        if isinstance(value, str):
            return self._text_size(value, key, path, depth)
        if isinstance(value, dict):
            return self._object_size(value, key, path, depth)
        if isinstance(value, list):
            inside = "" if key in NAMED else key
            return 1 + sum(self._size(each, inside, f"{path}[{n}]", depth + 1) for n, each in enumerate(value))
        return 1

    def _text_size(self, value: str, key: str, path: str, depth: int) -> int:
        if key in PATTERNS:
            return 1 + check_pattern(value, path)
        if key in GRAMMARS:
            return 1 + check_pattern(value, path) if _is_short(value) else 1 + check_grammar(value, path)
        if key in SCHEMA_TEXTS and value.lstrip()[:1] in ("{", "["):
            return self._root_size(self._decoded(path, value.encode("utf-8", "surrogatepass")), "", path, depth + 1)
        return 1

    def _object_size(self, value: dict[str, Any], key: str, path: str, depth: int) -> int:
        if key in NAMED and len(value) > NAMES_MAX:
            raise too_large(f"{path[:SHOWN_CHARS]} has {len(value):,} names, and {NAMES_MAX:,} is the most")
        if key in SCHEMA_TEXTS:
            return self._root_size(value, "", path, depth)
        if key in DATA:
            return 1 + sum(self._size(each, key, f"{path}.{name}", depth + 1) for name, each in value.items())
        total, factor = 1, 1
        for name, each in value.items():
            inside = f"{path}.{name}"
            if key in NAMED:
                total += check_pattern(name, inside) if key == "patternProperties" else 0
                total += self._size(each, "", inside, depth + 1)
            elif name in REFERENCES and isinstance(each, str):
                total += self._reference_size(each, inside, depth)
            elif isinstance(each, int | float) and not isinstance(each, bool):
                factor = max(factor, self._count(name, each, inside))
            else:
                total += self._size(each, name, inside, depth + 1)
        return self._check(total * factor, path)

    def _count(self, name: str, number: int | float, path: str) -> int:
        """The repetitions that a number causes. Raises: InvalidRow."""
        if name in DATA:
            return 1
        most = VALUE_MAX if name in VALUES else self._limits.repetitions_max
        if not abs(number) <= most:  # also refuses NaN
            limit = "2**63" if name in VALUES else f"{most:,} (limits.schema_repetitions_max)"
            is_long = isinstance(number, int) and abs(number) >= 10**30
            shown = f"a number of {number.bit_length()} bits" if is_long else f"{number:,}"
            raise too_large(f"{path[:SHOWN_CHARS]} is {shown}; {name} may be at most {limit}")
        if name in LENGTHS:
            self._lengths.add(max(0, number))
            self._check(math.ceil(sum(self._lengths)), f"{path[:SHOWN_CHARS]}, with the other lengths of texts,")
            return 1
        return 1 if name in VALUES else max(1, math.ceil(number))

    def _root_size(self, value: Any, key: str, path: str, depth: int) -> int:
        """The size of a schema that is the root of the references in it."""
        self._roots.append(value)
        try:
            return self._size(value, key, path, depth)
        finally:
            self._roots.pop()

    def _reference_size(self, reference: str, path: str, depth: int) -> int:
        """The size of a reference's target; a recursive one counts as a rule, without repetition."""
        if not reference.startswith("#"):
            raise InvalidRow(
                f"{path[:SHOWN_CHARS]} is {reference[:SHOWN_CHARS]!r}; a reference must point into the same schema "
                "and begin with #",
                code="invalid_field",
            )
        sizes = [1]
        for root in self._roots:
            target = _resolve_pointer(root, reference)
            if isinstance(target, dict | list) and id(target) not in self._measuring:
                if id(target) not in self._target_sizes:
                    self._measuring.add(id(target))
                    try:
                        self._target_sizes[id(target)] = self._size(target, "", path, depth + 1)
                    finally:
                        self._measuring.discard(id(target))
                sizes.append(self._target_sizes[id(target)])
        return max(sizes)


def _is_short(value: str) -> bool:
    """Whether a grammar has no rules: a pattern."""
    return "::=" not in value and ":" not in value


def _resolve_pointer(root: Any, reference: str) -> Any:
    """The target of a JSON pointer in a fragment; None if there is none. Source: RFC 6901."""
    target = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and len(name) < 9 and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


CHOICES_MAX = 128  # `n` and similar fields; OpenAI's limit
ANSWERS_MAX = 1_024  # of one request: choices times prompts
SMALL_BYTES_MAX = 4_096  # of a field without a specific limit
SMALL_DEPTH_MAX, SMALL_PARTS_MAX = 8, 256
NUMBER_MAX = 2**31 - 1
SHORT_BYTES = 9  # a number with this many digits is within NUMBER_MAX


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EMPTY_VALUES = (b"null", b'""', b"{}", b"[]")

# Bounded by the body and the context. `documents` and `items` are texts too.
CONTENT = _names(
    """
    data_1 data_2 documents input instruction instructions items messages metadata model previous_input_messages
    prompt prompt_cache_key queries query safety_identifier suffix text_1 text_2 user
    """
)
# Fields that shape an answer; the engine compiles them. vLLM before 0.12 called them `guided_*`.
SHAPES = _names(
    """
    functions guided_choice guided_grammar guided_json guided_regex response_format structural_tag
    structured_outputs text tool_choice tools
    """
)
# Field -> why no caller may set it.
REFUSED = {
    "chat_template": "it is a program that would run in the engine; the engine uses the model's template",
    "ec_transfer_params": "it is for calls between engines",
    "kv_transfer_params": "it is for calls between engines",
    "media_io_kwargs": "it changes how much memory an image or video takes",
    "mm_processor_kwargs": "it changes how much memory an image or video takes",
    "prompt_embeds": "it is a serialised tensor; send text or token ids",
    "request_id": "the engine assigns the id of each request",
    "vllm_xargs": "it is for extensions of the engine",
}
# Names in `chat_template_kwargs` that are parameters of the renderer, not of a template.
RENDERER = _names(
    """
    chat_template max_length padding return_assistant_tokens_mask return_dict return_tensors tokenize
    tokenizer_kwargs truncation
    """
)
# Field -> its maximum bytes and entries.
LISTS = {
    "allowed_token_ids": (2 * 1024 * 1024, 262_144),
    "bad_words": (65_536, 1_024),
    "logit_bias": (65_536, 1_024),
    "logprob_token_ids": (65_536, 1_024),
    "stop": (65_536, 1_024),
    "stop_token_ids": (65_536, 1_024),
}
TEXTS = frozenset(["bad_words", "cache_salt", "session_id", "stop"])  # texts, never numbers
RANGES = {
    "best_of": (0, CHOICES_MAX),
    "n": (0, CHOICES_MAX),
    "priority": (0, NUMBER_MAX),
    "seed": (-(2**63), 2**63 - 1),
}


class RequestLimits:
    """The limits of one model's requests."""

    def __init__(self, limits: Limits) -> None:
        self._schemas = SchemaLimits.of(limits)

    def check(self, url: str, members: Mapping[str, Raw]) -> None:
        """Check a body. Raises: InvalidRow, naming the field, its value and the limit."""
        walk: SchemaWalk | None = None
        for name, raw in members.items():
            if name in CONTENT:
                continue
            if name in SHAPES:
                walk = walk or SchemaWalk(self._schemas)
                walk.check(name, bytes(raw))
            else:
                _check(name, bytes(raw))
        if "n" in members and url == COMPLETIONS:
            _check_answers(members)


def _check(name: str, raw: bytes) -> None:
    size = len(raw)
    if size <= SHORT_BYTES and name not in REFUSED and name not in RANGES and raw.isdigit():
        return
    if name in REFUSED:
        if raw not in EMPTY_VALUES:
            raise InvalidRow(f"body.{name} is not supported: {REFUSED[name]}", code="parameter_not_allowed")
        return
    bytes_max, entries_max = LISTS.get(name, (SMALL_BYTES_MAX, SMALL_PARTS_MAX))
    if size > bytes_max:
        raise InvalidRow(f"body.{name} has {size:,} bytes, and {bytes_max:,} is the most", code="parameter_too_large")
    if raw in (b"true", b"false", b"null"):
        return
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRow(f"body.{name} cannot be read: {error}", code="invalid_field") from None
    if name == "chat_template_kwargs" and isinstance(value, dict) and (refused := sorted(RENDERER & value.keys())):
        text = f"body.chat_template_kwargs.{refused[0]} is refused: it is not a variable of a template"
        raise InvalidRow(text, code="parameter_not_allowed")
    _check_value(name, value, entries_max, RANGES.get(name, (-NUMBER_MAX, NUMBER_MAX)))


def _check_value(name: str, value: Any, entries_max: int, allowed: tuple[int, int]) -> None:
    """Check the numbers, depth and size of a value."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    parts = 0
    while stack:
        each, depth = stack.pop()
        parts += 1
        if parts > entries_max + 1 or depth > SMALL_DEPTH_MAX:
            raise InvalidRow(
                f"body.{name} has more than {entries_max:,} entries, or nests deeper than {SMALL_DEPTH_MAX}",
                code="parameter_too_large",
            )
        if isinstance(each, dict):
            stack += [(inner, depth + 1) for inner in each.values()]
        elif isinstance(each, list):
            stack += [(inner, depth + 1) for inner in each]
        elif not isinstance(each, bool | None) and (number := _number(name, each)) is not None:
            _check_number(name, number, allowed)


def _number(name: str, value: Any) -> int | float | None:
    """The number that the engine reads from a value, also from a text that looks like a number."""
    if isinstance(value, str) and name not in TEXTS:
        try:
            return float(value)
        except ValueError:
            return None
    return None if isinstance(value, str) else value


def _check_number(name: str, number: int | float, allowed: tuple[int, int]) -> None:
    least, most = allowed
    if not least <= number <= most:  # also refuses NaN
        is_short = isinstance(number, float) or abs(number) < 10**30
        shown = str(number) if is_short else f"a number of {int(number).bit_length()} bits"
        raise InvalidRow(f"body.{name} is {shown}; it may be {least:,} to {most:,}", code="number_out_of_range")


def _check_answers(members: Mapping[str, Raw]) -> None:
    """Check the number of answers: choices times prompts."""
    try:
        choices = msgspec.json.decode(members["n"], type=int | None) or 1
        prompt = members.get("prompt", Raw(b"null"))
        prompts = len(msgspec.json.decode(prompt, type=list[Raw])) if bytes(prompt).startswith(b"[") else 1
    except (msgspec.MsgspecError, RecursionError):
        return  # the engine refuses it
    if choices * prompts > ANSWERS_MAX:
        raise InvalidRow(
            f"body requests {choices} choices for each of {prompts:,} prompts; {ANSWERS_MAX:,} answers in all are "
            "the most",
            code="parameter_too_large",
        )
