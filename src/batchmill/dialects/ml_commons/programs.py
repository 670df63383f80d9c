"""What a caller's words make of many documents or of a long reply, in a child process: searches, `filter_path`.

Nothing of what a caller wrote is read before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.children.bounds import Bounds
from batchmill.children.programs import Programs
from batchmill.dialects.ml_commons.filter_path import filtered
from batchmill.errors import TooComplex
from batchmill.server.bodies import parse_object
from batchmill.services.documents.search import Document
from batchmill.services.documents.search import search as search_documents

MODULE = "batchmill.dialects.ml_commons.programs"
BOUNDS = Bounds()
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
    told = parse_object(asked) if asked else {}
    return write_shaped(search_documents(documents, told, index=index), shape)


def write(order: bytes, progress: Progress) -> bytes:
    asked = msgspec.json.decode(order, type=_Written)
    return write_shaped(msgspec.json.decode(asked.value), asked.shape)


def write_shaped(value: Any, shape: Shape) -> bytes:
    data = msgspec.json.encode(filtered(value, shape.filter_path) if shape.filter_path else value)
    return msgspec.json.format(data, indent=2) + b"\n" if shape.is_pretty else data
