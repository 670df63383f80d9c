"""What a node asks of the object store for one part of results: requests and bytes, of a short and of a long job.

    python benchmarks/part_requests.py

One node, which is this process; moto's S3 server behind a proxy that counts. Parts of 1,000 rows, whose lines lie in
four objects each. Aim: a part of the long job costs no more than one of the short one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

sys.path[:0] = [str(harness.ROOT / "tests"), str(harness.ROOT / "tests" / "jobs")]
import test_parts_by_nodes as parts_by_nodes  # noqa: E402
from fakes.faulty_objects import FaultyObjects, faulty_objects  # noqa: E402
from fakes.s3_server import bucket_client, s3_environment, s3_server  # noqa: E402

RATIO_AIM = 1.1
PART_ROWS, OBJECT_ROWS = 1000, 250
TEXT = "x" * 400


@contextmanager
def counting_store() -> Iterator[tuple[FaultyObjects, Any]]:
    with s3_server() as url, bucket_client(url, parts_by_nodes.BUCKET) as client, faulty_objects(url) as plan:
        os.environ.update(s3_environment(plan.url))
        yield plan, client


async def cost(folder: Path, plan: FaultyObjects, client: Any, parts: int) -> dict[str, float]:
    """Of one part, on average."""
    folder.mkdir()
    rows = parts * PART_ROWS
    url = f"s3://{parts_by_nodes.BUCKET}/own-{parts}"
    stage = parts_by_nodes.Stage(folder, client, url=url, contents=[TEXT] * rows, object_rows=OBJECT_ROWS)
    await stage.open()
    stage.run_rest()
    total: Counter[str] = Counter()
    send = stage.node.send

    def counted(frame: Any) -> None:
        before, read_bytes = len(plan.requests), plan.read_bytes
        send(frame)
        for method, path, _ in plan.requests[before:]:
            total["LIST" if "list-type" in path else method] += 1
        total["bytes"] += plan.read_bytes - read_bytes

    stage.node.send = counted  # type: ignore[method-assign]
    await stage.parts()
    await stage.close()
    if parts_by_nodes.rewritten(stage):
        raise harness.CommandFailed("the node wrote not all parts")
    for key in stage.objects():
        client.delete_object(Bucket=parts_by_nodes.BUCKET, Key=f"out/{key}")
    return {name: count / parts for name, count in sorted(total.items())}


def main() -> None:
    """Print both jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=20, help="of the short job; the long one has 8 times as many")
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    parts_by_nodes.PART_ROWS = PART_ROWS
    found = {}
    with harness.work_folder() as folder, counting_store() as (plan, client):
        for parts in (arguments.parts, 8 * arguments.parts):
            found[parts] = asyncio.run(cost(folder / str(parts), plan, client, parts))
            shown = ", ".join(f"{name} {count:,.1f}" for name, count in found[parts].items())
            print(f"  {parts} parts: of each, read by the node: {shown}", flush=True)
    short, long = (each["bytes"] for each in found.values())
    harness.print_limit("bytes of a part of the long job, of one of the short job", long / short, RATIO_AIM, "x")


if __name__ == "__main__":
    main()
