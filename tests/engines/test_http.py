"""The http engine against a service that misbehaves in every way it can."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from contract.engine_suite import PATIENCE_S, Handle, ListSink, OpenFeed, chat_row, run_all
from fakes.held_clock import HeldClock
from fakes.openai_service import CUT, HANG, RESET, STALL, Answer, OpenAIService, refusal

from batchmill.engines.remote.http import HttpEngine
from batchmill.engines.retry import REPLY_BYTES_MAX
from batchmill.errors import AuthRefused, JobPaused, ModelFailed, QuotaExhausted
from batchmill.ports.clock import Clock
from batchmill.states import PauseReason
from batchmill.types import Limits, ModelSpec, Outcome, Row, Usage
from batchmill.wire.rows.forms import TableForm


@pytest.fixture
async def service() -> AsyncIterator[OpenAIService]:
    async with OpenAIService() as service:
        yield service


def spec(base_url: str | None, **fields: object) -> ModelSpec:
    return ModelSpec(**{"name": "m", "engine": "http", "source": "remote", "base_url": base_url, **fields})


@asynccontextmanager
async def started(
    model: ModelSpec, *, clock: Clock | None = None, jitter: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(model, Path(), clock=clock, jitter=jitter)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Endless(HeldClock):
    """A clock on which nobody wakes."""

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.Event().wait()


async def run_one(service: OpenAIService, *answers: Answer, text: str = "a", **fields: object) -> Outcome:
    """The outcome of one row whose first calls are met by `answers`."""
    service.script[text] = list(answers)
    async with started(spec(service.base_url, **fields)) as engine:
        sink = await run_all(engine, [chat_row(0, text)])
    return sink.outcomes[0]


# what is sent


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/api/v1", "/api/v1/chat/completions"),
        ("/v1beta/openai", "/v1beta/openai/chat/completions"),
        ("/d/x?api-version=1", "/d/x/chat/completions?api-version=1"),
    ],
)
async def test_address(service: OpenAIService, base: str, path: str) -> None:
    """The row's url goes below the base URL, as OpenAI's SDKs join them, and `/v1` is never doubled or lost."""
    async with started(spec(f"http://127.0.0.1:{service.port}{base}")) as engine:
        await run_all(engine, [chat_row(0, "a")])
    assert [call.path for call in service.calls] == [path]


@pytest.mark.parametrize(
    ("body", "sent"),
    [({}, "remote"), ({"model": ""}, "remote"), ({"model": None}, "remote"), ({"model": "m"}, "remote")]
    + [({"model": name}, name) for name in ("remote", "tuned")],
)
async def test_model_is_filled_in(service: OpenAIService, body: dict[str, object], sent: str) -> None:
    """An empty model, or our name for it, becomes the service's; an adapter's name goes as it is."""
    async with started(spec(service.base_url, adapters={"tuned": "tuned"})) as engine:
        await run_all(engine, [chat_row(0, "a", **body)])
    assert [json.loads(call.data)["model"] for call in service.calls] == [sent]


@pytest.mark.parametrize("key", ["model", "\\u006dodel"])
async def test_model_is_sent_once(service: OpenAIService, key: str) -> None:
    """A body that names two models goes out with the one that was checked: services differ in which they read."""
    row = chat_row(0, "a")
    body = b'{"messages":[{"role":"user","content":"a"}],"%s":"dearer","model":"remote"}' % key.encode()
    raw = b'{"custom_id":"x","url":"/v1/chat/completions","body":%s}' % body
    async with started(spec(service.base_url)) as engine:
        await run_all(engine, [Row(0, 0, raw, row.form)])
    assert [json.loads(call.data, object_pairs_hook=list)[1:] for call in service.calls] == [[("model", "remote")]]


async def test_body_goes_out_as_written(service: OpenAIService) -> None:
    """A body that needs no model filled in is sent byte for byte."""
    row = chat_row(0, "a")
    body = b'{"messages" : [{"role":"user","content":"a"}],"model":"remote","seed":1.00000000000000000001}'
    raw = b'{"custom_id":"x","url":"/v1/chat/completions","body":%s}' % body
    async with started(spec(service.base_url)) as engine:
        await run_all(engine, [Row(0, 0, raw, row.form)])
    assert [call.data for call in service.calls] == [body]


async def test_table_rows_are_sent(service: OpenAIService) -> None:
    """A row of a table becomes the request that its form makes of it."""
    row = Row(0, 0, b'{"word":"tree"}', TableForm(prompt="say {word}"))
    async with started(spec(service.base_url)) as engine:
        sink = await run_all(engine, [row])
    assert [call.text for call in service.calls] == ["say tree"]
    assert sink.outcomes[0].error is None


async def test_key_and_headers(service: OpenAIService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key and the headers of engine arguments are sent with every call, read from where they lie."""
    monkeypatch.setenv("SOME_KEY", "s3cret")
    arguments = {"header.api-key": "env:SOME_KEY", "header.OpenAI-Project": "p1"}
    async with started(spec(service.base_url, api_key="env:SOME_KEY", engine_args=arguments)) as engine:
        await run_all(engine, [chat_row(0, "a")])
    headers = service.calls[0].headers
    assert headers["Authorization"] == "Bearer s3cret"
    assert (headers["api-key"], headers["OpenAI-Project"]) == ("s3cret", "p1")
    assert headers["Content-Type"] == "application/json"


