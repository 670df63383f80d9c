"""How much a regular expression or a grammar repeats: counted by reading it, never by compiling it."""

from __future__ import annotations

import re

from msgspec import Struct

from batchmill.errors import InvalidRow

PATTERN_CHARS_MAX = 16_384
PATTERN_SIZE_MAX = 10_000  # pieces, each as often as it is repeated
NESTED_REPEATS_MAX = 1_000  # of a repetition in a repetition: an automaton for it costs more than its pieces
GROUP_DEPTH_MAX = 64
GRAMMAR_CHARS_MAX = 65_536
GRAMMAR_REPEATS_MAX = 10_000  # through all rules that a rule refers to
GRAMMAR_SIZE_MAX = 100_000  # pieces of all rules, each as often as it is repeated
RULE_DEPTH_MAX = 128
COUNT_DIGITS_MAX = 9
CODE, BAD = "structured_output_too_large", "invalid_field"

# None of them goes back over what it has read, and what is not closed ends with its line: reading takes time in
# proportion to the text, whatever it holds.
_COUNT = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?+\}")
_ESCAPE = re.compile(r"\\(?:[pPuxN]\{[^}]{0,100}+\}|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?+\]?(?:\\.|[^\]\\])*+\]", re.DOTALL)
_TOKENS = r"""(?P<comment>\#[^\n]*+|//[^\n]*+)
    |(?P<text>"(?:\\.|[^"\\\n])*+"?+|'(?:\\.|[^'\\\n])*+'?+)
    |(?P<regex>/(?![/*\s])(?:\\.|[^/\\\n])++/?+[a-z]*+)
    |(?P<rule>[?!]?+[A-Za-z_][\w.-]*+
        (?:\{[^}\n]{0,200}+\}|\[(?:"(?:\\.|[^"\\\n])*+"|\s++|[^\]"\s]){0,200}+\])?+\s*+(?:::=|:(?![:=])))
    |(?P<directive>%\w++)
    |(?P<name>[A-Za-z_][\w.-]*+)
    |(?P<count>\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?+\}|~\s*+\d++(?:\s*+\.\.\s*+\d++)?+)"""
# `[` begins a set of letters in EBNF, and in Lark a part that may be absent.
_READINGS = (
    re.compile(r"(?P<class>\[\^?+\]?+(?:\\.|[^\]\\\n])*+\]?+)|(?P<open>\()|(?P<close>\))|" + _TOKENS, re.X | re.DOTALL),
    re.compile(r"(?P<open>[(\[])|(?P<close>[)\]])|" + _TOKENS, re.X | re.DOTALL),
)
_RULE_NAME = re.compile(r"[?!]?+([A-Za-z_][\w.-]*+)")
_PRIORITY = re.compile(r"\.-?\d+\Z")  # of a terminal of Lark: others refer to it without
_DIRECTIVES = frozenset(["%ignore", "%import", "%llguidance"])  # others bring a schema or another language with them


def check_pattern(text: str, where: str) -> int:
    """How many pieces a regular expression has. Raises: InvalidRow for one that is too long, too deep or too large."""
    if len(text) > PATTERN_CHARS_MAX:
        raise too_large(f"{where} is a pattern of {len(text):,} characters, of {PATTERN_CHARS_MAX:,} at most")
    stack = [_Group()]
    at = 0
    while at < len(text):
        char = text[at]
        group = stack[-1]
        if char == "\\":
            found = _ESCAPE.match(text, at)
            group.add(1)
        elif char == "[":
            found = _CLASS.match(text, at)
            if found is None:
                raise InvalidRow(f"{where} has a set of letters, at character {at:,}, that is not closed", code=BAD)
            group.add(1)
        elif char == "{" and (found := _COUNT.match(text, at)) is not None and any(found.groups()):
            group.repeat(_largest(found.groups()), where)
        elif char == "(":
            found = None
            stack.append(_Group())
            if len(stack) > GROUP_DEPTH_MAX:
                raise too_large(f"{where} nests groups deeper than {GROUP_DEPTH_MAX}")
        elif char == ")" and len(stack) > 1:
            found = None
            inner = stack.pop()
            stack[-1].add(max(1, inner.size), inner.repeats)
        else:
            found = None
            if char not in "*+?|^$":
                group.add(1)
        at = at + 1 if found is None else found.end()
    return sum(group.size for group in stack)


