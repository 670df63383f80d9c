"""Rows of a table to which sealing has added what a template made of them: the prompt, or why there is none.

The addition is the last member of the row's JSON object. Its name begins with a NUL, as no column of a table does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from batchmill.types import RowError
from batchmill.wire.json_bytes import append_members, encode

PROMPT, FAULT = "\0prompt", "\0fault"
TEMPLATE_FAULTS = ("template_failed", "template_too_slow", "template_too_large")  # of single rows: the others go on
_PROMPT_HEAD, _FAULT_HEAD = (encode(name) + b":" for name in (PROMPT, FAULT))
# In a string a quote follows a backslash, so these bytes can only be the name of a member.
_HEADS = (_PROMPT_HEAD, _FAULT_HEAD)


def with_prompt(row: bytes, prompt: str) -> bytes:
    """Add a prompt to a JSON object, which has no line end."""
    return append_members(row, _PROMPT_HEAD + encode(prompt))


def with_fault(row: bytes, code: str, message: str) -> bytes:
    """Add the reason why there is no prompt."""
    return append_members(row, _FAULT_HEAD + encode([code, message]))


def without_additions(row: bytes) -> bytes:
    """The row as it was in the input. A row to which nothing was added is unchanged."""
    at = max(map(row.rfind, _HEADS))
    return row if at < 0 else row[:at].removesuffix(b",") + b"}"


def fault_of(members: dict[str, Any]) -> RowError | None:
    """Why a row has no prompt, from the members of its object; None: it has one."""
    if FAULT not in members:
        return None
    code, message = msgspec.json.decode(members[FAULT], type=tuple[str, str])
    return RowError(code, message)
