"""The short way of a request that somebody waits for: to a worker of its model and back, past every row."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

from batchmill.errors import ModelFailed, StorageFull, TooLarge, Unavailable
from batchmill.jobs.pool import Pool, PoolWorker
from batchmill.jobs.pools import Pools
from batchmill.jobs.tallies import Tallies
from batchmill.ports import Clock
from batchmill.states import PauseReason
from batchmill.types import LiveHead, LiveRequest, ModelSpec
from batchmill.wire.messages import LIVE_AHEAD_BYTES, MESSAGE_BYTES_MAX, Abandon, Predict, Taken

WAITING_MAX = 1024  # requests that wait for the first worker of one model
IN_FLIGHT_MAX = 8192  # requests of one model that its workers are answering
BODY_BYTES_MAX = MESSAGE_BYTES_MAX - 64 * 1024  # so that the message around it fits too
TRY_AGAIN_S = 15.0  # a model that could not be started is started again for a request that comes later than this


LOADING_S = 300.0  # how long a request waits for the first worker of its model


class LivePath:
    """`ports.Live` over the pools of a data directory."""

    def __init__(self, pools: Pools, tallies: Tallies, clock: Clock, *, loading_s: float = LOADING_S) -> None:
        self._pools, self._tallies, self._clock = pools, tallies, clock
        self._loading_s = loading_s
        self._numbers = itertools.count(1)
        self._failed: dict[str, tuple[float, str]] = {}  # pool key -> when it could not be started, and why

    async def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """Raises, besides what `ports.Live` says: TooLarge for a body that does not fit one message."""
        if len(request.body) > BODY_BYTES_MAX:
            raise TooLarge(f"a body of {len(request.body)} bytes; a live request may have {BODY_BYTES_MAX}")
        number = next(self._numbers)
        user = f"live {number}"
        key = self._pools.key_of(model)
        has_begun = False
        try:
            worker = await self._loaded(user, model, key)
            async for piece in self._answer(worker, Predict(number, request)):
                if not has_begun:
                    has_begun = True
                    self._tallies.count_live(model.name, piece if isinstance(piece, LiveHead) else None)
                yield piece
        finally:
            self._pools.leave(key, user)
            if not has_begun:
                self._tallies.count_live(model.name, None)

    async def _loaded(self, user: str, model: ModelSpec, key: str) -> PoolWorker:
        """As `_worker`, for a while: the model goes on loading, and who asks again may find it ready."""
        try:
            async with asyncio.timeout(self._loading_s):
                return await self._worker(user, model, key)
        except TimeoutError:
            raise Unavailable(f"{model.name!r} is still being loaded after {self._loading_s:g} s; try again") from None

    async def _worker(self, user: str, model: ModelSpec, key: str) -> PoolWorker:
        """The ready worker with the fewest live requests, once there is one."""
        while True:
            pool = self._pool(user, model, key)
            worker = pool.least_live()
            if worker is not None:
                if sum(len(each.calls) for each in pool.workers.values()) >= IN_FLIGHT_MAX:
                    raise Unavailable(f"{IN_FLIGHT_MAX} requests to {model.name!r} are being answered; try again")
                return worker
            if pool.waiting >= WAITING_MAX:
                raise Unavailable(f"{WAITING_MAX} requests wait for {model.name!r} to start; try again later")
            await pool.change()
            if pool.failure is not None and self._pools.is_current(pool):
                if pool.failure.reason == PauseReason.STORAGE_FULL:  # it may work the next moment
                    raise StorageFull(pool.failure.message)
                self._failed[key] = self._clock.monotonic(), pool.failure.message
                raise ModelFailed(pool.failure.message)

    def _pool(self, user: str, model: ModelSpec, key: str) -> Pool:
        """The model's pool. One that has just failed fails at once: every start may take its time."""
        if self._pools.is_closed:
            raise Unavailable("the server is stopping")
        at, why = self._failed.get(key, (0.0, ""))
        if why and self._clock.monotonic() - at < TRY_AGAIN_S:
            raise ModelFailed(why)
        self._failed.pop(key, None)
        return self._pools.use(user, model, key)

    async def _answer(self, worker: PoolWorker, asked: Predict) -> AsyncGenerator[LiveHead | bytes]:
        """What the worker says. Raises: what it raised; Unavailable when it ended before it had answered."""
        pieces: asyncio.Queue[LiveHead | bytes | Exception | None] = asyncio.Queue()
        worker.calls[asked.id] = pieces.put_nowait
        worker.handle.send(asked)
        owed = 0
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if isinstance(piece, bytes):
                    owed += len(piece)
                    if owed >= LIVE_AHEAD_BYTES // 4:
                        worker.handle.send(Taken(asked.id, owed))
                        owed = 0
        finally:
            if worker.calls.pop(asked.id, None) is not None:  # its end has not been heard
                worker.handle.send(Abandon(asked.id))