class _Group(Struct):
    """A group that is being read: its pieces so far, and the last of them, which a count would repeat."""

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
    """A piece of a rule: what it refers to, and how often it is repeated there."""

    name: str = ""
    inner: list[_Atom] = []
    count: int = 1


def check_grammar(text: str, where: str) -> int:
    """How many characters a grammar has, EBNF or Lark. Raises: InvalidRow for one that repeats too much."""
    if len(text) > GRAMMAR_CHARS_MAX:
        raise too_large(f"{where} is a grammar of {len(text):,} characters, of {GRAMMAR_CHARS_MAX:,} at most")
    for reading in _READINGS if "[" in text else _READINGS[:1]:
        _check_reading(_rules(text, reading, where), where)
    return len(text)


def _check_reading(rules: dict[str, list[_Atom]], where: str) -> None:
    known: dict[str, int] = {}
    for name in rules:
        if _repeats(rules, name, known, (), where) > GRAMMAR_REPEATS_MAX:
            raise too_large(
                f"{where}: the rule {name!r} repeats what it refers to {known[name]:,} times, and "
                f"{GRAMMAR_REPEATS_MAX:,} is the most"
            )
    written = sum(_size(atoms) for atoms in {id(atoms): atoms for atoms in rules.values()}.values())
    if written > GRAMMAR_SIZE_MAX:
        raise too_large(f"{where} repeats its pieces {written:,} times in all, and {GRAMMAR_SIZE_MAX:,} is the most")


def _size(atoms: list[_Atom]) -> int:
    """The pieces of a rule, each as often as it is repeated there."""
    return sum(atom.count * max(1, _size(atom.inner)) for atom in atoms)


def _rules(text: str, reading: re.Pattern[str], where: str) -> dict[str, list[_Atom]]:
    rules: dict[str, list[_Atom]] = {}
    stack: list[list[_Atom]] = [[]]
    for found in reading.finditer(text):
        kind, token = found.lastgroup, found.group()
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
                f"{where} has the directive {token}, which is not taken: put a schema into `json`, a pattern into "
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
    """Where the atoms of a rule go, by the name that it is defined by."""
    found = _RULE_NAME.match(token)
    assert found is not None, "a rule begins with its name"
    name = found[1]
    atoms = rules.setdefault(name, [])
    if (plain := _PRIORITY.sub("", name)) != name:
        rules.setdefault(plain, []).append(_Atom(name))
    return atoms


def _repeats(
    rules: dict[str, list[_Atom]], name: str, known: dict[str, int], above: tuple[str, ...], where: str
) -> int:
    """The longest product of counts of a rule. One that refers to itself counts once."""
    if name in known:
        return known[name]
    if len(above) > RULE_DEPTH_MAX:
        raise too_large(f"{where} has rules that refer to rules more than {RULE_DEPTH_MAX} deep")
    if name in above:
        return 1

    def of(atoms: list[_Atom]) -> int:
        most = 1
        for atom in atoms:
            inner = of(atom.inner)
            if atom.name in rules:
                inner = max(inner, _repeats(rules, atom.name, known, (*above, name), where))
            most = max(most, inner * atom.count)
        return most

    known[name] = of(rules[name])
    return known[name]


def _largest(counts: tuple[str | None, ...] | list[str]) -> int:
    """Of the numbers of `{n,m}`; one too long to be meant is as large as can be written in `COUNT_DIGITS_MAX`."""
    numbers = [int(each) if len(each) <= COUNT_DIGITS_MAX else 10**COUNT_DIGITS_MAX for each in counts if each]
    return max(numbers, default=1)


def too_large(text: str) -> InvalidRow:
    return InvalidRow(text, code=CODE)
