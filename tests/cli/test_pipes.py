"""Standard input as a dataset, and standard output as the place for results."""

import gzip
import io
import json
import os
import subprocess
import sys
import time

import pytest

from batchmill.datasets import standard_input
from batchmill.errors import InvalidDataset

MAIN = ("-c", "from batchmill.cli.main import main; main()")
FUNCTION = """
def up(text):
    if text == "bad": raise ValueError("no")
    return text.upper()
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
    return sorted((tmp_path / "data" / standard_input.FOLDER).glob("[!.]*"))


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
        path = standard_input.spool(io.BytesIO(data), tmp_path, given)
        assert path.name[standard_input.DIGEST_CHARS :] == suffix
        assert path.read_bytes() == data and path.stat().st_mode & 0o777 == 0o600
        before = path.stat()
        assert standard_input.spool(io.BytesIO(data), tmp_path, given) == path and path.stat() == before
    with pytest.raises(InvalidDataset, match="--format"):
        standard_input.spool(io.BytesIO(packed), tmp_path, None)


def test_what_a_killed_command_left_goes_by_age(tmp_path):
    """A sweep removes old files that no job reads, and no others."""
    folder = tmp_path / standard_input.FOLDER
    old = standard_input.spool(io.BytesIO(b"{}"), folder, None)
    read = standard_input.spool(io.BytesIO(b'{"a":1}'), folder, None)
    new = standard_input.spool(io.BytesIO(b'{"a":2}'), folder, None)
    part = folder / f"{standard_input.PART}1"
    part.touch()
    standard_input.keep(tmp_path, [str(read), "/elsewhere/x.jsonl"], "job_1")
    long_ago = time.time() - 2 * standard_input.LEFT_S
    for path in (old, read, part):
        os.utime(path, (long_ago, long_ago))
    standard_input.sweep(tmp_path)
    assert not old.exists() and not part.exists() and read.exists() and new.exists()
    standard_input.release(tmp_path, "job_2")
    assert read.exists()
    standard_input.release(tmp_path, "job_1")
    assert sorted(folder.iterdir()) == [new]
