"""An owner that is stopped, or whose network is cut, and comes back after another one has replaced it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from fakes.databases import POSTGRESQL, databases, server
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server
from fakes.tcp_proxy import TcpProxy
from openai import OpenAI
from story.openai_story import ended, result_lines, row, submit, texts, until, write_project
from story.running_server import RunningServer
from story.test_take_over import STEADY, free_url

from batchmill.services.databases import EXIT_REPLACED

ROWS, BUCKET = 500, "replaced"
CONFIG = """
[models.steady]
engine = "function"
source = "app.py:steady"
[database]
url = "{url}"
[storage]
objects = "s3://{bucket}/server"
[secrets]
key_file = "{keys}"
"""


class Place:
    """A server with a way of its own to the database, and one to the object store."""

    def __init__(self, folder: Path, data: Path, s3: str, stack: ExitStack) -> None:
        folder.mkdir()
        self.database = TcpProxy(server().port)
        stack.callback(self.database.close)
        self.objects: FaultyObjects = stack.enter_context(faulty_objects(s3))
        url = databases.url(data).replace(f":{server().port}/", f":{self.database.port}/")
        write_project(folder, CONFIG.format(url=url, bucket=BUCKET, keys=data / "keys"))
        (folder / "app.py").write_text("import time\n" + (folder / "app.py").read_text() + STEADY)
        self.server = RunningServer(folder, "--data-dir", str(data / "data"), env=s3_environment(self.objects.url))
        self.server.url = free_url()

    def changes(self) -> int:
        """Requests of this server and its workers that change an object."""
        return sum(self.objects.count(method) for method in ("PUT", "POST", "DELETE"))

    def answers(self) -> tuple[int, str]:
        try:
            reply = httpx2.get(f"{self.server.url}/v1/batches", timeout=2)
        except httpx2.TimeoutException:  # it waits for the database
            return 0, ""
        return reply.status_code, reply.json().get("error", {}).get("code", "")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    databases.begin(POSTGRESQL)
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server())
        stack.enter_context(bucket_client(s3, BUCKET))
        yield Place(tmp_path / "first", tmp_path, s3, stack), Place(tmp_path / "second", tmp_path, s3, stack)
    databases.end()


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_an_owner_that_comes_back_writes_nothing(places: tuple[Place, Place], is_cut_off: bool):
    """A cut-off owner answers no key before its successor begins. Once there is a successor, the old owner and its
    workers change no object; when it comes back it ends, and each row has the one outcome that the ledger names.
    """
    old, new = places
    first, second = old.server, new.server
    with first, ThreadPoolExecutor(1) as pool, OpenAI(api_key="x", base_url=f"{first.url}/v1") as client:
        batch = submit(client, [row(f"r{n}", f"text {n}", "steady") for n in range(ROWS)])
        starting = pool.submit(second.start)
        try:
            until(lambda: (second.folder / "log").exists() and "standing by" in second.log)
            until(lambda: client.batches.retrieve(batch.id), lambda seen: seen.request_counts.completed >= ROWS // 10)
            if is_cut_off:
                old.database.cut()
                assert until(old.answers, lambda seen: seen[0] not in (0, 200)) == (503, "database_silent")
                assert not starting.done()
            else:
                first.signal(signal.SIGSTOP)
            starting.result()
            changes = old.changes()
            with OpenAI(api_key="x", base_url=f"{second.url}/v1", max_retries=5) as successor:
                done = ended(successor, batch)
                results = result_lines(successor, done.output_file_id)
            if is_cut_off:
                assert old.answers() == (503, "database_silent")
                old.database.mend()
            else:
                first.signal(signal.SIGCONT)
            assert first.wait() == EXIT_REPLACED
            assert old.changes() == changes and new.changes() > 0
            assert [each["custom_id"] for each in results] == [f"r{n}" for n in range(ROWS)]
            assert texts(results) == {f"r{n}": f"TEXT {n}" for n in range(ROWS)}
            job = batch.id.replace("batch_", "job_")
            report = httpx2.post(f"{second.url}/batchmill/v1/jobs/{job}/verify", timeout=60).json()
            assert (report["broken"], report["rows_done"]) == ([], ROWS), report
        finally:
            old.database.mend()
            first.signal(signal.SIGCONT)
            second.stop()
