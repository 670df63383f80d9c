"""The same work through a column UDF of Daft, JSON to JSON: `daft_udf.py INPUT OUTPUT_FOLDER`."""

import os
import sys

import daft
from daft import DataType, Series, col

BODY = DataType.struct({"ok": DataType.bool()})


@daft.func.batch(return_dtype=DataType.struct({"status_code": DataType.int64(), "body": BODY}))
def nothing(bodies: Series) -> list[dict[str, object]]:
    """Do nothing with the rows of a column, and build a response for each."""
    return [{"status_code": 200, "body": {"ok": True}}] * len(bodies)


def main() -> None:
    """Read, call and write with Daft's defaults on this machine's cores."""
    rows = daft.read_json(sys.argv[1])
    results = rows.select(col("custom_id"), nothing(col("body")).alias("response"))
    results.write_json(sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # its threads sometimes crash while Python ends


if __name__ == "__main__":
    main()
