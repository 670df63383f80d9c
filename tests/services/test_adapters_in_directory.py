"""Registered adapters among the models of a server: what a caller may name, and what an engine is given."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.lora_files import write_lora
from services.adapter_room import SMALL, THEM, US, AdapterRoom

from batchmill.errors import Conflict, UnknownName
from batchmill.jobs.pools.pools import Pools
from batchmill.services.live_calls import request_of
from batchmill.types import Caller, Scope


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[AdapterRoom]:
    room = AdapterRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


async def add(room: AdapterRoom, name: str, who: Caller = US, base: str = "tiny", rank: int = 4):
    folder = write_lora(room.folder / f"{name}-{rank}", r=rank)
    return await room.adapters.wait(await room.adapters.register(who, base, name, str(folder), is_trusted=True))


def names(room: AdapterRoom, who: Caller) -> list[str]:
    return [served.name for served in room.directory.list(who)]


async def test_every_name(room: AdapterRoom) -> None:
    """A registered adapter stands behind its model, by its name and by each version; another project sees none."""
    first, second = await add(room, "shout"), await add(room, "shout", rank=8)
    assert names(room, US) == ["tiny", "shout", "shout/1", "shout/2", "twin", "far", "a"]
    assert names(room, THEM) == ["tiny", "twin", "far", "a"]
    served = room.directory.find(US, "shout")
    assert (served.model.name, served.adapter) == ("tiny", "shout/2")
    assert room.directory.find(US, "shout/1").model.adapters == {"shout/1": first.folder}
    request = request_of(served, "/v1/chat/completions", b"{}", stream=False)
    assert (request.adapter, request.adapter_place) == ("shout/2", second.folder)
    with pytest.raises(UnknownName):
        room.directory.find(THEM, "shout")


async def test_the_models_of_a_job(room: AdapterRoom) -> None:
    """A job's model has every version, and its name for the newest that was ready when it came."""
    first, second = await add(room, "shout"), await add(room, "shout", rank=8)
    spec = next(each for each in room.directory.specs(US) if each.name == "tiny")
    assert spec.targets() == {"tiny": None, "shout": "shout/2", "shout/1": "shout/1", "shout/2": "shout/2"}
    assert spec.adapters == {"shout/1": first.folder, "shout/2": second.folder}
    assert room.directory.for_job(US, "shout") == spec
    await room.adapters.remove("default", "shout", 2)
    spec = next(each for each in room.directory.specs(US) if each.name == "tiny")
    assert spec.targets() == {"tiny": None, "shout": "shout/1", "shout/1": "shout/1"}


async def test_versions_for_several_bases(room: AdapterRoom) -> None:
    """A name stands for one model where a job has several: that of its newest version; alone each base has its own."""
    await add(room, "shout")
    await add(room, "shout", base="twin", rank=8)
    assert names(room, US) == ["tiny", "shout/1", "twin", "shout", "shout/2", "far", "a"]
    assert (served := room.directory.find(US, "shout")).adapter == "shout/2" and served.model.name == "twin"
    result = {each.name: each.allowed for each in room.directory.specs(US)}
    assert result == {"tiny": ["tiny", "shout/1"], "twin": ["twin", "shout", "shout/2"], "far": ["far", "a"]}
    assert room.directory.for_job(US, "tiny").targets()["shout"] == "shout/1"


async def test_keys_narrow_it(room: AdapterRoom) -> None:
    """A key that lists a name has all its versions, one that lists a version has that; neither has the base by it."""
    await add(room, "shout")
    await add(room, "shout", rank=8)
    by_name = Caller("default", Scope.SUBMIT, models=frozenset({"shout"}))
    by_version = Caller("default", Scope.SUBMIT, models=frozenset({"shout/1"}))
    assert names(room, by_name) == ["shout", "shout/1", "shout/2"]
    assert names(room, by_version) == ["shout/1"]
    [spec] = room.directory.specs(by_version)
    assert (spec.targets(), list(spec.adapters)) == ({"shout/1": "shout/1"}, ["shout/1"])


async def test_projects_narrow_it(room: AdapterRoom) -> None:
    """What a project registers is its own, for the models that it may use."""
    await add(room, "shout", SMALL, "twin")
    assert names(room, SMALL) == ["twin", "shout", "shout/1"]


async def test_one_engine_for_all(room: AdapterRoom) -> None:
    """Requests to a base and to adapters of any project, and their jobs, are one engine's, with room for all ranks."""
    await add(room, "shout", rank=8)
    await add(room, "whisper", THEM, rank=32)
    pools = Pools(room.folder, None, room.clock, dispatcher=None, idle_timeout_s=0)
    models = [room.directory.find(US, name).model for name in ("tiny", "shout", "shout/1")]
    models += [room.directory.find(THEM, name).model for name in ("tiny", "whisper")]
    models += [each for who in (US, THEM) for each in room.directory.specs(who) if each.name == "tiny"]
    assert {model.adapter_rank for model in models} == {32}
    assert len({pools.key_of(model) for model in models}) == 1
    assert room.directory.find(US, "twin").model.adapter_rank == 0


async def test_names_that_are_taken(room: AdapterRoom) -> None:
    """An adapter is not called as a model or adapter of the configuration; a further version of it is its own."""
    await add(room, "shout")
    for name in ("tiny", "a"):
        with pytest.raises(Conflict, match=f"'{name}' is already the name of a"):
            await add(room, name)
    assert (await add(room, "shout", rank=8)).version == 2
