"""Parquet in and out through polars `map_batches` over three numpy columns: python polars_batches.py IN OUT"""

import sys

import polars as pl


def weighted(columns: pl.Series) -> pl.Series:
    x0, x1, x2 = (columns.struct.field(name).to_numpy() for name in ("x0", "x1", "x2"))
    return pl.Series(x0 + x1 * x2)


source, target = sys.argv[1:]
output = pl.struct("x0", "x1", "x2").map_batches(weighted, return_dtype=pl.Float64)
pl.scan_parquet(source).with_columns(output=output).sink_parquet(target)
