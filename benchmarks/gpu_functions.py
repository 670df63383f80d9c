"""The functions of `gpu_rows.py` and `gpu_faults.py`: an encoder, and functions that fail on a GPU as real ones do.

The encoder has BERT's base shape (86 M parameters in its layers) and random weights. A text is the sequence of its
bytes, 128 at most. They need torch and transformers.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from batchmill import batched

BATCH, TOKENS, WIDTH = 1024, 128, 768
BYTES_A_ROW = 24 * 1024 * 1024  # of GPU memory, for each row of `Hungry`
KNOWN = 1000  # rows of the table that `Lookup` reads


class Encoder:
    """Mean-pooled embeddings of texts."""

    def setup(self) -> None:
        """Draw the weights."""
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.BertConfig(attn_implementation="sdpa")
        model = transformers.BertModel(config, add_pooling_layer=False)
        self._model = model.to("cuda", torch.bfloat16).eval()
        self._torch = torch

    def encode(self, texts: list[str]) -> np.ndarray:
        """Float32 [texts, WIDTH]."""
        torch = self._torch
        tokens = np.zeros((len(texts), TOKENS), np.uint8)
        for at, text in enumerate(texts):
            data = text.encode()[:TOKENS]
            tokens[at, : len(data)] = np.frombuffer(data, np.uint8)
        with torch.inference_mode():
            ids = torch.from_numpy(tokens).to("cuda").int()
            mask = ids > 0
            found = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(found.dtype)
            return ((found * weights).sum(1) / weights.sum(1)).float().cpu().numpy()

    @batched(BATCH)
    def predict(self, text: list[str]) -> np.ndarray:
        return self.encode(text)


class Lookup:
    """Reads a table on the GPU; a number that the table does not have fails an assertion of the kernel."""

    def setup(self) -> None:
        """Fill the table."""
        import torch

        self._table = torch.arange(KNOWN, device="cuda") * 3
        self._torch = torch

    @batched(512)
    def predict(self, number: np.ndarray) -> list[int]:
        return self._table[self._torch.from_numpy(number.copy()).to("cuda")].tolist()


class SlowLookup(Lookup):
    """The same, a little slower; it notes the size of each call in CALLS."""

    @batched(256)
    def predict(self, number: np.ndarray) -> list[int]:
        time.sleep(0.05)
        with Path(os.environ["CALLS"]).open("a") as file:
            file.write(f"{len(number)}\n")
        return super().predict(number)


class Hungry:
    """Takes BYTES_A_ROW for each row of a call, and notes the size of each call in CALLS."""

    def setup(self) -> None:
        """Take the file's name."""
        import torch

        self._calls, self._torch = Path(os.environ["CALLS"]), torch

    @batched(8192)
    def predict(self, number: np.ndarray) -> list[int]:
        with self._calls.open("a") as file:
            file.write(f"{len(number)}\n")
        room = self._torch.zeros((len(number), BYTES_A_ROW), dtype=self._torch.uint8, device="cuda")
        room[:, 0] = self._torch.from_numpy(number % 100).to("cuda")
        return room[:, 0].tolist()