async def test_idempotency_key(service: OpenAIService) -> None:
    """A row's idempotency key is the same for all its attempts, and another row's is another."""
    service.script["a"] = [refusal(500), refusal(500)]
    async with started(spec(service.base_url)) as engine:
        await run_all(engine, [chat_row(n, text, lease=Handle(1)) for n, text in enumerate("ab")])
    keys = {text: {c.headers["Idempotency-Key"] for c in service.calls if c.text == text} for text in "ab"}
    assert service.count() == {"a": 3, "b": 1}
    assert len(keys["a"]) == 1
    assert keys["a"] != keys["b"]


async def test_idempotency_header_can_be_named_or_left_out(service: OpenAIService) -> None:
    """The header's name is an engine argument, and false sends none."""
    for value, name in (("X-Once", "X-Once"), (False, None)):
        service.calls.clear()
        async with started(spec(service.base_url, engine_args={"idempotency_header": value})) as engine:
            await run_all(engine, [chat_row(0, "a", lease=Handle(1))])
        headers = service.calls[0].headers
        assert "Idempotency-Key" not in headers
        assert name is None or name in headers


async def test_large_body(service: OpenAIService) -> None:
    """A request of several MiB goes out whole, again after a failure, and its reply comes back whole."""
    text = "x" * (3 * 1024 * 1024)
    outcome = await run_one(service, refusal(500), text=text)
    assert outcome.error is None
    assert outcome.body is not None
    assert len(outcome.body) > len(text)


# what comes back


async def test_answer(service: OpenAIService) -> None:
    """An answered row has the reply's own bytes, its usage and the service's id for it."""
    outcome = await run_one(service, Answer(200, b' {"a": 1.50,"usage":{"prompt_tokens":4}}', {"x-request-id": "r-9"}))
    assert outcome.body == b'{"a": 1.50,"usage":{"prompt_tokens":4}}'
    assert (outcome.status, outcome.usage, outcome.request_id, outcome.error) == (200, Usage(4, 0, 0), "r-9", None)
    assert (await run_one(service)).usage == Usage(7, 2, 3)


async def test_compressed_answer(service: OpenAIService) -> None:
    """A compressed reply is kept decompressed."""
    data = gzip.compress(b'{"a":1}')
    assert (await run_one(service, Answer(200, data, {"Content-Encoding": "gzip"}))).body == b'{"a":1}'


async def test_bomb_is_refused(service: OpenAIService) -> None:
    """A reply that unpacks to more than the limit is an error of its row, and is not unpacked further."""
    data = gzip.compress(b'{"a":"' + b"x" * (2 * REPLY_BYTES_MAX) + b'"}', 1)
    outcome = await run_one(service, Answer(200, data, {"Content-Encoding": "gzip"}))
    assert outcome.error is not None
    assert (outcome.error.code, outcome.body, service.count()) == ("reply_too_large", None, {"a": 1})


