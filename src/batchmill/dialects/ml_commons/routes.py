"""How the operations of this API are described: what all of them have in common is said once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from batchmill.dialects.ml_commons.requests import OBJECT, Common, Search
from batchmill.server.operations import Call, Operation
from batchmill.types import Scope

Handler = Callable[[Call], Awaitable[Response]]
MISSING, TAKEN = 404, 409


def operation(
    name: str, route: str, summary: str, scope: Scope, handler: Handler, *,
    query: type[Common] = Common, body: str = "", errors: tuple[int, ...] = (MISSING,), **more: Any,
) -> Operation:  # fmt: skip
    """One operation; a slash may stand at the end of its path.

    Args:
        route: "METHOD PATH".
        body: "required" or "optional" for a JSON object; empty for none.
        more: other fields of an Operation.
    """
    method, path = route.split()
    return Operation(
        name, method, path, summary, scope, handler,
        query=query, body=OBJECT if body else None, body_is_optional=body == "optional", reply=OBJECT, errors=errors,
        last_slash_is_optional=path != "/", **more,
    )  # fmt: skip


def searches(name: str, path: str, summary: str, handler: Handler) -> list[Operation]:
    """A search, which clients send with either method; it takes a body in both."""
    return [
        operation(
            f"{name}{suffix}", f"{method} {path}", summary, Scope.READ, handler,
            query=Search, body="optional", errors=(),
        )
        for method, suffix in (("GET", ""), ("POST", "ByPost"))
    ]  # fmt: skip
