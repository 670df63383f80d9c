"""20,000 rows through a function that counts its calls, while processes of the run are killed or stopped at random.

Victims are the owner, the workers and the function processes, every 0.5 to 2 s: half of them get SIGKILL, the others
SIGSTOP and, a moment later, SIGCONT. The command is started again until it ends by itself. Its output must be that of
an undisturbed run, byte by byte but for the job's id (Parquet: value by value). No row may be called again whose
result stood in a segment when a process was killed. Rows are lines of OpenAI's form, of a table, or Parquet's columns.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import kill
import rows
from local_endpoint import Call

KINDS = ("lines", "table", "columns")
FUNCTIONS = Path(__file__).with_name("counting_functions.py")
ROW_BYTES = 600
STOP_S_MIN, STOP_S_MAX = 0.05, 0.5
CALLS = "BENCHMARK_CALLS"  # the variable that names the log of calls


@dataclass(frozen=True)
class CallLog:
    """Where the function writes a line for each row it is called with: the row's key, and the time."""

    log: Path

    def calls(self) -> list[Call]:
        """All calls so far. The last line may be half of one, as its process was killed."""
        text = self.log.read_text() if self.log.exists() else ""
        found = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [Call(key, float(at), float(at)) for key, at in found]


class FunctionChaos(kill.Chaos):
    """Stops processes for a moment too."""

    stopped = 0

    def kill_one(self, root: int) -> None:
        """Kill a process of the tree, or stop one for a moment."""
        if self.rng.random() < 0.5:
            super().kill_one(root)
            return
        pid = self.rng.choice(harness.tree_of(root))
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(STOP_S_MIN, STOP_S_MAX))
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # it ended by itself meanwhile
        self.stopped += 1


def source_of(kind: str, count: int) -> Path:
    """The input file of this kind."""
    if kind == "lines":
        return rows.chat_rows(count, ROW_BYTES)
    if kind == "table":

        def lines() -> Iterator[bytes]:
            for number in range(count):
                yield b'{"user":"row-%08d","x":%d.5}\n' % (number, number)

        return harness.made_input(f"table-{count}.jsonl", lambda path: rows.write_lines(path, lines()))
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(path: Path) -> None:
        names = [f"row-{number:08d}" for number in range(count)]
        pq.write_table(pa.table({"user": names, "x": [number + 0.5 for number in range(count)]}), path)

    return harness.made_input(f"users-{count}.parquet", write)


def command_of(kind: str, source: Path, output: Path, data_dir: Path) -> list[str]:
    """The run of a file through its function."""
    name = "counted_columns" if kind == "columns" else "counted"
    words = [harness.BATCHMILL, "run", source, "--model", f"function:{FUNCTIONS}:{name}", "--workers", 2]
    return [str(word) for word in (*words, "-o", output, "--data-dir", data_dir)]


def are_same(one: Path, other: Path) -> bool:
    """Whether two result files say the same, but for the job's own id in the ids of OpenAI's form."""
    if one.suffix != ".parquet":
        first, second = [re.sub(rb"batch_req_[0-9a-f]+_", b"", each.read_bytes()) for each in (one, other)]
        return first == second
    import pyarrow.parquet as pq

    return pq.read_table(one).equals(pq.read_table(other))


def run_kind(kind: str, folder: Path, arguments: argparse.Namespace) -> bool:
    """Run a file of this kind undisturbed and under fire, and print the audit; whether all is as it should be."""
    source = source_of(kind, arguments.rows)
    output = folder / f"out{source.suffix}"
    expected = folder / f"expected{source.suffix}"
    os.environ[CALLS] = str(folder / "undisturbed.calls")
    subprocess.run(command_of(kind, source, output, folder / "undisturbed"), check=True, capture_output=True)
    output.rename(expected)
    os.environ[CALLS] = str(folder / "calls")
    counted = CallLog(folder / "calls")
    began = time.monotonic()
    chaos = FunctionChaos(command_of(kind, source, output, folder / "data"), folder, counted, arguments)
    story = chaos.run()
    seconds = time.monotonic() - began
    calls = counted.calls()
    repeated, wrong, late = kill.count_repeats(calls, story.kills)
    victims = [each.victim for each in story.kills]
    kills = {victim: victims.count(victim) for victim in sorted(set(victims))}
    print(f"{kind}: {arguments.rows:,} rows, {seconds:.0f} s; {len(victims)} kills {kills}, ", end="")
    print(f"{chaos.stopped} stops, {story.starts} starts; {len(calls):,} calls, {repeated:,} of them repeats, ", end="")
    print(f"{late} of these more than a second after the call and without a kill")
    flaws = {
        "output that differs from an undisturbed run": int(not are_same(output, expected)),
        "rows never called": arguments.rows - len({call.key for call in calls}),
        "calls repeated wrongly": wrong,
        "processes left behind": len(kill.left_processes(story)),
        "flaws of the ledger": len(kill.verify_ledger(folder / "data")),
        "unexpected ends": len(story.unexpected_ends),
    }
    for name, count in flaws.items():
        print(f"=> {kind}: {name}: {count}; aim: 0: {harness.verdict(count == 0)}")
    for end in story.unexpected_ends:
        print(f"ended by itself, unfinished: {end}")
    return not any(flaws.values())


def main() -> None:
    """Run each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--kills", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--every-s-min", type=float, default=0.5)
    parser.add_argument("--every-s-max", type=float, default=2.0)
    parser.add_argument("--every-calls", type=int, default=0, help="kill each time so many rows were called")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        with harness.work_folder() as folder:
            run_kind(kind, folder, arguments)


if __name__ == "__main__":
    main()
