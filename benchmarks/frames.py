"""A function over a frame of pandas in process, and over the same rows from Parquet to Parquet, in pairs.

frames.py [ROWS] [PAIRS]

Each run is a process of its own, as a notebook or a command is, with a data directory of its own. The time is that of
`run(frame)` and `to_pandas()`, and of the same `run(path, output=…)`, with everything that they start.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

import batchmill

ROWS, PAIRS = 1_000_000, 3
SIDES = ("frame", "parquet")


def length(text: str, x: float) -> int:
    return len(text)


def make_frame(rows: int) -> pd.DataFrame:
    texts = [f"row {number} text" for number in range(rows)]
    return pd.DataFrame({"id": np.arange(rows), "text": texts, "x": np.random.default_rng(0).random(rows)})


def processor_s() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def run_side(side: str, rows: int, place: Path) -> dict[str, float]:
    frame = make_frame(rows)
    if side == "parquet":
        frame.to_parquet(place / "in.parquet", row_group_size=65_536)
    before, began = processor_s(), time.perf_counter()
    if side == "frame":
        found = batchmill.run(frame, model=length, data_dir=place / "data").to_pandas()
        assert len(found) == rows and int(found["output"].iloc[-1]) == len(frame["text"].iloc[-1])
    else:
        batchmill.run(place / "in.parquet", model=length, data_dir=place / "data", output=place / "out.parquet")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall_s": time.perf_counter() - began, "processor_s": processor_s() - before, "peak_mib": peak}


def measure(side: str, rows: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, side, str(rows), place]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        return json.loads(done.stdout)


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in SIDES:
        print(json.dumps(run_side(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
        return
    numbers = [int(each) for each in sys.argv[1:]]
    rows, pairs = (*numbers, *(ROWS, PAIRS)[len(numbers) :])
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(pairs):
        for side in SIDES:
            found[side].append(measure(side, rows))
            print(side, {name: round(value, 2) for name, value in found[side][-1].items()}, flush=True)
    for name in ("wall_s", "processor_s"):
        ratios = [one[name] / two[name] for one, two in zip(found["frame"], found["parquet"], strict=True)]
        print(f"{name}: {statistics.median(ratios):.2f} x Parquet to Parquet")


if __name__ == "__main__":
    main()
