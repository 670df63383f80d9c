"""Live requests to a service: what is sent, what is handed on, pacing shared with rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from contract.engine_suite import ListSink, OpenFeed, answer_to, chat_request, chat_row
from fakes.openai_service import CUT, RESET, Answer, OpenAIService, refusal

from batchmill.engines.remote.http import HttpEngine
from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, ModelFailed, Unavailable
from batchmill.types import Limits, LiveHead, LiveRequest, ModelSpec

KEY = "sk-very-secret-key-0123456789"


@pytest.fixture
async def service() -> AsyncIterator[OpenAIService]:
    async with OpenAIService() as service:
        yield service


@asynccontextmanager
async def started(service: OpenAIService, **fields: object) -> AsyncIterator[HttpEngine]:
    spec = {"name": "m", "engine": "http", "source": "remote", "base_url": service.base_url, **fields}
    engine = HttpEngine(ModelSpec(**spec), Path(), jitter=lambda: 0.0)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(service: OpenAIService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpEngine]:
    monkeypatch.setenv("LIVE_KEY", KEY)
    async with started(service, api_key="env:LIVE_KEY") as engine:
        yield engine


async def test_what_is_sent(engine: HttpEngine, service: OpenAIService) -> None:
    """The service gets its own name of the model, the credentials, and the body's other fields as they were."""
    await answer_to(engine, chat_request("a", model="m", seed=7))
    [call] = service.calls
    assert json.loads(call.data) == {"messages": [{"role": "user", "content": "a"}], "model": "remote", "seed": 7}
    assert call.headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_errors_are_handed_on(engine: HttpEngine, service: OpenAIService, status: int) -> None:
    """An error of the service reaches the caller with its status and envelope, and is not asked for again."""
    service.script["a"] = [refusal(status, "odd")]
    head, body = await answer_to(engine, chat_request("a"))
    assert (head.status, json.loads(body)["error"]["code"]) == (status, "odd")
    assert len(service.calls) == 1


async def test_errors_without_an_envelope(engine: HttpEngine, service: OpenAIService) -> None:
    """A page of a proxy becomes an error in OpenAI's form, with the page's status."""
    service.script["a"] = [Answer(502, b"<html>bad gateway</html>")]
    head, body = await answer_to(engine, chat_request("a"))
    assert head.status == 502
    assert "bad gateway" in json.loads(body)["error"]["message"]


async def test_refused_credentials_are_not_the_callers(engine: HttpEngine, service: OpenAIService) -> None:
    """A 401 of the service is not a 401 of ours: the caller's own key is well."""
    service.script["a"] = [refusal(401, "invalid_api_key", f"wrong key {KEY}")]
    with pytest.raises(AuthRefused) as refused:
        await answer_to(engine, chat_request("a"))
    assert KEY not in refused.value.message


async def test_one_more_call_where_there_was_no_connection(engine: HttpEngine, service: OpenAIService) -> None:
    """A connection that breaks without a reply is tried once more, and not twice."""
    service.script["a"] = [Answer(act=RESET)]
    assert (await answer_to(engine, chat_request("a")))[0].status == 200
    service.script["b"] = [Answer(act=RESET)] * 5
    with pytest.raises(Unavailable) as lost:
        await answer_to(engine, chat_request("b"))
    assert lost.value.code == "connection_failed"
    assert service.count()["b"] == 2


async def test_half_a_reply(engine: HttpEngine, service: OpenAIService) -> None:
    """A reply that breaks off is an error."""
    service.script["a"] = [Answer(200, {"a": "b" * 1000}, act=CUT)]
    with pytest.raises(Unavailable):
        await answer_to(engine, chat_request("a"))
    assert engine.stats().live == engine.stats().in_flight == 0


async def test_redirects_are_not_followed(engine: HttpEngine, service: OpenAIService) -> None:
    """A service that sends us elsewhere gets neither our request nor our key there."""
    service.script["a"] = [Answer(307, b"", {"Location": "http://elsewhere.invalid/?q=1"})]
    with pytest.raises(ModelFailed, match="redirects to http://elsewhere.invalid/, and"):
        await answer_to(engine, chat_request("a"))


