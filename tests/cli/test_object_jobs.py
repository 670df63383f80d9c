"""Jobs of this machine whose input and results lie in an object store, by the command itself."""

import csv
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

BUCKET = "jobs"
ROWS = [{"n": n} for n in range(200)]
INPUT, OUTPUT = f"s3://{BUCKET}/in/*.jsonl", f"s3://{BUCKET}/out/results.jsonl"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def stage(s3: str, tmp_path: Path) -> Iterator["Stage"]:
    with ExitStack() as stack:
        client = stack.enter_context(bucket_client(s3, BUCKET))
        plan = stack.enter_context(faulty_objects(s3))
        yield Stage(client, plan, tmp_path)


class Stage:
    def __init__(self, client, plan: FaultyObjects, folder: Path) -> None:
        self.client, self.plan, self.folder = client, plan, folder
        self.put("in/a.jsonl", ROWS[:150])
        self.put("in/b.jsonl", ROWS[150:])
        (folder / "double.py").write_text("def run(n):\n    return n * 2\n")

    def put(self, key: str, rows: list[dict]) -> None:
        body = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        self.client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def objects(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=BUCKET)["Contents"]]

    def results(self, key: str = "out/results.jsonl") -> list[int]:
        body = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return [msgspec.json.decode(line)["output"] for line in body.splitlines()]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **s3_environment(self.plan.url)}
        command = [sys.executable, "-m", "batchmill", *arguments, "--data-dir", str(self.folder / "data")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=self.folder)

    def run(self, *more: str, source: str = INPUT, output: str = OUTPUT) -> subprocess.CompletedProcess[str]:
        model = f"function:{self.folder / 'double.py'}:run"
        return self.command("run", source, "--model", model, "-o", output, *more)


DOUBLED = [2 * row["n"] for row in ROWS]


def test_a_job_from_and_to_a_store(stage: Stage):
    """Rows come from objects and results go to one; no credentials are in the job's folder."""
    done = stage.run()
    assert done.returncode == 0, done.stderr
    assert OUTPUT in done.stdout
    assert stage.results() == DOUBLED
    assert stage.objects() == ["in/a.jsonl", "in/b.jsonl", "out/results.jsonl"]
    (home,) = (stage.folder / "data" / "jobs").iterdir()
    assert not list(home.glob("upload*"))
    for path in filter(Path.is_file, home.rglob("*")):
        assert b"AWS_" not in path.read_bytes()
        assert b"testing" not in path.read_bytes()
    shown = stage.command("results", home.name)
    assert len(shown.stdout.splitlines()) == len(ROWS)
    puts = stage.plan.count("PUT")
    assert stage.run().returncode == 0  # it is finished, and nothing is written again
    assert stage.plan.count("PUT") == puts


def test_existing_results_stay(stage: Stage):
    """An object of somebody else is not replaced without --overwrite; an input never is."""
    stage.put("out/results.jsonl", [{"mine": 1}])
    done = stage.run()
    assert done.returncode == 2
    assert f"{OUTPUT} exists and is not this job's" in done.stderr
    done = stage.run(source=OUTPUT)
    assert "is an input" in done.stderr
    assert stage.run("--overwrite").returncode == 0
    assert stage.results() == DOUBLED


def test_credentials_that_expire(stage: Stage):
    """Credentials that a store refuses while rows run pause the job; the same command goes on with others."""
    assert stage.run(output=f"s3://{BUCKET}/out/first.jsonl").returncode == 0
    stage.plan.serve("GET", stage.plan.count("GET") - 1)  # all reads of a job but the last
    stage.plan.always = {"GET": "expired"}
    done = stage.run()
    assert "give credentials" in done.stdout + done.stderr, done.stderr
    assert done.returncode not in (0, 2)
    stage.plan.always = {}
    done = stage.run()
    assert done.returncode == 0, done.stderr
    assert stage.results() == DOUBLED


