"""Writes the columns of a sealed dataset, as the plan reads them, from plain values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from batchmill.types import Seal


@dataclass
class RowKeys:
    """What validation knows of a row."""

    target: int = 0
    prefix: int = 0
    cost: int = 1
    fold: tuple[int, int] = (0, 0)
    rejected: bool = False
    bytes: int = 100


@dataclass
class Written:
    """Folders of a dataset and of the plan to make."""

    dataset: Path
    plan: Path
    rows: list[RowKeys] = field(default_factory=list)


def write_dataset(folder: Path, rows: list[RowKeys], keys: bool = True) -> Written:
    dataset, plan = folder / "dataset", folder / "plan"
    dataset.mkdir()
    plan.mkdir()
    offsets = array("Q", [0])
    for row in rows:
        offsets.append(offsets[-1] + row.bytes)
    (dataset / "offsets.u64").write_bytes(offsets.tobytes())
    refused = [{"row": n, "code": "bad", "message": f"row {n}"} for n, row in enumerate(rows) if row.rejected]
    (dataset / "rejected.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in refused))
    if keys:
        (dataset / "target.u16").write_bytes(array("H", [row.target for row in rows]).tobytes())
        (dataset / "prefix.u64").write_bytes(array("Q", [row.prefix for row in rows]).tobytes())
        (dataset / "cost.u32").write_bytes(array("I", [row.cost for row in rows]).tobytes())
        (dataset / "fold.u64").write_bytes(array("Q", [half for row in rows for half in row.fold]).tobytes())
    seal = Seal(
        rows=len(rows), bytes=offsets[-1], digest="0" * 64, format="openai", columns=[], files=[], sources=[],
        rejected=len(refused),
    )  # fmt: skip
    (dataset / "seal.json").write_bytes(msgspec.json.encode(seal))
    return Written(dataset, plan, rows)
