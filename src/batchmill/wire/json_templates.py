"""JSON bodies with placeholders: compiled once, filled for every row.

What a caller gives is data: inside of a JSON string it is escaped, elsewhere it must be a JSON value of its own, and
placeholders that happen to stand in it are text. The values of a template's own author stand as they were written.
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
BRACES_MAX = 32  # within one another, in a default
TO_STRING = ".toString()"  # at the end of a name: the text of the parameter, escaped for a JSON string

_START = re.compile(r"(\$?)\$\{(parameters|credential)\.")


class Hole(Struct, frozen=True):
    """One placeholder."""

    scope: str  # PARAMETERS or CREDENTIAL
    name: str
    default: str | None  # what stands there when nothing fills it; may hold placeholders itself
    text: str  # as it was written


def split(text: str) -> list[str | Hole]:
    """The literal pieces and the placeholders of a text, in their order. `$${parameters.x}` is literal, less a `$`."""
    pieces: list[str | Hole] = []
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
        pieces.append(Hole(start[2], name, default if mark else None, text[start.start() : at]))
    literal += text[at:]
    return [*pieces, literal] if literal else pieces


def holes(text: str) -> Iterator[Hole]:
    """Every placeholder of a text, those within defaults too."""
    for piece in split(text):
        if isinstance(piece, Hole):
            yield piece
            yield from holes(piece.default or "")


def _end_of(text: str, at: int) -> int:
    """Where the brace stands that closes a placeholder. Braces of a default come in pairs, and not too deep.

    However many placeholders are never closed, each is followed only so far.
    """
    first = text.find("}", at)
    depth = 0
    for found in _BRACES.finditer(text, at):
        if found[0] == "{":
            depth += 1
            if depth > BRACES_MAX:
                break
        elif depth == 0:
            return found.start()
        else:
            depth -= 1
    return first


_BRACES = re.compile(r"[{}]")


DEPTH_MAX = 32  # parameters that refer to one another
FILLS_MAX = 10_000  # places that one template comes to when they are followed
BYTES_MAX = 4 * 1024 * 1024  # of everything that its author wrote
BODY_BYTES_MAX = 64 * 1024 * 1024  # of a body that was filled, however often a value stands in it

_BARE, _QUOTED, _STRING = 0, 1, 2  # where a value goes: outside of strings, into one, in place of a whole one
_WORD = re.compile(r"\w+", re.ASCII)
_MARKS = re.compile(r'\\.|"', re.DOTALL)

_raw = msgspec.json.Decoder(Raw)


class _Place:
    """Where a value goes."""

    __slots__ = ("is_inner", "name", "own", "style", "text")

    def __init__(self, name: str, style: int, text: bytes) -> None:
        self.name = name
        self.style = style
        self.text = text  # what stands there as long as nothing fills it
        self.own: list[Any] | None = None  # what its author has for it; None: nothing
        self.is_inner = False  # `own` is JSON that goes into a string: filled first, then escaped


class _Loop:
    """Where parameters come back to one that they began with."""

    __slots__ = ("names",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names


class Filling:
    """How one body is filled, and what was found missing."""

    __slots__ = ("is_broken", "is_typed", "left", "missing", "raw")

    def __init__(self, raw: Collection[str] = (), is_typed: bool = False) -> None:
        self.raw = raw  # names whose values go in as they are
        self.is_typed = is_typed  # a str is a JSON string wherever it stands; else it may be the text of other JSON
        self.left = BODY_BYTES_MAX
        self.missing: list[str] = []
        self.is_broken = False  # a value stands where only JSON can, and is none


class JsonTemplate:
    """A template, and the parameters of its author."""

    def __init__(self, text: str, own: Mapping[str, str]) -> None:
        """Raises: InvalidInput, `template_too_large` when following its parameters does not come to an end soon, or
        `invalid_template` where a backslash would swallow the beginning of a value."""
        self._nodes = _Compiler(own).compile(text, False, ())

    def fill(self, values: Mapping[str, Any], filling: Filling) -> bytes:
        """The body with the values of one call; what is missing stays as it is written.

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
    """A JSON object or array, or lines that are."""
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
            data = _given(node, value, filling)
            out.append(data)
            filling.left -= len(data)
            if filling.left < 0:
                raise InvalidInput(
                    f"the body of a call comes to more than {BODY_BYTES_MAX:,} bytes once its template is filled: "
                    "make its parameters shorter, or name them less often",
                    code="payload_too_large",
                )
        elif node.own is None:
            filling.missing.append(node.name)
            out.append(node.text)
        elif node.is_inner:
            inner: list[bytes] = []
            _write(node.own, values, filling, inner)
            out.append(_escape(b"".join(inner).decode()))
        else:
            _write(node.own, values, filling, out)


def loop_message(names: tuple[str, ...]) -> str:
    """What is said of parameters that refer to themselves. Source: Apache's StringSubstitutor."""
    paths = [f"parameters.{name}" for name in names]
    return f"Infinite loop in property interpolation of {paths[-1]}: {'->'.join(paths)}"


