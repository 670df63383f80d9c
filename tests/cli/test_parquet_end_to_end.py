"""Jobs over Parquet through the real command line: read where it lies, they give what its conversion to lines gives."""

import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 600
FUNCTIONS = """
import os, pathlib, time
import numpy as np, pyarrow as pa
from batchmill import batched

def each(number, real, text):
    if number % 97 == 5: raise ValueError(f"no {number}")
    kinds = [number, None, text, {"a": [real, number]}, [1.5, 2], float("nan"), True]
    return kinds[number % 7]

def everything(**row): return {"row": row, "usage": {"prompt_tokens": 3}}
def missing(number, absent): return 1
async def later(number): return number

def crash(number):
    if number == 300: os._exit(3)
    return number / 2

@batched(64)
def arrays(number: np.ndarray, vector: np.ndarray): return vector * number[:, None]

@batched(16384)
def many(number: np.ndarray, real: np.ndarray): return number * real

@batched(64)
def table(t: pa.Table): return t.select(["number", "text"])

@batched(64)
def lists(number, real):
    if 333 in number: raise KeyError("333 is in it")
    return [n if r is None else r for n, r in zip(number, real)]

here = pathlib.Path(__file__).parent
def mended(number):
    if number % 3 == 1 and not (here / "fixed").exists(): raise RuntimeError("not yet")
    return number

def gated(number):
    if number >= 200 and not (here / "gate").exists(): time.sleep(0.02)
    return number
"""


def table() -> pa.Table:
    return pa.table(
        {
            "number": pa.array(range(ROWS), pa.int32()),
            "real": [None if n % 7 == 0 else n / 3 for n in range(ROWS)],
            "text": [f"line\n{n}" for n in range(ROWS)],
            "money": pa.array([Decimal("1.50")] * ROWS, pa.decimal128(9, 2)),
            "vector": pa.array([[n * 0.5, 1.0] for n in range(ROWS)], pa.list_(pa.float32(), 2)),
            "nested": [{"a": [n], "b": None} for n in range(ROWS)],
        }
    )


@pytest.fixture
def work(tmp_path):
    (tmp_path / "app.py").write_text(FUNCTIONS)
    pq.write_table(table(), tmp_path / "in.parquet", row_group_size=250)
    started = []

    def start(*args: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "BATCHMILL_DATA_DIR": str(tmp_path / "data")}
        process = subprocess.Popen(
            [sys.executable, "-m", "batchmill", *args],
            cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def run(work, function: str, output: str, *args: str) -> tuple[int, str]:
    process = work("run", "in.parquet", "--model", f"function:app.py:{function}", "-o", output, *args)
    out, err = process.communicate(timeout=100)
    return process.returncode, out + err


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("each", pa.string()),
        ("everything", None),
        ("later", pa.int64()),
        ("crash", pa.float64()),
        ("arrays", pa.list_(pa.float64())),
        ("table", pa.struct([("number", pa.int32()), ("text", pa.string())])),
        ("missing", pa.string()),
        ("lists", None),
    ],
)
def test_the_results_are_those_of_the_conversion(work, tmp_path, function, kind):
    """Read where it lies or converted first, the input gives the same lines. As Parquet the results keep the columns of
    the input, and `output` has the type of its values."""
    here, here_said = run(work, function, "here.jsonl")
    copied, copied_said = run(work, function, "copied.jsonl", "--copy")
    assert (here, (tmp_path / "here.jsonl").read_bytes()) == (copied, (tmp_path / "copied.jsonl").read_bytes()), (
        here_said + copied_said
    )
    assert list((tmp_path / "data").glob("jobs/*/dataset/rows.jsonl"))
    assert len(list((tmp_path / "data").glob("jobs/*/dataset/groups.u64"))) == 1
    if kind is None:
        return
    _, said = run(work, function, "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.drop_columns(["output", "error"]).equals(table()), said
    assert str(found.schema.field("output").type).replace("element:", "item:") == str(kind)
    lines = [json.loads(line) for line in (tmp_path / "here.jsonl").read_text().splitlines()]
    assert found["error"].to_pylist() == [line["error"] for line in lines]
    for value, line in zip(found["output"].to_pylist(), lines, strict=True):
        expected = line["output"]
        assert value == (json.dumps(expected, separators=(",", ":")) if function == "each" and expected is not None
                         else expected) or json.loads(value) == expected  # fmt: skip


def test_large_blocks_of_columns(work, tmp_path):
    """Blocks of columns that go through shared memory, in both directions, are whole."""
    rows = 120_000
    many = pa.table({"number": pa.array(range(rows), pa.int64()), "real": [n / 8 for n in range(rows)]})
    pq.write_table(many, tmp_path / "in.parquet")
    code, said = run(work, "many", "out.parquet")
    assert code == 0, said
    assert pq.read_table(tmp_path / "out.parquet")["output"].to_pylist() == [n * (n / 8) for n in range(rows)]


def test_rows_that_failed_run_again_and_the_others_stay(work, tmp_path):
    code, said = run(work, "mended", "out.parquet")
    assert code == 3, said
    assert pq.read_table(tmp_path / "out.parquet")["output"].null_count == ROWS // 3
    (tmp_path / "fixed").touch()
    job = next(word for word in said.split() if word.startswith("job_")).rstrip(":")
    process = work("retry", job)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["output"].to_pylist() == list(range(ROWS))
    assert found["error"].null_count == ROWS


def test_a_killed_run_goes_on_and_a_changed_file_pauses_it(work, tmp_path):
    process = work("run", "in.parquet", "--model", "function:app.py:gated", "-o", "out.csv")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 500 for path in (tmp_path / "data").glob("jobs/*/segments/*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    original = (tmp_path / "in.parquet").read_bytes()
    changed = bytearray(original)
    changed[len(changed) // 2] ^= 255
    (tmp_path / "gate").touch()
    (tmp_path / "in.parquet").write_bytes(changed)
    code, said = run(work, "gated", "out.csv")
    assert code != 0, said
    assert "changed" in said
    (tmp_path / "in.parquet").write_bytes(original)
    code, said = run(work, "gated", "out.csv")
    assert code == 0, said
    outputs = [line.rsplit(",", 2)[1] for line in (tmp_path / "out.csv").read_text().splitlines() if line[-1] == ","]
    assert outputs == list(map(str, range(ROWS)))
    assert Path(tmp_path / "in.parquet").exists()
