"""The files of LoRA adapters, made for a test: whole ones, and ones with something wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def config(**changes: Any) -> dict[str, Any]:
    """An adapter_config.json; None takes a field out."""
    fields = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
        "base_model_name_or_path": "org/tiny", "init_lora_weights": True, "use_dora": False, "modules_to_save": None,
    }  # fmt: skip
    return {name: value for name, value in (fields | changes).items() if value is not None}


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file with tensors of these shapes, all zeros."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    data = json.dumps(head).encode()
    return len(data).to_bytes(8, "little") + data + bytes(at)


def lora(rank: int = 4, takes: int = 16, gives: int = 16, module: str = MODULE) -> bytes:
    """The weights of an adapter of one module."""
    return safetensors({f"{module}.lora_A.weight": [rank, takes], f"{module}.lora_B.weight": [gives, rank]})


def lora_files(**changes: Any) -> dict[str, bytes]:
    """The two files of an adapter that is sound."""
    result = config(**changes)
    return {CONFIG: json.dumps(result).encode(), WEIGHTS: lora(result["r"])}


def write_lora(folder: Path, files: dict[str, bytes] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (files or lora_files(**changes)).items():
        (folder / name).write_bytes(data)
    return folder


def write_base(folder: Path, width: int = 16, layers: int = 2) -> Path:
    """A base model that has q_proj, as far as anybody looks without loading it."""
    folder.mkdir(parents=True)
    fields = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = {f"model.layers.{layer}.self_attn.q_proj.weight": [width, width] for layer in range(layers)}
    (folder / "model.safetensors").write_bytes(safetensors(shapes))
    return folder
