"""Adapters that come and go in the LLM engine, over the fake server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from contract.engine_suite import ListSink as OpenSink
from contract.engine_suite import OpenFeed, answer_to, chat_request
from llm_support import FakeVllm, ListFeed, ListSink, QuickClock, chat_row
from msgspec.structs import replace

from batchmill.engines.llm.engine import LlmEngine
from batchmill.errors import InvalidInput
from batchmill.types import AdapterSet, Limits, LiveRequest

PATIENCE_S = 60.0


@pytest.fixture
def fake(tmp_path):
    return FakeVllm(tmp_path)


@pytest.fixture
async def start(fake):
    """Start an engine on the fake server; it is stopped after the test."""
    engines = []

    async def make(*, env=None, **fields):
        fields = {"adapter_rank": 16, "limits": Limits(adapters_max=2), **fields}
        engine = LlmEngine(fake.model(**fields), fake.home, clock=QuickClock(), env={**fake.env, **(env or {})})
        engines.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


def made(fake, *names, **files):
    """Adapters whose answers begin with their names; `files` are further ones in each folder."""
    places = {}
    for name in names:
        place = Path(fake.adapter(name.replace("/", "-")))
        (place / "says").write_text(name)
        for file, text in files.items():
            (place / file).write_text(text)
        places[name] = str(place)
    return places


def rows_of(adapters, models, **body):
    """A row for each model named, of a job that may use these adapters."""
    if not isinstance(adapters, AdapterSet):
        adapters = AdapterSet(adapters)
    lease = SimpleNamespace(adapters=adapters)
    return [replace(chat_row(n, str(n), model=model, **body), lease=lease) for n, model in enumerate(models)]


async def run(engine, rows):
    sink = ListSink()
    async with asyncio.timeout(PATIENCE_S):
        await engine.run(ListFeed(rows), sink)
    assert len(sink.outcomes) == len(rows)
    return sink


def moves(fake):
    """Loads (+) and unloads (-), in order."""
    signs = {"/v1/load_lora_adapter": "+", "/v1/unload_lora_adapter": "-"}
    return [signs[call["url"]] + call["body"]["lora_name"] for call in fake.calls() if call["url"] in signs]


def asked(fake):
    """The calls of rows and live requests."""
    calls = fake.calls() if fake.calls_file.exists() else []
    return [call for call in calls if "messages" in call["body"]]


def faults(fake):
    """What the server would not have survived or done right."""
    return [call["url"] for call in fake.calls() if call["url"] in ("too-many", "unloaded-in-use")]


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def live(text, adapter, place, **body):
    request = chat_request(text, model=adapter, **body)
    return LiveRequest(request.url, request.body, request.stream, adapter=adapter, adapter_place=place)


async def text_of(engine, request):
    async with asyncio.timeout(PATIENCE_S):
        head, body = await answer_to(engine, request)
    assert head.status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


async def test_more_adapters_than_places(start, fake):
    """Grouped rows of ten adapters go through two places: each loaded once, in order, none while it is in use."""
    places = made(fake, *(f"a/{n}" for n in range(10)))
    engine = await start(env={"FAKE_REPLY_S": "0.005", "FAKE_LOAD_S": "0.01"})
    models = [name for name in places for _ in range(20)]
    sink = await run(engine, rows_of(places, models))
    assert [sink.text(n) for n in range(200)] == [f"{model} {n}" for n, model in enumerate(models)]
    assert [move for move in moves(fake) if move[0] == "+"] == [f"+{name}" for name in places]
    assert faults(fake) == []
    assert engine.stats().adapters_loaded == 2
    assert sum(each.loads for each in engine.stats().adapters) == 10


async def test_rows_at_random_all_get_their_adapter(start, fake):
    """In whatever order rows come, each is answered by its adapter and the base's by the base."""
    places = made(fake, *(f"a{n}" for n in range(7)))
    engine = await start(env={"FAKE_REPLY_S": "0.002"})
    models = ["tiny", *places] * 60
    models = [models[n * 37 % len(models)] for n in range(len(models))]
    sink = await run(engine, rows_of(places, models))
    assert [sink.text(n) for n in range(len(models))] == [
        str(n) if model == "tiny" else f"{model} {n}" for n, model in enumerate(models)
    ]
    assert faults(fake) == []


