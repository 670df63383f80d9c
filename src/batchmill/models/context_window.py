"""How many tokens a language model takes, prompt and answer together, as far as its files and flags say."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.types import ModelSpec

FLAG = "max-model-len"
CONFIG_BYTES_MAX = 4 * 1024 * 1024


class _Text(Struct):
    max_position_embeddings: int | None = None


class _Config(Struct):
    """Of a model's config.json, what says its length; of one that sees images, the part for text says it."""

    max_position_embeddings: int | None = None
    n_positions: int | None = None
    text_config: _Text | None = None


def context_window(model: ModelSpec) -> int | None:
    """What its engine was told, or what its folder says; None where neither does."""
    for name, value in model.engine_args.items():
        if name.lstrip("-").replace("_", "-") == FLAG and type(value) is int and value > 0:
            return value
    return _of_folder(model.source)


@lru_cache(maxsize=256)
def _of_folder(source: str) -> int | None:
    """Of a hub's id nothing is known: its files are the engine's."""
    path = Path(source) / "config.json"
    try:
        if not Path(source).is_absolute() or path.stat().st_size > CONFIG_BYTES_MAX:
            return None
        told = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    text = None if told.text_config is None else told.text_config.max_position_embeddings
    return told.max_position_embeddings or told.n_positions or text
