"""Whether the rows of a dataset are OpenAI batch rows with ids of their own, whichever model they will be for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal_patiently
from batchmill.types import DatasetSpec, Problem
from batchmill.wire.forms import URLS

PROBLEMS_MAX = 100  # that are kept with a dataset
TARGET = f"{__name__}:check"


class CheckOrder(Struct, frozen=True):
    """What to check. `home` is a folder in which a folder may be made."""

    path: str
    home: str
    line_bytes_max: int
    depth_max: int
    rows_max: int | None


class Checked(Struct, frozen=True):
    rows: int
    problems: list[Problem]
    problems_total: int
    rejected: int


def check(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: CheckOrder in, Checked out, both as JSON. Raises: InvalidDataset, InputChanged, StorageFull."""
    asked = msgspec.json.decode(order, type=CheckOrder)
    dataset = DatasetSpec([asked.path], format="openai", line_bytes_max=asked.line_bytes_max, depth_max=asked.depth_max)
    wanted = SealOrder(
        dataset, any_model=True, urls=[frozenset(URLS)], rows_max=asked.rows_max, problems_max=PROBLEMS_MAX
    )
    # A name that an owner sweeps where a kill has left it.
    with tempfile.TemporaryDirectory(prefix="preview-dataset-", dir=asked.home) as home:
        report = seal_patiently(wanted, Path(home), progress)
    return msgspec.json.encode(Checked(report.seal.rows, report.problems, report.problems_total, report.rejected))
