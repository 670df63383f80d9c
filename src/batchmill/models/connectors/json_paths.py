"""`response_filter`: JSONPath expressions, compiled once. Works on any JSON."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from jsonpath import JSONPath, JSONPathEnvironment
from jsonpath.exceptions import JSONPathError
from jsonpath.selectors import NameSelector

from batchmill.errors import InvalidInput

PATH_CHARS_MAX = 1000
WILDCARDS_MAX = 8  # of a plain path
DESCENTS_MAX = 1  # each visits everything below it, so several multiply
SEARCHED_BYTES_MAX = 4 * 1024 * 1024  # of a reply that is searched by descent or condition, on an event loop


_NAME = r"\.([A-Za-z_][A-Za-z0-9_]*)|\['([^'\\\x00-\x1f]+)'\]|\[\"([^\"\\\x00-\x1f]+)\"\]"
_STEP = re.compile(rf"{_NAME}|\[(0|[1-9][0-9]{{0,8}})\]|(\.\*|\[\*\])")
_PLAIN = re.compile(rf"\$(?:{_STEP.pattern})+")


class _Environment(JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        """Define no functions, because the patterns of `match` and `search` could run without end."""


_environment = _Environment()


def find(expression: str, document: Any, size_bytes: int) -> tuple[bool, Any]:
    """Find what an expression selects. Returns whether it exists, and the value, or a list if there may be several.

    Args:
        size_bytes: of the document's JSON.

    Raises: InvalidInput, `invalid_response_filter`.
    """
    if is_plain(expression):
        return find_plain(expression, document)
    path, steps = _compile(expression)
    if steps is not None:
        return _walk(document, steps)
    if size_bytes > SEARCHED_BYTES_MAX and (".." in expression or "?" in expression):
        raise _invalid(expression, f"replies of more than {SEARCHED_BYTES_MAX} bytes are not searched for .. and ?")
    try:
        return True, path.findall(document)
    except (JSONPathError, RecursionError, ArithmeticError) as error:
        raise _invalid(expression, str(error)) from None


def is_plain(expression: str) -> bool:
    """Whether an expression has only names, indexes and a few wildcards: it is as fast as parsing the reply."""
    return len(expression) <= PATH_CHARS_MAX and _plain_steps(expression) is not None


def find_plain(expression: str, document: Any) -> tuple[bool, Any]:
    """As `find`, for a plain expression."""
    steps = _plain_steps(expression)
    assert steps is not None, "it is plain"
    if None not in steps:
        return _walk(document, [step for step in steps if step is not None])
    level = [document]
    for step in steps:
        if step is None:
            level = [inner for each in level for inner in _members(each)]
        else:
            level = [value for exists, value in (_walk(each, [step]) for each in level) if exists]
    return True, level


def _members(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


@lru_cache(maxsize=256)
def _plain_steps(expression: str) -> tuple[str | int | None, ...] | None:
    """The names and indexes of an expression, with None for each wildcard; None if it is not plain."""
    text = expression.strip()
    if _PLAIN.fullmatch(text) is None:
        return None
    steps: list[str | int | None] = []
    for match in _STEP.finditer(text, 1):
        name = match[1] or match[2] or match[3]
        steps.append(name if name is not None else None if match[4] is None else int(match[4]))
    return tuple(steps) if steps.count(None) <= WILDCARDS_MAX else None


def check(expression: str) -> None:
    """Raises: InvalidInput, `invalid_response_filter`, for an invalid expression."""
    _compile(expression)


@lru_cache(maxsize=256)
def _compile(expression: str) -> tuple[Any, list[str | int] | None]:
    """Compile an expression. Also returns its names and indexes if it selects at most one value."""
    if len(expression) > PATH_CHARS_MAX:
        raise _invalid(expression, f"it is longer than {PATH_CHARS_MAX} characters")
    if expression.count("..") > DESCENTS_MAX:
        raise _invalid(expression, f"it has more than {DESCENTS_MAX} recursive descent (..)")
    if "=~" in expression:
        raise _invalid(expression, "it has a pattern (=~), which could run without end")
    if "$" in expression[1:] or "^" in expression:
        raise _invalid(expression, "it refers back to the root ($ or ^), which could take very long")
    try:
        path = _environment.compile(expression)
    except (JSONPathError, RecursionError, ValueError, ArithmeticError) as error:
        raise _invalid(expression, str(error)) from None
    return path, _steps(path) if isinstance(path, JSONPath) and path.singular_query() else None


def _steps(path: JSONPath) -> list[str | int]:
    steps: list[str | int] = []
    for segment in path.segments:
        (selector,) = segment.selectors
        steps.append(selector.name if isinstance(selector, NameSelector) else selector.index)
    return steps


def _walk(document: Any, steps: list[str | int]) -> tuple[bool, Any]:
    for step in steps:
        if not isinstance(document, dict if isinstance(step, str) else list):
            return False, None
        try:
            document = document[step]
        except LookupError:
            return False, None
    return True, document


def _invalid(expression: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"response_filter {expression[:100]!r} is not a valid JSONPath: {why[:200]}",
        code="invalid_response_filter",
    )
