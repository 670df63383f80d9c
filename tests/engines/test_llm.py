"""The LLM engine over the fake server: rows, adapters, faults, crashes, restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial

import pytest
from blake3 import blake3
from llm_support import FakeVllm, ListFeed, ListSink, QuickClock, body_row, chat_row

from batchmill.engines.llm import flow
from batchmill.engines.llm.calls import stable_code
from batchmill.engines.llm.engine import LlmEngine
from batchmill.engines.llm.guard import start_time
from batchmill.errors import JobPaused, ModelFailed
from batchmill.states import PauseReason
from batchmill.types import Limits, MediaColumn, Row, Usage
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, with_media


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


async def run(engine, rows):
    sink = ListSink()
    await engine.run(ListFeed(rows), sink)
    assert len(sink.outcomes) == len(rows)
    return sink


def server_pid(engine):
    """The API server's process id, as its record has it."""
    return json.loads(engine.server.process.pid_file.read_text())["server_pid"]


async def test_rows_name_the_base_an_adapter_or_nothing(start, fake):
    """`body.model` may be the model's name, its source, an adapter, empty or absent, and the right weights answer."""
    adapters = {"upper": fake.adapter("upper"), "reverse": fake.adapter("reverse", rank=20)}
    engine = await start(adapters=adapters)
    names = ["tiny", fake.model().source, "upper", "reverse", "", None]
    rows = [chat_row(number, "abc", model=name) for number, name in enumerate(names)]
    sink = await run(engine, [*rows, chat_row(6, "abc")])
    assert [sink.text(number) for number in range(7)] == ["abc", "abc", "ABC", "cba", "abc", "abc", "abc"]


async def test_usage_and_the_exact_reply_are_kept(start):
    """An outcome carries the tokens, cached ones too, and the reply's own bytes."""
    sink = await run(await start(), [chat_row(0, "abc")])
    outcome = sink.outcomes[0]
    assert outcome.usage == Usage(4, 1, 4)
    assert outcome.status == 200
    assert outcome.body.startswith(b'{"id": "chatcmpl-1"')


async def test_a_thousand_rows_are_sent_in_order_and_never_more_than_the_limit(start, fake):
    """Rows go out in the feed's order, with at most `in_flight_max` of them unanswered."""
    engine = await start(env={"FAKE_REPLY_S": "0.002"}, limits=Limits(in_flight_max=32))
    sink = await run(engine, [chat_row(number, str(number)) for number in range(1000)])
    assert [sink.text(number) for number in range(1000)] == [str(number) for number in range(1000)]
    sent = [int(call["body"]["messages"][0]["content"]) for call in fake.calls()]
    assert max(abs(place - number) for place, number in enumerate(sent)) < 32
    assert engine.stats().in_flight_limit <= 32


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (chat_row(0, "x", model="nobody"), "unknown_model"),
        (chat_row(0, "x", temprature=1), "unknown_parameter"),
        (chat_row(0, "x", stream=True), "invalid_parameter"),
        (chat_row(0, "x", url="/v1/nothing"), "unknown_url"),
        (body_row(0, {"input": "x"}, url="/v1/embeddings"), "url_not_supported"),
        (body_row(0, {"model": "tiny"}), "bad_request"),
        (chat_row(0, "too-long"), "bad_request"),
    ],
)
async def test_a_row_that_cannot_be_run_is_an_error_of_its_own(start, row, code):
    """What is wrong with one row becomes that row's error, once, and its neighbour is answered."""
    sink = await run(await start(), [row, chat_row(1, "fine")])
    assert sink.code(0) == code
    assert sink.text(1) == "fine"


async def test_an_unknown_field_is_told_with_the_nearest_name(start):
    """A misspelt field is refused by name, with what it was meant to be."""
    sink = await run(await start(), [chat_row(0, "x", temprature=1)])
    assert "'temprature' (did you mean 'temperature'?)" in sink.outcomes[0].error.message


async def test_a_fault_of_the_moment_is_tried_again(start):
    """A 500 or a broken connection of a server that lives costs the row an attempt, not its result."""
    rows = [chat_row(0, "fails-once a"), chat_row(1, "resets-once b"), chat_row(2, "c")]
    sink = await run(await start(), rows)
    assert [sink.text(number) for number in range(3)] == ["fails-once a", "resets-once b", "c"]


@pytest.mark.parametrize("attempts", [1, 3])
async def test_a_row_that_always_fails_is_given_up_after_its_attempts(start, fake, attempts):
    """A row that makes a living server fail gets the server's error after exactly its attempts."""
    engine = await start(limits=Limits(attempts_max=attempts))
    sink = await run(engine, [chat_row(0, "fails: x"), chat_row(1, "y")])
    assert sink.code(0) == "internal_server"
    assert sink.outcomes[0].status == 500
    assert sum(call["body"]["messages"][0]["content"] == "fails: x" for call in fake.calls()) == attempts


async def test_a_row_that_kills_the_server_is_found_and_the_others_finish(start):
    """The row that kills its server gets `engine_crashed`; every row that flew beside it is answered."""
    rows = [chat_row(number, "crash" if number == 5 else str(number)) for number in range(40)]
    sink = await run(await start(env={"FAKE_REPLY_S": "0.2"}), rows)
    assert sink.code(5) == "engine_crashed"
    assert "killed by signal 9" in sink.outcomes[5].error.message
    assert [sink.text(number) for number in range(40) if number != 5] == [str(n) for n in range(40) if n != 5]


async def test_a_row_that_kills_the_engine_core_is_found_too(start):
    """A server that answers 500 because its engine core died is started again, not asked again."""
    rows = [chat_row(number, "core-dies" if number == 1 else str(number)) for number in range(3)]
    sink = await run(await start(env={"FAKE_REPLY_S": "0.2"}), rows)
    assert sink.code(1) == "engine_crashed"
    assert [sink.text(0), sink.text(2)] == ["0", "2"]


