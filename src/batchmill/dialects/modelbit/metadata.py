"""The metadata of deployments and their URLs, which Modelbit's client reads before it calls."""

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
SLASH = "~"  # replaces the "/" in a branch
# Suffix of an operation's name -> its path.
PATHS = {
    "": "/v1/{deployment}/{version}",
    "OnBranch": "/v1/{deployment}/{branch}/{version}",
    "Prefixed": PREFIX + "/v1/{deployment}/{version}",
    "OnBranchPrefixed": PREFIX + "/v1/{deployment}/{branch}/{version}",
}


def is_ours(path: dict[str, str]) -> bool:
    """True if the first segment of the path is not reserved by another API."""
    return path["deployment"] not in RESERVED_NAMES


def is_certain(url: str) -> bool:
    """True if only this API has such a path."""
    return url.startswith(PREFIX)


def branch_of(path: dict[str, str]) -> str | None:
    """Return the branch of a path; None if it has none."""
    branch = path.get("branch")
    return None if branch is None else branch.replace(SLASH, "/")


# Datatype -> Modelbit's name, the JSON schema, an example value.
_TEXT = ("str", {"type": "string"}, "text")
_TYPES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "BOOL": ("bool", {"type": "boolean"}, True),
    "STRING": _TEXT,
    "BYTES": _TEXT,
    "FP16": ("float", {"type": "number"}, 0.5),
    "FP32": ("float", {"type": "number"}, 0.5),
    "FP64": ("float", {"type": "number"}, 0.5),
    "BF16": ("float", {"type": "number"}, 0.5),
}
_INT: tuple[str, dict[str, Any], Any] = ("int", {"type": "integer"}, 1)
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
                f"getDeployment{suffix}", "GET", path, "Show a deployment", Scope.READ, self.show,
                reply=Content("application/json", {"type": "object"}), errors=(404,), claims=is_ours,
            )
            for suffix, path in PATHS.items()
        ]  # fmt: skip

    async def show(self, call: Call) -> Response:
        path = call.path
        target = self._functions.find(call.caller, path["deployment"], branch_of(path), path["version"])
        return json_reply(describe(target, base_of(call.request), path["version"]))


def describe(target: VersionTarget, base: str, version: str) -> Deployment:
    """Describe a deployment. `version` is the requested one: `latest`, a number or an alias."""
    interface = target.interface
    path = f"/v1/{target.name}/{version}"
    if target.branch != MAIN and (version == "latest" or version.isdigit()):
        path = f"/v1/{target.name}/{target.branch.replace('/', SLASH)}/{version}"
    body = {"data": [[1, *_example_row(interface)]]}
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    curl = f"curl -s -XPOST {shlex.quote(base + path)} -d {text}"
    return Deployment(
        target.name,
        target.branch,
        target.number,
        interface.summary,
        [Argument(each.name, type_of(each), each.required, example_of(each)) for each in interface.inputs],
        interface.calls == "frame",
        interface.streams,
        base + path,
        curl,
        _document(target, base, path, body),
    )


def type_of(tensor: Tensor) -> str:
    word = _type_row(tensor)[0]
    return word if tensor.shape == [1] else f"list[{word}]" if len(tensor.shape) == 1 else "list"


def example_of(tensor: Tensor) -> Any:
    """Return the example in the function's code, or a value of the type."""
    if tensor.example is not None:
        return tensor.example
    value = _type_row(tensor)[2]
    if tensor.shape != [1]:
        for size in reversed(tensor.shape):
            value = [value] * (2 if size < 0 else min(size, 4))
    return value


def _type_row(tensor: Tensor) -> tuple[str, dict[str, Any], Any]:
    if tensor.datatype is None:
        return _ANY
    return _TYPES.get(tensor.datatype, _INT)


def _schema_of(tensor: Tensor) -> dict[str, Any]:
    schema_of_one = _type_row(tensor)[1]
    if tensor.shape == [1]:
        return schema_of_one
    schema = schema_of_one
    for _ in tensor.shape:
        schema = {"type": "array", "items": schema}
    return schema


def _example_row(interface: Interface) -> list[Any]:
    """Return example arguments after the id. Functions of a data frame or a dict have them in one object."""
    values = {each.name: example_of(each) for each in interface.inputs if each.required}
    if interface.takes != "arguments" or (interface.calls == "frame" and len(values) != 1):
        return [values]
    return list(values.values())


def _document(target: VersionTarget, base: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI document with one path, as precise as the function's type hints."""
    inputs = target.interface.inputs
    schemas = {each.name: _schema_of(each) for each in inputs}
    required = [each.name for each in inputs if each.required]
    single: list[dict[str, Any]] = [{"type": "object", "properties": schemas, "required": required}]
    if target.interface.takes == "arguments":
        single += [_schema_of(inputs[0])] if len(inputs) == 1 else [{"type": "array"}]
    row = {"type": "array", "prefixItems": [{"title": "id"}], "minItems": 1}
    if target.interface.takes == "arguments" and target.interface.calls != "frame":
        row["prefixItems"] = [{"title": "id"}, *({"title": name, **schema} for name, schema in schemas.items())]
    request = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"type": "array", "items": row}, *single]}},
    }
    reply = {"type": "object", "required": ["data"], "properties": {"data": {}}}
    operation = {
        "operationId": target.name,
        "summary": target.interface.summary or f"Call {target.name}",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request, "example": body}},
        },
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": reply}}},
            "400": {"description": "Error", "content": {"application/json": {"schema": SCHEMA}}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": target.name, "version": f"{target.branch}/{target.version}"},
        "servers": [{"url": base}],
        "paths": {path: {"post": operation}},
    }
