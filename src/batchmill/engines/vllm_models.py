"""What the files of a Hugging Face model say before anything is loaded: code it would run, the rank of an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from batchmill.errors import ModelFailed

CONFIG_BYTES_MAX = 16 * 1024 * 1024
CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)


def find_files(source: str, env: Mapping[str, str]) -> list[Path]:
    """The directories that a model or adapter is read from: its own, or its snapshots in the Hugging Face cache."""
    if Path(source).is_dir():
        return [Path(source)]
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub")
    return sorted((hub / f"models--{source.replace('/', '--')}" / "snapshots").glob("*/"))


def refuse_remote_code(source: str, places: list[Path], *, trusted: bool) -> None:
    """Raise ModelFailed for a model that brings Python code, unless the caller trusts it.

    vLLM before 0.14 ran such code without being asked (CVE-2026-22807).
    """
    if not places and source.startswith(("/", ".", "~")):
        raise ModelFailed(f"there is no model directory {source!r}")
    for path in [place / name for place in places for name in CONFIGS]:
        if not trusted and "auto_map" in _read_object(path):
            raise ModelFailed(
                f"the model {source!r} brings Python code of its own ({path.name} has auto_map), which would run with "
                "your rights; if you trust it, pass the engine argument trust-remote-code=true"
            )


def adapter_rank(name: str, path: str, env: Mapping[str, str]) -> int | None:
    """The rank of LoRA weights; None for an id that has not been downloaded yet.

    Raises: ModelFailed for a directory that holds no adapter.
    """
    places = find_files(path, env)
    if not places and (os.path.isabs(path) or path.startswith((".", "~"))):
        raise ModelFailed(f"the adapter {name!r}: there is no directory {path!r}")
    for place in places:
        config = _read_object(place / "adapter_config.json")
        rank = config.get("r")
        if isinstance(rank, int) and rank > 0:
            patterns = config.get("rank_pattern")
            others = patterns.values() if isinstance(patterns, dict) else ()
            return max(rank, *(other for other in others if isinstance(other, int)), 1)
        raise ModelFailed(f"the adapter {name!r}: {place} holds no adapter_config.json that names its rank `r`")
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file. Raises: ModelFailed for a file that is no JSON."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(CONFIG_BYTES_MAX), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelFailed(f"{path} cannot be read: {error}") from None
