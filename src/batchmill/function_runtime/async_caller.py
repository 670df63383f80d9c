"""Runs async functions and generators on an event loop: up to 64 calls at once, live calls first."""

from __future__ import annotations

import asyncio
import os
import time

from . import gpus, printing, sync_callers
from .arguments import read_rows
from .batch_window import BatchWindow
from .kept_results import ResultSerializer
from .loading import row_error
from .requests import RESULT_BYTES, STAGE_NS, BatchQueue, Bisection, PendingRequest, halves, singles
from .streams import StreamCall, call_with, check_count
from .user_code import ROW

CALLS_MAX = 64  # of single rows, at once
SHORT_NS = 5_000_000  # results wait so long if calls are missing: the worker sends more rows when it has results
BATCHES_MAX = 4  # of many rows, at once: more of them would never fill

new_loop = asyncio.new_event_loop


class AsyncLoop:
    """The caller for async functions. `run` returns after `stop`.

    Args:
        when_full: is called between calls once a call was refused memory.
        calls_max: calls of single rows at once, if it is more than CALLS_MAX.
    """

    def __init__(self, loop, code, replies, progress, link, *, when_full, memory_bytes=None, calls_max=None):
        self._loop, self._code, self._replies, self._progress, self._link = loop, code, replies, progress, link
        self._memory_bytes, self._when_full = memory_bytes, when_full
        self.met_memory_limit = False
        self._is_row = code.calls == ROW
        window_ns = 0 if self._is_row else int(code.batch_window_s * 1e9)
        self._batches = BatchQueue(code.batch_size, BatchWindow(window_ns, shares_max=1))
        self._bisection = Bisection()
        self._asks = {}
        self._running = {}  # task -> its (ask id, first row, rows), as many as the call has asks
        self._places = []  # the tasks of single rows and streams, as `progress` numbers them
        self._place_of = {}
        self._streams = {}  # id -> (async generator, whether it answers tensors, its StreamCall)
        self._closed = set()  # ids of streams whose `close` has come and not been carried out
        self._steps = {}  # stream id -> the task that makes its next event
        self._chains = {}  # stream id -> the last thing to be done for it
        self._timer = None
        self._staging, self._is_staged_soon = None, False  # the timer of `_stage`, and whether it is SHORT_NS
        self._failed = 0
        self._was_too_large = False  # the last call that raised
        self._serializer = ResultSerializer(self._error_of)
        self._calls_max = max(CALLS_MAX, calls_max or 0) if self._is_row else BATCHES_MAX
        self._stopped = loop.create_future()

    def run(self, frames):
        """Serve until `stop`."""
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._link.fileno(), self._readable)
        self._loop.call_soon(self._handle, frames)
        self._loop.run_until_complete(self._stopped)
        self._loop.remove_reader(self._link.fileno())
        tasks = [*self._running, *self._chains.values()]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, self._close_streams(), return_exceptions=True))

    async def _close_streams(self):
        for events, _, _ in self._streams.values():
            await events.aclose()

    def _readable(self):
        self._end_child()
        self._handle(self._link.receive())

    def _end_child(self):
        if self._link.is_child:
            os._exit(0)

    def _handle(self, frames):
        for meta, buffers in frames:
            kind = meta["kind"]
            if kind == "ask":
                self._add(meta, buffers)
            elif kind == "abandon":
                self._abandon(meta["id"])
            elif kind == "stop":
                if not self._stopped.done():
                    self._stopped.set_result(None)
            else:
                self._follow(meta, buffers)
        self._start_calls()
        self._replies.flush()

    def _add(self, meta, buffers):
        ask = PendingRequest(meta, self._read(meta, buffers))
        if not ask.left:
            self._replies.finish(ask)
            return
        self._asks[ask.id] = ask
        if self._is_row:
            ask.keep_done()
            runs = [(first, end, None) for first, end in reversed(ask.runs)]
        else:
            runs = sync_callers.prepare(ask, self._code)
        for first, end, key in runs:
            self._batches.add(ask, first, end, key)

    def _read(self, meta, buffers):
        """The rows of an `ask`. Where user code makes objects of them, all of them count as being called."""
        parameters = self._code.parameters
        if not parameters.models:
            return read_rows(meta, buffers, parameters, as_columns=not self._is_row)
        entry = (meta["id"], 0, meta["rows"])
        self._progress.many([entry, *[each for entries in self._running.values() for each in entries]])
        try:
            return read_rows(meta, buffers, parameters, as_columns=not self._is_row)
        finally:
            if self._is_row:
                self._progress.many([self._running[task][0] for task in self._places])
            else:
                self._note_all()

    def _abandon(self, ask_id):
        ask = self._asks.pop(ask_id, None)
        if ask is None:
            return
        ask.is_abandoned = True
        self._batches.drop(ask)
        for task, entries in list(self._running.items()):
            if all(called == ask_id for called, _, _ in entries):  # others may wait for the rest
                task.cancel()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _start_calls(self):
        """Start the calls that are due, up to the limit."""
        size = 1 if self._is_row else self._bisection.size(self._batches.size)
        while len(self._running) < self._calls_max:
            parts = self._batches.take(time.perf_counter_ns(), size)
            if not parts:
                break
            for ask, _, _ in parts:
                ask.begin(self._progress)
            call = self._call_row(parts) if self._is_row else self._call_batch(parts)
            self._begin(call, [(ask.id, first, end - first) for ask, first, end in parts], self._ended)
        if self._batches or self._timer is not None:
            self._wake_in_time(size)

    def _begin(self, call, entries, ended):
        task = self._loop.create_task(call)
        self._running[task] = entries
        if self._is_row:
            self._place_of[task] = len(self._places)
            self._progress.add(len(self._places), *entries[0])
            self._places.append(task)
        else:
            self._note_all()
        task.add_done_callback(ended)
        return task

    def _note_all(self):
        self._progress.many([entry for entries in self._running.values() for entry in entries])

    def _note_end(self, task):
        del self._running[task]
        if not self._is_row:
            self._note_all()
            return
        place, last = self._place_of.pop(task), self._places.pop()
        self._progress.take(place, len(self._places) + 1)
        if last is not task:
            self._places[place] = last
            self._place_of[last] = place

    def _wake_in_time(self, size):
        """Wake up when a waiting batch is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batches and len(self._running) < self._calls_max:
            wait_ns = self._batches.due_ns(time.perf_counter_ns(), size)
            self._timer = self._loop.call_later(wait_ns / 1e9, self._start_calls)

    def _ended(self, task):
        self._end_child()
        self._note_end(task)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()
        self._start_calls()
        self._replies.flush()
        if self.met_memory_limit and not self._running:
            self.met_memory_limit = False
            self._when_full()

    async def _call_row(self, parts):
        [(ask, row, _)] = parts
        printing.calling((ask,), row)
        began = time.perf_counter_ns()
        try:
            if self._code.streams:
                value = await self._collected(ask.bound, row)
            else:
                value = await call_with(self._code.call, ask.bound, row)
        except BaseException as error:  # SystemExit and the like too: one row must not end the process
            self._refuse_cancel()
            self._replies.end_if_lost(error, [ask.id])
            ask.errors[row] = self._error_of(error)
        else:
            sync_callers.keep_result(ask, row, value, self._code, self._serializer)
        self._replies.count(1, 1, 0, time.perf_counter_ns() - began)
        ask.end_rows(row, row + 1)
        self._reply(ask, 1)

    def _error_of(self, error):
        self.met_memory_limit |= isinstance(error, MemoryError)
        return row_error(error, self._memory_bytes)

    def _refuse_cancel(self):
        """Go on being cancelled if it was us, at the end, and not user code that cancelled itself."""
        if self._stopped.done():
            raise asyncio.CancelledError

    async def _collected(self, bound, row):
        items = []
        async for event in call_with(self._code.call, bound, row):
            items.append(event if self._code.result is None else self._code.result(event))
            check_count(items)
        return items

    def _reply(self, ask, size):
        if ask.left == 0:
            self._asks.pop(ask.id, None)
            self._replies.finish(ask, size)
        elif ask.is_staged:
            self._stage_in_time(size)

    def _stage_in_time(self, size):
        """Send the rows that have ended in a while, however long the others run."""
        if self._serializer.size_bytes >= RESULT_BYTES:
            self._stage(size)
            return
        is_short = not self._batches and len(self._running) < self._calls_max
        if self._staging is not None and is_short > self._is_staged_soon:
            self._staging.cancel()
            self._staging = None
        if self._staging is None:
            wait_ns = SHORT_NS if is_short else STAGE_NS
            self._staging, self._is_staged_soon = self._loop.call_later(wait_ns / 1e9, self._stage, size), is_short

    def _stage(self, size):
        self._end_child()
        if self._staging is not None:
            self._staging.cancel()
            self._staging = None
        for ask in self._asks.values():
            self._replies.stage(ask, self._serializer, size)

    async def _call_batch(self, parts):
        rows = sum(end - first for _, first, end in parts)
        before, began = self._failed, time.perf_counter_ns()
        if not await self._try(parts, rows):
            await self._cut(parts, rows)
        self._bisection.learn(rows, self._failed - before)
        asks = list(dict.fromkeys(ask for ask, _, _ in parts))
        for ask in asks:
            self._reply(ask, rows)
        if not asks[0].from_job:
            ended = time.perf_counter_ns()
            self._batches.window.called(asks, rows, began, ended, is_whole=self._failed == before)

    async def _try(self, parts, rows):
        """Call with these rows; False if it raised, and no row has a result then."""
        began = called = time.perf_counter_ns()
        printing.calling(tuple(dict.fromkeys([ask for ask, _, _ in parts])))
        try:
            args, named = sync_callers.arguments_of(parts, self._code)
            called = time.perf_counter_ns()
            result = await self._code.call(*args, **named)
            sync_callers.share_out(parts, rows, result, self._code, self._serializer)
        except BaseException as error:  # as in _call_row
            self._refuse_cancel()
            self._replies.end_if_lost(error, [ask.id for ask, _, _ in parts])
            if rows > 1:
                self._was_too_large = gpus.is_out_of_memory(error)
                return False
            sync_callers.fail(parts, self._error_of(error))
            self._failed += 1
            return True
        finally:
            self._replies.count(rows, 1, called - began, time.perf_counter_ns() - called)
        return True

    async def _cut(self, parts, rows):
        if all(ask.is_abandoned for ask, _, _ in parts):
            return
        was_too_large, failed = self._was_too_large, self._failed
        if not was_too_large and self._bisection.should_split_singly(rows):
            for part in singles(parts):
                await self._try(part, 1)
            return
        for part, part_rows in zip(halves(parts), (rows // 2, rows - rows // 2)):
            if not await self._try(part, part_rows):
                await self._cut(part, part_rows)
        if was_too_large and self._failed == failed:
            self._bisection.did_not_fit(rows)

    # -- streams ------------------------------------------------------------------------------------------------------

    def _follow(self, meta, buffers):
        """Run the operations on a stream one after another."""
        stream_id = meta["id"]
        if meta["kind"] == "close":  # nobody reads the event that is being made, or those that were requested
            self._closed.add(stream_id)
            if stream_id in self._steps:
                self._steps[stream_id].cancel()
        call = self._after(self._chains.get(stream_id), meta, buffers)
        self._chains[stream_id] = self._begin(call, [(stream_id, 0, 1)], self._followed)

    def _followed(self, task):
        for stream_id, last in list(self._chains.items()):
            if last is task:
                del self._chains[stream_id]
        self._ended(task)

    async def _after(self, earlier, meta, buffers):
        if earlier is not None:
            await asyncio.wait([earlier])
        stream_id = meta["id"]
        if meta["kind"] == "open":
            self._open(meta, buffers)
        elif stream_id in self._streams:
            events, exact, called = self._streams[stream_id]
            printing.calling((called,))
            if meta["kind"] == "close":
                await self._close(stream_id, events)
            elif stream_id not in self._closed:
                await self._next(stream_id, events, exact)
        if meta["kind"] == "close":
            self._closed.discard(stream_id)

    def _open(self, meta, buffers):
        stream_id = meta["id"]
        bound = read_rows({**meta, "rows": 1, "from_job": False}, buffers, self._code.parameters)
        if not self._code.streams:
            message = "the function does not answer in events: ask without a stream"
            self._replies.end_stream(stream_id, ["invalid_argument", message, ""])
        elif bound.errors:
            self._replies.end_stream(stream_id, bound.errors[0])
        else:
            self._streams[stream_id] = (call_with(self._code.call, bound), meta["exact"], StreamCall(meta))

    async def _next(self, stream_id, events, exact):
        error = None
        self._steps[stream_id] = asyncio.current_task()
        try:
            event = await events.__anext__()
            if self._code.result is not None:
                event = self._code.result(event)
        except StopAsyncIteration:
            pass
        except BaseException as raised:  # user code
            self._refuse_cancel()
            self._replies.end_if_lost(raised, [stream_id])
            error = self._error_of(raised)
        else:
            if not self._replies.piece(stream_id, event, exact=exact):
                await self._close(stream_id, events)
            return
        finally:
            del self._steps[stream_id]
        del self._streams[stream_id]
        self._replies.end_stream(stream_id, error)

    async def _close(self, stream_id, events):
        del self._streams[stream_id]
        try:
            await events.aclose()
        except BaseException as error:  # user code, whose results are not read any more
            self._refuse_cancel()
            self._replies.note(error)
