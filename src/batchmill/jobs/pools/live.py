"""Live calls: from a caller to a worker of the model and back, ahead of all rows."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from batchmill.errors import BatchmillError, ModelFailed, StorageFailed, StorageFull, TooLarge, Unavailable
from batchmill.jobs.pools.pool import Pool
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.pools import Pools
from batchmill.jobs.pools.resources import hide_names
from batchmill.jobs.pools.tallies import Tallies
from batchmill.ports.clock import Clock
from batchmill.states import PauseReason
from batchmill.types import CallStats, FunctionRequest, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import LIVE_AHEAD_BYTES, MESSAGE_BYTES_MAX, Abandon, AnswerLive, FlowCredit, FunctionReply

WAITING_MAX = 1024  # requests that wait for the first worker of one model
IN_FLIGHT_MAX = 8192  # requests of one model that its workers are answering
BODY_BYTES_MAX = MESSAGE_BYTES_MAX - 64 * 1024  # leaves space for the rest of the message
TRY_AGAIN_S = 15.0  # a model that failed to start is started again for the first request after this
LOADING_S = 300.0  # how long a request waits for the first worker of its model
HOLD_S = 5.0  # a pool is held for 1 to 2 times this after the last call of its model
_DISK_ERRORS = {PauseReason.STORAGE_FULL: StorageFull, PauseReason.STORAGE_FAILED: StorageFailed}
QUEUES_MAX = 4096  # models with a `CallQueue`; beyond that, those without calls are dropped
BYTES_IN_FLIGHT_MAX = 512 * 1024 * 1024  # of the bodies of one model's calls
LOST = "worker_crashed"  # the error code of a call whose worker died

ReplyCallback = Callable[[FunctionReply], None]
Cancel = Callable[[], None]


class CallQueue:
    """The calls of one model that are in flight, and whether its pool is held for them."""

    def __init__(self, model: ModelSpec, key: str, user: str) -> None:
        """`user`: the user of the pool, as in `Pools.use`."""
        self.model, self.key, self.user = model, key, user
        self.is_idempotent = model.function is not None and model.function.is_idempotent
        self.in_flight = 0
        self.bytes = 0
        self.begun = 0  # calls that were ever started
        self.is_held = False

    def has_room(self, size: int) -> bool:
        """Whether a call of so many bytes may begin."""
        return self.bytes + size <= BYTES_IN_FLIGHT_MAX


class FunctionCall:
    """A call that a worker has, with the callback for its reply or its error."""

    __slots__ = ("_is_retry", "_on_reply", "_queue", "_request", "_retry", "_worker")

    def __init__(
        self, queue: CallQueue, request: FunctionRequest, on_reply: ReplyCallback, retry: Callable[[FunctionCall], None]
    ) -> None:
        """Args: retry: called with a call that may be repeated on another worker."""
        self._queue, self._request, self._retry = queue, request, retry
        self._on_reply: ReplyCallback | None = on_reply  # until it is called
        self._worker: PoolWorker | None = None
        self._is_retry = False
        queue.in_flight += 1
        queue.begun += 1
        queue.bytes += len(request.body)

    @property
    def queue(self) -> CallQueue:
        return self._queue

    def begin(self, worker: PoolWorker) -> None:
        if self._on_reply is not None:
            self._worker = worker
            worker.send_request(self._request, self)

    def __call__(self, piece: FunctionReply | LiveHead | bytes | Exception | None) -> None:
        if isinstance(piece, FunctionReply):
            self._end(piece)
            return
        assert isinstance(piece, BatchmillError), "a function call has one reply"
        if isinstance(piece, Unavailable) and self._queue.is_idempotent and not self._is_retry:
            self._is_retry, self._worker = True, None
            self._retry(self)
        else:
            self.fail(self._masked(piece))

    def fail(self, error: BatchmillError) -> None:
        """Report that no reply will come."""
        self._end(FunctionReply(self._request.id, raised=Raised.of(error)))

    def cancel(self) -> None:
        """Cancel: the caller no longer waits."""
        if self._on_reply is not None:
            self._leave()
            if self._worker is not None:
                self._worker.abandon(self._request.id)

    def _masked(self, error: BatchmillError) -> BatchmillError:
        """The error of a call whose worker died: whether the call was the cause is unknown."""
        if not isinstance(error, Unavailable):
            return error
        return ModelFailed(f"the worker of {self._queue.model.name!r} died before it replied", code=LOST)

    def _end(self, reply: FunctionReply) -> None:
        on_reply = self._on_reply
        if on_reply is not None:
            self._leave()
            on_reply(reply)

    def _leave(self) -> None:
        self._on_reply = None  # breaks a reference cycle, so that memory is freed at once
        self._queue.in_flight -= 1
        self._queue.bytes -= len(self._request.body)


class LivePath:
    """`ports.jobs.Live` over the pools of a data directory."""

    def __init__(self, pools: Pools, tallies: Tallies, clock: Clock, *, loading_s: float = LOADING_S) -> None:
        self._pools, self._tallies, self._clock = pools, tallies, clock
        self._loading_s = loading_s
        self._numbers = itertools.count(1)
        self._failed: dict[str, tuple[float, str]] = {}  # pool key -> when and why it failed to start
        self._queues: dict[int, CallQueue] = {}  # id of a spec, which its queue keeps alive -> its calls
        self._tasks: set[asyncio.Task[None]] = set()

    async def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """Raises, besides what `ports.jobs.Live` says: TooLarge for a body that does not fit one message."""
        if len(request.body) > BODY_BYTES_MAX:
            raise TooLarge(f"a body of {len(request.body)} bytes; a live request may have {BODY_BYTES_MAX}")
        number = next(self._numbers)
        user = f"live {number}"
        key = self._pools.key_of(model)
        has_begun = False
        try:
            worker = await self._loaded(user, model, key)
            async for piece in self._answer(worker, AnswerLive(number, request)):
                if not has_begun:
                    has_begun = True
                    self._tallies.count_live(model.name, piece if isinstance(piece, LiveHead) else None)
                yield piece
        finally:
            self._pools.leave(key, user)
            if not has_begun:
                self._tallies.count_live(model.name, None)

    # -- calls of deployed functions ----------------------------------------------------------------------------------

    def call_nowait(
        self,
        model: ModelSpec,
        form: str,
        body: bytes,
        *,
        head: bytes = b"",
        timeout_s: float | None = None,
        origin: tuple[str, str] = ("", ""),
        on_reply: ReplyCallback,
    ) -> Cancel | None:
        """Begin a call at once; None if it would have to wait or would be refused: then call `call`.

        `origin`: the caller's project and the id of the request.
        `on_reply`: called once with the reply, which may have an error in `raised`; never after the call was cancelled.
        """
        queue = self._queue_of(model)
        worker = self._free_worker(queue)
        if worker is None or len(body) > BODY_BYTES_MAX or not queue.has_room(len(body)):
            return None
        call = FunctionCall(
            queue, FunctionRequest(next(self._numbers), form, body, head, timeout_s, *origin), on_reply, self._retry
        )
        call.begin(worker)
        return call.cancel

    async def call(
        self, model: ModelSpec, form: str, body: bytes, *, head: bytes = b"", timeout_s: float | None = None,
        origin: tuple[str, str] = ("", ""),
    ) -> FunctionReply:  # fmt: skip
        """See `ports.jobs.Live`. Raises: TooLarge for a body that does not fit one message."""
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(f"a body of {len(body)} bytes; a live request may have {BODY_BYTES_MAX}")
        future: asyncio.Future[FunctionReply] = asyncio.get_running_loop().create_future()

        def on_reply(reply: FunctionReply) -> None:
            if not future.done():
                future.set_result(reply)

        cancel = self.call_nowait(model, form, body, head=head, timeout_s=timeout_s, origin=origin, on_reply=on_reply)
        if cancel is None:
            queue = self._queue_of(model)
            if not queue.has_room(len(body)):
                raise Unavailable(
                    f"{BYTES_IN_FLIGHT_MAX:,} bytes are in flight to {model.name!r}; try again",
                    code="too_many_bytes",
                )
            request = FunctionRequest(next(self._numbers), form, body, head, timeout_s, *origin)
            call = FunctionCall(queue, request, on_reply, self._retry)
            cancel = call.cancel
            try:
                await self._begin(call)
            except BaseException:
                cancel()
                raise
        try:
            reply = await future
        finally:
            cancel()
        if reply.raised is not None:
            raise reply.raised.error()
        return reply if type(reply.body) is bytes else replace(reply, body=bytes(reply.body))

    async def load(self, model: ModelSpec) -> None:
        """Keep a worker ready for calls until `unload`. Raises as `call`."""
        key = self._queue_of(model).key
        try:
            await self._loaded(_loader(key), model, key)
        except BaseException:
            self._pools.leave(key, _loader(key))
            raise

    async def replace(self, old: ModelSpec, new: ModelSpec) -> None:
        """Returns once a worker of `new` is up, if `old` has one. Raises: ModelFailed; `old` then continues."""
        if self.is_ready(old):
            await self.warm(new)

    async def warm(self, model: ModelSpec) -> None:
        """Start a worker as if the model had just been called. Raises as `call`."""
        queue = self._queue_of(model)
        user = f"live {next(self._numbers)}"
        try:
            await self._loaded(user, model, queue.key)
            if not queue.is_held:
                self._hold(queue)
        finally:
            self._pools.leave(queue.key, user)

    def unload(self, model: ModelSpec) -> None:
        """Stop keeping the model ready: its workers end after the idle timeout."""
        key = self._queue_of(model).key
        self._pools.leave(key, _loader(key))

    def is_ready(self, model: ModelSpec) -> bool:
        """Whether a call would not wait for a worker to start."""
        return self._free_worker(self._queue_of(model), hold=False) is not None

    def stats(self, model: ModelSpec) -> CallStats:
        """Counters of this model's calls, and of its rows in jobs, since this process started."""
        return self._pools.sums(self._queue_of(model).key).total()

    def _queue_of(self, model: ModelSpec) -> CallQueue:
        queue = self._queues.get(id(model))
        if queue is None:
            if len(self._queues) >= QUEUES_MAX:
                self._queues = {at: each for at, each in self._queues.items() if each.in_flight or each.is_held}
            queue = self._queues[id(model)] = CallQueue(
                model, self._pools.key_of(model), f"calls {next(self._numbers)}"
            )
        return queue

    def _free_worker(self, queue: CallQueue, *, hold: bool = True) -> PoolWorker | None:
        """A worker that can take another call now."""
        pool = self._pools.get(queue.key)
        if pool is None or pool.failure is not None or self._pools.is_closed:
            return None
        worker = pool.least_loaded_worker()
        if worker is None or queue.in_flight >= IN_FLIGHT_MAX:
            return None
        if hold and not queue.is_held:
            self._hold(queue)
        return worker

    async def _begin(self, call: FunctionCall) -> None:
        """Send a call to a worker, once there is one. Raises as `call`."""
        queue = call.queue
        user = f"live {next(self._numbers)}"
        try:
            call.begin(await self._loaded(user, queue.model, queue.key))
            if not queue.is_held:
                self._hold(queue)
        finally:
            self._pools.leave(queue.key, user)

    def _retry(self, call: FunctionCall) -> None:
        """Repeat a call whose worker died, if it may be repeated."""
        self._spawn(self._begin_retry(call))

    async def _begin_retry(self, call: FunctionCall) -> None:
        try:
            await self._begin(call)
        except BatchmillError as error:
            call.fail(error)

    def _hold(self, queue: CallQueue) -> None:
        """Hold the pool while calls arrive: acquiring it for each call would cost more than the call."""
        self._pools.use(queue.user, queue.model, queue.key)
        queue.is_held = True
        self._spawn(self._hold_while_called(queue))

    async def _hold_while_called(self, queue: CallQueue) -> None:
        begun = -1
        while queue.in_flight or begun != queue.begun:
            begun = queue.begun
            await self._clock.sleep(HOLD_S)
            if self._pools.is_closed:
                return
        queue.is_held = False
        self._pools.leave(queue.key, queue.user)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Release all pools, which are closed or about to be."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- a worker -----------------------------------------------------------------------------------------------------

    async def _loaded(self, user: str, model: ModelSpec, key: str) -> PoolWorker:
        """As `_worker`, with a timeout. The model continues to load, so a later call may find it ready."""
        try:
            async with asyncio.timeout(self._loading_s):
                return await self._worker(user, model, key)
        except TimeoutError:
            pool = self._pools.get(key)
            why = "" if pool is None else hide_names(pool.waits, lambda _: False)  # for any caller
            text = f"{model.name!r} is still being loaded after {self._loading_s:g} s"
            raise Unavailable(text + (f", for {why}" if why else "") + "; try again") from None

    async def _worker(self, user: str, model: ModelSpec, key: str) -> PoolWorker:
        """The ready worker with the fewest live requests, once there is one."""
        while True:
            pool = self._pool(user, model, key)
            worker = pool.least_loaded_worker()
            if worker is not None:
                if sum(len(each.calls) for each in pool.workers.values()) >= IN_FLIGHT_MAX:
                    raise Unavailable(
                        f"{IN_FLIGHT_MAX} requests to {model.name!r} are being answered; try again",
                        code="too_many_calls",
                    )
                return worker
            if pool.waiting >= WAITING_MAX:
                raise Unavailable(
                    f"{WAITING_MAX} requests wait for {model.name!r} to start; try again later", code="too_many_calls"
                )
            await pool.wait_for_change()
            if pool.failure is not None and self._pools.is_current(pool):
                if storage := _DISK_ERRORS.get(pool.failure.reason):  # it may be temporary
                    raise storage(pool.failure.message)
                self._failed[key] = self._clock.monotonic(), pool.failure.message
                raise ModelFailed(pool.failure.message)

    def _pool(self, user: str, model: ModelSpec, key: str) -> Pool:
        """The model's pool. A pool that has just failed fails at once, because each start may be slow."""
        if self._pools.is_closed:
            raise Unavailable("the server is stopping")
        at, why = self._failed.get(key, (0.0, ""))
        if why and self._clock.monotonic() - at < TRY_AGAIN_S:
            raise ModelFailed(why)
        self._failed.pop(key, None)
        return self._pools.use(user, model, key)

    async def _answer(self, worker: PoolWorker, pending: AnswerLive) -> AsyncGenerator[LiveHead | bytes]:
        """The reply of the worker. Raises: its error; Unavailable if it ended before it replied."""
        pieces: asyncio.Queue[LiveHead | bytes | Exception | None] = asyncio.Queue()
        worker.calls[pending.id] = pieces.put_nowait
        worker.handle.send(pending)
        unacknowledged = 0  # bytes
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if isinstance(piece, bytes):
                    unacknowledged += len(piece)
                    if unacknowledged >= LIVE_AHEAD_BYTES // 4:
                        worker.handle.send(FlowCredit(pending.id, unacknowledged))
                        unacknowledged = 0  # bytes
        finally:
            if worker.calls.pop(pending.id, None) is not None:  # it has not ended yet
                worker.handle.send(Abandon(pending.id))


def _loader(key: str) -> str:
    """The user of a pool that stays ready between calls."""
    return f"loaded {key}"
