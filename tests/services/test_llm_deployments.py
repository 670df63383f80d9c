"""Deployments of language models: made, changed, served and removed."""

import asyncio

import pytest
from msgspec.structs import replace
from services.llm_room import READY, THEM, TOKEN, US, LlmRoom

from batchmill.errors import Conflict, InvalidInput, ModelFailed, Unavailable, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.deployed import ModelsRemoved
from batchmill.services.llms.settings import model_of
from batchmill.store.sql.tables import jobs
from batchmill.types import (
    Caller,
    DatasetSpec,
    EngineState,
    EngineView,
    LlmSettings,
    ModelSpec,
    Policy,
    Price,
    Scaling,
    Scope,
)
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

TINY = LlmSettings("tiny")
LONG = LlmSettings("tiny", {"max-model-len": 2048})
STAYS = Scaling(replicas_min=1)


@pytest.fixture
async def room(tmp_path):
    room = LlmRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


async def until(is_so):
    """Let tasks go on until something is so."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def test_it_is_there_after_a_restart(room):
    """A deployment outlives its process, with its settings and what a dialect keeps of it."""
    made = await room.llms.create(US, "d", LONG, description="ours", details={"a": 1})
    assert room.llms.get(US, "d") == made
    await room.again()
    found = room.llms.get(US, "d")
    assert (found.id, found.settings, found.description, found.details) == (made.id, LONG, "ours", {"a": 1})
    assert (found.model.name, found.model.source, found.model.engine_args["max-model-len"]) == ("d", "org/tiny", 2048)


@pytest.mark.parametrize(
    ("base", "source"), [("tiny", "org/tiny"), ("small", "org/small"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
)
async def test_base_models(room, base, source):
    """A model of the configuration, an alias, an id that a pattern allows; the default price where there is none."""
    made = await room.llms.create(US, "d", LlmSettings(base))
    assert (made.model.source, made.model.price) == (source, Price(input=0.5, output=0.5))


@pytest.mark.parametrize("base", ["far", "nobody", "Meta/x", "/etc", "../x", "Qwen/../x", "Qwen/a/b", "./Qwen/x", ""])
async def test_what_is_no_base(room, base):
    """Paths, models that are not a language models of ours, and ids that no pattern allows are alike unknown."""
    with pytest.raises(UnknownName, match="there is no base model") as caught:
        await room.llms.create(US, "d", LlmSettings(base))
    assert caught.value.code == "unknown_base_model"


async def test_a_folder_is_no_id(room):
    """Where a folder is called like an id of a hub, the id cannot be deployed: the folder would be loaded."""
    (room.folder / "Qwen" / "x").mkdir(parents=True)
    with pytest.raises(UnknownName):
        room.llms.spec(US, LlmSettings("Qwen/x"))


async def test_a_key_and_its_project_limit_bases(room):
    """A key that may use other models alone may not make a deployment of this one."""
    with pytest.raises(UnknownName):
        room.llms.spec(Caller("default", Scope.SUBMIT, "k", frozenset({"far"})), TINY)


@pytest.mark.parametrize("name", ["", "a b", "-x", "a/b", "x" * 101, "batches", "a~b", "..."])
async def test_names_that_cannot_be(room, name):
    """A name stands in URLs as it is, and means nothing else there."""
    with pytest.raises(InvalidInput):
        await room.llms.create(US, name, TINY)


@pytest.mark.parametrize("name", ["tiny", "far", "small", "d"])
async def test_names_that_are_taken(room, name):
    """Nothing else that the project could mean has the name; another project's deployment may."""
    await room.llms.create(US, "d", TINY)
    await room.llms.create(THEM, "d", TINY)
    with pytest.raises(Conflict):
        await room.llms.create(US, name, TINY)


async def test_other_projects_do_not_see_it(room):
    """A deployment is its project's own."""
    await room.llms.create(US, "d", TINY)
    assert [each.name for each in room.llms.list(THEM)] == ["tiny"]
    for verb in (room.llms.get, room.directory.find):
        with pytest.raises(UnknownName):
            verb(THEM, "d")


async def test_those_of_the_configuration(room):
    """They are shown like the others, and changed only where they are written."""
    found = room.llms.get(US, "tiny")
    assert (found.is_configured, found.project, found.settings.base_model) == (True, "default", "tiny")
    for change in (room.llms.update(US, "tiny", LONG), room.llms.delete(US, "tiny"), room.llms.stop(US, "tiny")):
        with pytest.raises(Conflict, match="in the configuration"):
            await change


async def test_settings_make_one_model(room):
    """Nothing said is the configured model itself; the same settings are the same model; others another."""
    configured = room.directory.configured.get("tiny")
    assert room.llms.spec(US, TINY) == replace(configured, allowed=["tiny"])
    assert room.llms.spec(US, LONG) == room.llms.spec(US, LONG)
    assert room.llms.spec(US, LONG).name.startswith("tiny~") and room.llms.spec(US, LONG).alias == "tiny"
    assert room.llms.spec(US, LlmSettings("tiny", {"seed": 1})).name != room.llms.spec(US, LONG).name


