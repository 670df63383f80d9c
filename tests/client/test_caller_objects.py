"""Objects as inputs and output of jobs at a server: below the folders of the caller's project, and nowhere else."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from dialects.open_server import CONFIG, open_server
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import BatchmillError
from batchmill.services.caller_objects import PATTERNS_MAX

BUCKET = "data"
OBJECTS = f"""
[projects.default]
objects = ["s3://{BUCKET}/team-a/"]
"""


class Stage:
    def __init__(self, url, bucket):
        self.url, self.bucket = url, bucket
        self.client = AsyncClient(url, "none")


@pytest.fixture(scope="module")
def faults() -> Iterator[FaultyObjects]:
    with s3_server() as url, faulty_objects(url) as plan:
        yield plan


@pytest.fixture
async def stage(faults, tmp_path, monkeypatch) -> AsyncIterator[Stage]:
    s3 = faults.url
    with bucket_client(s3, BUCKET) as bucket:
        for name, value in s3_environment(s3).items():
            monkeypatch.setenv(name, value)
        for key, numbers in (("team-a/in/a.jsonl", (1, 2)), ("team-a/in/b.jsonl", (3,)), ("team-b/x.jsonl", (4,))):
            body = b"".join(msgspec.json.encode({"n": n}) + b"\n" for n in numbers)
            bucket.put_object(Bucket=BUCKET, Key=key, Body=body)
        async with open_server(tmp_path, CONFIG + OBJECTS) as running:
            there = Stage(running.url, bucket)
            async with there.client:
                yield there


async def test_a_server_reads_objects_for_callers(stage, tmp_path):
    """A glob, with an upload: rows of both, views with URLs, and nothing of other projects."""
    upload = tmp_path / "more.jsonl"
    upload.write_text('{"n": 9}\n')
    glob = f"s3://{BUCKET}/team-a/in/*.jsonl"
    report = await stage.client.validate([glob], model="double")
    assert report.seal.rows == 3
    assert [file.path for file in report.seal.sources] == [f"s3://{BUCKET}/team-a/in/{name}.jsonl" for name in "ab"]
    job = await stage.client.submit([glob, upload], model="double")
    view = await job.wait()
    assert view.input[:2] == [f"s3://{BUCKET}/team-a/in/{name}.jsonl" for name in "ab"]
    assert view.state == "completed" and view.rows_ok == 4

    refused = {
        f"s3://{BUCKET}/team-b/x.jsonl": "object_forbidden",
        f"s3://{BUCKET}/*/x.jsonl": "object_forbidden",
        f"s3://{BUCKET}/team-a/%2e%2e/team-b/x.jsonl": "invalid_url",
        f"s3://{BUCKET}/team-a/none.jsonl": "no_object",
        f"s3://{BUCKET}/team-a/none*.jsonl": "no_input",
    }
    for url, code in refused.items():
        for call in (stage.client.submit, stage.client.validate):
            with pytest.raises(BatchmillError) as error:
                await call(url, model="double")
            assert error.value.code == code, url
    with pytest.raises(BatchmillError) as error:
        await stage.client.submit([glob, f"s3://{BUCKET}/team-a/in/a.jsonl"], model="double")
    assert error.value.code == "duplicate_file"
    globs = [f"s3://{BUCKET}/team-a/{number}*" for number in range(PATTERNS_MAX + 1)]
    for named, code in ((globs, "too_many_patterns"), (globs[1:], "no_input")):
        with pytest.raises(BatchmillError) as error:
            await stage.client.submit(named, model="double")
        assert error.value.code == code


async def test_a_server_writes_objects_for_callers(stage):
    """An object, and parts with their manifest; nothing outside of the folders, and nothing over what is there."""
    inputs, folder = f"s3://{BUCKET}/team-a/in/", f"s3://{BUCKET}/team-a/out/"
    job = await stage.client.submit(inputs, model="double", output=f"{folder}r.csv")
    view = await job.wait()
    assert (view.state, view.output, view.rows_ok) == ("completed", f"{folder}r.csv", 3)
    body = stage.bucket.get_object(Bucket=BUCKET, Key="team-a/out/r.csv")["Body"].read()
    assert len(body.splitlines()) == 4

    with pytest.raises(BatchmillError) as error:
        [row async for row in job.results()]
    assert error.value.code == "no_copy_here" and f"{folder}r.csv" in error.value.message

    job = await stage.client.submit(inputs, model="double", output=f"{folder}parts/", part_rows=2)
    assert (await job.wait()).output == f"{folder}parts/"
    body = stage.bucket.get_object(Bucket=BUCKET, Key="team-a/out/parts/manifest.json")["Body"].read()
    assert [part["rows"] for part in msgspec.json.decode(body)["parts"]] == [2, 1]

    refused = [
        ({"output": f"s3://{BUCKET}/team-b/r.jsonl"}, "object_forbidden"),
        ({"output": f"s3://{BUCKET}/team-a/%2e%2e/r.jsonl"}, "invalid_url"),
        ({"output": "/tmp/r.jsonl"}, "invalid_output"),
        ({"output": "file:///tmp/r.jsonl"}, "invalid_output"),
        ({"output": f"{folder}r.txt"}, "invalid_output"),
        ({"output": f"{folder}r.jsonl", "output_format": "csv"}, "invalid_output"),
        ({"output": f"{folder}r.jsonl", "part_rows": 1}, "invalid_part_rows"),
        ({"part_rows": 1}, "invalid_part_rows"),
        ({"output": f"{folder}parts/", "output_format": "csv.gz"}, "invalid_output"),
        ({"output": inputs}, "output_is_input"),
        ({"output": f"{folder}r.csv"}, "output_exists"),
        ({"output": f"{folder}parts/"}, "output_exists"),
    ]
    for fields, code in refused:
        with pytest.raises(BatchmillError) as error:
            await stage.client.submit(inputs, model="double", **fields)
        assert error.value.code == code, fields
    job = await stage.client.submit(
        inputs, model="double", output=f"{folder}parts/", overwrite=True, output_format="csv"
    )
    assert (await job.wait()).state == "completed"
    body = stage.bucket.get_object(Bucket=BUCKET, Key="team-a/out/parts/manifest.json")["Body"].read()
    manifest = msgspec.json.decode(body)
    assert manifest["job"] == job.id and manifest["parts"][0]["name"].endswith(".csv")


async def test_two_unfinished_jobs_share_no_output(stage):
    """The second is refused until the first has ended, also a folder."""
    inputs, folder = f"s3://{BUCKET}/team-a/in/", f"s3://{BUCKET}/team-a/out/"
    first = await stage.client.submit(inputs, model="gated", output=folder)
    with pytest.raises(BatchmillError) as error:
        await stage.client.submit(inputs, model="double", output=folder)
    assert error.value.code == "output_taken" and first.id in error.value.message
    await first.cancel()
    assert (await first.wait()).state == "cancelled"


async def test_callers_learn_nothing_of_the_store(stage, faults):
    """Where the store refuses the server's credentials, the reply has neither its words nor its address."""
    faults.always["GET"] = "denied"
    try:
        with pytest.raises(BatchmillError, match="refuses the server's credentials; try again") as error:
            await stage.client.submit(f"s3://{BUCKET}/team-a/in/", model="double")
    finally:
        faults.always.clear()
    assert error.value.code == "store_unavailable"
    assert "AccessDenied" not in error.value.message and "127.0.0.1" not in error.value.message


async def command(stage, folder, *arguments):
    """A command without credentials of the store."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batchmill", *arguments, "--server", stage.url,
        cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_a_command_needs_no_credentials(stage, tmp_path):
    """With --server a URL goes to the server; the results come to this machine, or are objects too."""
    code, said = await command(
        stage, tmp_path, "run", f"s3://{BUCKET}/team-a/in/", "--model", "double", "-o", "out.jsonl"
    )
    assert code == 0, said
    rows = [msgspec.json.decode(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["output"]["twice"] for row in rows] == [2, 4, 6]

    output = f"s3://{BUCKET}/team-a/cli/"
    arguments = ["run", "out.jsonl", "--model", "double", "--format", "jsonl", "-o", output, "--part-rows", "2"]
    (tmp_path / "out.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    code, said = await command(stage, tmp_path, *arguments)
    assert code == 0 and output in said, said
    keys = [each["Key"] for each in stage.bucket.list_objects_v2(Bucket=BUCKET, Prefix="team-a/cli/")["Contents"]]
    assert len(keys) == 3 and "team-a/cli/manifest.json" in keys
    code, said = await command(stage, tmp_path, *arguments)
    assert code != 0 and "--overwrite" in said, said
