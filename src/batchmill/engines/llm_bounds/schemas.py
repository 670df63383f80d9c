"""How much a JSON schema, or a tag that holds some, would make an engine build: walked and summed up, never compiled.

Whatever a keyword is called: a number under it counts as a repetition, unless it is one of those that bound a value.
So a keyword that nobody here knows can repeat no more than one that is known.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from batchmill.engines.llm_bounds.patterns import check_grammar, check_pattern, too_large
from batchmill.errors import InvalidRow
from batchmill.types import Limits

DEPTH_MAX = 64  # levels of objects and lists; as vLLM has it
REFERENCE_DEPTH_MAX = 128  # with the levels of what is referred to
NAMES_MAX = 1_000  # of one object: what an engine builds for optional ones grows with their square
# The whole, each part as often as it is repeated, may be so many times one repetition's limit; so may all different
# lengths of texts together.
SIZE_FACTOR = 10
VALUE_MAX = 2.0**63
SHOWN_CHARS = 120  # of a place, in a message

VALUES = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
LENGTHS = frozenset(["minLength", "maxLength"])  # of texts, which hold nothing that could be repeated
DATA = frozenset(["const", "enum", "default", "example", "examples", "choice", "required", "title", "description"])
NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"])
PATTERNS = frozenset(["pattern", "regex", "whitespace_pattern", "guided_regex"])
GRAMMARS = frozenset(["grammar", "ebnf", "lark", "definition", "guided_grammar"])
TEXTS = frozenset(["json", "structural_tag", "schema", "json_schema", "parameters", "guided_json"])  # JSON in a string
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
    """The bounds of one request: what its fields hold is summed."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._bytes = self._nodes = 0
        self._lengths: set[int | float] = set()  # what is built for one is built once, however many texts have it
        self._roots: list[Any] = []  # what a reference may be relative to, the innermost last
        self._targets: dict[int, int] = {}  # id of what is referred to -> its size
        self._open: set[int] = set()  # that are being measured: who refers to them again repeats nothing
        self._kept: list[Any] = []  # whatever was decoded: an id is one thing's for as long as that lives

    def check(self, field: str, raw: bytes) -> None:
        """Raises: InvalidRow (`structured_output_too_large`), naming the keyword, its value and the limit."""
        self._bytes += len(raw)
        if self._bytes > self._limits.bytes_max:
            raise too_large(
                f"{field} and what else shapes the answer have {self._bytes:,} bytes; "
                f"limits.schema_bytes_max is {self._limits.bytes_max:,}"
            )
        self._check(self._size(self._decoded(field, raw), field, field, 0), field)

    def _decoded(self, field: str, raw: bytes) -> Any:
        try:
            found = msgspec.json.decode(raw)
        except RecursionError:
            raise too_large(f"{field} nests deeper than {DEPTH_MAX} levels") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRow(f"{field} cannot be read as JSON: {error}", code="invalid_field") from None
        self._kept.append(found)
        return found

    def _check(self, size: int, place: str) -> int:
        if size > self._limits.size_max:
            raise too_large(
                f"{place[:SHOWN_CHARS]} comes to {size:,} parts with what it repeats and refers to; "
                f"{self._limits.size_max:,} is the most ({SIZE_FACTOR} x limits.schema_repetitions_max)"
            )
        return size

    def _size(self, value: Any, key: str, place: str, depth: int) -> int:
        """How many parts a value comes to. `key`: the keyword it stands under; "": it stands under a name."""
        self._nodes += not self._open  # what is referred to is counted where it stands
        if self._nodes > self._limits.nodes_max:
            raise too_large(
                f"{place[:SHOWN_CHARS]}: there are more than {self._limits.nodes_max:,} parts (limits.schema_nodes_max)"
            )
        if depth > REFERENCE_DEPTH_MAX or (not self._open and depth > DEPTH_MAX):
            raise too_large(f"{place[:SHOWN_CHARS]} nests deeper than {DEPTH_MAX} levels")
        if isinstance(value, str):
            return self._text_size(value, key, place, depth)
        if isinstance(value, dict):
            return self._object_size(value, key, place, depth)
        if isinstance(value, list):
            inside = "" if key in NAMED else key
            return 1 + sum(self._size(each, inside, f"{place}[{n}]", depth + 1) for n, each in enumerate(value))
        return 1

    def _text_size(self, value: str, key: str, place: str, depth: int) -> int:
        if key in PATTERNS:
            return 1 + check_pattern(value, place)
        if key in GRAMMARS:
            return 1 + check_pattern(value, place) if _is_short(value) else 1 + check_grammar(value, place)
        if key in TEXTS and value.lstrip()[:1] in ("{", "["):
            return self._rooted(self._decoded(place, value.encode("utf-8", "surrogatepass")), "", place, depth + 1)
        return 1

    def _object_size(self, value: dict[str, Any], key: str, place: str, depth: int) -> int:
        if key in NAMED and len(value) > NAMES_MAX:
            raise too_large(f"{place[:SHOWN_CHARS]} has {len(value):,} names, and {NAMES_MAX:,} is the most")
        if key in TEXTS:
            return self._rooted(value, "", place, depth)
        if key in DATA:
            return 1 + sum(self._size(each, key, f"{place}.{name}", depth + 1) for name, each in value.items())
        total, factor = 1, 1
        for name, each in value.items():
            inside = f"{place}.{name}"
            if key in NAMED:
                total += check_pattern(name, inside) if key == "patternProperties" else 0
                total += self._size(each, "", inside, depth + 1)
            elif name in REFERENCES and isinstance(each, str):
                total += self._referred(each, inside, depth)
            elif isinstance(each, int | float) and not isinstance(each, bool):
                factor = max(factor, self._count(name, each, inside))
            else:
                total += self._size(each, name, inside, depth + 1)
        return self._check(total * factor, place)

    def _count(self, name: str, number: int | float, place: str) -> int:
        """How often a number has something repeated. Raises: InvalidRow."""
        if name in DATA:
            return 1
        most = VALUE_MAX if name in VALUES else self._limits.repetitions_max
        if not abs(number) <= most:  # nor what is no number
            limit = "2**63" if name in VALUES else f"{most:,} (limits.schema_repetitions_max)"
            is_long = isinstance(number, int) and abs(number) >= 10**30
            shown = f"a number of {number.bit_length()} bits" if is_long else f"{number:,}"
            raise too_large(f"{place[:SHOWN_CHARS]} is {shown}; {name} may be at most {limit}")
        if name in LENGTHS:
            self._lengths.add(max(0, number))
            self._check(math.ceil(sum(self._lengths)), f"{place[:SHOWN_CHARS]}, with the other lengths of texts,")
            return 1
        return 1 if name in VALUES else max(1, math.ceil(number))

    def _rooted(self, value: Any, key: str, place: str, depth: int) -> int:
        """The size of what references inside it are relative to."""
        self._roots.append(value)
        try:
            return self._size(value, key, place, depth)
        finally:
            self._roots.pop()

    def _referred(self, reference: str, place: str, depth: int) -> int:
        """The size of what a reference stands for; one that leads back to itself is a rule, which repeats nothing."""
        if not reference.startswith("#"):
            raise InvalidRow(
                f"{place[:SHOWN_CHARS]} is {reference[:SHOWN_CHARS]!r}; a reference leads into the same schema: it "
                "begins with #",
                code="invalid_field",
            )
        sizes = [1]
        for root in self._roots:
            target = _pointed(root, reference)
            if isinstance(target, dict | list) and id(target) not in self._open:
                if id(target) not in self._targets:
                    self._open.add(id(target))
                    try:
                        self._targets[id(target)] = self._size(target, "", place, depth + 1)
                    finally:
                        self._open.discard(id(target))
                sizes.append(self._targets[id(target)])
        return max(sizes)


def _is_short(value: str) -> bool:
    """It has no rules: a pattern under the name of a grammar."""
    return "::=" not in value and ":" not in value


def _pointed(root: Any, reference: str) -> Any:
    """What a JSON pointer in a fragment leads to; None: nothing. Source: RFC 6901."""
    found = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
