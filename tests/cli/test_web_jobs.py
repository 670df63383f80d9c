"""Jobs of this machine whose input is downloaded, by the command itself."""

import gzip
import json
import subprocess
import sys

import pytest
from fakes.web_files import WebFile, web_files

LINES = b"".join(b'{"n": %d}\n' % n for n in range(20))
ALLOWED = '[server]\nprivate_hosts = ["127.0.0.1"]\n'


@pytest.fixture(scope="module")
def web():
    with web_files() as served:
        served.files["/rows.jsonl"] = WebFile(LINES)
        served.files["/rows.jsonl.gz"] = WebFile(gzip.compress(LINES))
        yield served


@pytest.fixture
def command(tmp_path):
    (tmp_path / "double.py").write_text("def run(n):\n    return n * 2\n")
    (tmp_path / "batchmill.toml").write_text(ALLOWED)

    def run(verb, *arguments):
        given = [sys.executable, "-m", "batchmill", verb, *arguments, "--model", "function:double.py:run"]
        given += ["--data-dir", "data"]
        return subprocess.run(given, capture_output=True, text=True, timeout=100, cwd=tmp_path)

    return run


def test_a_job_of_urls(command, web, tmp_path):
    """It runs, is finished when it is asked for again, and its description has the URLs."""
    inputs = [f"{web.url}/rows.jsonl", f"{web.url}/rows.jsonl.gz"]
    done = command("run", *inputs, "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["output"] for row in rows] == [2 * n for n in range(20)] * 2
    web.requests.clear()
    again = command("run", *inputs, "-o", "out.jsonl")
    assert again.returncode == 0 and "finished already" in again.stdout + again.stderr
    assert web.requests == [("/rows.jsonl", None)]  # its first bytes
    validated = command("validate", inputs[0])
    assert validated.returncode == 0 and "20 jsonl rows" in validated.stdout, validated.stderr


def test_what_cannot_be_read_is_told(command, web, tmp_path):
    missing = command("run", f"{web.url}/none.csv", "-o", "out.jsonl")
    assert missing.returncode != 0 and "there is no file" in missing.stderr + missing.stdout
    (tmp_path / "batchmill.toml").write_text("")
    refused = command("run", f"{web.url}/rows.jsonl", "-o", "out.jsonl")
    assert refused.returncode != 0 and "server.private_hosts" in refused.stderr + refused.stdout
