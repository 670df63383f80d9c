"""Objects as inputs of jobs at a server: below the folders of the caller's project, and nowhere else."""

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
    def __init__(self, url):
        self.url = url
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
            there = Stage(running.url)
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


async def test_callers_learn_nothing_of_the_store(stage, faults):
    """Where the store refuses the server's credentials, the reply has neither its words nor its address."""
    faults.always["GET"] = "denied"
    try:
        with pytest.raises(BatchmillError, match="refuses the server's credentials; try again later") as error:
            await stage.client.submit(f"s3://{BUCKET}/team-a/in/", model="double")
    finally:
        faults.always.clear()
    assert error.value.code == "store_unavailable"
    assert "AccessDenied" not in error.value.message and "127.0.0.1" not in error.value.message


async def test_a_command_needs_no_credentials(stage, tmp_path):
    """With --server a URL goes to the server; the results come to this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    arguments = ["run", f"s3://{BUCKET}/team-a/in/", "--server", stage.url, "--model", "double", "-o", "out.jsonl"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batchmill", *arguments, cwd=tmp_path, env=environment, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    rows = [msgspec.json.decode(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["output"]["twice"] for row in rows] == [2, 4, 6]
