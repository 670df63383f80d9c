"""Workers as Ray actors against child processes, on one machine: rows a second of one function, in pairs.

    BATCHMILL_RAY_PYTHON=.venv-ray/bin/python python benchmarks/ray_executor.py

Both run the same job in the same minute, alternating; the time is that of the rows, without the start of Ray. The
processor time is that of `batchmill run` and all its children that it waited for, Ray's start included.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = 1_000_000
PAIRS = 3
APP = "def double(n):\n    return 2 * n\n"


def run(folder: Path, executor: str, number: int) -> tuple[float, float]:
    """Returns: rows a second, and processor seconds."""
    out = folder / f"out-{executor}-{number}.jsonl"
    cluster = f'[cluster]\nexecutor = "ray"\naddress = "local"\npython = "{os.environ["BATCHMILL_RAY_PYTHON"]}"\n'
    (folder / "batchmill.toml").write_text(
        f'data_dir = "data-{executor}-{number}"\n' + (cluster if executor == "ray" else "")
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    batchmill = [sys.executable, "-P", "-m", "batchmill"]
    order = ["run", "in.jsonl", "--model", "function:app.py:double", "--output", str(out)]
    done = subprocess.run([*batchmill, *order], cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shown = subprocess.run([*batchmill, "jobs", "--json"], cwd=folder, capture_output=True, text=True, check=True)
    job = json.loads(shown.stdout.splitlines()[0])["job"]
    assert job["rows_ok"] == ROWS, job
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ROWS / job["elapsed_s"], processor_s


def main() -> None:
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(APP)
        (folder / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(ROWS)))
        for number in range(PAIRS):
            for executor, found in rates.items():
                rate, processor_s = run(folder, executor, number)
                found.append(rate)
                print(f"{executor}: {rate:,.0f} rows/s, {processor_s:.1f} s of processor time", flush=True)
    ratio = statistics.median(rates["ray"]) / statistics.median(rates["local"])
    print(f"Ray against local: {ratio:.2f} x")


if __name__ == "__main__":
    main()
