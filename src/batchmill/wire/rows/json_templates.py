"""JSON bodies with placeholders: compiled once, filled for every row.

A caller's values are data. Inside a JSON string they are escaped, elsewhere they must be complete JSON values, and
placeholders inside them are plain text. The values of a template's author are inserted unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import encode, shallow

PARAMETERS, CREDENTIAL = "parameters", "credential"
BRACES_MAX = 32  # nesting of braces in a default
TO_STRING = ".toString()"  # suffix of a name: insert the parameter's text, escaped for a JSON string

_START = re.compile(r"(\$?)\$\{(parameters|credential)\.")


class Placeholder(Struct, frozen=True):
    """One placeholder."""

    scope: str  # PARAMETERS or CREDENTIAL
    name: str
    default: str | None  # used if there is no value; it may hold placeholders itself
    text: str  # the placeholder's source text


def split(text: str) -> list[str | Placeholder]:
    """Split a text into literal pieces and placeholders. `$${parameters.x}` is a literal `${parameters.x}`."""
    pieces: list[str | Placeholder] = []
    literal, at, last = "", 0, text.rfind("}")
    while start := _START.search(text, at):
        literal += text[at : start.start()]
        end = _end_of(text, start.end()) if start.end() <= last and not start[1] else -1
        if end < 0:
            literal += text[start.start() + len(start[1]) : start.end()]
            at = start.end()
            continue
        if literal:
            pieces.append(literal)
        literal, at = "", end + 1
        name, mark, default = text[start.end() : end].partition(":-")
        pieces.append(Placeholder(start[2], name, default if mark else None, text[start.start() : at]))
    literal += text[at:]
    return [*pieces, literal] if literal else pieces


def find_placeholders(text: str) -> Iterator[Placeholder]:
    """Yield every placeholder of a text, including those in defaults."""
    for piece in split(text):
        if isinstance(piece, Placeholder):
            yield piece
            yield from find_placeholders(piece.default or "")


def _end_of(text: str, at: int) -> int:
    """Return where the closing brace of a placeholder is. Braces in a default must be balanced, to a limited depth.

    The search is bounded for each placeholder, even if many are never closed.
    """
    first = text.find("}", at)
    depth = 0
    for brace in _BRACES.finditer(text, at):
        if brace[0] == "{":
            depth += 1
            if depth > BRACES_MAX:
                break
        elif depth == 0:
            return brace.start()
        else:
            depth -= 1
    return first


_BRACES = re.compile(r"[{}]")


DEPTH_MAX = 32  # length of a chain of parameters that refer to one another
FILLS_MAX = 10_000  # placeholders of one template, with those that its parameters bring in
BYTES_MAX = 4 * 1024 * 1024  # of everything that the author wrote
BODY_BYTES_MAX = 64 * 1024 * 1024  # of a filled body

_BARE, _QUOTED, _STRING = 0, 1, 2  # where a value goes: outside of strings, inside a string, replacing a whole string
_WORD = re.compile(r"\w+", re.ASCII)
_MARKS = re.compile(r'\\.|"', re.DOTALL)

_raw = msgspec.json.Decoder(Raw)


class _PlaceholderNode:
    """A compiled placeholder."""

    __slots__ = ("fallback", "is_inner", "name", "style", "text")

    def __init__(self, name: str, style: int, text: bytes) -> None:
        self.name = name
        self.style = style
        self.text = text  # left in the body if there is no value
        self.fallback: list[Any] | None = None  # the author's value, compiled; None: there is none
        self.is_inner = False  # `fallback` is JSON inside a string: it is filled first, then escaped


class _Loop:
    """A chain of parameters that returns to its first one."""

    __slots__ = ("names",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names


class Filling:
    """The options for filling one body, and the names that have no value."""

    __slots__ = ("is_broken", "is_typed", "left", "missing", "raw")

    def __init__(self, raw: Collection[str] = (), is_typed: bool = False) -> None:
        self.raw = raw  # names whose values are inserted unchanged
        self.is_typed = is_typed  # a str always becomes a JSON string; else it may be the text of other JSON
        self.left = BODY_BYTES_MAX
        self.missing: list[str] = []
        self.is_broken = False  # a value that is not JSON was inserted where only JSON is valid


class JsonTemplate:
    """A compiled template with its author's parameters."""

    def __init__(self, text: str, own: Mapping[str, str]) -> None:
        """Args: own: the author's parameters.

        Raises: InvalidInput: `template_too_large` if the parameters refer to one another beyond a limit,
        `invalid_template` if a backslash comes before a placeholder and would escape the beginning of a value.
        """
        self._nodes = _Compiler(own).compile(text, False, ())

    def fill(self, values: Mapping[str, Any], filling: Filling) -> bytes:
        """Fill the body with the values of one call. Placeholders without a value stay in the text.

        Raises: InvalidInput, `placeholder_loop`, `invalid_encoding` for half a character, `nesting_too_deep`,
        `payload_too_large`.
        """
        out: list[bytes] = []
        try:
            _write(self._nodes, values, filling, out)
        except UnicodeEncodeError:
            raise InvalidInput("a parameter holds half of a surrogate pair", code="invalid_encoding") from None
        except RecursionError:
            raise InvalidInput("a parameter nests too deep", code="nesting_too_deep") from None
        return b"".join(out)


