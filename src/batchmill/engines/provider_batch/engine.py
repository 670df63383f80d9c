"""The provider batch engine: takes whole leases, and submits each as one or a few batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import batchmill
from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import load_provider
from batchmill.engines.provider_batch.provider import ProviderApi
from batchmill.engines.provider_batch.settings import argument, read_settings
from batchmill.engines.provider_batch.shard import ProviderShard, Tools
from batchmill.engines.provider_batch.spool import WINDOW
from batchmill.engines.row_media import RowMedia
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import addresses, secrets
from batchmill.ports.clock import Clock
from batchmill.ports.engines import Feed, LeaseFeed, Sink
from batchmill.types import EngineStats, LiveHead, LiveRequest, ModelSpec, Row

IDLE_TIMEOUT_S = 120.0  # how long a provider may send nothing while it receives a large file
LEAVE_S = 30.0  # how long calls in flight may take to end when the engine fails
FOLDER = "provider-batch-"  # + the id of the process that uses it


class ProviderBatchEngine:
    """Runs rows as batches of a provider. Engine arguments: see `settings` and the provider's own `arguments`.

    `home` contains waiting rows and files that are being uploaded. Nothing there is needed after a crash.
    """

    def __init__(
        self, model: ModelSpec, home: Path, *, clock: Clock | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        if model.python is not None:
            raise ModelFailed(
                "the provider_batch engine runs no Python interpreter: leave `python` out", code="unknown_argument"
            )
        self._model, self._home, self._jitter = model, home, jitter
        self._clock: Clock = clock or SystemClock()
        self._provider = model.provider or "openai"
        self._connections = _connect(model)
        self._api: ProviderApi = load_provider(model, self._connections)
        self._settings = read_settings(model, self._api.arguments)
        self._folder: Path | None = None
        self._shards: dict[asyncio.Task[None], ProviderShard] = {}
        self._moved = asyncio.Event()  # a shard has begun, ended or failed
        self._media: RowMedia | None = None  # of the last run

    async def start(self) -> None:
        """Open the connection pool. The provider is not called yet."""
        self._home.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(sweep, self._home)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=self._home))
        await self._connections.start()

    async def run(self, feed: Feed, sink: Sink) -> None:
        assert self._folder is not None, "call start() first"
        slots = asyncio.Semaphore(self._settings.jobs_max)
        attempts_max = self._model.limits.attempts_max
        media = self._media = RowMedia(lambda: 0, attempts_max=attempts_max, clock=self._clock)
        tools = Tools(
            self._api, self._provider, self._settings, sink, self._clock, self._jitter, self._folder, slots,
            self._moved, media,
        )  # fmt: skip
        try:
            while rows := await self._take(feed):
                self._add_rows(rows, tools)
            while self._shards:
                await self._wait_for_shards()
        except asyncio.CancelledError:
            await self._leave()
            raise
        except BaseException:
            await self._leave(LEAVE_S)
            raise
        finally:
            await media.close()

    def predict(self, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]:
        raise InvalidInput(
            f"{self._model.name} runs as batches of {self._provider}, which cannot answer live requests: send them to "
            "a model whose engine calls the same service row by row, or configure both as `routes` of the model",
            code="no_live_requests",
        )

    async def stop(self) -> None:
        await self._leave()
        await self._connections.stop()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def stats(self) -> EngineStats:
        jobs = [following.job for shard in self._shards.values() for following in shard.followings]
        submitted = [job for job in jobs if job.state in ("submitted", "cancelling")]
        rows, done = sum(job.rows for job in submitted), sum(job.completed + job.failed for job in submitted)
        plural = "" if len(submitted) == 1 else "s"
        again = sum(job.rows for job in submitted if job.attempt)
        asked = f" ({again:,} asked for again: their answers did not fit the schema)" if again else ""
        notes = [f"{len(submitted)} job{plural}, {done:,} of {rows:,} rows done there{asked}"] if submitted else []
        notes += [] if self._media is None or not self._media.note else [self._media.note]
        notes += [f"it waits: {each}" for shard in self._shards.values() if (each := shard.course.trouble)][:1]
        note = f"{self._provider}: {'; '.join(notes)}" if notes else ""
        return EngineStats(rows, self._settings.jobs_max * self._api.limits.rows_max, note)

    # -- rows ---------------------------------------------------------------------------------------------------------

    async def _take(self, feed: Feed) -> list[Row]:
        """The next rows. While a shard waits for room at the provider, only rows of noted batches, which need none."""
        while True:
            is_full = self._is_full()
            if not is_full:
                rows = await self._race(feed.take(WINDOW), is_full)
            elif isinstance(feed, LeaseFeed):
                rows = await self._race(feed.take_noted(WINDOW), is_full)
            else:
                rows = []
            if rows or (rows is not None and not is_full):
                return rows
            if rows is not None:
                await self._wait_for_shards()  # the other rows of the feed need room

    async def _race(self, take: Coroutine[None, None, list[Row]], is_full: bool) -> list[Row] | None:
        """The result of a take; None if it has not finished and the room at the provider has changed."""
        task = asyncio.create_task(take)
        try:
            while not task.done() and is_full == self._is_full():
                changed = asyncio.create_task(self._moved.wait())
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._reap()
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def _is_full(self) -> bool:
        return any(shard.waits for shard in self._shards.values())

    def _add_rows(self, rows: list[Row], tools: Tools) -> None:
        """Give rows to the shard of their lease."""
        lease = rows[0].lease
        shard = next((each for each in self._shards.values() if each.lease is lease), None)
        if shard is None:
            shard = ProviderShard(lease, tools)
            task = asyncio.create_task(shard.run())
            self._shards[task] = shard
            task.add_done_callback(lambda _: self._moved.set())
        shard.add(rows)

    async def _wait_for_shards(self) -> None:
        """Wait until a shard has ended. Raises: an error that concerns all shards."""
        await self._moved.wait()
        self._reap()

    def _reap(self) -> None:
        self._moved.clear()
        for task in [task for task in self._shards if task.done()]:
            del self._shards[task]
            task.result()

    async def _leave(self, seconds: float = 0.0) -> None:
        """Stop all shards, after a grace period for calls in flight. Submitted batches keep running."""
        for shard in self._shards.values():
            shard.course.end()
        if self._shards and seconds:
            await asyncio.wait(self._shards, timeout=seconds)
        for task in self._shards:
            task.cancel()
        await asyncio.gather(*self._shards, return_exceptions=True)
        self._shards.clear()


def _connect(model: ModelSpec) -> Connections:
    """Create the connections. Those of an untrusted connector reach only addresses that its owner allows."""
    is_tls_checked = True
    private = None
    if model.connector is not None:
        private = addresses.EVERYWHERE if model.connector.is_trusted else secrets.private()
        config = model.connector.client_config
        is_tls_checked = config is None or not config.skip_ssl_verification
    return Connections(
        model.limits,
        headers={"User-Agent": f"batchmill/{batchmill.__version__}"},
        private=private,
        verify_tls=is_tls_checked,
        idle_timeout_s=argument(model, "idle_timeout_s", IDLE_TIMEOUT_S, least=0.001),
    )


def sweep(home: Path) -> None:
    """Delete the folders of killed workers."""
    for folder in home.glob(f"{FOLDER}*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
