"""Requests that engines died of, as the owner of a data directory keeps and passes them on."""

from __future__ import annotations

from dispatcher_stage import Stage
from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.config import QuarantineEntry
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.types import ModelSpec
from batchmill.types.models import DIED, Charge, Suspect
from batchmill.wire.messages import Charged, EngineDied, Learn, Suspected

LLM = ModelSpec("m", "llm", "org/base")


def suspect(digest, deaths, at, project="a"):
    return Suspect(digest, project, "/v1/completions", deaths, at)


async def test_what_is_known_survives_a_restart_and_ends(tmp_path):
    """It is read back by the next owner, forgotten when it is old or there are too many, and cleared for good."""
    clock, settings = HeldClock(), QuarantineEntry(expires_s=100.0, entries_max=2)
    now = clock.now()
    database = open_database(tmp_path / "db")
    try:
        first = Quarantine(clock, database, settings)
        for digest, at in (("old", now), ("one", now + 50), ("two", now + 60)):
            first.suspect("m", suspect(digest, 2, at))
        first.suspect("m", suspect("one", 0, now + 61))
        first.suspect("m", suspect("three", 1, now + 62, "b"))
        await first.close()
        second = Quarantine(clock, database, settings)
        await second.load()
        assert [each.digest for each in second.list(None)] == ["two", "three"]
        assert [each.is_refused for each in second.list(None)] == [True, False]
        assert [each.digest for each in second.list("b")] == ["three"]
        assert [each.digest for each in second.poison("m").suspects] == ["two", "three"]
        assert second.poison("other").suspects == []
        assert second.clear("a", "thr") == []
        assert [each.digest for each in second.clear(None, "tw")] == ["two"]
        await second.close()
        third = Quarantine(clock, database, settings)
        await third.load()
        assert [each.digest for each in third.list(None)] == ["three"]
    finally:
        database.close()


async def test_every_worker_of_a_base_model_knows_what_one_has_learnt(tmp_path):
    """A death is an event; a suspect and a charge reach workers that run and those that start; so does a clearing."""
    stage = Stage(tmp_path)
    try:
        stage.begin("job", LLM)
        worker = await stage.executor.next()
        charge = Charge("a", stage.clock.now())
        worker.say(EngineDied(1.0, "killed by signal 9", {"a": 1, "b": 2}))
        worker.say(Suspected(suspect("one", 1, stage.clock.now())))
        worker.say(Charged(charge))
        first = await worker.expect(Learn)
        second = await worker.expect(Learn)
        assert ([each.digest for each in first.poison.suspects], first.poison.charges) == (["one"], [])
        assert second.poison.charges == [charge]
        event = next(each for each in stage.dispatcher.engine_of(LLM).events if each.kind == DIED)
        assert (event.message, event.by_project) == ("killed by signal 9", {"a": 1, "b": 2})
        stage.dispatcher.quarantine.clear(None)
        assert (await worker.expect(Learn)).poison.suspects == []
    finally:
        await stage.close()