@pytest.mark.parametrize("over", [0, 1])
async def test_reply_at_its_limit(service: OpenAIService, over: int) -> None:
    """A reply of exactly the limit is kept; one byte more is not."""
    body = b'{"a":"%s"}' % (b"x" * (REPLY_BYTES_MAX - 8 + over))
    outcome = await run_one(service, Answer(200, body))
    assert (outcome.error is None) is (over == 0)


async def test_refused_row(service: OpenAIService) -> None:
    """A refusal that no retry can help is the row's error after one call, with the service's code and body."""
    answer = refusal(400, "context_length_exceeded", "too long")
    outcome = await run_one(service, answer)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("context_length_exceeded", "too long")
    assert (outcome.status, json.loads(outcome.body or b"")) == (400, answer.body)
    assert service.count() == {"a": 1}


async def test_redirect(service: OpenAIService) -> None:
    """A redirect is not followed: the row's error names where it leads."""
    outcome = await run_one(service, Answer(307, b"", {"Location": "http://127.0.0.1:9/v1"}))
    assert outcome.error is not None
    assert outcome.error.code == "redirected"
    assert "http://127.0.0.1:9/v1" in outcome.error.message
    assert len(service.calls) == 1


async def test_key_is_never_kept(service: OpenAIService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that repeats the key in its error does not get it into the message."""
    monkeypatch.setenv("SOME_KEY", "very-s3cret")
    outcome = await run_one(service, refusal(400, "x", "bad key very-s3cret"), api_key="env:SOME_KEY")
    assert outcome.error is not None
    assert outcome.error.message == "bad key ***"


# what is tried again


@pytest.mark.parametrize(
    "answer",
    [
        refusal(500),
        refusal(503),
        refusal(409),
        refusal(429),
        refusal(429, retry_after="0.01"),
        refusal(429, retry_after_ms="10"),
        refusal(429, retry_after="-1"),
        refusal(429, retry_after="nan"),
        refusal(429, retry_after="1e99"),
        refusal(429, retry_after=formatdate(0, usegmt=True)),
        refusal(503, retry_after="0.01"),
        Answer(act=RESET),
        Answer(200, b'{"a": [1, 2'),
        Answer(200, b'{"a": "' + b"x" * 1000 + b'"}', act=CUT),
        Answer(200, {"error": {"message": "upstream", "code": 502}}),
        Answer(200, b"not gzip", {"Content-Encoding": "gzip"}),
        Answer(204, b""),
    ],
    ids=lambda answer: f"{answer.status}{answer.act}{''.join(answer.headers.values())}"[:30],
)
async def test_transient_fault_is_retried(service: OpenAIService, answer: Answer) -> None:
    """A fault that may pass costs the row nothing but another call, and a call that was answered is not repeated."""
    outcome = await run_one(service, answer)
    assert outcome.error is None
    assert service.count() == {"a": 2}


@pytest.mark.parametrize(
    ("answer", "code", "status"),
    [
        (refusal(500), "server_error", 500),
        (Answer(act=RESET), "connection_failed", 0),
        (Answer(200, b"{"), "bad_response", 0),
        (Answer(200, {"error": {"message": "upstream"}}), "server_error", 500),
    ],
    ids=["500", "reset", "half", "error in 200"],
)
async def test_attempts_run_out(service: OpenAIService, answer: Answer, code: str, status: int) -> None:
    """A row whose calls all fail has the last cause as its error, and was called `attempts_max` times."""
    outcome = await run_one(service, *[answer] * 9, limits=Limits(attempts_max=3))
    assert outcome.error is not None
    assert (outcome.error.code, outcome.status) == (code, status)
    assert "after 3 calls" in outcome.error.message
    assert service.count() == {"a": 3}


async def test_half_a_character_is_asked_for_twice(service: OpenAIService) -> None:
    """A reply with half of a surrogate pair is not a result; the same question would bring it forever, so two will do.

    However many rows bring such replies, the service that sends them is not taken for one that is down.
    """
    service.every = Answer(200, rb'{"a":"\ud83d"}')
    service.script["good"] = [Answer(200, b"{}")]
    async with started(spec(service.base_url), clock=HeldClock()) as engine:
        sink = await run_all(engine, [*(chat_row(n, f"{n}") for n in range(60)), chat_row(60, "good")])
    codes = {outcome.error.code if outcome.error else None for outcome in sink.outcomes if outcome.row.number < 60}
    assert codes == {"bad_response"}
    assert service.count() == {"good": 1} | {f"{n}": 2 for n in range(60)}


@pytest.mark.parametrize("act", [HANG, STALL])
async def test_silence_is_a_timeout(service: OpenAIService, act: str) -> None:
    """A reply that never comes, or never ends, is given up after the attempt's time and tried again."""
    limits = Limits(attempt_timeout_s=0.3, attempts_max=2)
    service.script["b"] = [Answer(200, b'{"a": 1}', act=act)]
    assert (await run_one(service, text="b", limits=limits)).error is None
    service.script["a"] = []
    outcome = await run_one(service, *[Answer(200, b'{"a": 1}', act=act)] * 2, limits=limits)
    assert outcome.error is not None
    assert outcome.error.code == "timeout"


async def test_idle_reply_is_given_up(service: OpenAIService) -> None:
    """A reply that has begun and goes silent is given up long before the attempt's whole time."""
    outcome = await run_one(service, Answer(200, b'{"a": 1}', act=STALL), engine_args={"idle_timeout_s": 0.2})
    assert outcome.error is None
    assert service.count() == {"a": 2}


async def test_retries_wait_with_jitter(service: OpenAIService) -> None:
    """Retries wait a random part of a span that doubles."""
    clock = HeldClock()
    service.script["a"] = [refusal(500)] * 4
    async with started(spec(service.base_url), clock=clock, jitter=lambda: 0.5) as engine:
        await run_all(engine, [chat_row(0, "a")])
    assert clock.slept == [0.25, 0.5, 1.0, 2.0]


async def test_throttled_rows_keep_their_attempts(service: OpenAIService) -> None:
    """A service may throttle a row more often than it may fail, and the row is answered in the end."""
    clock = HeldClock()
    service.script["a"] = [refusal(429, retry_after="7")] * 20
    async with started(spec(service.base_url, limits=Limits(attempts_max=2)), clock=clock) as engine:
        sink = await run_all(engine, [chat_row(0, "a")])
    assert sink.outcomes[0].error is None
    assert clock.slept == [pytest.approx(7.0)] * 20


async def test_throttling_ends_after_a_day(service: OpenAIService) -> None:
    """A row that is put off for a day has its error, so that a job ends."""
    clock = HeldClock()
    service.every = refusal(429, retry_after="3600")
    async with started(spec(service.base_url), clock=clock) as engine:
        sink = await run_all(engine, [chat_row(0, "a")])
    error = sink.outcomes[0].error
    assert error is not None
    assert (error.code, sink.outcomes[0].status) == ("rate_limited", 429)
    assert 86400 <= sum(clock.slept) < 90100


async def test_rest_holds_the_whole_service(service: OpenAIService) -> None:
    """While one call's Retry-After lasts no row is sent, and people are told why."""
    clock = HeldClock()
    gate = asyncio.Event()

    class Gated(HeldClock):
        async def sleep(self, seconds: float) -> None:
            await gate.wait()
            await clock.sleep(seconds)

        def monotonic(self) -> float:
            return clock.monotonic()

    service.script["a"] = [refusal(429, retry_after="12")]
    async with started(spec(service.base_url), clock=Gated()) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(0, "a")])
        running = asyncio.create_task(engine.run(feed, sink))
        while engine.stats().note == "":
            await asyncio.sleep(0)
        feed.give([chat_row(n, "b") for n in range(1, 9)])
        while feed.taken < 9:
            await asyncio.sleep(0)
        assert engine.stats().note == "the service requests a wait of 12 s"
        assert service.count() == {"a": 1}
        gate.set()
        feed.end()
        await running
    assert sink.numbers() == list(range(9))


