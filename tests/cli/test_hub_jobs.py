"""Jobs of this machine whose input is a data set of a hub, by the command itself."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.model_hub import TOKEN, ModelHub

LINES = b"".join(b'{"n": %d}\n' % n for n in range(20))
NAME = "datasets/team/rows"


@pytest.fixture(scope="module")
def hub():
    with ModelHub() as served:
        yield served


@pytest.fixture
def rows(hub):
    hub.repositories[NAME] = {
        "README.md": b"# Rows", "data/a.jsonl": LINES, "data/b.jsonl.gz": gzip.compress(LINES),
        "data/deep/c.jsonl": b'{"n": 100}\n',
    }  # fmt: skip
    hub.private.clear()
    hub.gated.clear()
    hub.asked.clear()
    return hub


@pytest.fixture
def command(hub, tmp_path):
    (tmp_path / "double.py").write_text("def run(n):\n    return n * 2\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= hub.environment() | {"HF_HOME": str(tmp_path / "hf")}

    def run(verb, *arguments, **variables):
        given = [sys.executable, "-m", "batchmill", verb, *arguments, "--model", "function:double.py:run"]
        given += ["--data-dir", "data"]
        return subprocess.run(
            given, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment | variables
        )

    return run


def test_a_private_data_set_is_read_at_its_commit(command, rows, tmp_path):
    """The token comes from the environment, and is in no file of the job; rows come from the commit of the start."""
    rows.private.add(NAME)
    commit = rows.commit(NAME)
    done = command("run", f"hf://{NAME}/data/*.jsonl*", "-o", "out.jsonl", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert results == [2 * n for n in range(20)] * 2
    (home,) = (tmp_path / "data" / "jobs").iterdir()
    described = json.loads((home / "job.json").read_bytes())["dataset"]["paths"]
    assert described == [f"hf://{NAME}@{commit}/data/{name}" for name in ("a.jsonl", "b.jsonl.gz")]
    assert all(TOKEN.encode() not in path.read_bytes() for path in Path(tmp_path, "data").rglob("*") if path.is_file())
    again = command("run", f"hf://{NAME}@main/data/*.jsonl*", "-o", "out.jsonl", HF_TOKEN=TOKEN)
    assert "finished already" in again.stdout + again.stderr

    denied = command("run", f"hf://{NAME}/data/a.jsonl", "-o", "out2.jsonl")
    assert denied.returncode != 0 and "HF_TOKEN" in denied.stderr, denied.stderr


def test_folders_globs_and_what_is_missing(command, rows):
    shown = command("validate", f"hf://{NAME}/data/")
    assert "40 jsonl rows" in shown.stdout, shown.stderr
    shown = command("validate", f"hf://{NAME}@{rows.commit(NAME)}/**/c.jsonl")
    assert "1 jsonl row" in shown.stdout, shown.stderr
    refused = {
        f"hf://{NAME}/none.jsonl": "names or matches no file",
        f"hf://{NAME}/none/": "holds no file",
        f"hf://{NAME}@other/data/": "has no revision 'other'",
        "hf://datasets/team/none/x.jsonl": "has no hf://datasets/team/none",
        f"hf://{NAME}/data/../x.jsonl": "is not a URL of a data set",
        "hf://team/rows/x.jsonl": "is not a URL of a data set",
    }
    for url, words in refused.items():
        done = command("validate", url)
        assert done.returncode != 0 and words in done.stderr, (url, done.stderr)
    done = command("validate", f"hf://{NAME}/data/", HF_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode != 0 and "cannot be read from http://127.0.0.1:1" in done.stderr, done.stderr
    done = command("validate", f"hf://{NAME}/data/", HF_HUB_OFFLINE="1")
    assert done.returncode != 0 and "HF_HUB_OFFLINE forbids it" in done.stderr, done.stderr
    rows.gated.add(NAME)
    done = command("validate", f"hf://{NAME}/data/")
    assert done.returncode != 0 and "is gated" in done.stderr, done.stderr


def test_without_the_library_the_way_out_is_told(command, tmp_path):
    """An empty module of its name hides it: a submodule is missing then, as it is without the package."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['huggingface_hub'] = None\n")
    done = command("validate", f"hf://{NAME}/data/", PYTHONPATH=str(tmp_path / "hidden"))
    assert done.returncode != 0 and "pip install 'batchmill[hub]'" in done.stderr, done.stderr
