"""Standard input as a dataset, and standard output as the place for results."""

import gzip
import io
import json
import os
import subprocess
import sys
import time

import pytest

from batchmill.cli.jobs.result_stream import PIECE_BYTES, ResultTail
from batchmill.datasets import spooled_inputs
from batchmill.errors import InvalidDataset
from batchmill.owned_files import OwnedFiles

MAIN = ("-m", "batchmill")
FUNCTION = """
import pathlib, time
gate = pathlib.Path(__file__).parent / "gate"
def up(text):
    if text == "bad": raise ValueError("no")
    return text.upper()
def slow(n):
    if n >= 5 and not gate.exists(): time.sleep(0.05)
    return n
"""
LINES = '{"text":"a"}\n{"text":"bad"}\n{"text":"c"}\n'
RESULTS = [("a", "A", None), ("bad", None, "ValueError: no"), ("c", "C", None)]


@pytest.fixture
def batchmill(tmp_path):
    """Run a command with this on its standard input."""
    (tmp_path / "app.py").write_text(FUNCTION)
    environ = {**os.environ, "BATCHMILL_DATA_DIR": str(tmp_path / "data")}

    def run(*words, text=""):
        line = [sys.executable, *MAIN, *words]
        return subprocess.run(line, cwd=tmp_path, env=environ, input=text, capture_output=True, text=True, timeout=100)

    return run


def spooled(tmp_path):
    return sorted((tmp_path / "data" / spooled_inputs.FOLDER).glob("[!.]*"))


def test_rows_go_through_a_pipe(batchmill, tmp_path):
    """Rows come on standard input and go to standard output in their order, and the input goes with its last job."""
    words = ("run", "-", "--model", "function:app.py:up", "-o", "-")
    result = batchmill(*words, text=LINES)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["text"], row["output"], row["error"]) for row in rows] == RESULTS and result.returncode == 3
    assert "  failed    1" in result.stderr
    again = batchmill(*words, "--output-format", "csv", text=LINES)
    assert "is finished already" in again.stderr and again.stdout.splitlines()[2] == "bad,,ValueError: no"
    other = batchmill(*words, text=LINES.replace("bad", "b"))
    assert other.returncode == 0 and "is finished already" not in other.stderr
    more = batchmill(*words, "--restart", "--label", "a=b", "--overwrite", text=LINES)
    assert more.returncode == 3
    jobs = [json.loads(line)["job"] for line in batchmill("jobs", "--json").stdout.splitlines()]
    assert {job["input"][0] for job in jobs} == {str(each) for each in spooled(tmp_path) if ".job_" not in each.name}
    assert len({job["input"][0] for job in jobs}) == 2
    for job in jobs:
        assert all(os.path.exists(path) for path in job["input"])
        assert batchmill("jobs", "rm", job["id"]).returncode == 0
    assert spooled(tmp_path) == []