@pytest.mark.parametrize(
    "answer",
    [refusal(500), refusal(429), refusal(429, retry_after="3000"), refusal(503, retry_after="3000")],
    ids=["retry", "refused", "rest", "unavailable"],
)
async def test_waiting_rows_do_not_hold_up_a_stop(service: OpenAIService, answer: Answer) -> None:
    """Cancelling ends a run at once though rows wait for their retry or the service rests; they are left undone."""
    clock = Endless()
    service.every = answer
    async with started(spec(service.base_url), clock=clock, jitter=lambda: 0.5) as engine:
        sink = ListSink()
        running = asyncio.create_task(engine.run(OpenFeed(sink, [chat_row(n, f"{n}") for n in range(9)]), sink))
        while not clock.slept or engine.stats().in_flight:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE_S):
                await running
        assert engine.stats().in_flight == 0
    assert sink.outcomes == []


async def test_waiting_rows_do_not_hold_up_a_pause(service: OpenAIService) -> None:
    """When the credentials are refused the job pauses at once, whatever other rows wait for."""
    clock = Endless()
    service.script["a"] = [refusal(500)]
    service.script["b"] = [refusal(401)]
    async with started(spec(service.base_url), clock=clock, jitter=lambda: 0.5) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(0, "a")])
        running = asyncio.create_task(engine.run(feed, sink))
        while not clock.slept:
            await asyncio.sleep(0)
        feed.give([chat_row(1, "b")])
        with pytest.raises(AuthRefused):
            async with asyncio.timeout(PATIENCE_S):
                await running
    assert sink.outcomes == []


