"""Rows and what becomes of them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Usage(Struct, frozen=True, gc=False):
    """Tokens of one row, or summed over many. `input_tokens` includes `cached_tokens`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class Row(Struct, gc=False):
    """One request on its way through a worker. `raw` is its canonical JSON object without the line end."""

    position: int  # place in the plan
    number: int  # 0..N-1 in the dataset
    raw: bytes
    form: Any  # a wire.forms.Form: how to read `raw` and how to write the result
    lease: Any = None  # a ports.LeaseHandle; an engine hands it back untouched
    custom_id: bytes | None = None  # as JSON; the form leaves it here when it has read it


class Request(Struct, frozen=True, gc=False):
    """A row read as a call of an OpenAI-style path."""

    url: str  # "/v1/chat/completions"
    body: bytes  # the JSON object as it was written; its `model` may be empty or absent
    custom_id: str | None = None


class RowError(Struct, frozen=True, gc=False):
    """Why a row has no result: a stable code and a sentence with the offending value."""

    code: str
    message: str


class Outcome(Struct, frozen=True, gc=False):
    """The one terminal result of a row.

    ok:     `body` is the JSON of the reply's body and `error` is None.
    error:  `error` is set; `body` is the JSON a service replied with, or None where no reply came.
    """

    row: Row
    body: bytes | None = None
    error: RowError | None = None
    status: int = 200  # HTTP status of the reply, or 0 where none came
    usage: Usage | None = None
    request_id: str | None = None
