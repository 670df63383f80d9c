"""Live requests through the LLM engine over the fake server: what is sent, what is handed on, and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from contract.engine_suite import ListSink, OpenFeed, answer_to, chat_request, chat_row
from llm_support import FakeVllm, QuickClock

from batchmill.engines.llm.calls import LIVE_PRIORITY
from batchmill.engines.llm.engine import LlmEngine
from batchmill.errors import InvalidInput, Unavailable
from batchmill.types import LiveHead, LiveRequest


@pytest.fixture
def fake(tmp_path):
    return FakeVllm(tmp_path)


@pytest.fixture
async def start(fake):
    """Start an engine on the fake server; it is stopped after the test."""
    engines = []

    async def make(*, env=None, clock=None, **fields):
        engine = LlmEngine(
            fake.model(**fields), fake.home, clock=clock or QuickClock(), env={**fake.env, **(env or {})}
        )
        engines.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


def server_pid(engine):
    return json.loads(engine.server.process.pid_file.read_text())["server_pid"]


async def kill_server(engine):
    os.kill(server_pid(engine), signal.SIGKILL)
    await engine.server.process.wait()


async def text_of(engine, request):
    head, body = await answer_to(engine, request)
    assert head.status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


async def test_base_and_adapters_by_name(start, fake):
    """A body's model may be the model's name, its source, an adapter or nothing, and the right weights answer."""
    engine = await start(adapters={"upper": fake.adapter("upper")})
    names = ["tiny", fake.model().source, "upper", "", None]
    assert [await text_of(engine, chat_request("abc", model=name)) for name in names] == [
        "abc",
        "abc",
        "ABC",
        "abc",
        "abc",
    ]


async def test_live_requests_have_the_highest_priority(start, fake):
    """A live request is sent with a lower number than any row's; rows are sent as they are."""
    engine = await start()
    await answer_to(engine, chat_request("live"))
    sink = ListSink()
    await engine.run(OpenFeed(sink, [chat_row(0, "row")], ended=True), sink)
    assert [call["body"].get("priority") for call in fake.calls()] == [LIVE_PRIORITY, None]


async def test_another_policy_of_the_callers_stands(start, fake):
    """A server that was asked for another policy gets no priorities, which it would refuse."""
    engine = await start(engine_args={"scheduling_policy": "fcfs"})
    await answer_to(engine, chat_request("live"))
    assert "priority" not in fake.calls()[0]["body"]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (chat_request("x", priority=1), "parameter_not_allowed", "`priority` cannot be set"),
        (chat_request("x", temprature=1), "unknown_parameter", "did you mean 'temperature'"),
        (chat_request("x", model="nobody"), "model_not_found", "'nobody' is not served here"),
        (LiveRequest("/v1/nothing", b"{}"), "unknown_url", "no engine answers"),
        (LiveRequest("/v1/embeddings", b'{"input":"x"}'), "url_not_supported", "runner=pooling"),
    ],
)
async def test_what_is_refused(start, request_, code, words):
    """A request that the server would misread, or not understand, is refused by name."""
    engine = await start()
    with pytest.raises(InvalidInput, match=words) as refused:
        await answer_to(engine, request_)
    assert refused.value.code == code


async def test_an_error_of_the_server_is_handed_on(start):
    """The server's own status and envelope reach the caller as they are."""
    head, body = await answer_to(await start(), chat_request("too-long"))
    assert head.status == 400
    assert json.loads(body)["error"]["message"] == "This model's maximum context length is 16 tokens."


async def test_an_unknown_model_of_the_server_is_handed_on(start, fake):
    """A 404 that has an envelope is the server's answer; one of its web framework is ours to explain."""
    engine = await start(adapters={"late": fake.adapter("late")})
    engine._calls._bases.add("gone")
    head, body = await answer_to(engine, chat_request("x", model="gone"))
    assert (head.status, json.loads(body)["error"]["type"]) == (404, "NotFoundError")


async def test_a_caller_that_goes_ends_the_request_at_the_server(start, fake):
    """Closing a stream closes its connection, and the server gives the request up."""
    engine = await start()
    pieces = engine.predict(chat_request("trickles on", stream=True))
    assert isinstance(await anext(pieces), LiveHead)
    await anext(pieces)
    await pieces.aclose()
    async with asyncio.timeout(10):
        while not any(call["url"] == "abandoned" for call in fake.calls()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_rows", [False, True])
async def test_a_request_waits_while_the_server_is_started_again(start, has_rows):
    """A live request that finds the server dead is answered by the next one, whether rows run or not."""
    engine = await start()
    sink = ListSink()
    feed = OpenFeed(sink)
    running = asyncio.create_task(engine.run(feed, sink)) if has_rows else None
    await asyncio.sleep(0)
    await kill_server(engine)
    assert await text_of(engine, chat_request("back")) == "back"
    feed.end()
    if running is not None:
        await running


async def test_a_request_that_lost_its_server_is_told(start):
    """A request whose server died under it is not sent to the next one, which it might kill too."""
    engine = await start()
    with pytest.raises(Unavailable, match="died and is started again") as lost:
        await answer_to(engine, chat_request("crash"))
    assert lost.value.code == "engine_lost"
    assert await text_of(engine, chat_request("next")) == "next"


async def test_a_broken_connection_is_tried_once_more(start):
    """A connection that breaks before the answer has begun costs nothing while the server lives."""
    assert await text_of(await start(), chat_request("resets-once x")) == "resets-once x"


async def test_a_stopped_engine_answers_nothing(start):
    """A request that waits for a server which will not come is sent away."""
    engine = await start()
    engine._env["FAKE_START_ERROR"] = "RuntimeError: no memory left"
    await kill_server(engine)
    with pytest.raises(Unavailable, match="no memory left"):
        await answer_to(engine, chat_request("x"))


async def test_what_people_see(start):
    """Live requests in flight, the cache's fill and the share of prompts that it held are told."""
    engine = await start(env={"FAKE_KV_TOKENS": "1000"})
    pieces = engine.predict(chat_request("trickles on", stream=True))
    await anext(pieces)
    sink = ListSink()
    feed = OpenFeed(sink, [chat_row(n, str(n)) for n in range(8)])
    running = asyncio.create_task(engine.run(feed, sink))
    async with asyncio.timeout(10):
        while engine.stats().cached_share is None:
            await asyncio.sleep(0.01)
    stats = engine.stats()
    assert (stats.live, stats.cached_share) == (1, 0.25)
    await pieces.aclose()
    feed.end()
    await running
    assert len(sink.outcomes) == 8
    assert engine.stats().live == 0


async def test_rows_are_sent_again_when_the_live_request_ends(start):
    """Rows that were held back go on at once when nobody waits any more."""
    engine = await start()
    pieces = engine.predict(chat_request("trickles on", stream=True))
    await anext(pieces)
    sink = ListSink()
    running = asyncio.create_task(engine.run(OpenFeed(sink, [chat_row(0, "row")], ended=True), sink))
    await pieces.aclose()
    async with asyncio.timeout(10):
        await running
    assert len(sink.outcomes) == 1
