"""Run callers' searches and `filter_path` in a child process.

Only the child process parses what a caller wrote. Source: OpenSearch's common REST parameters.
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


def apply_filter_path(reply: Any, expression: str) -> Any:
    """Return `reply` with only the members that the paths name, without those named by paths that begin with `-`.

    `*` matches any part of a name, `**` any number of names; paths also apply inside lists. An empty result is `{}`.
    """
    paths = [path.strip() for path in expression.split(",") if path.strip()][:PATHS_MAX]
    included = [tuple(path.split(".")) for path in paths if not path.startswith("-")]
    excluded = [tuple(path[1:].split(".")) for path in paths if path.startswith("-")]
    if included:
        reply = _include(reply, included)
    if excluded and reply is not None:
        reply = _exclude(reply, excluded)
    return {} if reply is None else reply


def _steps(name: str, paths: list[_Path]) -> tuple[bool, list[_Path]]:
    """Return whether a path ends at this member, and the rest of the paths that continue inside it."""
    ends, rest = False, []
    for path in paths:
        if path[0] == ANY_DEPTH:
            rest.append(path)
            path = path[1:]
            if not path:
                ends = True
                continue
        if _is_match(path[0], name):
            if len(path) == 1:
                ends = True
            else:
                rest.append(path[1:])
    return ends, list(dict.fromkeys(rest))  # several `**` lead to the same rest


def _is_match(pattern: str, name: str) -> bool:
    """Match a pattern with stars in one pass, in time of at most its length times the name's."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    if not name.startswith(first):
        return False
    at = len(first)
    for part in middle:
        start = name.find(part, at)
        if start < 0:
            return False
        at = start + len(part)
    return len(name) - at >= len(last) and name.endswith(last)


def _include(value: Any, paths: list[_Path]) -> Any:
    """Return the parts of `value` that the paths name; None if there are none."""
    if isinstance(value, list):
        items = [part for each in value if (part := _include(each, paths)) is not None]
        return items or None
    if not isinstance(value, dict):
        return None
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        part = each if ends else _include(each, rest) if rest else None
        if ends or part is not None:
            members[name] = part
    return members or None


def _exclude(value: Any, paths: list[_Path]) -> Any:
    if isinstance(value, list):
        return [_exclude(each, paths) for each in value]
    if not isinstance(value, dict):
        return value
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        if not ends:
            members[name] = _exclude(each, rest) if rest else each
    return members


MODULE = "batchmill.dialects.ml_commons.programs"
BOUNDS = ResourceLimits()
DOCUMENTS_BYTES_MAX = 32 * 1024 * 1024  # limit of the documents of one search
PIECE_BYTES = 256 * 1024  # of documents encoded before other tasks run

Progress = Callable[[float], None]


class Shape(Struct, frozen=True):
    """The form of a reply."""

    filter_path: str = ""
    is_pretty: bool = False


class _Order(Struct, frozen=True):
    value: Raw
    shape: Shape


class ShapedReply(Response):
    """A reply that a child process writes when it is sent."""

    def __init__(self, programs: Programs, project: str, value: bytes, shape: Shape, status: int) -> None:
        super().__init__(None, status)
        self._programs, self._project, self._value, self._shape = programs, project, value, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: TooComplex, RateLimited, before anything is sent."""
        order = msgspec.json.encode(_Order(Raw(self._value), self._shape))
        data = await self._programs.run(
            f"{MODULE}:write", order, who=self._project, work="filter_path", program=self._shape.filter_path.encode(),
            bounds=BOUNDS,
        )  # fmt: skip
        await Response(data, self.status_code, media_type="application/json")(scope, receive, send)


async def run_search(
    programs: Programs, project: str, documents: Iterable[Document], body: bytes, *, index: str, shape: Shape
) -> bytes:
    """Run a search in a child process and return its reply as JSON. Raises: InvalidInput, TooComplex, RateLimited."""
    encoded, total, since = [], 0, 0
    for document in documents:
        encoded.append(msgspec.json.encode(document))
        total, since = total + len(encoded[-1]), since + len(encoded[-1])
        if total > DOCUMENTS_BYTES_MAX:
            raise TooComplex(
                f"there is more than {DOCUMENTS_BYTES_MAX // 2**20} MiB to search: delete what you no longer need"
            )
        if since > PIECE_BYTES:
            since = 0
            await asyncio.sleep(0)
    order = b"[[%b],%b]" % (b",".join(encoded), msgspec.json.encode((body, index, shape)))
    return await programs.run(f"{MODULE}:search", order, who=project, work="the search", program=body, bounds=BOUNDS)


# -- in the child -----------------------------------------------------------------------------------------------------


def search(order: bytes, progress: Progress) -> bytes:
    documents, (body, index, shape) = msgspec.json.decode(order, type=tuple[list[Document], tuple[bytes, str, Shape]])
    query = parse_object(body) if body else {}
    return write_shaped(search_documents(documents, query, index=index), shape)


def write(order: bytes, progress: Progress) -> bytes:
    reply = msgspec.json.decode(order, type=_Order)
    return write_shaped(msgspec.json.decode(reply.value), reply.shape)


def write_shaped(value: Any, shape: Shape) -> bytes:
    data = msgspec.json.encode(apply_filter_path(value, shape.filter_path) if shape.filter_path else value)
    return msgspec.json.format(data, indent=2) + b"\n" if shape.is_pretty else data
