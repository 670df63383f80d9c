"""An owner that is stopped, or whose network is cut, and comes back after another one has replaced it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from aiohttp import web
from fakes.batch_provider import BatchProvider
from fakes.beside import beside
from fakes.child_processes import children_of
from fakes.databases import POSTGRESQL, databases, server
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server
from fakes.tcp_proxy import TcpProxy
from openai import OpenAI
from openai.types import Batch
from story.openai_story import TIMEOUT_S, ended, result_lines, row, submit, texts, until, write_project
from story.running_server import RunningServer
from story.test_take_over import STEADY, free_url

from batchmill.services.data_dirs.databases import EXIT_REPLACED

ROWS, BUCKET = 500, "replaced"
FAR_ROWS = 6
STOPPED, SUSPENDED, CUT_OFF = "stopped", "suspended", "cut off"  # its process; all of its processes; its database
ANSWERED, LOOKED_FOR, REFUSED = "answered", "looked for", "refused"
CONFIG = """
[models.steady]
engine = "function"
source = "app.py:steady"
[models.far]
engine = "openai-batch"
source = "gpt"
base_url = "{far}"
engine_args = {{ poll_s = 0.05, poll_max_s = 0.05, keep_files = true }}
[database]
url = "{url}"
[storage]
objects = "s3://{bucket}/server"
[secrets]
key_file = "{keys}"
"""


class Place:
    """A server with a way of its own to the database, and one to the object store."""

    def __init__(self, folder: Path, data: Path, s3: str, far: str, stack: ExitStack) -> None:
        folder.mkdir()
        self.database = TcpProxy(server().port)
        stack.callback(self.database.close)
        self.objects: FaultyObjects = stack.enter_context(faulty_objects(s3))
        url = databases.url(data).replace(f":{server().port}/", f":{self.database.port}/")
        write_project(folder, CONFIG.format(url=url, bucket=BUCKET, keys=data / "keys", far=far))
        (folder / "app.py").write_text("import time\n" + (folder / "app.py").read_text() + STEADY)
        self.server = RunningServer(folder, "--data-dir", str(data / "data"), env=s3_environment(self.objects.url))
        self.server.url = free_url()
        self._data = data / "data"
        self._processes: list[int] = []
        self._stopped: list[int] = []

    def changes(self) -> int:
        """Requests of this server and its workers that change an object."""
        return sum(self.objects.count(method) for method in ("PUT", "POST", "DELETE"))

    def answers(self) -> tuple[int, str]:
        try:
            reply = httpx2.get(f"{self.server.url}/v1/batches", timeout=2)
        except httpx2.TimeoutException:  # it waits for the database
            return 0, ""
        return reply.status_code, reply.json().get("error", {}).get("code", "")

    def leave(self, how: str) -> None:
        """Be stopped, suspended or cut off. The successor is as on another machine: it cannot end our processes."""
        self._processes = [self.server.pid, *descendants(self.server.pid)]
        for ids in (self._data / "workers").glob("*.pid"):
            ids.unlink()
        if how == CUT_OFF:
            self.database.cut()
            return
        self._stopped = self._processes if how == SUSPENDED else [self.server.pid]
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def come_back(self) -> None:
        self.database.mend()
        for pid in reversed(self._stopped):  # its workers first: they do what they can before they hear of its end
            os.kill(pid, signal.SIGCONT)
        self._stopped = []

    def end(self) -> int:
        """The exit code of the server, once it and what it has started have ended."""
        code = self.server.wait()
        until(lambda: not any(map(is_running, self._processes)))
        return code


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, with theirs."""
    found = children_of(pid)
    return [*found, *(each for child in found for each in descendants(child))]