def _given(place: _Place, value: Any, filling: Filling) -> bytes:
    if place.style == _BARE:
        return _bare(place.name, value, filling)
    text = value if value.__class__ is str else encode(value).decode()
    inner = text.encode() if place.name in filling.raw else _escape(text)
    return inner if place.style == _QUOTED else b'"%s"' % inner


def _bare(name: str, value: Any, filling: Filling) -> bytes:
    if value.__class__ is not str or filling.is_typed:
        return encode(value)
    data = value.encode()
    if name not in filling.raw and not is_json(data):
        filling.is_broken = True  # whatever it does to the text around it
    return data


def _escape(text: str) -> bytes:
    return encode(text)[1:-1]


class _Compiler:
    """Follows the placeholders of a template into the values of its author, within limits."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = own
        self._fills = 0
        self._bytes = 0

    def compile(self, text: str, is_quoted: bool, path: tuple[str, ...], is_plain: bool = False) -> list[Any]:
        """`is_plain`: text that is to be escaped wherever it stands."""
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
                nodes.append(self._place(piece, _STRING, path))
            else:
                nodes.append(self._place(piece, _QUOTED if is_quoted or is_plain else _BARE, path))
        return _joined(nodes)

    def _place(self, hole: Hole, style: int, path: tuple[str, ...]) -> Any:
        name, is_text = hole.name, False
        if name.endswith(TO_STRING):
            name, is_text, style = name.removesuffix(TO_STRING), True, _QUOTED
        place = _Place(name, style, hole.text.encode())
        written = self._own.get(name)
        if written is None:
            written = hole.default
        elif name in path:
            place.own = [_Loop((*path[path.index(name) :], name))]
            return place
        if written is None:
            return place
        inside = (*path, name)
        if style == _BARE:
            place.own = self.compile(written, False, inside)
        elif style == _QUOTED:
            self._into_string(place, written, inside, is_text)
        elif name in self._own:
            place.own = [b'"', self._place(hole, _QUOTED, path), b'"']
        else:
            place.own = [b"null"]
        return place

    def _into_string(self, place: _Place, written: str, path: tuple[str, ...], is_text: bool) -> None:
        """What the author wrote goes into a string as it is, if it can; what cannot is escaped."""
        if not is_text and is_json(b'"%s"' % _sample(written, True)):
            place.own = self.compile(written, True, path)
        elif _is_container(_sample(written, False)):
            place.own, place.is_inner = self.compile(written, False, path), True
        else:
            place.own = self.compile(written, True, path, is_plain=True)

    def _count(self, size: int, path: tuple[str, ...]) -> None:
        self._fills += 1
        self._bytes += size
        if self._fills > FILLS_MAX or self._bytes > BYTES_MAX or len(path) > DEPTH_MAX:
            raise InvalidInput(
                f"the parameters of a template refer to one another more than {FILLS_MAX} times, over more than "
                f"{DEPTH_MAX} steps or with more than {BYTES_MAX} bytes",
                code="template_too_large",
            )


def _joined(nodes: list[Any]) -> list[Any]:
    """The nodes, with neighbours that are text made one."""
    joined: list[Any] = []
    for is_text, group in groupby(nodes, lambda node: node.__class__ is bytes):
        same = list(group)
        joined += [b"".join(same)] if is_text else same
    return joined


def _refuse_half_escape(piece: str, *, has_next: bool) -> None:
    """A backslash before a placeholder would join with whatever a caller's value begins with."""
    if has_next and (len(piece) - len(piece.rstrip("\\"))) % 2:
        raise InvalidInput(
            "a placeholder stands behind a backslash: write two, or none, before ${parameters.…}",
            code="invalid_template",
        )


def _sample(text: str, is_quoted: bool) -> bytes:
    """A text with something in each of its places that can stand there."""
    sample: list[str] = []
    for piece in split(text):
        if isinstance(piece, str):
            is_quoted = _ends_quoted(piece, is_quoted)
            sample.append(piece)
        else:
            sample.append("x" if is_quoted else "0")
    return "".join(sample).encode()


def _is_nullable(pieces: list[str | Hole], index: int) -> bool:
    """`"${parameters.k:-null}"`: a whole string that becomes null when nothing fills it."""
    hole = pieces[index]
    if not isinstance(hole, Hole) or hole.default != "null" or not _WORD.fullmatch(hole.name):
        return False
    before = pieces[index - 1] if index else ""
    after = pieces[index + 1] if index + 1 < len(pieces) else ""
    is_opened = isinstance(before, str) and before.endswith('"') and not before.endswith('\\"')
    return is_opened and isinstance(after, str) and after.startswith('"')


def _ends_quoted(text: str, is_quoted: bool) -> bool:
    """Whether the end of a piece of JSON stands inside a string, given how its beginning does."""
    for mark in _MARKS.finditer(text):
        if mark[0] == '"':
            is_quoted = not is_quoted
    return is_quoted
