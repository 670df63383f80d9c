"""What a caller's words make of many documents or of a long reply: searches and `filter_path`, in a child process.

The server reads nothing of what a caller wrote before the child does. Source: OpenSearch's common REST parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.children.bounds import ResourceLimits
from batchmill.children.programs import Programs
from batchmill.errors import TooComplex
from batchmill.server.bodies import parse_object
from batchmill.services.documents.search import Document
from batchmill.services.documents.search import search as search_documents

PATHS_MAX = 100
ANY_DEPTH = "**"
_Path = tuple[str, ...]


def filtered(reply: Any, expression: str) -> Any:
    """`reply` with what the paths name, or without what those that begin with `-` name.

    `*` stands for any part of a name, `**` for any number of names; lists are looked into. Nothing left is `{}`.
    """
    paths = [path.strip() for path in expression.split(",") if path.strip()][:PATHS_MAX]
    kept = [tuple(path.split(".")) for path in paths if not path.startswith("-")]
    dropped = [tuple(path[1:].split(".")) for path in paths if path.startswith("-")]
    if kept:
        reply = _keep(reply, kept)
    if dropped and reply is not None:
        reply = _drop(reply, dropped)
    return {} if reply is None else reply


def _steps(name: str, paths: list[_Path]) -> tuple[bool, list[_Path]]:
    """Whether some path ends at this member, and what is left of the others within it."""
    ends, rest = False, []
    for path in paths:
        if path[0] == ANY_DEPTH:
            rest.append(path)
            path = path[1:]
            if not path:
                ends = True
                continue
        if _fits(path[0], name):
            if len(path) == 1:
                ends = True
            else:
                rest.append(path[1:])
    return ends, list(dict.fromkeys(rest))  # several `**` come to the same in many ways


def _fits(pattern: str, name: str) -> bool:
    """In one pass: an expression with many stars costs no more than its length times the name's."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    if not name.startswith(first):
        return False
    at = len(first)
    for part in middle:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(last) and name.endswith(last)


def _keep(value: Any, paths: list[_Path]) -> Any:
    """What the paths name of `value`; None: nothing."""
    if isinstance(value, list):
        found = [kept for each in value if (kept := _keep(each, paths)) is not None]
        return found or None
    if not isinstance(value, dict):
        return None
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        kept = each if ends else _keep(each, rest) if rest else None
        if ends or kept is not None:
            members[name] = kept
    return members or None


def _drop(value: Any, paths: list[_Path]) -> Any:
    if isinstance(value, list):
        return [_drop(each, paths) for each in value]
    if not isinstance(value, dict):
        return value
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        if not ends:
            members[name] = _drop(each, rest) if rest else each
    return members


MODULE = "batchmill.dialects.ml_commons.programs"
BOUNDS = ResourceLimits()
DOCUMENTS_BYTES_MAX = 32 * 1024 * 1024  # of what one search looks through
PIECE_BYTES = 256 * 1024  # of documents that are written before others have their turn

Progress = Callable[[float], None]


class Shape(Struct, frozen=True):
    """How a reply is to be written."""

    filter_path: str = ""
    is_pretty: bool = False


class _Written(Struct, frozen=True):
    value: Raw
    shape: Shape


class ShapedReply(Response):
    """A reply that is written in a child once somebody is there to send it to."""

    def __init__(self, programs: Programs, project: str, value: bytes, shape: Shape, status: int) -> None:
        super().__init__(None, status)
        self._programs, self._project, self._value, self._shape = programs, project, value, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: TooComplex, RateLimited, before anything is sent."""
        order = msgspec.json.encode(_Written(Raw(self._value), self._shape))
        data = await self._programs.run(
            f"{MODULE}:write", order, who=self._project, work="filter_path", program=self._shape.filter_path.encode(),
            bounds=BOUNDS,
        )  # fmt: skip
        await Response(data, self.status_code, media_type="application/json")(scope, receive, send)


async def found(
    programs: Programs, project: str, documents: Iterable[Document], asked: bytes, *, index: str, shape: Shape
) -> bytes:
    """The reply to a search, as JSON. Raises: InvalidInput, TooComplex, RateLimited."""
    written, total, since = [], 0, 0
    for document in documents:
        written.append(msgspec.json.encode(document))
        total, since = total + len(written[-1]), since + len(written[-1])
        if total > DOCUMENTS_BYTES_MAX:
            raise TooComplex(
                f"there is more than {DOCUMENTS_BYTES_MAX // 2**20} MiB to search: delete what is no longer needed"
            )
        if since > PIECE_BYTES:
            since = 0
            await asyncio.sleep(0)
    order = b"[[%b],%b]" % (b",".join(written), msgspec.json.encode((asked, index, shape)))
    return await programs.run(f"{MODULE}:search", order, who=project, work="the search", program=asked, bounds=BOUNDS)


# -- in the child -----------------------------------------------------------------------------------------------------


def search(order: bytes, progress: Progress) -> bytes:
    documents, (asked, index, shape) = msgspec.json.decode(order, type=tuple[list[Document], tuple[bytes, str, Shape]])
    body = parse_object(asked) if asked else {}
    return write_shaped(search_documents(documents, body, index=index), shape)


def write(order: bytes, progress: Progress) -> bytes:
    asked = msgspec.json.decode(order, type=_Written)
    return write_shaped(msgspec.json.decode(asked.value), asked.shape)


def write_shaped(value: Any, shape: Shape) -> bytes:
    data = msgspec.json.encode(filtered(value, shape.filter_path) if shape.filter_path else value)
    return msgspec.json.format(data, indent=2) + b"\n" if shape.is_pretty else data