async def test_requests_per_minute(service: OpenAIService) -> None:
    """Rows go out at the rate that was set."""
    clock = HeldClock()
    async with started(spec(service.base_url, limits=Limits(requests_per_minute=60)), clock=clock) as engine:
        await run_all(engine, [chat_row(n, f"{n}") for n in range(10)])
    assert clock.at - 1000 == pytest.approx(9.0, abs=0.1)


async def test_in_flight_max(service: OpenAIService) -> None:
    """No more rows are in flight than the limit says, and that many are."""
    service.held = {f"{n}" for n in range(20)}
    async with started(spec(service.base_url, limits=Limits(in_flight_max=4))) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(n, f"{n}") for n in range(20)], ended=True)
        running = asyncio.create_task(engine.run(feed, sink))
        while service.waiting < 4:
            await asyncio.sleep(0)
        assert (engine.stats().in_flight, engine.stats().in_flight_limit) == (4, 4)
        service.release.set()
        await running
    assert service.most_waiting == 4


# what pauses the job


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refusal(401, "invalid_api_key", "who are you"), AuthRefused),
        (refusal(403, None, "who are you"), AuthRefused),
        (refusal(402, None, "who are you"), QuotaExhausted),
        (refusal(429, "insufficient_quota", "who are you"), QuotaExhausted),
        (refusal(429, "billing_hard_limit_reached", "who are you"), QuotaExhausted),
        (refusal(429, None, "who are you", retry_after="7200"), QuotaExhausted),
    ],
    ids=["401", "403", "402", "quota", "billing", "long rest"],
)
async def test_pause(service: OpenAIService, answer: Answer, error: type[JobPaused]) -> None:
    """Credentials and quota pause the job: rows in flight have their chance, and no row is burnt."""
    service.held = {"slow"}
    service.script["no"] = [answer]
    async with started(spec(service.base_url, limits=Limits(in_flight_max=2))) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(0, "slow"), chat_row(1, "no"), *(chat_row(n, f"{n}") for n in range(2, 50))])
        running = asyncio.create_task(engine.run(feed, sink))
        while service.count()["no"] == 0 or engine.stats().in_flight > 1:
            await asyncio.sleep(0)
        service.release.set()
        with pytest.raises(error, match="who are you"):
            await running
    assert sink.numbers() == [0]
    assert sink.outcomes[0].error is None
    assert len(service.calls) == 2


async def test_unreachable_service_pauses(unused_tcp_port: int) -> None:
    """A service that nobody reaches pauses the job after half a minute, names its address, and burns no row."""
    clock = HeldClock()
    address = f"http://127.0.0.1:{unused_tcp_port}"
    async with started(spec(address), clock=clock, jitter=lambda: 0.99) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(n, "a") for n in range(100)], ended=True)
        with pytest.raises(JobPaused, match=address) as caught:
            await engine.run(feed, sink)
    assert caught.value.reason is PauseReason.ENGINE_FAILED
    assert sink.outcomes == []
    assert 30 <= clock.at - 1000 < 45


