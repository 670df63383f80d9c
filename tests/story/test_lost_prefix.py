"""A server whose prefix of the object store is given to another database while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server
from msgspec.structs import replace

from batchmill import AsyncClient
from batchmill.config import load
from batchmill.errors import BatchmillError
from batchmill.jobs import maintenance
from batchmill.jobs.results.publishing import Publishing
from batchmill.jobs.runner import JobRunner
from batchmill.serving import serve
from batchmill.store import prefix_owner
from batchmill.store.prefix_owner import NAME, PrefixClaim, PrefixOwner
from batchmill.types import JobView

BUCKET, ROWS = "lost", 1500  # more than a small job has
KEY = f"server/{NAME}"
CODE = """
import time

def double(n):
    time.sleep(0.002)
    return 2 * n
"""
CONFIG = """
[models.double]
engine = "function"
source = "app.py:double"
[storage]
objects = "s3://{bucket}/server"
[projects.default]
objects = ["s3://{bucket}/out/"]
[secrets]
key_file = "{keys}"
"""
OTHER = PrefixOwner("other-ledger", "the database of another server", "another-host")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, FaultyObjects]]:
    with s3_server() as url, bucket_client(url, BUCKET) as client, faulty_objects(url) as objects:
        for name, value in s3_environment(objects.url).items():
            monkeypatch.setenv(name, value)
        yield client, objects


def changes(objects: FaultyObjects) -> list[str]:
    """The objects that were changed, but for that of the owner."""
    return [path for method, path, _ in objects.requests if method in ("PUT", "POST", "DELETE") and NAME not in path]


async def until(is_reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_reached():
            await asyncio.sleep(0.02)


async def test_a_lost_prefix(tmp_path: Path, bucket: tuple[Any, FaultyObjects], monkeypatch: pytest.MonkeyPatch):
    """Nothing is written or removed there any more, nor where results go; jobs pause, and say whose the prefix is and
    what to do. Once it is given back, they go on, and every row has one result.
    """
    client, objects = bucket
    monkeypatch.setattr(prefix_owner, "RENEW_S", 0.05)
    monkeypatch.setattr(maintenance, "POLL_S", 0.1)
    (tmp_path / "app.py").write_text(CODE)
    (tmp_path / "batchmill.toml").write_text(CONFIG.format(bucket=BUCKET, keys=tmp_path / "keys"))
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(ROWS)))
    config = load(environ={}, cwd=tmp_path, data_dir=str(tmp_path / "data"))
    async with (
        serve(replace(config, server=replace(config.server, port=0))) as running,
        AsyncClient(running.url) as api,
    ):
        job = await api.submit(tmp_path / "in.jsonl", model="double", output=f"s3://{BUCKET}/out/", part_rows=1000)
        uploaded = await api.upload(tmp_path / "in.jsonl")
        view: JobView = await job.refresh()
        while not view.rows_ok:
            view = await job.refresh()
        own = client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=KEY, Body=msgspec.json.encode(OTHER))
        while view.state != "paused":
            assert view.state != "completed"
            view = await job.refresh()
        assert view.reason == "storage_failed" and 0 < view.rows_ok < ROWS
        for part in ("the database of another server", "Stop the other server", "storage owner --take-over"):
            assert part in view.message
        before, looks = changes(objects), objects.count("HEAD")
        with pytest.raises(BatchmillError, match="the database of another server"):
            await api.upload(tmp_path / "in.jsonl")
        await api.delete_file(uploaded.id)
        await until(lambda: objects.count("HEAD") > looks + 10)
        assert (await job.refresh()).state == "paused" and changes(objects) == before
        with monkeypatch.context() as patch:
            lost_again = lose_before_results(client, patch)
            client.put_object(Bucket=BUCKET, Key=KEY, Body=own)
            while not lost_again or view.state != "paused":
                assert view.state != "completed"
                view = await job.refresh()
        assert (view.reason, view.rows_ok) == ("storage_failed", ROWS) and "of another server" in view.message
        assert keys_below(client, "out/") == []
        client.put_object(Bucket=BUCKET, Key=KEY, Body=own)
        while (view := await job.wait(60, interval_s=0.1)).state == "paused":
            pass
        assert (view.state, view.rows_ok) == ("completed", ROWS)
    parts = [key for key in keys_below(client, "out/") if "/part-" in key]
    bodies = [client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in parts]
    results = [json.loads(line) for body in bodies for line in body.splitlines()]
    assert len(parts) == 2 and len(results) == ROWS
    assert {row["n"] for row in results} == set(range(ROWS)), results[:2]


def keys_below(client: Any, prefix: str) -> list[str]:
    return [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]


def lose_before_results(client: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Have the prefix given away once, and its owner learn of it, when results are about to be written. Returns a list
    that is not empty from then on.
    """
    claims: list[PrefixClaim] = []
    lost: list[str] = []
    renew, finish = PrefixClaim.renew, Publishing.finish

    def noted(claim: PrefixClaim) -> bool:
        claims[:] = [claim]
        return renew(claim)

    async def lose(publishing: Publishing, *arguments: Any, **named: Any) -> Any:
        if not lost:
            lost.append(KEY)
            patch.setattr(JobRunner, "refuse_storage", lambda *_: None)  # it would pause the job before a child runs
            client.put_object(Bucket=BUCKET, Key=KEY, Body=msgspec.json.encode(OTHER))
            claims[0].renew()
        return await finish(publishing, *arguments, **named)

    patch.setattr(PrefixClaim, "renew", noted)
    patch.setattr(Publishing, "finish", lose)
    return lost
