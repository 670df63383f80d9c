"""What only some connectors need, loaded when the first of them comes: signatures need botocore, filters a JSONPath."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchmill.errors import InvalidConfig

PARTS = {
    "aws_sigv4": "batchmill.models.connectors.signing:sign_connector",
    "check_filter": "batchmill.models.connectors.json_paths:check",
    "find": "batchmill.models.connectors.json_paths:find",
    "is_plain": "batchmill.models.connectors.json_paths:is_plain",
}
EXTRAS = {"botocore": ("a connector with the protocol aws_sigv4", "pip install 'batchmill[aws]'")}


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
