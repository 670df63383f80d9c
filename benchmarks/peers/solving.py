"""A numpy function that is about ten times cheaper for a row among 64 than for a row alone: most of it is done once.

Both parts are the same operation, so that the factor is much the same on every machine.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is there

import numpy  # noqa: E402

SHARED_ROWS = 11
_draw = numpy.random.default_rng(1)
SHARED = _draw.standard_normal((SHARED_ROWS, 2_700))
ROW = _draw.standard_normal(2_700)


def solve(x: list[float]) -> list[float]:
    """Eleven arrays are sorted for all rows, and one for each."""
    ready = numpy.sort(SHARED, axis=1)
    return [float(numpy.sort(ROW * each)[0] + ready[0, 0]) for each in x]
