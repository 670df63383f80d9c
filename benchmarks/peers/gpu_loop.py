"""What one writes for a GPU by hand: Parquet in batches through the encoder, and its embeddings to Parquet.

`gpu_loop.py INPUT OUTPUT`; nothing is recorded, so a loop that is stopped begins anew.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_functions import BATCH, WIDTH, Encoder


def main() -> None:
    """One batch after the other."""
    encoder = Encoder()
    encoder.setup()
    source = pq.ParquetFile(sys.argv[1])
    schema = pa.schema([*source.schema_arrow, pa.field("output", pa.list_(pa.float32(), WIDTH))])
    with pq.ParquetWriter(sys.argv[2], schema) as writer:
        for batch in source.iter_batches(BATCH):
            found = encoder.encode(batch["text"].to_pylist())
            column = pa.FixedSizeListArray.from_arrays(pa.array(found.reshape(-1)), WIDTH)
            writer.write_batch(pa.record_batch([*batch.columns, column], schema=schema))


if __name__ == "__main__":
    main()