def is_running(pid: int) -> bool:
    """Whether a process has not ended: the entry of one that has ended may stay."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def provider() -> Iterator[BatchProvider]:
    with beside(BatchProvider()) as running:
        yield running


@pytest.fixture
def places(tmp_path: Path, provider: BatchProvider) -> Iterator[tuple[Place, Place]]:
    databases.begin(POSTGRESQL)
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server())
        stack.enter_context(bucket_client(s3, BUCKET))
        first, second = (Place(tmp_path / name, tmp_path, s3, provider.base_url, stack) for name in ("first", "second"))
        yield first, second
    databases.end()


@contextmanager
def standing_by(old: Place, new: Place) -> Iterator[Future[RunningServer]]:
    """`old` serves, and `new` waits for its end: the future is done once `new` serves."""
    with old.server, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(new.server.start)
        try:
            until(lambda: (new.server.folder / "log").exists() and "standing by" in new.server.log)
            yield starting
        finally:
            old.come_back()
            new.server.stop()


def outcome(place: Place, batch: Batch) -> list[dict]:
    """The results of a batch, once it has ended."""
    with OpenAI(api_key="x", base_url=f"{place.server.url}/v1", max_retries=5) as client:
        return result_lines(client, ended(client, batch).output_file_id)


def verified(place: Place, batch: Batch) -> tuple[list, int]:
    """What is broken in a job, and its rows with an outcome."""
    job = batch.id.replace("batch_", "job_")
    report = httpx2.post(f"{place.server.url}/batchmill/v1/jobs/{job}/verify", timeout=60).json()
    return report["broken"], report["rows_done"]


@pytest.mark.parametrize("how", [CUT_OFF, STOPPED])
def test_an_owner_that_comes_back_writes_nothing(places: tuple[Place, Place], how: str):
    """A cut-off owner answers no key before its successor begins. Once there is a successor, the old owner and its
    workers change no object; when it comes back it ends, and each row has the one outcome that the ledger names.
    """
    old, new = places
    with standing_by(old, new) as starting:
        with OpenAI(api_key="x", base_url=f"{old.server.url}/v1") as client:
            batch = submit(client, [row(f"r{n}", f"text {n}", "steady") for n in range(ROWS)])
            until(lambda: client.batches.retrieve(batch.id), lambda seen: seen.request_counts.completed >= ROWS // 10)
        old.leave(how)
        if how == CUT_OFF:
            assert until(old.answers, lambda seen: seen[0] not in (0, 200)) == (503, "database_silent")
            assert not starting.done()
        starting.result()
        changes = old.changes()
        results = outcome(new, batch)
        if how == CUT_OFF:
            assert old.answers() == (503, "database_silent")
        old.come_back()
        assert old.end() == EXIT_REPLACED
        assert old.changes() == changes and new.changes() > 0
        assert [each["custom_id"] for each in results] == [f"r{n}" for n in range(ROWS)]
        assert texts(results) == {f"r{n}": f"TEXT {n}" for n in range(ROWS)}
        assert verified(new, batch) == ([], ROWS)


class HeldCall:
    """The first call of an operation at the provider, which is held.

    `then`: ANSWERED: it is done at once, and answered once it is released; LOOKED_FOR: it is done once somebody looks
    for its effect; REFUSED: it is refused, to be made again, once it is released.
    """

    def __init__(self, provider: BatchProvider, operation: str, then: str) -> None:
        self._provider, self._operation, self._then = provider, operation, then
        self._loop: asyncio.AbstractEventLoop | None = None  # of the provider
        self._released, self._is_done = asyncio.Event(), asyncio.Event()
        self.has_arrived = threading.Event()
        provider.on_call = self._on_call

    async def _on_call(self, operation: str, done: bool) -> None:
        self._loop = asyncio.get_running_loop()
        is_here = operation == self._operation and done is (self._then == ANSWERED)
        if is_here and not self.has_arrived.is_set():
            self.has_arrived.set()
            await self._released.wait()
            if self._then == REFUSED:
                raise web.HTTPTooManyRequests
        if operation == self._operation and done:
            self._is_done.set()
        if operation == "list" and self._then == LOOKED_FOR:
            self._released.set()
            await self._is_done.wait()

    def release(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)

    def settle(self) -> None:
        """Wait until nobody is connected to the provider."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._provider.settled(), self._loop).result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("how", "operation", "then"),
    [
        (STOPPED, "upload", ANSWERED),
        (SUSPENDED, "create", ANSWERED),
        (STOPPED, "create", LOOKED_FOR),
        (STOPPED, "create", REFUSED),
        (CUT_OFF, "create", REFUSED),
    ],
)
def test_an_owner_that_comes_back_submits_nothing(
    places: tuple[Place, Place], provider: BatchProvider, how: str, operation: str, then: str
):
    """The owner leaves while its worker submits a batch to a provider. The successor finds by its tag what was
    submitted; the worker, whose call then ends, begins nothing: there is one upload and one batch, which ran once.
    """
    old, new = places
    held = HeldCall(provider, operation, then)
    with standing_by(old, new) as starting:
        with OpenAI(api_key="x", base_url=f"{old.server.url}/v1") as client:
            batch = submit(client, [row(f"r{n}", f"text {n}", "far") for n in range(FAR_ROWS)])
        assert held.has_arrived.wait(TIMEOUT_S)
        old.leave(how)
        starting.result()
        results = outcome(new, batch)
        held.release()
        assert texts(results) == {f"r{n}": f"to text {n}" for n in range(FAR_ROWS)}
        assert len(results) == FAR_ROWS and verified(new, batch) == ([], FAR_ROWS)
        old.come_back()
        assert old.end() == EXIT_REPLACED
    held.settle()
    calls = [provider.calls[name] for name in ("upload", "create", "cancel")]
    assert calls == [1, 2 if then == REFUSED else 1, 0]
    assert [each.status for each in provider.batches.values()] == ["completed"]
    assert provider.billed == {f"text {n}": 1 for n in range(FAR_ROWS)}
