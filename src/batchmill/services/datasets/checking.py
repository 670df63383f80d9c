"""Whether each line of a dataset is an OpenAI batch row with an id of its own. What its body asks for is not looked at:
a request that cannot be answered fails by itself, when it is known which model it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealing import seal_patiently
from batchmill.types import DatasetSpec, Problem

PROBLEMS_MAX = 100  # that are kept with a dataset
TARGET = f"{__name__}:check"


class CheckOrder(Struct, frozen=True):
    """What to check. `home` is an empty folder, which whoever asks removes: this process may be killed."""

    dataset: DatasetSpec
    home: str
    rows_max: int | None
    bytes_left: int | None = None  # see SealOrder
    no_room: str = ""


class Checked(Struct, frozen=True):
    rows: int
    problems: list[Problem]
    problems_total: int
    rejected: int


def check(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: CheckOrder in, Checked out, both as JSON. Raises: InvalidDataset, InputChanged, StorageFull."""
    asked = msgspec.json.decode(order, type=CheckOrder)
    wanted = SealOrder(
        asked.dataset, any_model=True, urls=[None], rows_max=asked.rows_max, problems_max=PROBLEMS_MAX,
        bytes_left=asked.bytes_left, no_room=asked.no_room,
    )  # fmt: skip
    report = seal_patiently(wanted, Path(asked.home), progress)
    return msgspec.json.encode(Checked(report.seal.rows, report.problems, report.problems_total, report.rejected))
