"""Rows that nodes of a cluster check, against the same checked by children of the owner, for a whole command: processor
time of the owner's machine.

    BATCHMILL_RAY_PYTHON=.venv-ray/bin/python python benchmarks/ray_sealing.py

800,000 requests to a language model lie in a local S3 server, as four objects; two nodes see nothing of the data
directory. The last row is refused, so the command ends once all rows are checked. The owner is counted with its
children and the driver; the nodes and the S3 server are not. Aim: under 0.3.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import harness
import many_rows
import object_rows

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
from ray_support import Nodes, ray_nodes, ray_python  # noqa: E402

RATIO_AIM = 0.3
OBJECTS = 4
MODEL = "m"
ADAPTER = re.compile(r'"model":"a\d+"')
REFUSED = '{"custom_id":"refused"}\n'
# The same command, whose nodes check no row.
HERE = (
    "from batchmill.jobs.intake import node_sealing; node_sealing.BYTES_MIN = 1 << 60; "
    "from batchmill.cli.main import main; main()"
)
FAILS = ("sh", "-c", '"$@"; test $? -ne 0', "sh")


class Stage:
    def __init__(self, folder: Path, store: object_rows.Store, nodes: Nodes, rows: int) -> None:
        self._folder, self._store, self._nodes, self._rows = folder, store, nodes, rows

    def run(self, name: str, *program: str | Path) -> harness.Finished:
        """One whole command with a fresh data directory. Args: name: of the side and the pair."""
        (self._folder / "batchmill.toml").write_text(
            f'data_dir = "{self._folder / "data" / name}"\n'
            f'[cluster]\nexecutor = "ray"\naddress = "{self._nodes.address}"\npython = "{ray_python()}"\n'
            f'cache = "{self._folder / "cache"}"\ntrusted_network = true\n'
            f'[storage]\nobjects = "s3://{object_rows.BUCKET}/{name}"\n'
            f'[secrets]\nkey_file = "{self._folder / "keys"}"\n'
            f'[models.{MODEL}]\nengine = "openai"\nsource = "model"\nbase_url = "http://127.0.0.1:9/v1"\n'
        )
        command = [
            *FAILS, *program, "run", f"s3://{object_rows.BUCKET}/in/*.jsonl", "--model", MODEL,
            "-o", self._folder / "out.jsonl", "--config", self._folder / "batchmill.toml",
        ]  # fmt: skip
        finished = harness.run_whole(list(command), log=self._folder / "log", env=self._store.environment)
        if f"1 of {self._rows + 1} rows" not in finished.log or "checked on this machine" in finished.log:
            raise harness.CommandFailed(f"{name}: {finished.log[-3000:]}")
        return finished


def main() -> None:
    """Run the pairs and print both sides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=800_000)
    arguments = parser.parse_args()
    sides = {"here": (sys.executable, "-c", HERE), "nodes": (harness.BATCHMILL,)}
    found: dict[str, list[harness.Finished]] = {name: [] for name in sides}
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder())
        store = stack.enter_context(object_rows.serve(folder))
        pieces = many_rows.requests(arguments.rows)
        each = -(-arguments.rows // many_rows.BATCH_ROWS // OBJECTS)
        for number in range(OBJECTS):
            text = ADAPTER.sub(f'"model":"{MODEL}"', "".join(islice(pieces, each)))
            (folder / "in.jsonl").write_text(text + (REFUSED if number == OBJECTS - 1 else ""))
            store.objects.put_file(f"in/{number}.jsonl", folder / "in.jsonl")
        hidden = folder / "data"
        hidden.mkdir()
        nodes = stack.enter_context(ray_nodes(0, 2, 2, environ=store.environment, hidden=hidden))
        stage = Stage(folder, store, nodes, arguments.rows)
        for pair in range(arguments.pairs):
            for name in sorted(sides, reverse=pair % 2 == 1):
                found[name].append(stage.run(f"{name}-{pair}", *sides[name]))
                print(f"  pair {pair + 1}: {name}: {object_rows.shown(found[name][-1])}", flush=True)
    for name, runs in found.items():
        harness.print_side(f"{name}, processor time of the owner's machine", [each.cpu_s for each in runs], "s")
        harness.print_side(f"{name}, wall clock", [each.wall_s for each in runs], "s")
    ratio = statistics.median(each.cpu_s for each in found["nodes"]) / statistics.median(
        each.cpu_s for each in found["here"]
    )
    harness.print_limit("processor time with nodes, of that without", ratio, RATIO_AIM, "x")


if __name__ == "__main__":
    main()