@pytest.fixture
def streaming(tmp_path):
    """`streaming()` begins a job of 3,000 rows that takes minutes, until there is a file `gate`."""
    (tmp_path / "app.py").write_text(FUNCTION)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n":{n}}}\n' for n in range(3000)))
    environ = {**os.environ, "BATCHMILL_DATA_DIR": str(tmp_path / "data")}
    started = []

    def begin():
        words = ("run", "in.jsonl", "--model", "function:app.py:slow", "-o", "-")
        with (tmp_path / "log").open("a") as log:
            pipes = {"stdout": subprocess.PIPE, "stderr": log}
            started.append(subprocess.Popen([sys.executable, *MAIN, *words], cwd=tmp_path, env=environ, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_rows_come_while_the_job_runs(streaming, tmp_path):
    """Rows are there before the job has ended, in the order of the input, each once and whole."""
    process = streaming()
    first = process.stdout.readline()
    assert process.poll() is None and json.loads(first) == {"n": 0, "output": 0, "error": None}
    (tmp_path / "gate").touch()
    assert [json.loads(line)["output"] for line in [first, *process.stdout]] == list(range(3000))
    assert process.wait(timeout=100) == 0


def test_a_reader_that_leaves_pauses_the_job(streaming, batchmill, tmp_path):
    """As `| head` does: the exit code is that of a closed pipe, nothing is a traceback, and the command goes on."""
    process = streaming()
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=100) == 141, (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
    job = json.loads(batchmill("jobs", "--json").stdout)["job"]
    assert job["state"] == "paused" and job["rows_ok"] < 3000
    (tmp_path / "gate").touch()
    again = streaming()
    assert [json.loads(line)["output"] for line in again.stdout] == list(range(3000)) and again.wait(timeout=100) == 0


async def test_a_tail_copies_whole_lines_of_what_is_written_anew(tmp_path):
    """It waits for the rest of a line, goes on in a file that another begins, and in the one with the final name."""
    copied, path = [], tmp_path / "results.jsonl"
    part, tail = path.with_name("results.jsonl.part"), ResultTail(path, copied.append)
    assert not await tail.copy()
    part.write_bytes(b"1\n2\n3")
    assert await tail.copy() and not await tail.copy()
    assert (copied, tail.written) == ([b"1\n2\n"], 4)
    part.unlink()
    part.write_bytes(b"1\n")
    assert not await tail.copy()
    long = b"4" * 3 * PIECE_BYTES
    part.write_bytes(b"1\n2\n3\n" + long + b"\n")
    part.rename(path)
    assert await tail.copy()
    assert b"".join(copied) == path.read_bytes() and tail.written == path.stat().st_size


def test_what_is_no_dataset_is_refused(batchmill, tmp_path):
    """Empty input, an unknown format, another input beside it and two kinds of output are refused; nothing stays."""
    model = ("--model", "function:app.py:up")
    for words, text, message in (
        (("run", "-"), "", "standard input is empty"),
        (("run", "-"), "text\na\n", "name it with --format"),
        (("run", "-", "app.py"), LINES, "name no other input"),
        (("run", "-", "-o", "-", "--json"), LINES, "both write to standard output"),
        (("validate", "-"), "[1]", "standard input:1: invalid_json"),
    ):
        refused = batchmill(*words, *model, text=text)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert spooled(tmp_path) == [] and "1 csv rows" in batchmill("validate", "-", *model, text="text,b\na,b\n").stdout


def test_the_first_bytes_say_the_format(tmp_path):
    """The name of the file says what the bytes or --format say, and the same bytes are the same file."""
    packed = gzip.compress(LINES.encode())
    for data, given, suffix in (
        (LINES.encode(), None, ".jsonl"),
        (b"\xef\xbb\xbf {}", None, ".jsonl"),
        (b"PAR1...", None, ".parquet"),
        (b"a,b\n1,2\n", None, ".csv"),
        (b"a\n1\n", "csv", ".csv"),
        (LINES.encode(), "openai", ".jsonl"),
        (packed, "jsonl", ".jsonl.gz"),
    ):
        path = spooled_inputs.spool(io.BytesIO(data), tmp_path, given)
        assert path.name[spooled_inputs.DIGEST_CHARS :] == suffix
        assert path.read_bytes() == data and path.stat().st_mode & 0o777 == 0o600
        before = path.stat()
        assert spooled_inputs.spool(io.BytesIO(data), tmp_path, given) == path
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(InvalidDataset, match="--format"):
        spooled_inputs.spool(io.BytesIO(packed), tmp_path, None)


def test_what_a_killed_command_left_goes_by_age(tmp_path):
    """A sweep removes old files that no job reads, and no others."""
    folder = tmp_path / spooled_inputs.FOLDER
    old = spooled_inputs.spool(io.BytesIO(b"{}"), folder, None)
    again = spooled_inputs.spool(io.BytesIO(b'{"a":3}'), folder, None)
    read = spooled_inputs.spool(io.BytesIO(b'{"a":1}'), folder, None)
    new = spooled_inputs.spool(io.BytesIO(b'{"a":2}'), folder, None)
    part = folder / f"{spooled_inputs.PART}1"
    part.touch()
    spooled_inputs.keep(tmp_path, [str(read), "/elsewhere/x.jsonl"], "job_1")
    long_ago = time.time() - 2 * spooled_inputs.LEFT_S
    for path in (old, read, part, again):
        os.utime(path, (long_ago, long_ago))
    assert spooled_inputs.spool(io.BytesIO(b'{"a":3}'), folder, None) == again  # by a command whose job is to come
    assert again.stat().st_mtime == pytest.approx(long_ago)
    spooled_inputs.sweep(tmp_path, OwnedFiles())
    assert not old.exists() and not part.exists() and read.exists() and new.exists()
    assert again.exists()
    again.unlink()
    spooled_inputs.release(tmp_path, "job_2", OwnedFiles())
    assert read.exists()
    spooled_inputs.release(tmp_path, "job_1", OwnedFiles())
    assert sorted(folder.iterdir()) == [new]
