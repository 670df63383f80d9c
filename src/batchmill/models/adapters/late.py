"""What fetches adapters from elsewhere, loaded when the first of them comes: each needs a package of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchmill.errors import InvalidConfig

PARTS = {
    "hub": "batchmill.models.adapters.hub:download",
    "objects": "batchmill.models.adapters.objects:download",
}
EXTRAS = {
    "huggingface_hub": ("an adapter of a model hub", "pip install 'batchmill[hub]'"),
    "obstore": ("an adapter in an object store", "pip install 'batchmill[objects]'"),
}


def load(part: str) -> Any:
    """A function of the table. Raises: InvalidConfig, `missing_dependency`, where it needs what is not installed."""
    module, _, name = PARTS[part].partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        purpose, remedy = EXTRAS[package]
        raise InvalidConfig(f"{purpose} needs {package}: {remedy}", code="missing_dependency") from None