def test_lost_replies_of_an_upload(stage: Stage):
    """Uploads whose replies are lost, or that the store refuses for now, are sent again."""
    stage.plan.fail("PUT", "lost_reply", "slow_down")
    assert stage.run().returncode == 0
    assert stage.results() == DOUBLED


def test_results_as_tables(stage: Stage):
    """Results can be CSV, Parquet or packed, as files can."""
    for name in ("r.csv.gz", "r.parquet"):
        done = stage.run(output=f"s3://{BUCKET}/{name}")
        assert done.returncode == 0, done.stderr
        assert name in stage.objects()


def test_results_in_parts(stage: Stage):
    """A folder gets parts and a manifest, over lost replies and refusals; nothing of them stays on this machine."""
    folder = f"s3://{BUCKET}/out/"
    stage.plan.fail("PUT", "lost_reply", "slow_down", "lost_reply")
    done = stage.run("--part-rows", "90", output=folder)
    assert done.returncode == 0, done.stderr
    assert folder in done.stdout
    manifest = msgspec.json.decode(stage.client.get_object(Bucket=BUCKET, Key="out/manifest.json")["Body"].read())
    keys = [f"out/{part['name']}" for part in manifest["parts"]]
    assert [part["rows"] for part in manifest["parts"]] == [90, 90, 20]
    assert stage.objects() == ["in/a.jsonl", "in/b.jsonl", "out/manifest.json", *keys]
    assert [value for key in keys for value in stage.results(key)] == DOUBLED
    (home,) = (stage.folder / "data" / "jobs").iterdir()
    assert not list(home.glob("**/part-*"))
    assert len(stage.command("results", home.name).stdout.splitlines()) == len(ROWS)
    done = stage.run("--part-rows", "150", output=folder)
    assert done.returncode == 2
    assert f"{folder} has the results of the job {home.name}" in done.stderr and "--overwrite" in done.stderr
    done = stage.run(source=f"s3://{BUCKET}/out/part-*.jsonl", output=folder)
    assert "is an input" in done.stderr
    assert stage.run("--part-rows", "150", "--overwrite", output=folder).returncode == 0
    assert len(stage.objects()) == 2 + 1 + 2


def test_parts_as_tables(stage: Stage):
    """A folder of objects, or of this machine, gets CSV or Parquet; files of a name and packed parts are refused."""
    for kind in ("csv", "parquet"):
        for output in (f"s3://{BUCKET}/{kind}/", f"{stage.folder}/{kind}/"):
            done = stage.run("--part-rows", "90", "--output-format", kind, output=output)
            assert done.returncode == 0, done.stderr
        here, there = stage.folder / kind, f"{kind}/"
        manifest = msgspec.json.decode((here / "manifest.json").read_bytes())
        files = [(here / part["name"]).read_bytes() for part in manifest["parts"]]
        assert [part["rows"] for part in manifest["parts"]] == [90, 90, 20]
        keys = [key for key in stage.objects() if key.startswith(there) and key.endswith(f".{kind}")]
        assert [stage.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys] == files
        if kind == "parquet":
            outputs = [value for file in files for value in pq.read_table(io.BytesIO(file))["output"].to_pylist()]
        else:
            outputs = [int(record["output"]) for file in files for record in csv.DictReader(io.StringIO(file.decode()))]
        assert outputs == DOUBLED
        done = stage.command("results", manifest["job"])
        if kind == "csv":
            assert len(done.stdout.splitlines()) == 1 + len(ROWS)
        else:
            assert done.returncode == 2 and "3 Parquet files" in done.stderr
    done = stage.run("--output-format", "csv")
    assert done.returncode == 2 and "says its format" in done.stderr


def test_previews(stage: Stage):
    """A dataset in a store can be validated and estimated before it runs."""
    model = f"function:{stage.folder / 'double.py'}:run"
    for command in ("validate", "plan", "estimate"):
        done = stage.command(command, INPUT, "--model", model)
        assert done.returncode == 0, done.stderr
        assert "200" in done.stdout
