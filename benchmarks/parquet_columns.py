"""Parquet of 5,000,000 rows and ten float columns through functions of three of them, to Parquet: whole commands.

A function of numpy columns against polars `map_batches`; a function of single rows against a plain Python loop over
`to_pylist()` on one core. Also the largest process, and the data directory against the output.
"""

from __future__ import annotations

from pathlib import Path

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

AIM_POLARS, AIM_LOOP, AIM_DATA, AIM_BYTES = 0.5, 0.6, 1.5, 1024**3
WORKERS = 2
COLUMNS = 10
GROUP_ROWS = 1_000_000


def source_of(rows: int) -> Path:
    """The input, drawn once from a seed."""
    harness.DATA.mkdir(parents=True, exist_ok=True)
    path = harness.DATA / f"columns-{rows}.parquet"
    if not path.exists():
        random = np.random.default_rng(7)
        schema = pa.schema([(f"x{number}", pa.float64()) for number in range(COLUMNS)])
        part = path.with_suffix(".part")
        with pq.ParquetWriter(part, schema) as writer:
            for first in range(0, rows, GROUP_ROWS):
                count = min(GROUP_ROWS, rows - first)
                writer.write_table(pa.table([random.random(count) for _ in range(COLUMNS)], schema=schema))
        part.rename(path)
    return path


def check_output(path: Path, source: Path) -> None:
    """Make sure that a side computed every row: one that loses rows has no figure."""
    rows = 0
    pairs = zip(pq.ParquetFile(source).iter_batches(), pq.ParquetFile(path).iter_batches(), strict=False)
    found = pq.ParquetFile(path).metadata.num_rows
    for given, written in pairs:
        x0, x1, x2 = (given[name].to_numpy() for name in ("x0", "x1", "x2"))
        if not np.array_equal(written["output"].to_numpy(), x0 + x1 * x2):
            raise harness.CommandFailed(f"{path.name} differs within {given.num_rows} rows after row {rows}")
        rows += given.num_rows
    if found != pq.ParquetFile(source).metadata.num_rows:
        raise harness.CommandFailed(f"{path.name} has {found:,} rows")


def rate(finished: harness.Finished, rows: int) -> float:
    print(f"    {finished.wall_s:.2f} s, {finished.cpu_s:.2f} s of processor time")
    return rows / finished.wall_s


def time_batchmill(name: str, source: Path, rows: int) -> float:
    """Rows a second of `batchmill run`, with a fresh data directory."""
    with harness.work_folder() as folder:
        output, data = folder / "out.parquet", folder / "data"
        model = f"function:{harness.FOLDER / 'column_functions.py'}:{name}"
        command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", str(WORKERS)]
        finished = harness.run_whole([*command, "-o", output, "--data-dir", data], log=folder / "log")
        check_output(output, source)
        return rate(finished, rows)


def time_peer(python: Path, script: str, source: Path, rows: int) -> float:
    with harness.work_folder() as folder:
        output = folder / "out.parquet"
        command = [python, harness.FOLDER / "peers" / script, source, output]
        finished = harness.run_whole(command, log=folder / "log")
        check_output(output, source)
        return rate(finished, rows)


def watch_sizes(source: Path) -> None:
    """Run once more and print the largest process and the data directory."""
    peaks = harness.Peaks()
    with harness.work_folder() as folder:
        output, data = folder / "out.parquet", folder / "data"
        model = f"function:{harness.FOLDER / 'column_functions.py'}:weighted_columns"
        command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", str(WORKERS)]
        harness.run_whole([*command, "-o", output, "--data-dir", data], log=folder / "log", peaks=peaks)
        held = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
        share = held / output.stat().st_size
        verdict = "reached" if share <= AIM_DATA else "missed"
        print(f"data directory: {held / 2**20:,.0f} MiB, {share:.2f} x the output (at most {AIM_DATA} x, {verdict})")
    pid, most = max(peaks.bytes_of.items(), key=lambda item: item[1])
    verdict = "reached" if most <= AIM_BYTES else "missed"
    print(f"largest process: {peaks.name_of[pid]}, {most / 2**20:,.0f} MiB (at most 1,024 MiB, {verdict})")


def main() -> None:
    """Run all sides in turn and print the ratios."""
    arguments = harness.parse_arguments(__doc__, rows=5_000_000)
    source = source_of(arguments.rows)
    polars, arrow = harness.peer_python("polars", "polars", "numpy"), harness.peer_python("arrow", "pyarrow")
    sides = {
        "batchmill, columns": lambda: time_batchmill("weighted_columns", source, arguments.rows),
        "polars": lambda: time_peer(polars, "polars_batches.py", source, arguments.rows),
        "batchmill, rows": lambda: time_batchmill("weighted", source, arguments.rows),
        "plain loop": lambda: time_peer(arrow, "plain_parquet.py", source, arguments.rows),
    }
    print(f"{arguments.rows:,} rows of {COLUMNS} columns, {WORKERS} workers, {arguments.pairs} pairs")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill, columns"], figures["polars"], AIM_POLARS, "polars map_batches")
    harness.print_ratio(figures["batchmill, rows"], figures["plain loop"], AIM_LOOP, "a plain loop")
    watch_sizes(source)


if __name__ == "__main__":
    main()
