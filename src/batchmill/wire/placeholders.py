"""Text with `${parameters.name}` and `${credential.name}` in it, taken apart.

Knows neither what fills the placeholders nor what the text is for: JSON, a URL, a header. Source: ML Commons, which
reads them with Apache's StringSubstitutor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

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
