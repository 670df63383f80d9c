"""How many tokens a request asks for: its prompt, counted or guessed by length, and the most its answer may have."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from batchmill.datasets.plan_keys import BYTES_A_TOKEN, OUTPUT_TOKENS_DEFAULT
from batchmill.types import ModelSpec, Request
from batchmill.wire.forms import EMBEDDINGS, RERANK, SCORE
from batchmill.wire.json_bytes import decode, encode

MESSAGE_TOKENS = 4  # what a chat template puts around a message, about
ANSWERLESS_URLS = frozenset((EMBEDDINGS, RERANK, SCORE))
TOKENIZER = "tokenizer.json"  # in a model's folder


class RowTokens(Struct, frozen=True, gc=False):
    """Tokens of one request. `output`: the most its answer may have, or the default where it sets no limit."""

    input: int = 0
    output: int = 0
    is_unlimited: bool = False
    has_media: bool = False  # parts that are no text: not counted


class Counter(Protocol):
    name: str
    note: str  # what to know about its figures, or ""

    def count(self, text: str) -> int: ...


class ByLength:
    """Four bytes a token: right within a factor of two for most texts and tokenizers."""

    name = f"bytes / {BYTES_A_TOKEN}"

    def __init__(self, why: str) -> None:
        self.note = f"tokens are guessed as {BYTES_A_TOKEN} bytes each, {why}"

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // BYTES_A_TOKEN)


class ByTokenizer:
    """Counts with a tokenizer of Hugging Face's: as the model reads the text, but for its chat template."""

    name, note = TOKENIZER, ""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def counter_for(model: ModelSpec) -> Counter:
    """The model's own tokenizer where it lies in the model's folder and its library is there; else by length."""
    path = Path(model.source) / TOKENIZER
    if not path.is_file():
        return ByLength("as the model's tokenizer is not here")
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        return ByLength("as the Python package tokenizers is not installed")
    return ByTokenizer(tokenizers.Tokenizer.from_file(str(path)))


def tokens_of(request: Request, counter: Counter) -> RowTokens:
    """Count a request. Raises: MsgspecError for a body that cannot be read."""
    body = decode(request.body)
    parts = list(_parts(body))
    given = sum(part if isinstance(part, int) else counter.count(part) for part in parts if part is not None)
    media = any(part is None for part in parts)
    if request.url in ANSWERLESS_URLS:
        return RowTokens(given, has_media=media)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    answers = body.get("n") or 1
    return RowTokens(given, (limit or OUTPUT_TOKENS_DEFAULT) * answers, limit is None, media)


def _parts(body: dict[str, Any]) -> Iterator[str | int | None]:
    """The prompt in pieces: text, a number of tokens, or None for what is no text."""
    if body.get("tools"):
        yield encode(body["tools"]).decode()
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield MESSAGE_TOKENS
        yield from _text(message.get("content") if isinstance(message, dict) else message)
    for name in ("instructions", "prompt", "input", "query", "documents", "text_1", "text_2"):
        yield from _text(body.get(name))


def _text(value: Any) -> Iterator[str | int | None]:
    match value:
        case None:
            return
        case str():
            yield value
        case int():
            yield 1  # a token by its number
        case list():
            for item in value:
                yield from _text(item)
        case {"text": str(text)}:
            yield text
        case {"content": content}:
            yield MESSAGE_TOKENS
            yield from _text(content)
        case _:
            yield None
