"""How the tests of this folder write rows and seal them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchmill.datasets.sealing import SealOrder, seal
from batchmill.types import DatasetSpec
from batchmill.wire.native import SealReport


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "dataset"
    path.mkdir()
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write lines, or bytes as they are, to a file and give its path."""

    def write_file(lines: list[bytes] | bytes, name: str = "in.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(lines if isinstance(lines, bytes) else b"".join(line + b"\n" for line in lines))
        return str(path)

    return write_file


@pytest.fixture
def sealed(home: Path) -> Callable[..., SealReport]:
    """Seal files into `home`."""

    def seal_files(*paths: str, spec: dict[str, Any] | None = None, **order: Any) -> SealReport:
        return seal(SealOrder(DatasetSpec(list(paths), **(spec or {})), **order), home, lambda _: None)

    return seal_files
