"""A LoRA adapter small enough for a test, whole as far as anybody reads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_adapter(folder: Path, *, rank: int = 8, layer: int = 0) -> str:
    """A LoRA of one module, in a folder of its own."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
    size = rank * 16 * 4
    head = {
        f"{name}A.weight": {"dtype": "F32", "shape": [rank, 16], "data_offsets": [0, size]},
        f"{name}B.weight": {"dtype": "F32", "shape": [16, rank], "data_offsets": [size, 2 * size]},
    }
    data = json.dumps(head).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(2 * size))
    return str(folder)