async def test_name_that_nobody_knows_pauses() -> None:
    """A host name that cannot be resolved pauses the job like a refused connection."""
    async with started(spec("http://nowhere.invalid"), clock=HeldClock(), jitter=lambda: 0.99) as engine:
        with pytest.raises(JobPaused, match=r"nowhere\.invalid"):
            await run_all(engine, [chat_row(0, "a")])


async def test_outage_burns_no_row(service: OpenAIService) -> None:
    """While the service fails every call, rows keep their attempts; when it is back, all are answered."""
    clock = HeldClock()
    service.every = refusal(500)
    async with started(spec(service.base_url, limits=Limits(attempts_max=3)), clock=clock) as engine:
        sink = ListSink()
        feed = OpenFeed(sink, [chat_row(n, f"{n}") for n in range(60)], ended=True)
        running = asyncio.create_task(engine.run(feed, sink))
        while len(service.calls) < 100:
            await asyncio.sleep(0)
        service.every = None
        await running
    assert sink.numbers() == list(range(60))
    assert [outcome.error for outcome in sink.outcomes if outcome.error] == []


async def test_no_repeats(service: OpenAIService) -> None:
    """Under all faults at once each row has one outcome, and none is called again once it was answered."""
    faults = [refusal(500), refusal(429, retry_after="0.001"), Answer(act=RESET), Answer(200, b"{"), refusal(503)]
    for n in range(400):
        service.script[f"{n}"] = faults[: n % 3] if n % 10 == 0 else []
    async with started(spec(service.base_url)) as engine:
        sink = await run_all(engine, [chat_row(n, f"{n}") for n in range(400)])
    assert sink.numbers() == list(range(400))
    assert [outcome.error for outcome in sink.outcomes if outcome.error] == []
    expected = {f"{n}": 1 + (n % 3 if n % 10 == 0 else 0) for n in range(400)}
    assert service.count() == expected


# what is refused at the start


@pytest.mark.parametrize("base_url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://u:p@x/v1"])
def test_bad_base_url(base_url: str) -> None:
    """A base URL that cannot be called is refused before anything runs."""
    with pytest.raises(ModelFailed) as caught:
        HttpEngine(spec(base_url), Path())
    assert caught.value.code == "invalid_base_url"


async def test_openai_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a base URL the service is OpenAI's, and its key is looked for where OpenAI's own tools do."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelFailed, match="OPENAI_API_KEY"):
        await HttpEngine(spec(None), Path()).start()


def test_unknown_arguments() -> None:
    """An engine argument that would have no effect is refused by name."""
    for fields in ({"engine_args": {"temperature": 1}}, {"python": "/usr/bin/python3"}):
        with pytest.raises(ModelFailed, match="temperature|python"):
            HttpEngine(spec("http://x", **fields), Path())


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (chat_row(0, "a", stream=True), "unsupported_parameter"),
        (chat_row(0, "a", model=7), "invalid_row"),
        (Row(0, 0, b'{"custom_id":"a","url":"http://elsewhere/","body":{}}', chat_row(0, "a").form), "invalid_url"),
        (Row(0, 0, b'{"custom_id":"a","url":"/v1/../x","body":{}}', chat_row(0, "a").form), "invalid_url"),
        (Row(0, 0, b'{"word":"a"}', TableForm()), "missing_prompt"),
        (Row(0, 0, b'{"word":"a"}', TableForm(prompt="{other}")), "missing_column"),
    ],
    ids=["stream", "model", "host", "dots", "no prompt", "no column"],
)
async def test_row_that_cannot_be_sent(service: OpenAIService, row: Row, code: str) -> None:
    """A row that makes no call has an error that says so, and nothing is sent for it."""
    async with started(spec(service.base_url)) as engine:
        sink = await run_all(engine, [row])
    error = sink.outcomes[0].error
    assert error is not None
    assert (error.code, sink.outcomes[0].status) == (code, 0)
    assert service.calls == []