@pytest.mark.parametrize("url", ["/v2/x", "/v1/../admin", "/v1/a b", "http://x/v1/y", "/v1/fine_tuning/jobs"])
async def test_paths(engine: HttpEngine, url: str) -> None:
    """A path that would leave the service's API is refused."""
    with pytest.raises(InvalidInput):
        await answer_to(engine, LiveRequest(url, b"{}"))


async def test_live_goes_before_rows(service: OpenAIService) -> None:
    """With every place in flight taken, the next that is free is the live request's, before rows that waited longer."""
    service.held = {f"{n}" for n in range(2)}
    async with started(service, limits=Limits(in_flight_max=2)) as engine:
        sink = ListSink()
        running = asyncio.create_task(
            engine.run(OpenFeed(sink, [chat_row(n, f"{n}") for n in range(20)], ended=True), sink)
        )
        while len(service.calls) < 2:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(answer_to(engine, chat_request("live")))
        await asyncio.sleep(0)
        service.release.set()
        await asyncio.gather(running, waiting)
    assert service.most_waiting == 2
    assert [call.text for call in service.calls].index("live") <= 3
    assert len(sink.outcomes) == 20


async def test_a_waiting_request_that_is_given_up_takes_no_place(service: OpenAIService) -> None:
    """Rows go on after a caller that waited for its turn has gone."""
    service.held = {"0"}
    async with started(service, limits=Limits(in_flight_max=1)) as engine:
        sink = ListSink()
        running = asyncio.create_task(
            engine.run(OpenFeed(sink, [chat_row(n, f"{n}") for n in range(5)], ended=True), sink)
        )
        while not service.calls:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(answer_to(engine, chat_request("live")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        service.release.set()
        await running
        assert (len(sink.outcomes), service.count()["live"]) == (5, 0)
        assert engine.stats().live == engine.stats().in_flight == 0


async def test_a_service_that_rests_for_long(engine: HttpEngine, service: OpenAIService) -> None:
    """After a 429 that asks for an hour the next live request is told so at once."""
    service.script["a"] = [refusal(429, "rate_limit_exceeded", retry_after="3000")]
    assert (await answer_to(engine, chat_request("a")))[0].status == 429
    with pytest.raises(Unavailable, match="requests a wait of 3000 s"):
        await answer_to(engine, chat_request("b"))
    assert service.count()["b"] == 0


async def test_rows_wait_for_the_rest_that_a_live_request_was_told(engine: HttpEngine, service: OpenAIService) -> None:
    """A 429 to a live request is a 429 to all: rows share the pacing."""
    service.script["a"] = [refusal(429, "rate_limit_exceeded", retry_after="3000")]
    await answer_to(engine, chat_request("a"))
    sink = ListSink()
    running = asyncio.create_task(engine.run(OpenFeed(sink, [chat_row(0, "row")], ended=True), sink))
    while "requests a wait" not in engine.stats().note:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert service.count()["row"] == 0


async def test_a_caller_that_goes_ends_the_call(engine: HttpEngine, service: OpenAIService) -> None:
    """Closing a stream closes the connection to the service."""
    pieces = engine.predict(chat_request("trickles on", stream=True))
    assert isinstance(await anext(pieces), LiveHead)
    await anext(pieces)
    await pieces.aclose()
    async with asyncio.timeout(10):
        while not service.left:
            await asyncio.sleep(0.01)
    assert engine.stats().live == engine.stats().in_flight == 0


async def test_live_and_rows_leave_the_count_right(engine: HttpEngine, service: OpenAIService) -> None:
    """A run that is cancelled beside a live request forgets its own calls and not the live one."""
    service.held = {"row", "live"}
    sink = ListSink()
    running = asyncio.create_task(engine.run(OpenFeed(sink, [chat_row(0, "row")]), sink))
    waiting = asyncio.create_task(answer_to(engine, chat_request("live")))
    while len(service.calls) < 2:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (engine.stats().live, engine.stats().in_flight) == (1, 0)
    service.release.set()
    await waiting
    assert (engine.stats().live, engine.stats().in_flight) == (0, 0)


async def test_every_error_is_ours(engine: HttpEngine, service: OpenAIService) -> None:
    """A reply that is not JSON ends in an error of batchmill's, never in one of a library's."""
    service.script["a"] = [Answer(200, b"not json")]
    with pytest.raises(BatchmillError) as received:
        await answer_to(engine, chat_request("a"))
    assert received.value.code == "bad_response"
