"""Results in parts, written by the nodes of a cluster, against the same written by children of the owner: processor
time of the owner's machine, for the whole command.

    BATCHMILL_RAY_PYTHON=.venv-ray/bin/python python benchmarks/ray_parts.py

Four objects of 500,000 rows, from and to a local S3 server, on two nodes that see nothing of the data directory. That
of the owner is counted with its children and the driver; the nodes and the S3 server are not. Aim: under 0.9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import harness
import object_rows

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
from ray_support import Nodes, ray_nodes, ray_python  # noqa: E402

RATIO_AIM = 0.9
OBJECTS = 4
FUNCTION = "def same(n, text):\n    return text\n"
TEXT = "x" * 100
# The same command, whose nodes write no part.
HERE = (
    "from batchmill.jobs.results import parts_run; parts_run.can_use_nodes = lambda *_: False; "
    "from batchmill.cli.main import main; main()"
)


class Stage:
    def __init__(self, folder: Path, store: object_rows.Store, nodes: Nodes, rows: int, part_rows: int) -> None:
        self._folder, self._store, self._nodes, self._rows, self._part_rows = folder, store, nodes, rows, part_rows

    def run(self, name: str, *program: str | Path) -> harness.Finished:
        """One whole command with a fresh data directory. Args: name: of the side and the pair."""
        data = self._folder / "data" / name
        (self._folder / "batchmill.toml").write_text(
            f'data_dir = "{data}"\n'
            f'[cluster]\nexecutor = "ray"\naddress = "{self._nodes.address}"\npython = "{ray_python()}"\n'
            f'cache = "{self._folder / "cache"}"\ntrusted_network = true\n'
            f'[storage]\nobjects = "s3://{object_rows.BUCKET}/{name}"\n'
            f'[secrets]\nkey_file = "{self._folder / "keys"}"\n'
        )
        output = f"s3://{object_rows.BUCKET}/out-{name}/"
        command = [
            *program, "run", f"s3://{object_rows.BUCKET}/in/*.jsonl", "--model",
            f"function:{self._folder / 'app.py'}:same", "-o", output, "--part-rows", str(self._part_rows),
            "--config", self._folder / "batchmill.toml",
        ]  # fmt: skip
        finished = harness.run_whole(list(command), log=self._folder / "log", env=self._store.environment)
        self._check(f"out-{name}/", by_nodes=not name.startswith("here"))
        return finished

    def _check(self, prefix: str, *, by_nodes: bool) -> None:
        """Raises: CommandFailed unless all rows are in parts that the right side has written."""
        manifest = json.loads(self._store.objects.get(f"{prefix}manifest.json", size_max=2**20))
        written = [part for part in manifest["parts"] if manifest["attempt"] not in part["name"]]
        if manifest["ok"] != self._rows or len(written) != (len(manifest["parts"]) if by_nodes else 0):
            raise harness.CommandFailed(f"{prefix}: {manifest['ok']} rows; {len(written)} parts written by nodes")


def main() -> None:
    """Run the pairs and print both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=500_000, help="of each object")
    parser.add_argument("--part-rows", type=int, default=250_000)
    arguments = parser.parse_args()
    sides = {"here": (sys.executable, "-c", HERE), "nodes": (harness.BATCHMILL,)}
    found: dict[str, list[harness.Finished]] = {name: [] for name in sides}
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder())
        store = stack.enter_context(object_rows.serve(folder))
        (folder / "app.py").write_text(FUNCTION)
        for number in range(OBJECTS):
            first = number * arguments.rows
            lines = [f'{{"n":{n},"text":"{TEXT}"}}\n' for n in range(first, first + arguments.rows)]
            (folder / "in.jsonl").write_text("".join(lines))
            store.objects.put_file(f"in/{number}.jsonl", folder / "in.jsonl")
        hidden = folder / "data"
        hidden.mkdir()
        nodes = stack.enter_context(ray_nodes(0, 2, 2, environ=store.environment, hidden=hidden))
        stage = Stage(folder, store, nodes, OBJECTS * arguments.rows, arguments.part_rows)
        for pair in range(arguments.pairs):
            for name in sorted(sides, reverse=pair % 2 == 1):
                finished = stage.run(f"{name}-{pair}", *sides[name])
                found[name].append(finished)
                print(f"  pair {pair + 1}: {name}: {object_rows.shown(finished)}", flush=True)
    for name, runs in found.items():
        harness.print_side(f"{name}, processor time of the owner's machine", [each.cpu_s for each in runs], "s")
        harness.print_side(f"{name}, wall clock", [each.wall_s for each in runs], "s")
    ratio = statistics.median(each.cpu_s for each in found["nodes"]) / statistics.median(
        each.cpu_s for each in found["here"]
    )
    harness.print_limit("processor time with nodes, of that without", ratio, RATIO_AIM, "x")


if __name__ == "__main__":
    main()
