"""Deployments and settings of jobs are no way to what a caller may not use."""

import asyncio

import pytest
from fakes.lora_files import write_base, write_lora
from msgspec.structs import replace
from services.llm_room import LlmRoom

from batchmill.errors import InvalidConfig, UnknownName
from batchmill.services.adapters.service import AdapterService
from batchmill.types import Caller, EngineEvent, EngineState, EngineView, LlmSettings, Scaling, Scope

CONFIG = """
[models.tiny]
engine = "vllm"
source = "tiny"
adapters = { house = "house" }

[projects.small]
models = ["tiny"]
"""
BIG, SMALL = Caller("big", Scope.ADMIN), Caller("small", Scope.ADMIN)
TINY, LONG = LlmSettings("tiny"), LlmSettings("tiny", {"max-model-len": 2048})


async def again(room: LlmRoom) -> None:
    """Open it as the next process does, with its adapters."""
    if room.adapters is not None:
        await room.adapters.close()
    await room.again(opens=False)
    room.adapters = AdapterService(room.database, room.clock, room.directory, config=room.config, vault=room.vault)
    await room.adapters.load()
    room.llms.open()


@pytest.fixture
async def room(tmp_path):
    write_base(tmp_path / "tiny")
    write_lora(tmp_path / "house")
    room = LlmRoom(tmp_path, CONFIG)
    room.adapters = None
    await again(room)
    yield room
    await room.adapters.close()
    await room.close()


async def add(room: LlmRoom, name: str, who: Caller) -> None:
    folder = write_lora(room.folder / "loras" / name)
    record = await room.adapters.register(who, "tiny", name, str(folder), is_trusted=True)
    assert (await room.adapters.wait(record)).state == "ready"


async def test_adapters_of_the_configuration(room):
    """A project that may use a base, and not an adapter of the configuration, does not get it by deploying the base."""
    await add(room, "own", SMALL)
    await room.llms.create(SMALL, "d", TINY)
    for spec in (room.directory.for_job(SMALL, "d"), room.llms.spec(SMALL, LONG), room.llms.spec(SMALL, TINY)):
        assert sorted(set(spec.targets()) - {"d", "tiny", spec.name}) == ["own", "own/1"]
    for spec in (room.llms.spec(BIG, LONG), room.llms.spec(BIG, TINY)):
        assert sorted(set(spec.targets()) - {spec.name}) == sorted({"tiny", "house"} - {spec.name})
    model = room.directory.find(SMALL, "d").model
    assert room.directory.find_adapter(SMALL, model, "house", "tiny") is None
    with pytest.raises(UnknownName):
        room.directory.find(SMALL, "house")


async def test_keys_narrow_the_settings_of_a_job(room):
    """A key that lists a base has no adapters by it; one that lists an adapter's name has its versions."""
    await add(room, "own", BIG)
    base = Caller("big", Scope.SUBMIT, models=frozenset({"tiny"}))
    both = replace(base, models=frozenset({"tiny", "own"}))
    for settings in (TINY, LONG):
        spec = room.llms.spec(base, settings)
        assert set(spec.targets()) == {spec.name, "tiny"}
        assert set(room.llms.spec(both, settings).targets()) == {spec.name, "tiny", "own", "own/1"}
    await room.llms.create(BIG, "d", TINY)
    limited = replace(both, models=frozenset({"d", "own"}))
    assert set(room.directory.find(limited, "d").model.targets()) == {"d", "own", "own/1"}


async def test_a_deployment_opens_no_model_of_its_name(room):
    """A model that comes to the configuration later is refused there while a deployment is called so."""
    await room.llms.create(SMALL, "later", TINY)
    room.config = replace(
        room.config, models=room.config.models | {"later": replace(room.config.models["tiny"], adapters={})}
    )
    await again(room)
    message = "models.later: 'later' is already the name of a deployment of the project small"
    with pytest.raises(InvalidConfig, match=message):
        room.directory.check()


async def test_a_job_of_all_models(room):
    """Each name stands for one of them, though deployments of one base share its adapters."""
    await add(room, "own", BIG)
    await room.llms.create(BIG, "one", TINY)
    await room.llms.create(BIG, "two", LONG)
    specs = room.directory.specs(BIG)
    names = [name for spec in specs for name in spec.allowed or ()]
    assert sorted(names) == ["house", "one", "own", "own/1", "tiny", "two"]
    chosen = [room.directory.for_job(BIG, name) for name in ("one", "two")]
    result = [name for spec in room.directory.each_once(BIG, chosen) for name in spec.allowed or ()]
    assert sorted(result) == ["house", "one", "own", "own/1", "two"]


async def test_names_of_others_in_what_is_waited_for(room):
    """A deployment that waits says for what, and names no model that its caller may not know of."""
    await room.llms.create(SMALL, "mine", TINY)
    await room.llms.create(BIG, "theirs", TINY)
    need = "'mine' needs 1 GPU and 0 of 2 GPUs are free"
    why = f"{need}: 'theirs' (a job runs on it) holds 1 GPU; 'tiny' (a job runs on it) holds 1 GPU"
    view = EngineView(EngineState.WAITING, message=why, events=[EngineEvent(1.0, "waiting", why)])
    room.engines.states["mine", None] = view
    view = room.llms.shown(SMALL, room.llms.get(SMALL, "mine"))
    assert view.message == view.events[0].message == why.replace("'theirs'", "another model")
    assert "'theirs'" in room.llms.view(room.llms.get(SMALL, "mine")).message
    sees = room.directory.sees
    assert sees(BIG, "theirs") and sees(SMALL, "tiny~0123abcd") and not sees(SMALL, "theirs") and not sees(SMALL, "x")


async def test_engines_that_stay_get_room_for_new_adapters(room):
    """One that nobody calls is exchanged for one that takes the adapter which was registered since."""
    room.config = replace(
        room.config, models={"tiny": replace(room.config.models["tiny"], adapters={}, replicas_min=1)}
    )
    await again(room)
    held = []
    room.engines.pin = lambda model: held.append((model.name, model.adapter_rank))
    await room.llms.create(BIG, "d", replace(TINY, scaling=Scaling(1)))
    await add(room, "own", BIG)
    async with asyncio.timeout(60):
        while len(held) < 3:
            await asyncio.sleep(0.01)
    assert held == [("d", 0), ("d", 16), ("tiny", 16)]
