"""1,000,000 OpenAI rows of 600 bytes through a Python function that does nothing: the whole command, results durable.

Against a bare one-core loop (orjson, no validation, no fsync) and a column UDF of Daft (no record of rows, no order) on
the same file, in turn; and against Ray Data's `map_batches`, JSON to JSON, fewer times, since it is slow.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import harness
import rows

AIM_BARE, AIM_RAY, AIM_DAFT = 0.85, 25.0, 1.0
WORKERS = 2


def check_output(path: Path, expected: int) -> None:
    """Make sure that a side wrote a result for every row: a side that loses rows has no figure."""
    with path.open("rb") as file:
        found = sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 24), b""))
    if found != expected:
        raise harness.CommandFailed(f"{path.name} has {found:,} lines, not {expected:,}")


def rate(finished: harness.Finished, expected: int) -> float:
    """Rows a second of a whole command; its processor time, which other work disturbs less, is printed."""
    print(f"    {finished.wall_s:.2f} s, {finished.cpu_s:.2f} s of processor time")
    return expected / finished.wall_s


def time_batchmill(source: Path, expected: int) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder:
        output = folder / "out.jsonl"
        model = f"function:{harness.FOLDER / 'functions.py'}:nothing"
        command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", str(WORKERS)]
        command += ["-o", output, "--data-dir", folder / "data"]
        finished = harness.run_whole(command, log=folder / "log")
        check_output(output, expected)
        return rate(finished, expected)


def time_bare_loop(python: Path, source: Path, expected: int) -> float:
    """Rows a second of the bare loop."""
    with harness.work_folder() as folder:
        output = folder / "out.jsonl"
        script = harness.FOLDER / "peers" / "bare_loop.py"
        finished = harness.run_whole([python, script, source, output], log=folder / "log")
        check_output(output, expected)
        return rate(finished, expected)


def time_peer(name: str, python: Path, source: Path, expected: int) -> float:
    """Rows a second of a peer that writes a folder of JSON files."""
    with harness.work_folder() as folder:
        output, script = folder / "out", harness.FOLDER / "peers" / name
        finished = harness.run_whole([python, script, source, output], log=folder / "log")
        merged = folder / "merged.jsonl"
        with merged.open("wb") as file:
            for part in sorted(output.rglob("*.json")):
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        check_output(merged, expected)
        return rate(finished, expected)


def main() -> None:
    """Run the pairs, then Ray Data, and print both ratios."""
    arguments = harness.parse_arguments(__doc__, rows=1_000_000, row_bytes=600, ray_runs=1, ray_rows=1_000_000)
    source = rows.chat_rows(arguments.rows, arguments.row_bytes)
    python = harness.peer_python("bare", "orjson")
    daft_python = harness.peer_python("daft", "daft==0.7.26")
    sides = {
        "batchmill": lambda: time_batchmill(source, arguments.rows),
        "bare loop": lambda: time_bare_loop(python, source, arguments.rows),
        "Daft": lambda: time_peer("daft_udf.py", daft_python, source, arguments.rows),
    }
    print(f"{arguments.rows:,} rows of {arguments.row_bytes} bytes, {WORKERS} workers, {arguments.pairs} pairs")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["bare loop"], AIM_BARE, "the bare loop")
    harness.print_ratio(figures["batchmill"], figures["Daft"], AIM_DAFT, "Daft")
    if not arguments.ray_runs:
        return
    ray_python = harness.peer_python("ray", "ray[data]")
    ray_source = rows.chat_rows(arguments.ray_rows, arguments.row_bytes)
    ray = [time_peer("ray_data.py", ray_python, ray_source, arguments.ray_rows) for _ in range(arguments.ray_runs)]
    harness.print_side(f"Ray Data on {arguments.ray_rows:,} rows", ray, "rows/s")
    ours = [statistics.median(figures["batchmill"])] * len(ray)
    harness.print_ratio(ours, ray, AIM_RAY, "Ray Data")


if __name__ == "__main__":
    main()