async def test_the_one_unused_for_longest_gives_way(start, fake):
    """Of two adapters that nobody uses the one used last stays."""
    places = made(fake, "a", "b", "c")
    engine = await start()
    for models in (["a"], ["b"], ["a"], ["c"]):
        await run(engine, rows_of(places, models))
    assert moves(fake) == ["+a", "+b", "-b", "+c"]


async def test_the_next_adapter_is_loaded_while_the_last_ones_rows_run(start, fake):
    """The third adapter takes the place of the first while rows of the second run, before there is room for its own."""
    places = made(fake, "a", "b", "c")
    engine = await start(limits=Limits(adapters_max=2, in_flight_max=1), env={"FAKE_REPLY_S": "0.05"})
    sink = await run(engine, rows_of(places, ["a"] * 5 + ["b"] * 20 + ["c"]))
    assert sink.text(25) == "c 25"
    calls = fake.calls()
    loaded = next(n for n, call in enumerate(calls) if call["body"].get("lora_name") == "c")
    assert sum(call["body"].get("model") == "b" for call in calls[loaded:]) > 10
    assert {each.name: each.hits for each in engine.stats().adapters}["c"] == 1


async def test_rows_of_others_are_not_held_up_by_a_slow_load(start, fake):
    """Rows of the base go past one whose adapter is being loaded, and people see what that one waits for."""
    places = made(fake, "slow")
    engine = await start(env={"FAKE_LOAD_S": "1000"})
    sink = OpenSink()
    feed = OpenFeed(sink, rows_of(places, ["slow", *["tiny"] * 50]))
    running = asyncio.create_task(engine.run(feed, sink))
    await sink.wait_for(50)
    assert sink.numbers() == list(range(1, 51))
    await until(lambda: "'slow', which is being loaded" in engine.stats().note)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_adapter_is_not_kept_waiting_for_ever(start, fake):
    """Rows of adapters that never run out make way for one that waits."""
    places = made(fake, "a", "b", "c")
    engine = await start(limits=Limits(adapters_max=2, in_flight_max=8), env={"FAKE_REPLY_S": "0.001"})
    models = ["a", "b"] * 20 + ["c"] + ["a", "b"] * 400
    order = []

    class Watching(ListSink):
        def put(self, outcomes):
            outcomes = list(outcomes)
            order.extend(outcome.row.number for outcome in outcomes)
            super().put(outcomes)

    sink = Watching()
    async with asyncio.timeout(PATIENCE_S):
        await engine.run(ListFeed(rows_of(places, models)), sink)
    assert sink.text(40) == "c 40"
    assert order.index(40) < 200
    assert faults(fake) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place: (place / "broken").write_text("LoRA rank 64 is greater than max_lora_rank 16."), "LoRA rank 64"),
        (lambda place: place.rename(place.with_name("gone")), "No adapter found for"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_fails_its_own_rows(start, fake, spoil, words):
    """Its rows get vLLM's own words, it is tried once, and nobody else's row is touched."""
    places = made(fake, "good", "bad")
    spoil(Path(places["bad"]))
    engine = await start()
    sink = await run(engine, rows_of(places, ["bad", "good", "tiny"] * 30))
    for n in range(90):
        if n % 3 == 0:
            assert sink.code(n) == "bad_adapter"
            assert words in sink.outcomes[n].error.message
            assert places["bad"] not in sink.outcomes[n].error.message
    assert [sink.text(1), sink.text(2)] == ["good 1", "2"]
    with pytest.raises(InvalidInput, match=words) as refused:
        await text_of(engine, live("x", "bad", places["bad"]))
    assert refused.value.code == "bad_adapter"
    assert moves(fake).count("+bad") == 1


async def test_a_failed_load_is_forgotten_after_a_while(start, fake):
    """What was mended is found to be so."""
    places = made(fake, "a", broken="not yet")
    engine = await start()
    assert (await run(engine, rows_of(places, ["a"]))).code(0) == "bad_adapter"
    (Path(places["a"]) / "broken").unlink()
    engine._clock.skipped_s += 3600
    assert (await run(engine, rows_of(places, ["a"]))).text(0) == "a 0"


async def test_an_adapter_that_ends_the_server_is_found(start, fake):
    """After three deaths its rows fail, and the others are answered."""
    places = {**made(fake, "good"), **made(fake, "deadly", deadly="")}
    engine = await start()
    sink = await run(engine, rows_of(places, ["good", "deadly", "tiny"]))
    assert sink.code(1) == "bad_adapter"
    assert "crashed 3 times while it loaded" in sink.outcomes[1].error.message
    assert [sink.text(0), sink.text(2)] == ["good 0", "2"]


async def test_what_is_known_to_be_bad_is_not_tried(start, fake):
    """A reason found beforehand is the row's error; vLLM hears nothing of it. Other names of it mean the same."""
    adapters = AdapterSet(
        {"a/1": "/no/such", "a/2": "/no/such"}, {"a": "a/2"}, {"a/2": "its shapes are another model's"}
    )
    engine = await start()
    sink = await run(engine, rows_of(adapters, ["a/2", "a", "tiny"]))
    assert [sink.code(0), sink.code(1)] == ["bad_adapter", "bad_adapter"]
    assert sink.outcomes[1].error.message == "its shapes are another model's"
    assert moves(fake) == []


async def test_names_mean_what_the_rows_job_says(start, fake):
    """A short name means the version that was pinned; an unknown one is the row's error, and tells what there is."""
    places = made(fake, "a/1", "a/2")
    engine = await start()
    sink = await run(engine, rows_of(AdapterSet(places, {"a": "a/2"}), ["a", "a/1", "b"]))
    assert [sink.text(0), sink.text(1)] == ["a/2 0", "a/1 1"]
    assert json.loads(sink.outcomes[0].body)["model"] == "a/2"
    assert sink.code(2) == "unknown_model"
    assert "a, a/1, a/2, tiny" in sink.outcomes[2].error.message


async def test_two_projects_may_use_one_name(start, fake):
    """Two folders under one name are two adapters: each project's rows get its own, under the name they know."""
    ours, theirs = made(fake, "a/1"), {"a/1": made(fake, "other")["other"]}
    engine = await start()
    rows = rows_of(ours, ["a/1"] * 3) + [replace(row, number=row.number + 3) for row in rows_of(theirs, ["a/1"] * 3)]
    sink = await run(engine, rows)
    assert [sink.text(n) for n in range(6)] == ["a/1 0", "a/1 1", "a/1 2", "other 0", "other 1", "other 2"]
    assert {json.loads(outcome.body)["model"] for outcome in sink.outcomes.values()} == {"a/1"}
    _, events = await answer_to(engine, live("x y", "a/1", theirs["a/1"], stream=True))
    assert b"a/1#2" not in events
    assert events.count(b'"model": "a/1"') == 3


async def test_after_a_restart_what_is_needed_is_loaded_again(start, fake):
    """kill -9 of the server costs no row its result, and the new server gets the adapters that rows wait for."""
    places = made(fake, "a", "b", "c")
    engine = await start(env={"FAKE_REPLY_S": "0.2"})
    running = asyncio.create_task(run(engine, rows_of(places, ["a", "b", "c"] * 5)))
    await until(lambda: engine.stats().in_flight)
    os.kill(json.loads(engine.server.process.pid_file.read_text())["server_pid"], signal.SIGKILL)
    sink = await running
    assert [sink.text(n) for n in range(15)] == [f"{'abc'[n % 3]} {n}" for n in range(15)]
    assert faults(fake) == []


async def test_a_live_request_brings_its_adapter_without_rows(start, fake):
    """It is loaded on demand, also after the server has died, and stays for the next one."""
    places = made(fake, "a/1")
    engine = await start()
    assert await text_of(engine, live("x", "a/1", places["a/1"])) == "a/1 x"
    assert await text_of(engine, live("y", "a/1", places["a/1"])) == "a/1 y"
    assert moves(fake) == ["+a/1"]
    os.kill(json.loads(engine.server.process.pid_file.read_text())["server_pid"], signal.SIGKILL)
    await engine.server.process.wait()
    assert await text_of(engine, live("z", "a/1", places["a/1"])) == "a/1 z"
    (stats,) = engine.stats().adapters
    assert (stats.name, stats.rows, stats.hits, stats.output_tokens) == ("a/1", 3, 1, 12)


async def test_a_live_request_goes_ahead_of_rows(start, fake):
    """Where rows hold every place, those of one adapter are called back for it; later they run all the same."""
    places = made(fake, "a", "b", "c")
    engine = await start(env={"FAKE_REPLY_S": "3"})
    running = asyncio.create_task(run(engine, rows_of(places, ["a", "b"] * 10)))
    await until(lambda: engine.stats().in_flight == 20)
    assert await text_of(engine, live("x", "c", places["c"])) == "c x"
    sink = await running
    assert [sink.text(n) for n in range(20)] == [f"{'ab'[n % 2]} {n}" for n in range(20)]
    assert moves(fake)[:4] in (["+a", "+b", "-a", "+c"], ["+a", "+b", "-b", "+c"])


async def test_adapters_of_live_requests_stay_while_rows_run(start, fake):
    """An adapter that answers a live request is not unloaded for rows, however many adapters they name."""
    places = made(fake, *(f"a{n}" for n in range(6)), "live")
    engine = await start()
    pieces = engine.predict(live("trickles on", "live", places["live"], stream=True))
    await anext(pieces)
    names = [name for name in places if name != "live"]
    sink = await run(engine, rows_of(places, names * 5))
    assert sink.text(29) == "a5 29"
    assert "-live" not in moves(fake)
    await pieces.aclose()
    assert faults(fake) == []


async def test_a_model_without_room_takes_no_adapters(start, fake):
    """A row that names an adapter of a model that takes none is told that there is no such model."""
    engine = await start(adapter_rank=0, limits=Limits())
    assert (await run(engine, rows_of(made(fake, "a"), ["a"]))).code(0) == "unknown_model"


async def test_a_row_that_runs_alone_is_called_back_once(start, fake):
    """A row that runs alone, since the server died with it in flight, gives way to a live request and runs again."""
    places = made(fake, "a", "b")
    engine = await start(limits=Limits(adapters_max=1), env={"FAKE_REPLY_S": "5"})
    rows = rows_of(places, ["a", "a"])
    rows[0] = replace(chat_row(0, "crash", model="a"), lease=rows[0].lease)
    running = asyncio.create_task(run(engine, rows))

    def is_alone():
        texts = [call["body"]["messages"][0]["content"] for call in asked(fake)]
        return texts.count("crash") == 3 and texts[-1] == "1"

    await until(is_alone)
    assert await text_of(engine, live("x", "b", places["b"])) == "b x"
    sink = await running
    assert (sink.code(0), sink.text(1)) == ("engine_crashed", "a 1")


async def test_a_server_that_does_not_let_go_of_an_adapter_is_not_waited_for(start, fake):
    """The next adapter comes all the same."""
    places = {**made(fake, "clings", clings=""), **made(fake, "b")}
    engine = await start(limits=Limits(adapters_max=1, attempt_timeout_s=0.5))
    assert (await run(engine, rows_of(places, ["clings"]))).text(0) == "clings 0"
    assert (await run(engine, rows_of(places, ["b"]))).text(0) == "b 0"
