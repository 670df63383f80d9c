"""Tokens counted by a Hugging Face tokenizer. The only file that needs the package tokenizers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class ByTokenizer:
    """Counts as the model reads the text, but for its chat template."""

    note = ""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def create(path: Path) -> ByTokenizer:
    return ByTokenizer(path)
