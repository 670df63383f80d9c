"""The same work through Ray Data, JSON to JSON: `ray_data.py INPUT OUTPUT_FOLDER`."""

import logging
import sys

import pyarrow as pa
import ray


def nothing(batch: pa.Table) -> pa.Table:
    """Do nothing with the rows of a batch, and build a result for each."""
    ids = batch.column("custom_id")
    count = len(ids)
    bodies = pa.array([{"ok": True}] * count)
    responses = pa.StructArray.from_arrays([pa.array([200] * count), bodies], ["status_code", "body"])
    return pa.table({"custom_id": ids, "response": responses, "error": pa.nulls(count, pa.string())})


def main() -> None:
    """Read, map and write with Ray Data's defaults on this machine's cores."""
    ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_json(sys.argv[1], lines=True)
    rows.map_batches(nothing, batch_format="pyarrow").write_json(sys.argv[2])
    ray.shutdown()


if __name__ == "__main__":
    main()
