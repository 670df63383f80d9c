"""What every engine promises, as tests. Subclass `EngineSuite` in a `Test…` class and say how its rows look."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable

import pytest

from batchmill.errors import BatchmillError
from batchmill.ports.engines import Engine
from batchmill.types import EngineStats, LiveHead, LiveRequest, Outcome, Row
from batchmill.wire.rows.forms import OpenAIForm

PATIENCE_S = 60.0  # a test that waits this long has failed


class ListSink:
    """Keeps outcomes, and lets a test wait for them."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._more = asyncio.Event()

    def put(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes.extend(outcomes)
        self._more.set()

    async def wait_for(self, count: int) -> None:
        """Return once `count` outcomes are there."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.outcomes) < count:
                self._more.clear()
                await self._more.wait()

    def numbers(self) -> list[int]:
        return sorted(outcome.row.number for outcome in self.outcomes)


class OpenFeed:
    """Rows as a test gives them. `unput_most` is how many an engine held at most: taken, and not yet put."""

    def __init__(self, sink: ListSink, rows: Iterable[Row] = (), *, ended: bool = False) -> None:
        self._sink = sink
        self._rows = list(rows)
        self._ended = ended
        self._changed = asyncio.Event()
        self.taken = 0
        self.unput_most = 0

    def give(self, rows: Iterable[Row]) -> None:
        self._rows.extend(rows)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def take(self, n: int) -> list[Row]:
        assert n >= 1
        while not self._rows and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        rows, self._rows = self._rows[:n], self._rows[n:]
        self.taken += len(rows)
        self.unput_most = max(self.unput_most, self.taken - len(self._sink.outcomes))
        return rows


def chat_row(number: int, text: str, *, lease: object = None, **body: object) -> Row:
    """An OpenAI row that asks a chat model to answer `text`."""
    content = {"messages": [{"role": "user", "content": text}], **body}
    line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": content}
    return Row(number, number, json.dumps(line).encode(), OpenAIForm(), lease)


def chat_request(text: str, *, stream: bool = False, **body: object) -> LiveRequest:
    """A live request that asks a chat model to answer `text`."""
    content = {"messages": [{"role": "user", "content": text}], **({"stream": True} if stream else {}), **body}
    return LiveRequest("/v1/chat/completions", json.dumps(content).encode(), stream)


async def answer_to(engine: Engine, request: LiveRequest) -> tuple[LiveHead, bytes]:
    """The whole answer to a live request."""
    async with asyncio.timeout(PATIENCE_S):
        head, *pieces = [piece async for piece in engine.predict(request)]
    assert isinstance(head, LiveHead)
    return head, b"".join(pieces)


async def run_all(engine: Engine, rows: Iterable[Row]) -> ListSink:
    """Everything the engine puts for `rows`."""
    sink = ListSink()
    async with asyncio.timeout(PATIENCE_S):
        await engine.run(OpenFeed(sink, rows, ended=True), sink)
    return sink


class EngineSuite:
    """Override `engine` (a fixture; started, and stopped afterwards) and the kinds of rows and live requests."""

    held_max = 4096  # rows the engine may have taken and not put

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        raise AssertionError("override the fixture `engine`")
        yield

    def good_row(self, number: int, lease: object = None) -> Row:
        """A row that is answered."""
        raise AssertionError("override good_row")

    def bad_row(self, number: int) -> Row:
        """A row that ends in an error, whatever is tried."""
        raise AssertionError("override bad_row")

    def endless_row(self, number: int) -> Row:
        """A row that is not answered before the test is over."""
        raise AssertionError("override endless_row")

    def live_request(self, number: int) -> LiveRequest:
        """A live request whose answer holds its number."""
        return chat_request(f"text {number}")

    def bad_live_request(self) -> LiveRequest:
        """One that ends in an error."""
        raise AssertionError("override bad_live_request")

    def endless_live_request(self) -> LiveRequest:
        """One that is not answered before the test is over, and holds up no other."""
        raise AssertionError("override endless_live_request")

    def live_stream(self, words: int) -> LiveRequest:
        """One that is answered by a stream of so many words."""
        return chat_request(" ".join(["word"] * words), stream=True)

    def endless_stream(self) -> LiveRequest:
        """One that is answered by a stream without end."""
        return chat_request("trickles on", stream=True)

    async def test_every_row_has_one_outcome(self, engine: Engine) -> None:
        """Each row of the feed is put exactly once, and run() returns when the feed has ended."""
        sink = await run_all(engine, [self.good_row(n) for n in range(300)])
        assert sink.numbers() == list(range(300))
        assert [outcome.error for outcome in sink.outcomes if outcome.error] == []

    async def test_bodies_are_one_line_of_json(self, engine: Engine) -> None:
        """An ok outcome holds valid JSON without a line end, ready for a result file."""
        sink = await run_all(engine, [self.good_row(n) for n in range(3)])
        for outcome in sink.outcomes:
            assert outcome.body is not None
            json.loads(outcome.body)
            assert b"\n" not in outcome.body

    async def test_rows_come_back_as_they_were(self, engine: Engine) -> None:
        """An outcome carries the very row that was taken, with the worker's own lease."""
        rows = [self.good_row(n, lease=Handle(n)) for n in range(3)]
        sink = await run_all(engine, rows)
        assert {id(outcome.row) for outcome in sink.outcomes} == {id(row) for row in rows}

    async def test_errors_stay_with_their_row(self, engine: Engine) -> None:
        """A row that fails has an error with a code and a message; its neighbours are answered."""
        rows = [self.bad_row(n) if n % 3 == 0 else self.good_row(n) for n in range(12)]
        sink = await run_all(engine, rows)
        failed = {outcome.row.number: outcome.error for outcome in sink.outcomes if outcome.error}
        assert sink.numbers() == list(range(12))
        assert sorted(failed) == [0, 3, 6, 9]
        assert all(error.code and error.message for error in failed.values())

    async def test_unreadable_row_is_an_error(self, engine: Engine) -> None:
        """A row that is not JSON object ends in an error outcome, never in a crash."""
        good = self.good_row(0)
        broken = Row(1, 1, b"[" * 5000, good.form)
        sink = await run_all(engine, [good, broken])
        assert [o.row.number for o in sink.outcomes if o.error] == [1]

    async def test_empty_feed(self, engine: Engine) -> None:
        """A feed without rows ends the run at once, with nothing put."""
        assert (await run_all(engine, [])).outcomes == []

    async def test_rows_run_as_they_come(self, engine: Engine) -> None:
        """Rows are answered while the feed is still open: no row waits for a batch to fill."""
        sink = ListSink()
        feed = OpenFeed(sink)
        running = asyncio.create_task(engine.run(feed, sink))
        for n in range(3):
            feed.give([self.good_row(n)])
            await sink.wait_for(n + 1)
        feed.end()
        async with asyncio.timeout(PATIENCE_S):
            await running
        assert sink.numbers() == [0, 1, 2]

    async def test_held_rows_are_bounded(self, engine: Engine) -> None:
        """However long the feed, the engine holds no more rows than it needs."""
        sink = ListSink()
        feed = OpenFeed(sink, (self.good_row(n) for n in range(self.held_max * 2)), ended=True)
        async with asyncio.timeout(PATIENCE_S):
            await engine.run(feed, sink)
        assert len(sink.outcomes) == self.held_max * 2
        assert feed.unput_most <= self.held_max

    async def test_cancelling_stops_at_once(self, engine: Engine) -> None:
        """Cancelling run() leaves rows in flight undone; finished ones have been put, and nothing is put later."""
        sink = ListSink()
        feed = OpenFeed(sink, [self.good_row(0)])
        running = asyncio.create_task(engine.run(feed, sink))
        await sink.wait_for(1)
        feed.give([self.endless_row(1)])
        while feed.taken < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE_S):
                await running
        assert sink.numbers() == [0]
        await asyncio.sleep(0)
        assert sink.numbers() == [0]

    async def test_run_again(self, engine: Engine) -> None:
        """An engine that has run to the end of one feed runs another."""
        first = await run_all(engine, [self.good_row(0)])
        second = await run_all(engine, [self.good_row(1)])
        assert (first.numbers(), second.numbers()) == ([0], [1])

    async def test_stats_after_the_run(self, engine: Engine) -> None:
        """With nothing left to do nothing is in flight."""
        await run_all(engine, [self.good_row(n) for n in range(5)])
        stats = engine.stats()
        assert isinstance(stats, EngineStats)
        assert stats.in_flight == 0

    # live requests

    async def test_live_answer(self, engine: Engine) -> None:
        """A live request has one head and a body of JSON, and nothing is left in flight after it."""
        head, body = await answer_to(engine, self.live_request(0))
        assert (head.status, head.content_type.partition(";")[0]) == (200, "application/json")
        assert isinstance(json.loads(body), dict)
        assert engine.stats().live == 0

    async def test_live_beside_rows(self, engine: Engine) -> None:
        """Live requests are answered while rows run, and every row has its outcome."""
        sink = ListSink()
        feed = OpenFeed(sink, [self.good_row(n) for n in range(100)])
        running = asyncio.create_task(engine.run(feed, sink))
        answers = await asyncio.gather(*(answer_to(engine, self.live_request(n)) for n in range(20)))
        assert [head.status for head, _ in answers] == [200] * 20
        await sink.wait_for(100)
        await answer_to(engine, self.live_request(20))
        feed.end()
        async with asyncio.timeout(PATIENCE_S):
            await running
        assert sink.numbers() == list(range(100))

    async def test_many_live_at_once(self, engine: Engine) -> None:
        """Each of many live requests gets its own answer."""
        answers = await asyncio.gather(*(answer_to(engine, self.live_request(n)) for n in range(150)))
        assert all(f"{n}" in body.decode() for n, (_, body) in enumerate(answers))

    async def test_live_error(self, engine: Engine) -> None:
        """What goes wrong is told by a status or an error, and the next request is answered."""
        try:
            head, body = await answer_to(engine, self.bad_live_request())
        except BatchmillError as error:
            assert error.code and error.message
        else:
            assert head.status >= 400
            assert json.loads(body)["error"]["message"]
        assert (await answer_to(engine, self.live_request(1)))[0].status == 200

    async def test_unreadable_live_request(self, engine: Engine) -> None:
        """A body that is not JSON object is refused, never a crash."""
        for body in (b"", b"[1]", b"{", b'{"messages":"\xff"}', b"[" * 5000):
            with pytest.raises(BatchmillError):
                await answer_to(engine, LiveRequest("/v1/chat/completions", body))

    async def test_live_stream(self, engine: Engine) -> None:
        """With `stream` the answer comes as server-sent events, ended by [DONE]."""
        head, body = await answer_to(engine, self.live_stream(3))
        assert (head.status, head.content_type.partition(";")[0]) == (200, "text/event-stream")
        *events, done, rest = body.decode().split("\n\n")
        assert len(events) >= 2
        assert all(isinstance(json.loads(event.removeprefix("data: ")), dict) for event in events)
        assert (done, rest) == ("data: [DONE]", "")

    async def test_closing_a_stream(self, engine: Engine) -> None:
        """A stream that is closed early leaves nothing in flight, and the engine answers on."""
        pieces = engine.predict(self.endless_stream())
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await anext(pieces), LiveHead)
            await anext(pieces)
            assert engine.stats().live == 1
            await pieces.aclose()
        assert engine.stats().live == 0
        assert (await answer_to(engine, self.live_request(0)))[0].status == 200

    async def test_giving_up_a_live_request(self, engine: Engine) -> None:
        """A caller that goes before its answer has begun leaves nothing in flight."""
        waiting = asyncio.create_task(answer_to(engine, self.endless_live_request()))
        while engine.stats().live == 0:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine.stats().live == 0

    async def test_stop_twice(self, engine: Engine) -> None:
        """stop() may be called again."""
        await engine.stop()
        await engine.stop()


class Handle:
    """What a worker hangs on its rows: engines read it and hand it back."""

    def __init__(self, number: int) -> None:
        self.key, self.job_id, self.project = f"job-{number}", f"job-{number}", "default"


class ServiceSuite(EngineSuite):
    """Of an engine that calls a service which answers chats, refuses `bad N` and never answers `endless N`."""

    def good_row(self, number: int, lease: object = None) -> Row:
        return chat_row(number, f"good {number}", lease=lease)

    def bad_row(self, number: int) -> Row:
        return chat_row(number, f"bad {number}")

    def endless_row(self, number: int) -> Row:
        return chat_row(number, f"endless {number}")

    def bad_live_request(self) -> LiveRequest:
        return chat_request("bad 1")

    def endless_live_request(self) -> LiveRequest:
        return chat_request("endless 1")
