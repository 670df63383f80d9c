"""Connectors as people write them."""

from __future__ import annotations

from typing import Any

from batchmill.models.connectors.reading import read_connector
from batchmill.types.connectors import Connector

KEY = {"Authorization": "Bearer ${credential.key}"}


def action(kind: str = "predict", **fields: Any) -> dict[str, Any]:
    """An action that may be called."""
    return {
        "action_type": kind,
        "method": "POST",
        "url": "https://api.example.com/v1/embeddings",
        "headers": KEY,
        "request_body": '{"input": "${parameters.input}"}',
    } | fields


def body(*actions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What is sent to make a connector."""
    whole = {
        "name": "an embedder",
        "version": 1,
        "protocol": "http",
        "credential": {"key": "s3cret"},
        "actions": list(actions) or [action()],
    }
    return whole | fields


def connector(*actions: dict[str, Any], is_trusted: bool = False, **fields: Any) -> Connector:
    """A connector with these actions."""
    return read_connector(body(*actions, **fields), id="c1", is_trusted=is_trusted)[0]