def is_payload(data: bytes) -> bool:
    """Whether data is a JSON object or array, or lines of them."""
    if _is_container(data):
        return True
    lines = [line for line in data.splitlines() if line.strip()]
    return len(lines) > 1 and all(map(_is_container, lines))


def _is_container(data: bytes) -> bool:
    return data.lstrip()[:1] in (b"{", b"[") and is_json(data)


def is_json(data: bytes) -> bool:
    try:
        _raw.decode(shallow(data))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _write(nodes: list[Any], values: Mapping[str, Any], filling: Filling, out: list[bytes]) -> None:
    for node in nodes:
        if node.__class__ is bytes:
            out.append(node)
            filling.left -= len(node)
            continue
        if node.__class__ is _Loop:
            raise InvalidInput(loop_message(node.names), code="placeholder_loop")
        value = values.get(node.name)
        if value is not None:
            data = _render_value(node, value, filling)
            out.append(data)
            filling.left -= len(data)
            if filling.left < 0:
                raise InvalidInput(
                    f"the filled body of a call is longer than {BODY_BYTES_MAX:,} bytes: "
                    "shorten its parameters, or use them less often",
                    code="payload_too_large",
                )
        elif node.fallback is None:
            filling.missing.append(node.name)
            out.append(node.text)
        elif node.is_inner:
            inner: list[bytes] = []
            _write(node.fallback, values, filling, inner)
            out.append(_escape(b"".join(inner).decode()))
        else:
            _write(node.fallback, values, filling, out)


def loop_message(names: tuple[str, ...]) -> str:
    """Render the error for parameters that refer to themselves. Source: Apache's StringSubstitutor."""
    paths = [f"parameters.{name}" for name in names]
    return f"Infinite loop in property interpolation of {paths[-1]}: {'->'.join(paths)}"


def _render_value(node: _PlaceholderNode, value: Any, filling: Filling) -> bytes:
    if node.style == _BARE:
        return _render_bare(node.name, value, filling)
    text = value if value.__class__ is str else encode(value).decode()
    inner = text.encode() if node.name in filling.raw else _escape(text)
    return inner if node.style == _QUOTED else b'"%s"' % inner


def _render_bare(name: str, value: Any, filling: Filling) -> bytes:
    if value.__class__ is not str or filling.is_typed:
        return encode(value)
    data = value.encode()
    if name not in filling.raw and not is_json(data):
        filling.is_broken = True
    return data


def _escape(text: str) -> bytes:
    return encode(text)[1:-1]


