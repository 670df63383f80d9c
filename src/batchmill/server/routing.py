"""Which operation a path means: the most exact template wins, then the method. Knows nothing of what operations do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from batchmill.server.operations import Dialect, Operation

_PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")
NAME_CHARS_MAX = 1024  # of a parameter of a path; a longer one names nothing


class Route(Struct, frozen=True):
    """An operation, and the dialect that says what is wrong with a request for it."""

    operation: Operation
    dialect: Dialect


class Found(Struct, frozen=True):
    """What a path means. `route` None: nothing, or not with this method; then `methods` are those there are."""

    dialect: Dialect
    route: Route | None = None
    parameters: dict[str, str] = {}
    methods: tuple[str, ...] = ()


class _Template(Struct, frozen=True, eq=False):
    path: str
    pattern: re.Pattern[str]
    rank: tuple[int, ...]  # of each segment: 0 literal, 1 a parameter, 2 the rest of the path
    methods: dict[str, Route]

    @property
    def is_catch_all(self) -> bool:
        """It takes whatever nobody else has: with another method there is nothing there."""
        return self.rank == (0, 2)

    def claims(self, parameters: dict[str, str]) -> bool:
        """Some operation of it wants a path with these parameters."""
        wanted = [route.operation.claims for route in self.methods.values()]
        return any(each is None or each(parameters) for each in wanted)


class Routes:
    """Raises: ValueError when two operations claim one method of one path."""

    def __init__(self, doors: Sequence[tuple[Dialect, Sequence[Operation]]], fallback: Dialect) -> None:
        self._fallback = fallback
        self._owners: dict[str, Dialect] = {}  # first segment -> the first dialect that has a path below it
        exact: dict[str, _Template] = {}
        slashed: set[str] = set()
        for dialect, operations in doors:
            for operation in operations:
                template = exact.setdefault(operation.path, _template(operation))
                if operation.last_slash_is_optional:
                    slashed.add(operation.path)
                if operation.method in template.methods:
                    raise ValueError(f"{operation.method} {operation.path} stands for two operations")
                template.methods[operation.method] = Route(operation, dialect)
                if operation.path != "/":  # the root alone owns nothing below it
                    self._owners.setdefault(_first(operation.path), dialect)
        self._exact = {path: each for path, each in exact.items() if "{" not in path}
        self._exact |= {f"{path}/": exact[path] for path in slashed if "{" not in path and f"{path}/" not in exact}
        self._templates = sorted((each for path, each in exact.items() if "{" in path), key=lambda each: each.rank)

    def find(self, method: str, path: str, after: Route | None = None) -> Found:
        """What a decoded path means. HEAD is answered by GET where nothing else is said.

        `after`: an operation that had the path and does not want it; what it means to those that come behind it.
        """
        if path.startswith("//"):  # of a client whose base URL ends with a slash
            path = f"/{path.lstrip('/')}"
        template, parameters = None if after is not None else self._exact.get(path), {}
        if template is None:
            template, parameters = self._match(path, after)
        if template is None or any(len(value) > NAME_CHARS_MAX for value in parameters.values()):
            return Found(self._owners.get(_first(path), self._fallback))
        methods = template.methods
        route = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if route is None and template.is_catch_all:
            return Found(self._owners.get(_first(path), self._fallback))
        if route is None:
            return Found(next(iter(methods.values())).dialect, methods=tuple(sorted(methods)))
        return Found(route.dialect, route, parameters)

    def _match(self, path: str, after: Route | None) -> tuple[_Template | None, dict[str, str]]:
        for template in self._templates:
            if after is not None:
                after = None if template.path == after.operation.path else after
            elif (match := template.pattern.fullmatch(path)) and template.claims(match.groupdict()):
                return template, match.groupdict()
        return None, {}

    def all(self) -> list[Route]:
        """Every operation, for the document and for tests."""
        templates = [*dict.fromkeys(self._exact.values()), *self._templates]
        return [route for template in templates for route in template.methods.values()]


def _first(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""


def _template(operation: Operation) -> _Template:
    path, pattern, at = operation.path, "", 0
    for match in _PARAMETER.finditer(path):
        pattern += re.escape(path[at : match.start()])
        pattern += f"(?P<{match[1]}>{'.+' if match[2] else '[^/]+'})"
        at = match.end()
    rank = tuple(2 if ":path}" in segment else 1 if segment.startswith("{") else 0 for segment in path.split("/")[1:])
    pattern += re.escape(path[at:]) + ("/?" if operation.last_slash_is_optional else "")
    return _Template(path, re.compile(pattern, re.DOTALL), rank, {})
