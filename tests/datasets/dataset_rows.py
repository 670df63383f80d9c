"""Rows that the tests of this folder write."""

from __future__ import annotations

import json
from typing import Any

CHAT = "/v1/chat/completions"


def openai_row(custom_id: str, body: dict[str, Any] | None = None, url: str = CHAT) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}]} if body is None else body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()
