"""The dialects by name, in the order in which they are asked whose a path is. A new one is one folder and one row."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchmill.server.operations import Dialect
    from batchmill.services.services import Services

DIALECTS = {
    "openai": "batchmill.dialects.openai.dialect:OpenAIDialect",
    "native": "batchmill.dialects.native.dialect:NativeDialect",
}
FALLBACK = "native"  # whose error form a path has that belongs to none


def load_dialects(services: Services, names: Sequence[str] = tuple(DIALECTS)) -> list[Dialect]:
    """The dialects with these names, in the order of the table."""
    loaded = []
    for name in names:
        module, _, attribute = DIALECTS[name].partition(":")
        loaded.append(getattr(import_module(module), attribute)(services))
    return loaded
