"""What becomes of requests that an engine server dies of: found, refused, and kept from stopping other projects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from contract.engine_suite import ListSink, OpenFeed, answer_to, chat_request, chat_row
from llm_support import FakeVllm, QuickClock
from msgspec.structs import replace

from batchmill.engines.llm.engine import LlmEngine
from batchmill.engines.llm.quarantine import Deaths, Tracked
from batchmill.errors import InvalidInput, Unavailable
from batchmill.types.models import Charge, Poison, Suspect
from batchmill.wire.messages import Charged, EngineDied, Suspected

CHAT = "/v1/chat/completions"


@dataclass
class Lease:
    project: str
    adapters = None
    isolated = False


@pytest.fixture
def fake(tmp_path):
    return FakeVllm(tmp_path)


@pytest.fixture
async def start(fake):
    """Start an engine on the fake server, with what it tells of deaths; it is stopped after the test."""
    engines = []

    async def make(**env):
        engine, received = LlmEngine(fake.model(), fake.home, clock=QuickClock(), env={**fake.env, **env}), []
        engine.report_deaths(received.append)
        engines.append(engine)
        await engine.start()
        return engine, received

    yield make
    for engine in engines:
        await engine.stop()


def row(number, text, project):
    return chat_row(number, text, lease=Lease(project))


def request(text, project="a", **body):
    return replace(chat_request(text, **body), project=project)


async def run(engine, rows):
    sink = ListSink()
    await engine.run(OpenFeed(sink, rows, ended=True), sink)
    return {outcome.row.number: outcome.error and outcome.error.code for outcome in sink.outcomes}


def charged(received):
    """Project -> deaths that are its, taken back ones left out."""
    kinds = [(each.charge.project, each.is_taken_back) for each in received if isinstance(each, Charged)]
    return {name: kinds.count((name, False)) - kinds.count((name, True)) for name, _ in kinds}


async def test_poison_among_rows_of_two_projects(start, fake):
    """Each row has one outcome, only poison fails, and its project answers for every death."""
    engine, received = await start(FAKE_REPLY_S="0.5", FAKE_CRASH_AMONG="40")
    rows = [row(n, "crash" if n == 3 else f"a{n}", "a") for n in range(8)] + [
        row(n, f"b{n}", "b") for n in range(8, 40)
    ]
    codes = await run(engine, rows)
    assert codes == {n: "engine_crashed" if n == 3 else None for n in range(40)}
    assert charged(received)["a"] == 3
    assert charged(received).get("b", 0) == 0
    deaths = [each for each in received if isinstance(each, EngineDied)]
    assert [sum(each.in_flight.values()) for each in deaths] == [40, 1, 1]
    assert deaths[0].in_flight == {"a": 8, "b": 32}
    assert "killed by signal 9" in deaths[0].how
    assert [each.suspect.deaths for each in received if isinstance(each, Suspected)] == [1, 2]


async def test_what_was_alone_at_two_deaths_is_refused_live_and_in_rows(start, fake):
    """A live request that kills the server runs alone when it comes again, and then never; nor does a row of it."""
    engine, received = await start()
    for _ in range(2):
        with pytest.raises(Unavailable):
            await answer_to(engine, request("crash"))
    sent = len(fake.calls())
    for asked in (request("crash"), request("crash", user="another", stream=True, project="b")):
        with pytest.raises(InvalidInput, match="batchmill quarantine clear") as refused:
            await answer_to(engine, asked)
        assert refused.value.code == "quarantined"
    assert await run(engine, [row(0, "crash", "a"), row(1, "fine", "a")]) == {0: "quarantined", 1: None}
    assert [call["body"]["messages"][0]["content"] for call in fake.calls()[sent:]] == ["fine"]
    suspect = [each.suspect for each in received if isinstance(each, Suspected)][-1]
    assert (suspect.deaths, suspect.project, suspect.url) == (2, "a", CHAT)
    engine.learn(Poison())  # somebody has cleared it
    with pytest.raises(Unavailable):
        await answer_to(engine, request("crash"))


async def test_another_engine_refuses_what_the_owner_knows(start, fake):
    """What one worker has found out holds for those that start after it, and a suspect that is answered is none."""
    engine, received = await start()
    digest = engine._calls.tracked("a", CHAT, request("x").body, None).digest
    engine.learn(Poison([Suspect(digest, "a", CHAT, 2, 0.0)]))
    with pytest.raises(InvalidInput):
        await answer_to(engine, request("x"))
    engine.learn(Poison([Suspect(digest, "a", CHAT, 1, 0.0)]))
    assert (await answer_to(engine, request("x")))[0].status == 200
    assert [each.suspect.deaths for each in received] == [0]


async def test_a_project_beyond_its_budget_comes_last_and_alone(start, fake):
    """Its rows run once no other project has any, and nothing of others is in flight beside them."""
    engine, received = await start(FAKE_REPLY_S="0.02")
    engine.learn(Poison(charges=[Charge("a", engine._clock.now() + n) for n in range(3)]))
    rows = [row(n, "crash" if n == 2 else f"a{n}", "a") for n in range(6)] + [
        row(n, f"b{n}", "b") for n in range(6, 200)
    ]
    codes = await run(engine, rows)
    assert codes == {n: "engine_crashed" if n == 2 else None for n in range(200)}
    assert all("b" not in each.in_flight for each in received if isinstance(each, EngineDied))
    texts = [call["body"]["messages"][0]["content"] for call in fake.calls()]
    assert max(n for n, text in enumerate(texts) if text[0] == "b") < min(
        n for n, text in enumerate(texts) if text[0] == "c"
    )


class HoldingFeed(OpenFeed):
    """As a worker's: rows of projects that are held back stay where they are."""

    held_back: frozenset[str] = frozenset()

    def hold_back(self, projects):
        if projects != self.held_back:
            self.held_back = projects
            self._changed.set()

    async def take(self, n):
        while True:
            self._changed.clear()
            if found := [each for each in self._rows if each.lease.project not in self.held_back][:n]:
                self._rows = [each for each in self._rows if each not in found]
                return found
            if self._ended and not self._rows:
                return []
            await self._changed.wait()


