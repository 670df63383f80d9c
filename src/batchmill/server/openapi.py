"""Make the OpenAPI document from the operations and their structs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

import batchmill
from batchmill.server.operations import Content, Dialect, MountedOperation, Operation

REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")
ALWAYS = (400, 429, 500, 503)
WITH_KEY = (401, 403)
WITH_BODY = (408, 413, 415)
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key; also as the bare header value."},
    "basic": {"type": "http", "scheme": "basic", "description": "An API key as the password; any user name."},
}


def document(routes: Sequence[MountedOperation]) -> dict[str, Any]:
    """The document of all operations of a server."""
    ordered = sorted(routes, key=lambda route: (route.operation.path, route.operation.method))
    schemas = _Schemas(route.operation for route in ordered)
    paths: dict[str, Any] = {}
    for route in ordered:
        path = _PARAMETER.sub(r"{\1}", route.operation.path)
        paths.setdefault(path, {})[route.operation.method.lower()] = _operation(route, schemas)
    errors = {_error_name(route.dialect): route.dialect.error_schema() for route in ordered}
    return {
        "openapi": "3.1.0",
        "info": {"title": "batchmill", "version": batchmill.__version__},
        "paths": paths,
        "components": {"schemas": schemas.components | errors, "securitySchemes": SECURITY},
    }


class _Schemas:
    """JSON schemas of all structs of the operations, under unique names."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: list[Any] = []
        for operation in operations:
            replies = [each for _, reply in _replies(operation) for each in _alternatives(reply)]
            for kind in (operation.query, operation.body, *replies):
                if kind is not None and not isinstance(kind, Content) and kind not in kinds:
                    kinds.append(kind)
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=REF)
        self._of = list(zip(kinds, schemas, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for each, schema in self._of if each == kind)

    def fields(self, kind: Any) -> tuple[dict[str, Any], list[str]]:
        """The properties of a struct, and the names of the required ones."""
        whole = self.components[self.of(kind)["$ref"].rsplit("/", 1)[-1]]
        return whole.get("properties", {}), whole.get("required", [])


def _replies(operation: Operation) -> list[tuple[int, Any]]:
    return [(operation.status, operation.reply), *operation.also.items()]


def _alternatives(reply: Any) -> tuple[Any, ...]:
    return reply if isinstance(reply, tuple) else (reply,)


def _operation(route: MountedOperation, schemas: _Schemas) -> dict[str, Any]:
    operation = route.operation
    fields: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [route.dialect.name],
        "parameters": [*_path_parameters(operation), *_query_parameters(operation, schemas)],
        "responses": _responses(route, schemas),
        "security": [{name: []} for name in SECURITY] if operation.scope is not None else [],
    }
    if operation.scope is not None:
        fields["x-batchmill-scope"] = operation.scope.value
    if operation.body is not None:
        fields["requestBody"] = {
            "required": not operation.body_is_optional,
            "content": _content(operation.body, schemas),
        }
    return fields


def _content(kind: Any, schemas: _Schemas) -> dict[str, Any]:
    if isinstance(kind, Content):
        return {kind.media: {"schema": kind.schema}}
    return {"application/json": {"schema": schemas.of(kind)}}


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": match[1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for match in _PARAMETER.finditer(operation.path)
    ]


def _query_parameters(operation: Operation, schemas: _Schemas) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    properties, required = schemas.fields(operation.query)
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(schema)}
        for name, schema in properties.items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a schema: a query parameter cannot be null, it is omitted instead."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name != "anyOf" and not (name == "default" and not value)}
    if not kinds:
        return rest
    return rest | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


def _responses(route: MountedOperation, schemas: _Schemas) -> dict[str, Any]:
    operation = route.operation
    fields: dict[str, Any] = {}
    for status, reply in _replies(operation):
        content: dict[str, Any] = {}
        for kind in _alternatives(reply):
            content |= _content(kind, schemas) if kind is not None else {}
        response = {"description": HTTPStatus(status).phrase, "headers": _ID_HEADER}
        fields[str(status)] = response | ({"content": content} if content else {})
    statuses = {*ALWAYS, *operation.errors}
    if operation.scope is not None or operation.method not in ("GET", "HEAD"):
        statuses |= {*WITH_KEY}
    if operation.body is not None:
        statuses |= {*WITH_BODY}
    envelope = {"application/json": {"schema": {"$ref": REF.format(name=_error_name(route.dialect))}}}
    for status in sorted(statuses - {status for status, _ in _replies(operation)}):
        fields[str(status)] = {
            "description": HTTPStatus(status).phrase, "headers": _ID_HEADER, "content": envelope,
        }  # fmt: skip
    return fields


_ID_HEADER = {"x-request-id": {"schema": {"type": "string"}, "description": "The id that the server's log has."}}


def _error_name(dialect: Dialect) -> str:
    return f"{dialect.name}Error"
