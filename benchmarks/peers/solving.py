"""A numpy function that is about ten times cheaper for a row among 64 than for a row alone: most of it is done once."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is there

import numpy  # noqa: E402

SIZE = 256
_draw = numpy.random.default_rng(1)
SYSTEM = _draw.standard_normal((SIZE, SIZE)) + SIZE * numpy.eye(SIZE)
SIDE = _draw.standard_normal(SIZE)
ROW = _draw.standard_normal(11_000)


def solve(x: list[float]) -> list[float]:
    """One system is solved for all, and something is sorted for each."""
    ready = numpy.linalg.solve(SYSTEM, SIDE)
    return [float(numpy.sort(ROW * each)[0] + ready[0]) for each in x]
