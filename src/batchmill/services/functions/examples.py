"""Shows how to call a deployed function through each public API: curl commands, and an OpenAPI document."""

from __future__ import annotations

import json
import shlex
from typing import Any

from batchmill.services.functions.names import LATEST, MAIN, folder_of
from batchmill.types import Interface, Tensor

MODELBIT, INFERENCE, OPENAI = "modelbit", "open_inference", "openai"
KEY = "$BATCHMILL_API_KEY"
TEXT = "text"
ROWS = 2  # rows in the example of a batch
_EXAMPLES: dict[str, Any] = {"BYTES": TEXT, "STRING": TEXT, "BOOL": True}
_RANGES = {f"{sign}INT{bits}": (bits, sign) for bits in (8, 16, 32, 64) for sign in ("", "U")}


def curl_examples(name: str, branch: str, interface: Interface, url: str) -> dict[str, str]:
    """API -> a curl command that calls the function: with one batch for Modelbit, once for the others."""
    path = f"/v1/{name}/{LATEST}" if branch == MAIN else f"/v1/{name}/{folder_of(branch)}/{LATEST}"
    values = [example_of(tensor) for tensor in interface.inputs if tensor.required]
    rows = [[number + 1, *_row(interface, values)] for number in range(ROWS)]
    model = f"/v2/models/{name}" if branch == MAIN else f"/v2/models/{name}/versions/{folder_of(branch)}~{LATEST}"
    inputs = [_tensor(tensor) for tensor in interface.inputs if tensor.required]
    commands = {MODELBIT: _curl(url + path, {"data": rows}, f"Authorization: {KEY}")}
    if branch == MAIN:
        commands[INFERENCE] = _curl(f"{url}{model}/infer", {"inputs": inputs}, f"Authorization: Bearer {KEY}")
    return commands


def _row(interface: Interface, values: list[Any]) -> list[Any]:
    """The arguments of one row in a Modelbit body."""
    if interface.takes in ("dict", "rows") or interface.calls == "frame":
        return [dict(zip((each.name for each in interface.inputs if each.required), values, strict=True))]
    return values


def _curl(url: str, body: Any, header: str) -> str:
    return f"curl {shlex.quote(url)} -H {json.dumps(header)} -d {shlex.quote(json.dumps(body))}"


def example_of(tensor: Tensor) -> Any:
    """A value that the input accepts: its own example, or a value of its type."""
    if tensor.example is not None:
        is_single = tensor.shape == [1] and isinstance(tensor.example, list) and len(tensor.example) == 1
        return tensor.example[0] if is_single else tensor.example
    value = _EXAMPLES.get(tensor.datatype or "", 1 if "INT" in (tensor.datatype or "INT") else 0.5)
    if tensor.shape == [1]:
        return value
    for size in reversed(tensor.shape):
        value = [value] * (size if size > 0 else 2)
    return value


def _tensor(tensor: Tensor) -> dict[str, Any]:
    value = example_of(tensor)
    shape: list[int] = []
    data = [value]
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        data = _flat(data)
        inner = inner[0] if inner else None
    datatype = "BYTES" if tensor.datatype in (None, "STRING") else tensor.datatype
    return {"name": tensor.name, "shape": shape or [1], "datatype": datatype, "data": data}


def _flat(values: list[Any]) -> list[Any]:
    return [inner for each in values for inner in (each if isinstance(each, list) else [each])]


def openapi(name: str, branch: str, interface: Interface) -> dict[str, Any]:
    """The OpenAPI document of one function: its arguments and results in each API."""
    path = f"/v1/{name}/{LATEST}" if branch == MAIN else f"/v1/{name}/{folder_of(branch)}/{LATEST}"
    paths = {
        path: {"post": _operation(f"call_{name}", interface.summary, _rows_schema(interface), _rows_reply(interface))}
    }
    if branch == MAIN:
        paths[f"/v2/models/{name}/infer"] = {
            "post": _operation(f"infer_{name}", interface.summary, _tensors_schema(interface.inputs, "inputs"),
                               _tensors_schema(interface.outputs or [], "outputs"))
        }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": name, "version": LATEST, "description": interface.summary},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "Authorization"}}},
        "security": [{"key": []}],
    }


def _operation(name: str, summary: str, request: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "What it returned", "content": {"application/json": {"schema": response}}},
            "default": {"description": "Why it did not", "content": {"application/json": {"schema": error}}},
        },
    }


def _rows_schema(interface: Interface) -> dict[str, Any]:
    values = [_schema(tensor) for tensor in interface.inputs]
    named = {
        "type": "object",
        "properties": {tensor.name: schema for tensor, schema in zip(interface.inputs, values, strict=True)},
        "required": [tensor.name for tensor in interface.inputs if tensor.required],
        "additionalProperties": interface.takes_more,
    }
    is_whole = interface.takes in ("dict", "rows") or interface.calls == "frame"
    arguments = [named] if is_whole else values
    row = {"type": "array", "prefixItems": [{"description": "the row's id"}, *arguments], "minItems": 1}
    single = [{"description": "one call"}, named, *(values[:1] if len(values) == 1 else [])]
    data = {"anyOf": [{"type": "array", "items": row, "minItems": 1}, *single]}
    timeout = {"type": "integer", "minimum": 1}
    return {"type": "object", "properties": {"data": data, "timeout_seconds": timeout}, "required": ["data"]}


def _rows_reply(interface: Interface) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if interface.outputs:
        result = {"type": "object", "properties": {each.name: _schema(each) for each in interface.outputs}}
        if len(interface.outputs) == 1 and interface.takes != "dict":
            result = _schema(interface.outputs[0])
    row = {"type": "array", "prefixItems": [{"description": "the row's id"}, result]}
    data = {"anyOf": [{"type": "array", "items": row}, result]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _schema(tensor: Tensor) -> dict[str, Any]:
    """JSON schema of one value. It shows the type hints, which are not enforced on rows."""
    fields: dict[str, Any] = {}
    match tensor.datatype:
        case "BOOL":
            fields = {"type": "boolean"}
        case "BYTES" | "STRING":
            fields = {"type": "string"}
        case "FP16" | "FP32" | "FP64" | "BF16":
            fields = {"type": "number"}
        case str() as kind if kind in _RANGES:
            bits, sign = _RANGES[kind]
            low, high = (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            fields = {"type": "integer", "minimum": low, "maximum": high}
    if tensor.shape != [1]:
        for size in reversed(tensor.shape):
            sizes = {} if size < 0 else {"minItems": size, "maxItems": size}
            fields = {"type": "array", "items": fields, **sizes}
    return fields if tensor.example is None else fields | {"examples": [example_of(tensor)]}


def _tensors_schema(tensors: list[Tensor], key: str) -> dict[str, Any]:
    """JSON schema of a V2 body, with each tensor by its name."""
    schemas = []
    for tensor in tensors:
        datatype = "BYTES" if tensor.datatype == "STRING" else tensor.datatype
        properties = {
            "name": {"const": tensor.name},
            "datatype": {"type": "string"} if datatype is None else {"const": datatype},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array"},
        }
        schemas.append({"type": "object", "properties": properties, "required": list(properties)})
    items = {"anyOf": schemas} if schemas else {"type": "object"}
    properties = {"id": {"type": "string"}, key: {"type": "array", "items": items}}
    return {"type": "object", "properties": properties, "required": [key]}
