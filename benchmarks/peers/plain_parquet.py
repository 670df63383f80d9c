"""Parquet in and out through a plain Python loop over `to_pylist()` on one core: python plain_parquet.py IN OUT"""

import sys

import pyarrow as pa
import pyarrow.parquet as pq


def weighted(x0, x1, x2):
    return x0 + x1 * x2


source, target = sys.argv[1:]
pa.set_cpu_count(1)
writer = None
for batch in pq.ParquetFile(source).iter_batches(65_536, use_threads=False):
    rows = batch.select(["x0", "x1", "x2"]).to_pylist()
    output = pa.array([weighted(row["x0"], row["x1"], row["x2"]) for row in rows])
    table = pa.table([*batch.columns, output], names=[*batch.schema.names, "output"])
    writer = writer or pq.ParquetWriter(target, table.schema)
    writer.write_table(table)
writer.close()