async def test_a_server_killed_from_outside_is_started_again(start):
    """kill -9 of the API server costs no row its result."""
    engine = await start(env={"FAKE_REPLY_S": "0.3"})
    first = server_pid(engine)
    running = asyncio.create_task(run(engine, [chat_row(number, str(number)) for number in range(20)]))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    sink = await running
    assert [sink.text(number) for number in range(20)] == [str(number) for number in range(20)]
    assert server_pid(engine) != first


async def test_a_silent_server_is_started_again(start):
    """A server that answers nothing and makes no token for `attempt_timeout_s` counts as dead."""
    engine = await start(limits=Limits(attempt_timeout_s=5.0))
    sink = await run(engine, [chat_row(0, "hangs"), chat_row(1, "fine")])
    assert sink.code(0) == "engine_crashed"
    assert sink.text(1) == "fine"


async def test_a_server_that_cannot_stay_up_pauses_the_job(start, fake):
    """After six deaths with no row finished the job pauses, says why, and the rows stay undone."""
    engine = await start(env={"FAKE_REPLY_S": "0.2"})
    engine._env["FAKE_START_ERROR"] = "RuntimeError: no memory left"
    os.kill(server_pid(engine), signal.SIGKILL)
    sink = ListSink()
    with pytest.raises(JobPaused) as paused:
        await engine.run(ListFeed([chat_row(0, "x")]), sink)
    assert paused.value.reason is PauseReason.ENGINE_FAILED
    assert "RuntimeError: no memory left" in paused.value.message
    assert sink.outcomes == {}


async def test_cancelling_a_run_leaves_rows_undone_and_the_engine_usable(start):
    """A cancelled run puts nothing more, and another run may follow."""
    engine = await start(env={"FAKE_REPLY_S": "0.1"})
    sink = ListSink()
    running = asyncio.create_task(engine.run(ListFeed([chat_row(0, "hangs"), chat_row(1, "hangs too")]), sink))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sink.outcomes == {}
    assert (await run(engine, [chat_row(2, "next")])).text(2) == "next"


async def test_a_start_that_fails_tells_the_reason_and_leaves_nothing(start, fake):
    """ModelFailed carries the server's last exception and where its log is; no process and no socket is left."""
    with pytest.raises(ModelFailed) as failed:
        await start(env={"FAKE_START_ERROR": "ValueError: No available memory for the cache blocks."})
    assert "ValueError: No available memory for the cache blocks." in failed.value.message
    assert "engine-0.log" in failed.value.message
    assert (fake.home / "engine-0.pid").read_text() == "{}"


async def test_stop_ends_the_server_and_may_be_called_again(start):
    """After `stop` no process of the engine is left; a second call and a call before `start` do nothing."""
    engine = await start()
    pid = server_pid(engine)
    await engine.stop()
    await engine.stop()
    assert start_time(pid) is None


async def test_stop_before_start_does_nothing(fake):
    """An engine that never started can be stopped."""
    await LlmEngine(fake.model(), fake.home, env=fake.env).stop()


async def test_cancelling_a_start_ends_the_server(fake):
    """A start that is cancelled half-way leaves no server behind."""
    engine = LlmEngine(fake.model(), fake.home, env={**fake.env, "FAKE_HEALTH_DELAY_S": "1000"})
    starting = asyncio.create_task(engine.start())
    while "starting vLLM" not in engine.stats().note:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (fake.home / "engine-0.pid").read_text() == "{}"


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "http://x"},
        {"api_key": "env:X"},
        {"limits": Limits(requests_per_minute=1)},
        {"limits": Limits(tokens_per_minute=1)},
    ],
)
def test_settings_without_meaning_are_refused_by_name(fake, fields):
    """What an engine of our own cannot honour is refused, not ignored."""
    with pytest.raises(ModelFailed, match="has no meaning for a managed engine"):
        LlmEngine(fake.model(**fields), fake.home)


@pytest.mark.parametrize(
    ("said", "code"),
    [("BadRequestError", "bad_request"), ("Bad Request", "bad_request"), ("context_length", "context_length")],
)
def test_one_cause_has_one_code(said, code):
    """vLLM spells an error's type in several ways; people group by one."""
    assert stable_code(said) == code


async def test_calls_with_contents_of_files_have_few_bytes_together(start, fake, monkeypatch, tmp_path):
    """However many may be in flight: the others wait without their bodies, and a row without its file fails alone."""
    monkeypatch.setattr(flow, "RowMedia", partial(flow.RowMedia, bytes_max=3000))
    most, take = 0, flow.Flow._add

    def add(self, read):
        nonlocal most
        take(self, read)
        most = max(most, self._media_bytes())

    monkeypatch.setattr(flow.Flow, "_add", add)
    data = b"\x89PNG\r\n\x1a\n" + b"x" * 1000
    (tmp_path / "a.png").write_bytes(data)
    form = TableForm("{q}", media=[MediaColumn("image", "img")])

    def row(number, path):
        part = MediaPart("image", "image/png", len(data), blake3(data).hexdigest(), path=str(path))
        return Row(number, number, with_media(b'{"q":"?","img":"a.png"}', [part]), form)

    rows = [row(number, tmp_path / "a.png") for number in range(20)]
    sink = await run(await start(), [*rows, row(20, tmp_path / "gone.png")])
    assert [sink.outcomes[number].error for number in range(20)] == [None] * 20
    assert sink.code(20) == "media_missing"
    assert 1500 < most < 5000
    assert len(fake.calls()) == 20
