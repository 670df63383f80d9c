"""The tensors of ML Commons as the reply that OpenAI's API has for embeddings. Pure.

Source: OpenAI's API reference, "Create embeddings".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.engines.replies import Reply
from batchmill.wire.json_bytes import encode

VECTOR = "sentence_embedding"  # how post-processing calls each of them


class _Tensor(Struct, gc=False):
    name: str
    data: Raw


class _Result(Struct, gc=False):
    output: list[_Tensor]


class _Named(Struct, gc=False):
    model: str | None = None


_result = msgspec.json.Decoder(_Result).decode
_named = msgspec.json.Decoder(_Named).decode


def embeddings_of(result: bytes, reply: Reply, model: str) -> bytes:
    """A result whose tensors are all vectors, in OpenAI's form, digit for digit; any other as it is.

    Args: model: what the reply names where the service named none.
    """
    try:
        output = _result(result).output
    except msgspec.MsgspecError:
        return result
    if not output or any(each.name != VECTOR for each in output):
        return result
    used = 0 if reply.usage is None else reply.usage.input_tokens
    told: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each.data} for at, each in enumerate(output)],
        "model": _model(reply) or model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }
    return encode(told)


def _model(reply: Reply) -> str | None:
    try:
        return _named(reply.body or b"{}").model
    except msgspec.MsgspecError:
        return None