@pytest.mark.once
def test_the_same_in_other_words_is_the_same_model():
    """What a client is shown of a configured model, and sends back as a job's config, is that very model."""
    base = ModelSpec("tiny", "llm", "s", engine_args={"--max_model_len": "512", "enforce-eager": None, "other": 0.5})
    for said in ({"max-model-len": 512, "enforce-eager": True}, {"max-model-len": 512}, {}):
        assert model_of(base, LlmSettings("tiny", said)) is base
    for said in ({"max-model-len": 513}, {"enforce-eager": False}, {"seed": 1}):
        assert model_of(base, LlmSettings("tiny", said)).name.startswith("tiny~")


async def test_a_job_shares_the_engine_of_a_deployment(room):
    """While it runs with the same settings; a job with others has its own."""
    made = await room.llms.create(US, "d", replace(LONG, scaling=Scaling(replicas_max=4)))
    assert room.llms.spec(US, LONG).name.startswith("tiny~")
    room.engines.states["d", 2048] = READY
    assert room.llms.spec(US, LONG) == replace(made.model, allowed=["d", "tiny"])
    assert room.llms.spec(US, TINY).name == "tiny"
    assert room.llms.spec(THEM, LONG).name.startswith("tiny~")


async def test_a_token_is_kept_and_never_shown(room):
    """It lies in the vault, is replaced with an update and goes with the deployment."""
    made = await room.llms.create(US, "d", replace(TINY, hf_token=TOKEN))
    name = f"llm/{made.id}/hf_token"
    assert made.settings.hf_token == f"secret:{name}" and made.model.secrets == {"HF_TOKEN": f"secret:{name}"}
    assert await room.vault.reveal(name) == TOKEN and TOKEN not in repr(made)
    await room.llms.update(US, "d", replace(made.settings, hf_token="hf_another"))
    assert await room.vault.reveal(name) == "hf_another"
    await room.llms.update(US, "d", replace(LONG, hf_token=made.settings.hf_token))
    assert await room.vault.reveal(name) == "hf_another"
    await room.llms.delete(US, "d")
    with pytest.raises(ModelFailed):
        await room.vault.reveal(name)


@pytest.mark.parametrize("token", ["secret:other", "env:HOME", "file:/etc/passwd", "two\nlines", ""])
async def test_a_token_is_no_reference(room, token):
    """A caller names no secret that others keep."""
    with pytest.raises(InvalidInput):
        await room.llms.create(US, "d", replace(TINY, hf_token=token))
    with pytest.raises(InvalidInput):
        await room.llms.keep_token(US, replace(TINY, hf_token=token))


async def test_the_token_of_a_job(room):
    """The same token of a project makes the same model; it goes a while after the last job that brought it."""
    settings = await room.llms.keep_token(US, replace(TINY, hf_token=TOKEN))
    assert settings == await room.llms.keep_token(US, replace(TINY, hf_token=TOKEN))
    assert settings != await room.llms.keep_token(THEM, replace(TINY, hf_token=TOKEN))
    assert room.llms.spec(US, settings).secrets == {"HF_TOKEN": settings.hf_token}
    with pytest.raises(InvalidInput):
        room.llms.spec(US, replace(TINY, hf_token=TOKEN))
    name = settings.hf_token.removeprefix("secret:")
    await room.llms.sweep()
    assert await room.vault.reveal(name) == TOKEN
    room.clock.at += 8 * 86_400
    await room.llms.sweep()
    with pytest.raises(ModelFailed):
        await room.vault.reveal(name)


def job_of(*models):
    return JobSpec("job_1", DatasetSpec(["x"]), [*models], TableForm(), Policy(), None, "", {}, 0.0)


@pytest.mark.parametrize("drops", ["the deployment", "its token"])
async def test_a_token_that_is_removed_while_an_order_is_taken(room, drops):
    """What is stored first counts: the job, and the token stays until it ends; or the removal, and rows of the job that
    name another model run."""

    async def remove():
        if drops == "the deployment":
            await room.llms.delete(US, "d")
        else:
            await room.llms.update(US, "d", LONG)

    made = await room.llms.create(US, "d", replace(TINY, hf_token=TOKEN))
    name, other = f"llm/{made.id}/hf_token", ModelSpec("other", "openai", "other")
    job = job_of(made.model, other)
    await room.database.write(job_records.enter, job, None, None)
    await remove()
    assert await room.vault.reveal(name) == TOKEN
    await room.database.write(lambda db: db.execute(jobs.update().values(state="completed")))
    await room.llms.sweep()
    with pytest.raises(ModelFailed):
        await room.vault.reveal(name)
    with pytest.raises(ModelsRemoved, match="the model d, or its token, was removed") as refused:
        await room.database.write(job_records.enter, replace(job, id="job_2"), None, None)
    assert refused.value.left_of(job.models) == [other]
    await room.database.write(job_records.enter, replace(job, id="job_2", used=["other"]), None, None)


