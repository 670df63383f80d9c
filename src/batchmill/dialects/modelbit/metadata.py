"""What is deployed, and under which addresses: the metadata that Modelbit's client reads before it calls."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.server.auth import base_of
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.server.replies import SCHEMA
from batchmill.services.functions.names import MAIN, RESERVED_NAMES
from batchmill.services.services import Services
from batchmill.types import Interface, Scope, Tensor

if TYPE_CHECKING:
    from batchmill.services.functions.calls import VersionTarget


PREFIX = "/:5000"
SLASH = "~"  # for the "/" of a branch
# What an operation's name ends with -> its path.
PATHS = {
    "": "/v1/{deployment}/{version}",
    "OnBranch": "/v1/{deployment}/{branch}/{version}",
    "Prefixed": PREFIX + "/v1/{deployment}/{version}",
    "OnBranchPrefixed": PREFIX + "/v1/{deployment}/{branch}/{version}",
}


def is_ours(path: dict[str, str]) -> bool:
    """Its first word means nothing in another API."""
    return path["deployment"] not in RESERVED_NAMES


def is_certain(url: str) -> bool:
    """Nobody else has such paths."""
    return url.startswith(PREFIX)


def branch_of(path: dict[str, str]) -> str | None:
    """None: the path names none."""
    branch = path.get("branch")
    return None if branch is None else branch.replace(SLASH, "/")


# Datatype -> what Modelbit calls it, its JSON schema, a value of it.
_TEXT = ("str", {"type": "string"}, "text")
_WORDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "BOOL": ("bool", {"type": "boolean"}, True),
    "STRING": _TEXT,
    "BYTES": _TEXT,
    "FP16": ("float", {"type": "number"}, 0.5),
    "FP32": ("float", {"type": "number"}, 0.5),
    "FP64": ("float", {"type": "number"}, 0.5),
    "BF16": ("float", {"type": "number"}, 0.5),
}
_WHOLE: tuple[str, dict[str, Any], Any] = ("int", {"type": "integer"}, 1)
_ANY: tuple[str, dict[str, Any], Any] = ("any", {}, 1)


class Argument(Struct, frozen=True):
    """`type` is a hint: arguments are neither checked against it nor changed."""

    name: str
    type: str
    required: bool
    example: Any


class Deployment(Struct, frozen=True):
    deployment: str
    branch: str
    version: int
    summary: str
    arguments: list[Argument]
    dataframe_mode: bool
    streams: bool
    url: str
    curl: str
    openapi: dict[str, Any]


class DeploymentHandlers:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                f"getDeployment{suffix}", "GET", path, "What a deployment takes", Scope.READ, self.show,
                reply=Content("application/json", {"type": "object"}), errors=(404,), claims=is_ours,
            )
            for suffix, path in PATHS.items()
        ]  # fmt: skip

    async def show(self, call: Call) -> Response:
        path = call.path
        target = self._functions.find(call.caller, path["deployment"], branch_of(path), path["version"])
        return json_reply(describe(target, base_of(call.request), path["version"]))


def describe(target: VersionTarget, base: str, version: str) -> Deployment:
    """`version` as it was asked for: `latest`, a number, an alias."""
    interface = target.interface
    place = f"/v1/{target.name}/{version}"
    if target.branch != MAIN and (version == "latest" or version.isdigit()):
        place = f"/v1/{target.name}/{target.branch.replace('/', SLASH)}/{version}"
    body = {"data": [[1, *_example_row(interface)]]}
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    curl = f"curl -s -XPOST {shlex.quote(base + place)} -d {text}"
    return Deployment(
        target.name,
        target.branch,
        target.number,
        interface.summary,
        [Argument(each.name, type_of(each), each.required, example_of(each)) for each in interface.inputs],
        interface.calls == "frame",
        interface.streams,
        base + place,
        curl,
        _document(target, base, place, body),
    )


def type_of(tensor: Tensor) -> str:
    word = _words(tensor)[0]
    return word if tensor.shape == [1] else f"list[{word}]" if len(tensor.shape) == 1 else "list"


def example_of(tensor: Tensor) -> Any:
    """The one that the function's code gives, or some value of its type."""
    if tensor.example is not None:
        return tensor.example
    value = _words(tensor)[2]
    if tensor.shape != [1]:
        for size in reversed(tensor.shape):
            value = [value] * (2 if size < 0 else min(size, 4))
    return value


def _words(tensor: Tensor) -> tuple[str, dict[str, Any], Any]:
    if tensor.datatype is None:
        return _ANY
    return _WORDS.get(tensor.datatype, _WHOLE)


def _schema_of(tensor: Tensor) -> dict[str, Any]:
    schema_of_one = _words(tensor)[1]
    if tensor.shape == [1]:
        return schema_of_one
    found = schema_of_one
    for _ in tensor.shape:
        found = {"type": "array", "items": found}
    return found


def _example_row(interface: Interface) -> list[Any]:
    """The arguments behind an id: a data-frame function, and one that takes a dict, has them in an object."""
    values = {each.name: example_of(each) for each in interface.inputs if each.required}
    if interface.takes != "arguments" or (interface.calls == "frame" and len(values) != 1):
        return [values]
    return list(values.values())


def _document(target: VersionTarget, base: str, place: str, body: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI: one path, as precise as the function's own hints."""
    inputs = target.interface.inputs
    named = {each.name: _schema_of(each) for each in inputs}
    required = [each.name for each in inputs if each.required]
    single: list[dict[str, Any]] = [{"type": "object", "properties": named, "required": required}]
    if target.interface.takes == "arguments":
        single += [_schema_of(inputs[0])] if len(inputs) == 1 else [{"type": "array"}]
    row = {"type": "array", "prefixItems": [{"title": "id"}], "minItems": 1}
    if target.interface.takes == "arguments" and target.interface.calls != "frame":
        row["prefixItems"] = [{"title": "id"}, *({"title": name, **found} for name, found in named.items())]
    asked = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"type": "array", "items": row}, *single]}},
    }
    answered = {"type": "object", "required": ["data"], "properties": {"data": {}}}
    operation = {
        "operationId": target.name,
        "summary": target.interface.summary or f"Call {target.name}",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": asked, "example": body}},
        },
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": answered}}},
            "400": {"description": "Error", "content": {"application/json": {"schema": SCHEMA}}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": target.name, "version": f"{target.branch}/{target.version}"},
        "servers": [{"url": base}],
        "paths": {place: {"post": operation}},
    }
