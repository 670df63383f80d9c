"""Prompt templates: text with {column} placeholders. `{{` and `}}` stand for the braces themselves."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import lru_cache

from batchmill.errors import InvalidInput

Parts = tuple[tuple[str, str | None], ...]  # (literal text, column that follows it or None)


@lru_cache(maxsize=64)
def parse(template: str) -> Parts:
    """Split a template. Only bare column names stand in braces: no attributes, indexes or format specs.

    Raises: InvalidInput (`invalid_template`).
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(
            f"the template {template!r} cannot be read: {error}; write {{{{ and }}}} for braces that are text",
            code="invalid_template",
        ) from None
    for _, name, spec, conversion in pieces:
        if name is not None and (spec or conversion or not name.strip()):
            raise InvalidInput(
                f"{{{name}}} in the template {template!r} must be a column name alone; "
                "write {{ and }} for braces that are text",
                code="invalid_template",
            )
    return tuple((text, name) for text, name, _, _ in pieces)


def columns(template: str) -> list[str]:
    """The columns a template needs, each once, in the order of their first use."""
    return list(dict.fromkeys(name for _, name in parse(template) if name is not None))


def render(template: str, values: Mapping[str, str]) -> str:
    """Fill a template. Raises: KeyError for a column that `values` lacks."""
    return "".join(text if name is None else text + values[name] for text, name in parse(template))