async def test_replicas_that_stay(room):
    """An engine whose replicas are to stay is held: after a restart too, until it is stopped or deleted."""
    await room.llms.create(US, "d", replace(TINY, scaling=STAYS))
    assert room.engines.kept == [("d", 1024)]
    room.engines.kept.clear()
    await room.again()
    assert room.engines.kept == [("d", 1024)]
    await room.llms.stop(US, "d")
    assert room.engines.kept == []
    with pytest.raises(Unavailable, match="start it"):
        room.directory.find(US, "d")
    await room.llms.start(US, "d")
    assert room.engines.kept == [("d", 1024)] and room.directory.find(US, "d").model.name == "d"
    await room.llms.delete(US, "d")
    assert room.engines.kept == []
    with pytest.raises(UnknownName):
        room.directory.find(US, "d")


async def test_an_update_replaces_what_runs_once_it_is_ready(room):
    """Calls go to the engine that runs until the new one is ready; then that one is let go."""
    await room.llms.create(US, "d", replace(TINY, scaling=STAYS))
    room.engines.states["d", 1024] = READY
    room.engines.hold.clear()
    made = await room.llms.update(US, "d", replace(LONG, scaling=STAYS))
    assert made.is_updating and made.model.engine_args["max-model-len"] == 1024
    room.engines.hold.set()

    def kinds() -> list[str]:
        return [each.kind for each in room.llms.view(room.llms.get(US, "d")).events]

    await until(lambda: "updated" in kinds())
    assert not room.llms.get(US, "d").is_updating, "who sees the event reads what is settled"
    assert room.llms.get(US, "d").model.engine_args["max-model-len"] == 2048
    assert room.engines.kept == [("d", 2048)]
    assert kinds() == ["ready", "updating", "updated"]


async def test_an_update_that_fails_keeps_what_runs(room):
    """It goes on answering, after a restart too, and says why the update did not come about."""
    await room.llms.create(US, "d", TINY)
    room.engines.states["d", 1024] = READY
    room.engines.failures["d", 2048] = ModelFailed("out of memory")
    await room.llms.update(US, "d", LONG)
    await until(lambda: room.llms.get(US, "d").problem)
    for _ in range(2):
        found = room.llms.get(US, "d")
        assert (found.problem, found.settings) == ("out of memory", LONG)
        assert found.model.engine_args["max-model-len"] == 1024
        assert "out of memory" in room.llms.view(found).message
        await room.again()


async def test_an_update_without_room_for_both(room):
    """Where the new engine waits for the machine, the old one is let go first."""
    await room.llms.create(US, "d", replace(TINY, scaling=STAYS))
    room.engines.states["d", 1024] = READY
    room.engines.states["d", 2048] = EngineView(EngineState.WAITING)
    room.engines.hold.clear()
    await room.llms.update(US, "d", replace(LONG, scaling=STAYS))
    await until(lambda: room.engines.kept == [("d", 2048)])
    room.engines.hold.set()
    await until(lambda: not room.llms.get(US, "d").is_updating)


async def test_more_replicas_need_no_other_engine(room):
    """How many there are to be changes at once."""
    await room.llms.create(US, "d", TINY)
    room.engines.states["d", 1024] = READY
    made = await room.llms.update(US, "d", replace(TINY, scaling=STAYS))
    assert not made.is_updating and room.engines.kept == [("d", 1024)]


@pytest.mark.parametrize(
    "settings",
    [
        replace(TINY, scaling=Scaling(replicas_min=3, replicas_max=2)),
        replace(TINY, scaling=Scaling(cooldown_s=-1.0)),
        replace(TINY, preloaded_adapters=["a"], takes_adapters=False),
        replace(TINY, preloaded_adapters=["nobody"]),
        LlmSettings("tiny", {"trust-remote-code": True}),
    ],
)
async def test_settings_that_cannot_be(room, settings):
    """Nothing of what is refused is kept."""
    with pytest.raises(InvalidInput):
        await room.llms.create(US, "d", settings)
    assert [each.name for each in room.llms.list(US)] == ["tiny"]


async def test_a_base_that_is_no_more(tmp_path):
    """Its deployment stays, answers nothing and says why."""
    room = LlmRoom(tmp_path)
    await room.again()
    await room.llms.create(US, "d", LlmSettings("small"))
    await room.close()
    room = LlmRoom(tmp_path, '[models.tiny]\nengine = "vllm"\nsource = "org/tiny"\n')
    await room.again()
    found = room.llms.get(US, "d")
    assert found.is_broken and room.llms.view(found).state == EngineState.FAILED
    with pytest.raises(Unavailable):
        room.directory.find(US, "d")
    await room.llms.delete(US, "d")
    await room.close()


async def test_the_directory_has_them(room):
    """A deployment is a model of its project by its name, for calls and for jobs."""
    await room.llms.create(US, "d", TINY)
    assert [each.name for each in room.directory.list(US)] == ["tiny", "far", "d"]
    assert [(each.name, each.allowed) for each in room.directory.specs(US)][-1] == ("d", ["d"])
    limited = Caller("default", Scope.SUBMIT, "k", frozenset({"tiny"}))
    assert [each.name for each in room.directory.list(limited)] == ["tiny"]
