"""Texts of 128 bytes in Parquet through an encoder of 86 M parameters on a GPU, embeddings to Parquet: whole commands.

With one worker, and with two that share the GPU, against the loop that one writes by hand. Needs a CUDA GPU, and torch
and transformers beside batchmill. Every embedding is compared with the loop's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gpu_functions import BATCH, TOKENS, WIDTH

AIM = 0.95
GROUP_ROWS = 65_536
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
DIFFERENCE_MAX = 0.05  # of batches that are cut elsewhere, in bfloat16


def write_texts(path: Path, rows: int) -> None:
    """A column of texts, drawn once from a seed."""
    random = np.random.default_rng(7)
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for first in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - first)
            letters = LETTERS[random.integers(0, len(LETTERS), count * TOKENS)].tobytes().decode()
            texts = [letters[at : at + TOKENS] for at in range(0, len(letters), TOKENS)]
            writer.write_table(pa.table({"text": texts}))


def check_output(path: Path, expected: Path | None) -> None:
    """Make sure that a side has the loop's embedding of every row."""
    if expected is None:
        return
    found, wanted = pq.ParquetFile(path), pq.ParquetFile(expected)
    if found.metadata.num_rows != wanted.metadata.num_rows:
        raise harness.CommandFailed(f"{path.name} has {found.metadata.num_rows:,} rows")
    batches = [each.iter_batches(BATCH, columns=["output"]) for each in (found, wanted)]
    for number, pair in enumerate(zip(*batches, strict=True)):
        ours, theirs = (np.asarray(each["output"].flatten()).reshape(-1, WIDTH) for each in pair)
        if (difference := float(np.abs(ours - theirs).max())) > DIFFERENCE_MAX:
            raise harness.CommandFailed(f"{path.name} differs by {difference} in batch {number}")


def rate(finished: harness.Finished, rows: int) -> float:
    print(f"    {finished.wall_s:.2f} s, {finished.cpu_s:.2f} s of processor time")
    return rows / finished.wall_s


def time_batchmill(source: Path, rows: int, workers: int, expected: Path) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder:
        output = folder / "out.parquet"
        model = f"function:{harness.FOLDER / 'gpu_functions.py'}:Encoder"
        command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", str(workers)]
        finished = harness.run_whole([*command, "-o", output, "--data-dir", folder / "data"], log=folder / "log")
        check_output(output, expected)
        return rate(finished, rows)


def time_loop(source: Path, rows: int, expected: Path) -> float:
    """Rows a second of the loop; the first run's output is the one that all are compared with."""
    with harness.work_folder() as folder:
        output = folder / "out.parquet"
        command = [sys.executable, harness.FOLDER / "peers" / "gpu_loop.py", source, output]
        finished = harness.run_whole(command, log=folder / "log")
        check_output(output, expected if expected.exists() else None)
        if not expected.exists():
            output.rename(expected)
        return rate(finished, rows)


def main() -> None:
    """Run all sides in turn and print the ratios."""
    arguments = harness.parse_arguments(__doc__, rows=200_000, pairs=2)
    source = harness.made_input(f"texts-{arguments.rows}.parquet", lambda path: write_texts(path, arguments.rows))
    expected = harness.DATA / f"embeddings-{arguments.rows}.parquet"
    sides = {
        "loop": lambda: time_loop(source, arguments.rows, expected),
        "batchmill": lambda: time_batchmill(source, arguments.rows, 1, expected),
        "batchmill, 2 workers": lambda: time_batchmill(source, arguments.rows, 2, expected),
    }
    time_loop(source, arguments.rows, expected)  # fills the caches of the disk and of the compiled kernels
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    for name in ("batchmill", "batchmill, 2 workers"):
        harness.print_ratio(figures[name], figures["loop"], AIM, "the loop by hand")


if __name__ == "__main__":
    main()