async def test_rows_that_were_held_back_run_once_the_budget_is_whole_again(start):
    """Nothing else has to happen for it: their charges are an hour old, or were taken back, while the engine idles."""
    engine, _ = await start()
    engine.learn(Poison(charges=[Charge("a", engine._clock.now() + n) for n in range(3)]))
    engine._deaths.record_work("b")
    engine._deaths._wait_until["a"] = engine._clock.monotonic() + 10**9
    sink = ListSink()
    feed = HoldingFeed(sink, [row(0, "a0", "a"), row(1, "b1", "b")], ended=True)
    running = asyncio.create_task(engine.run(feed, sink))
    while not sink.outcomes or "a" not in feed.held_back or engine.rows_in_flight or engine._flight.gauges.running:
        await asyncio.sleep(0.005)
    for _ in range(100):  # whatever was about to look again has done so
        await asyncio.sleep(0)
    assert [outcome.row.number for outcome in sink.outcomes] == [1]
    engine.learn(Poison())
    await asyncio.wait_for(running, 20)
    assert [outcome.row.number for outcome in sink.outcomes] == [1, 0]


async def test_a_live_request_waits_while_something_runs_alone(start, fake):
    """A suspect that runs has nothing beside it: what comes meanwhile is answered after it."""
    engine, _ = await start(FAKE_REPLY_S="0.3")
    digest = engine._calls.tracked("a", CHAT, request("slow").body, None).digest
    engine.learn(Poison([Suspect(digest, "a", CHAT, 1, 0.0)]))
    alone = asyncio.create_task(answer_to(engine, request("slow")))
    while not fake.calls_file.exists():
        await asyncio.sleep(0.005)
    assert (await answer_to(engine, request("other", "b")))[0].status == 200
    assert alone.done()


def test_whose_death_it_was():
    """A death is the one project's whose requests are left when the server has outlived all others; else nobody's."""
    clock, received = QuickClock(), []
    deaths = Deaths(clock)
    deaths.report = received.append
    server, second = object.__new__(type("Server", (), {})), object.__new__(type("Server", (), {}))
    ours, theirs = Tracked("a", "m", CHAT, b'{"x":1}', None), Tracked("b", "m", CHAT, b'{"x":2}', None)
    deaths.record_start(server, ours)
    deaths.record_start(server, theirs)
    assert deaths.record_death(server, "killed") == {ours, theirs}
    assert deaths.record_death(server, "killed") == set()
    assert charged(received) == {}
    deaths.record_reply(second, theirs)
    assert charged(received) == {"a": 1}
    deaths.record_reply(second, ours)
    assert charged(received) == {"a": 0}


def test_a_caller_that_goes_is_suspect_all_the_same():
    """A request whose caller left a moment before the death counts as in flight; the ids of a request do not count."""
    deaths, server = Deaths(QuickClock()), object.__new__(type("Server", (), {}))
    gone = Tracked("a", "m", CHAT, b'{"prompt":"x","user":"u1","stream":true,"model":"m"}', None)
    deaths.record_start(server, gone)
    deaths.withdraw(server, gone)
    assert deaths.record_death(server, "killed") == {gone}
    assert gone.digest == Tracked("b", "m", CHAT, b'{"model":"other","prompt":"x"}', None).digest
    assert gone.digest != Tracked("b", "m", CHAT, b'{"prompt":"y"}', None).digest