class _Compiler:
    """Compiles a template, and the author's values for its placeholders, within limits."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self._parameters = own
        self._fills = 0
        self._bytes = 0

    def compile(self, text: str, is_quoted: bool, path: tuple[str, ...], is_plain: bool = False) -> list[Any]:
        """Compile a text. `is_plain`: the text is always escaped for a JSON string."""
        self._count(len(text), path)
        pieces = split(text)
        nodes: list[Any] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, str):
                nodes.append(_escape(piece) if is_plain else piece.encode())
                if not is_plain:
                    is_quoted = _ends_quoted(piece, is_quoted)
                    _refuse_half_escape(piece, has_next=index + 1 < len(pieces))
            elif piece.scope != PARAMETERS:
                nodes.append(_escape(piece.text) if is_plain else piece.text.encode())
            elif is_quoted and not is_plain and _is_nullable(pieces, index):
                nodes[-1] = nodes[-1][:-1]
                pieces[index + 1] = pieces[index + 1][1:]
                is_quoted = False
                nodes.append(self._compile_placeholder(piece, _STRING, path))
            else:
                nodes.append(self._compile_placeholder(piece, _QUOTED if is_quoted or is_plain else _BARE, path))
        return _join_text(nodes)

    def _compile_placeholder(self, placeholder: Placeholder, style: int, path: tuple[str, ...]) -> Any:
        name, is_text = placeholder.name, False
        if name.endswith(TO_STRING):
            name, is_text, style = name.removesuffix(TO_STRING), True, _QUOTED
        node = _PlaceholderNode(name, style, placeholder.text.encode())
        value = self._parameters.get(name)
        if value is None:
            value = placeholder.default
        elif name in path:
            node.fallback = [_Loop((*path[path.index(name) :], name))]
            return node
        if value is None:
            return node
        inside = (*path, name)
        if style == _BARE:
            node.fallback = self.compile(value, False, inside)
        elif style == _QUOTED:
            self._compile_into_string(node, value, inside, is_text)
        elif name in self._parameters:
            node.fallback = [b'"', self._compile_placeholder(placeholder, _QUOTED, path), b'"']
        else:
            node.fallback = [b"null"]
        return node

    def _compile_into_string(self, node: _PlaceholderNode, value: str, path: tuple[str, ...], is_text: bool) -> None:
        """Compile the author's value inside a string: unchanged if that is valid JSON, otherwise escaped."""
        if not is_text and is_json(b'"%s"' % _sample(value, True)):
            node.fallback = self.compile(value, True, path)
        elif _is_container(_sample(value, False)):
            node.fallback, node.is_inner = self.compile(value, False, path), True
        else:
            node.fallback = self.compile(value, True, path, is_plain=True)

    def _count(self, size: int, path: tuple[str, ...]) -> None:
        self._fills += 1
        self._bytes += size
        if self._fills > FILLS_MAX or self._bytes > BYTES_MAX or len(path) > DEPTH_MAX:
            raise InvalidInput(
                f"the parameters of a template refer to one another more than {FILLS_MAX} times, more than "
                f"{DEPTH_MAX} levels deep, or with more than {BYTES_MAX} bytes",
                code="template_too_large",
            )


def _join_text(nodes: list[Any]) -> list[Any]:
    """Join neighbouring text nodes."""
    joined: list[Any] = []
    for is_text, group in groupby(nodes, lambda node: node.__class__ is bytes):
        same = list(group)
        joined += [b"".join(same)] if is_text else same
    return joined


def _refuse_half_escape(piece: str, *, has_next: bool) -> None:
    """Refuse a backslash before a placeholder: it would escape the first character of a caller's value."""
    if has_next and (len(piece) - len(piece.rstrip("\\"))) % 2:
        raise InvalidInput(
            "a placeholder follows a backslash: write two backslashes, or none, before ${parameters.…}",
            code="invalid_template",
        )


def _sample(text: str, is_quoted: bool) -> bytes:
    """Fill each placeholder of a text with a sample value that is valid there."""
    sample: list[str] = []
    for piece in split(text):
        if isinstance(piece, str):
            is_quoted = _ends_quoted(piece, is_quoted)
            sample.append(piece)
        else:
            sample.append("x" if is_quoted else "0")
    return "".join(sample).encode()


def _is_nullable(pieces: list[str | Placeholder], index: int) -> bool:
    """Whether a placeholder is a whole string that becomes null without a value: `"${parameters.k:-null}"`."""
    placeholder = pieces[index]
    if (
        not isinstance(placeholder, Placeholder)
        or placeholder.default != "null"
        or not _WORD.fullmatch(placeholder.name)
    ):
        return False
    before = pieces[index - 1] if index else ""
    after = pieces[index + 1] if index + 1 < len(pieces) else ""
    is_opened = isinstance(before, str) and before.endswith('"') and not before.endswith('\\"')
    return is_opened and isinstance(after, str) and after.startswith('"')


def _ends_quoted(text: str, is_quoted: bool) -> bool:
    """Whether a piece of JSON ends inside a string. `is_quoted`: it begins inside one."""
    for mark in _MARKS.finditer(text):
        if mark[0] == '"':
            is_quoted = not is_quoted
    return is_quoted
