"""What the plan wants to know of a row: where it goes, which prompt it shares, what it costs, whom it equals."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.datasets.orders import Fold
from batchmill.types import Request
from batchmill.wire.forms import EMBEDDINGS, RERANK, SCORE

LEVELS = (128, 256, 512, 1024, 2048, 4096)  # bytes of a prompt; 10 bits of the key each, the shortest on top
LEVEL_BITS = 10
BYTES_A_TOKEN = 4
OUTPUT_TOKENS_DEFAULT = 256  # of a row that sets no limit
COST_MAX = 2**32 - 1
FOLD_BYTES = 16
NO_FOLD = bytes(FOLD_BYTES)

_ANSWERS_ALWAYS_ALIKE = frozenset((EMBEDDINGS, RERANK, SCORE))
_EMPTY = Raw(b"")


class Keys(Struct, gc=False):
    prefix: int = 0
    cost: int = 0
    fold: bytes = NO_FOLD


class _Head(Struct, gc=False):
    """The parts of a body that make the prompt, in the order in which chat templates use them, and its limits."""

    tools: Raw = _EMPTY
    instructions: Raw = _EMPTY
    messages: Raw = _EMPTY
    prompt: Raw = _EMPTY
    input: Raw = _EMPTY
    query: Raw = _EMPTY
    documents: Raw = _EMPTY
    text_1: Raw = _EMPTY
    text_2: Raw = _EMPTY
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    stream: bool | None = None
    conversation: Raw = _EMPTY

    def text(self) -> bytes:
        parts = (self.tools, self.instructions, self.messages, self.prompt, self.input)
        return b"".join((*parts, self.query, self.documents, self.text_1, self.text_2))

    def output_tokens(self, url: str) -> int:
        if url in _ANSWERS_ALWAYS_ALIKE:
            return 0
        limit = self.max_completion_tokens or self.max_tokens or self.max_output_tokens or OUTPUT_TOKENS_DEFAULT
        return limit * (self.n or 1)

    def is_deterministic(self, url: str) -> bool:
        """A conversation is state at the service: what it answers may change between two equal rows."""
        return url in _ANSWERS_ALWAYS_ALIKE or (self.temperature == 0 and not self.conversation)


_head = msgspec.json.Decoder(_Head).decode
# Floats and huge integers keep their digits: 1.0 and 1.00 may be told apart, 2**70 and 2**70 + 1 must be.
_exact = msgspec.json.Decoder(float_hook=lambda digits: Raw(digits.encode())).decode


def of_request(request: Request, target: int, fold: Fold) -> Keys:
    """The keys of a request that a language model answers; its body has been checked."""
    try:
        head = _head(request.body)
    except msgspec.ValidationError:  # a field that this path does not know, and that elsewhere has another type
        return Keys(prefix_of(request.body), min(len(request.body) // BYTES_A_TOKEN, COST_MAX))
    text = head.text() or request.body
    cost = len(text) // BYTES_A_TOKEN + head.output_tokens(request.url)
    keys = Keys(prefix_of(text), min(cost, COST_MAX))
    if fold != "none" and not head.stream and (fold == "all" or head.is_deterministic(request.url)):
        keys.fold = fold_of(request.url, request.body, target, without="model")
    return keys


def of_arguments(url: str, data: bytes, target: int, fold: Fold) -> Keys:
    """The keys of a row whose fields are a function's arguments. Nobody but the caller knows whether it is pure."""
    return Keys(0, min(len(data) // BYTES_A_TOKEN, COST_MAX), fold_of(url, data, target) if fold == "all" else NO_FOLD)


def prefix_of(text: bytes) -> int:
    """Hashes of the first 128, 256 … 4096 bytes, 10 bits a level: rows that share more of a prompt sort closer."""
    key, crc, start = 0, 0, 0
    for level in LEVELS:
        crc = zlib.crc32(text[start:level], crc)
        key = key << LEVEL_BITS | (crc * 0x9E3779B1 & 0xFFFFFFFF) >> (32 - LEVEL_BITS)
        start = level
    return key


def fold_of(url: str, body: bytes, target: int, without: str | None = None) -> bytes:
    """128 bits that equal requests share: the model as it is resolved, and every field in a fixed order.

    `without` names the field that the target stands for.
    """
    try:
        members: dict[str, Any] = _exact(body)
    except msgspec.ValidationError:  # a number with more digits than any reader takes: never equal to another
        return NO_FOLD
    members.pop(without, None)
    canonical = msgspec.json.encode(members, order="deterministic")
    head = b"%s\0%d\0" % (url.encode(), target)
    return hashlib.blake2b(head + canonical, digest_size=FOLD_BYTES).digest()
