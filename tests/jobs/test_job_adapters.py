"""Adapters that a job's rows name: had, and looked at, before any row runs. The engine itself never starts here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace
from small_adapter import write_adapter

from batchmill.errors import InvalidInput
from batchmill.jobs.intake import adapters, preparation
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, prepare
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.ledger.plan import PlanReader
from batchmill.jobs.service import JobService
from batchmill.states import JobState
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import CHAT, OpenAIForm

FRONTEND = {"frontend": "openai"}


class Had(Struct, frozen=True):
    """What became of an adapter of the hub."""

    own_name: str
    state: str = "ready"
    message: str = ""
    folder: str = ""
    rank: int = 8


class Hub:
    """Adapters that can be had, by id; the others cannot. With `gate` it takes until that is set."""

    def __init__(self, folders: dict[str, str], gate: asyncio.Event | None = None) -> None:
        self.folders, self.gate = folders, gate
        self.asked: list[tuple[str, str, list[str]]] = []
        self.tokens: list[str | None] = []
        self.called = asyncio.Event()

    async def ensure(self, project, base, hub_ids, *, token=None):
        self.asked.append((project, base, list(hub_ids)))
        self.tokens.append(token)
        self.called.set()
        if self.gate is not None:
            await self.gate.wait()
        return {each: self._had(each) for each in hub_ids}

    def _had(self, hub_id):
        if hub_id not in self.folders:
            return Had(f"{hub_id}/1", "failed", f"there is no {hub_id}", rank=0)
        return Had(f"{hub_id}/1", folder=self.folders[hub_id])


class RankedHub(Hub):
    """Whose adapters have a high rank."""

    def _had(self, hub_id):
        return msgspec.structs.replace(super()._had(hub_id), rank=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"num_hidden_layers": 2}')
    return tmp_path


def write_rows(folder: Path, *models: str | None, text: str = "hi") -> str:
    lines = []
    for number, model in enumerate(models):
        body = {"temperature": 0, "messages": [{"role": "user", "content": text}]}
        body |= {} if model is None else {"model": model}
        lines.append(json.dumps({"custom_id": f"r{number}", "url": CHAT, "body": body}) + "\n")
    (folder / "in.jsonl").write_text("".join(lines))
    return str(folder / "in.jsonl")


def base(folder: Path, **more) -> ModelSpec:
    """A model whose engine cannot be started."""
    return ModelSpec("base", "llm", str(folder / "base"), python=str(folder / "no-python"), **more)


def order(folder: Path, *models: str | None, model: ModelSpec, **more) -> JobOrder:
    path = write_rows(folder, *models)
    return JobOrder(DatasetSpec([path], format="openai"), [model], origin=FRONTEND, project="p", **more)


async def prepared(service: JobService, asked: JobOrder) -> tuple[JobView, JobSpec]:
    """A job that has come as far as its engine, and how it is described then."""
    submitted = await service.submit(asked)
    view = [view async for view in service.watch(submitted.id, 0.05)][-1]
    return view, read_spec((await service._record(submitted.id))["spec"])


async def test_adapters_of_a_model_that_settings_made(folder, opened):
    """They are registered for its base, where others find them, and fetched with the token that the job brings."""
    hub = Hub({"acme/a": write_adapter(folder / "a")})
    made = replace(
        base(folder, adapter_patterns=["acme/*"], alias="base", secrets={"HF_TOKEN": "secret:mine"}), name="base~1"
    )
    await prepared(await opened(adapters=hub), order(folder, "acme/a", model=made, default_model=True))
    assert (hub.asked, hub.tokens) == ([("p", "base", ["acme/a"])], ["secret:mine"])


async def test_adapters_are_fetched_and_pinned(folder, opened):
    """What rows name by a pattern is fetched once, and stands in the description under its own name."""
    place = write_adapter(folder / "a")
    hub = Hub({"acme/a": place})
    job_order = order(
        folder, None, "acme/a", "acme/gone", "acme/a",
        model=base(folder, adapter_patterns=["acme/*"], allowed=["base"]), default_model=True,
    )  # fmt: skip
    service = await opened(adapters=hub)
    view, spec = await prepared(service, job_order)
    assert (hub.asked, hub.tokens) == ([("p", "base", ["acme/a", "acme/gone"])], [None])
    assert (view.state, view.reason) == (JobState.PAUSED, "engine_failed"), view.message
    model = spec.models[0]
    assert model.adapters == {"acme/a/1": place, "acme/gone/1": "acme/gone"}
    assert model.adapter_names == {"acme/a": "acme/a/1", "acme/gone": "acme/gone/1"}
    assert model.bad_adapters == {"acme/gone/1": "there is no acme/gone"}
    assert model.adapter_rank == 16
    assert spec.used == ["base", "acme/a/1", "acme/gone/1"]
    assert view.rows_folded == 1  # two rows that name one adapter share a target
    await service.resume(view.id)
    [view async for view in service.watch(view.id, 0.05)]
    assert len(hub.asked) == 1, "a job that goes on fetches nothing again"


@pytest.mark.parametrize(
    "known", [{"adapter_patterns": ["acme/*"]}, {"adapters": {"acme/a": "acme/a", "acme/b": "acme/b"}}]
)
async def test_a_job_says_what_it_waits_for(known, folder, opened):
    """While adapters are fetched the job is stored, its notes and its explanation say which; it can be cancelled."""
    hub = Hub({}, asyncio.Event())
    service = await opened(adapters=hub)
    job_order = order(folder, "acme/a", "acme/b", model=base(folder, **known))
    async with asyncio.timeout(60):
        job = (await service.submit(job_order)).id
        await hub.called.wait()
    result = "fetching 2 adapters: acme/a, acme/b"
    assert (await service.show(job)).notes[0] == result
    assert (await service.explain(job)).reasons[0] == result
    await service.cancel(job)
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert view.state == JobState.CANCELLED


async def test_an_interrupted_fetch_begins_anew(folder, opened):
    """A job that is paused while adapters are fetched asks for them again when it goes on."""
    place, hub = write_adapter(folder / "a"), Hub({}, asyncio.Event())
    service = await opened(adapters=hub)
    job = (await service.submit(order(folder, "acme/a", model=base(folder, adapter_patterns=["acme/*"])))).id
    async with asyncio.timeout(60):
        await hub.called.wait()
    assert (await service.pause(job)).state == JobState.PAUSED
    hub.folders, hub.gate = {"acme/a": place}, None
    await service.resume(job)
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.reason, view.rows, len(hub.asked)) == ("engine_failed", 1, 2)


async def test_adapters_that_rows_use_are_looked_at(folder, opened):
    """Of registered and configured adapters those that rows go to are checked; what does not fit is named."""
    good, high, deep = (
        write_adapter(folder / "good"), write_adapter(folder / "high", rank=64), write_adapter(folder / "deep", layer=7)
    )  # fmt: skip
    places = {"good/1": good, "high/2": high, "deep": deep, "gone/1": str(folder / "gone"), "unused/1": "/nowhere"}
    model = base(folder, adapters=places, adapter_names={"good": "good/1", "gone": "gone/1"}, adapter_rank=16)
    job_order = order(folder, "good", "good/1", "high/2", "deep", "gone", model=model)
    view, spec = await prepared(await opened(adapters=Hub({})), job_order)
    assert view.rows_folded == 1
    assert sorted(spec.models[0].adapters) == ["deep", "gone/1", "good/1", "high/2"], "what no row uses is left out"
    bad = spec.models[0].bad_adapters
    assert sorted(bad) == ["deep", "gone/1", "high/2"]
    assert bad["high/2"] == "its rank is 64, and the maximum of this model's engine is 16"
    assert "layer 7" in bad["deep"] and "adapter_config.json" in bad["gone/1"]


async def test_a_configured_id_of_a_hub_is_fetched(folder, opened):
    """A configured adapter that lies at a hub is fetched when rows use it, and keeps its name."""
    place = write_adapter(folder / "a")
    hub = Hub({"acme/a": place})
    model = base(folder, adapters={"tuned": "acme/a", "idle": "acme/b"}, adapter_rank=16)
    _, spec = await prepared(await opened(adapters=hub), order(folder, "tuned", model=model))
    assert hub.asked == [("p", "base", ["acme/a"])]
    assert (spec.models[0].adapters, spec.models[0].bad_adapters) == ({"tuned": place}, {})


async def test_a_refused_dataset_fetches_nothing(folder, opened):
    """With a bad row nothing runs, so nothing is fetched."""
    hub = Hub({})
    job_order = order(folder, "acme/a", "elsewhere/a", model=base(folder, adapter_patterns=["acme/*"]))
    view, _ = await prepared(await opened(adapters=hub), job_order)
    assert (view.state, view.problems[0].code, hub.asked) == (JobState.FAILED, "unknown_model", [])


async def test_without_a_service_the_job_fails(folder, opened):
    """Where nobody fetches adapters the job says so, naming the adapter."""
    service = await opened()
    job_order = order(folder, "acme/a", model=base(folder, adapter_patterns=["acme/*"]))
    view, _ = await prepared(service, job_order)
    assert (view.state, view.reason) == (JobState.FAILED, "no_adapters")
    assert "'acme/a'" in view.message


async def test_a_known_order_keeps_what_was_fetched(folder, opened):
    """The same command again goes on with the adapters that its job was given."""
    place, hub = write_adapter(folder / "a"), Hub({})
    hub.folders["acme/a"] = place
    service = await opened(adapters=hub)
    job_order = msgspec.structs.replace(
        order(folder, "acme/a", model=base(folder, adapter_patterns=["acme/*"])),
        origin=None, output=str(folder / "out.jsonl"),
    )  # fmt: skip
    first, before = await prepared(service, job_order)
    again, after = await prepared(service, job_order)
    assert (again.id, len(hub.asked)) == (first.id, 1)
    assert after.models == before.models


def test_rows_of_one_adapter_run_together(folder):
    """Whatever its rows call an adapter they are one target; targets come by own name, the base first."""
    places = {"b/1": "/b", "a/2": "/a"}
    model = base(folder, adapters=places, adapter_names={"a": "a/2", "b": "b/1"}, adapter_rank=16)
    path = write_rows(folder, "b", "a", None, "b/1", "a/2", text="same")
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([path]), models=[model], form=OpenAIForm(), policy=Policy(), output=None,
        identity="", code={}, created=0.0,
    )  # fmt: skip
    for name in ("dataset", "plan"):
        (folder / name).mkdir()
    new_order = PrepareOrder(spec, str(folder / "dataset"), str(folder / "plan"))
    found = msgspec.json.decode(prepare(msgspec.json.encode(new_order), lambda _: None), type=Prepared)
    assert [(each.adapter, each.rows, each.folded) for each in found.plan.targets] == [
        (None, 1, 0), ("a/2", 1, 1), ("b/1", 1, 1),
    ]  # fmt: skip
    reader = PlanReader(folder / "plan")
    assert (list(reader.row_numbers(0, 3)), list(reader.followers())) == ([2, 1, 0], [(3, 0), (4, 1)])
    assert adapters.used_by([model], found.plan) == {0: ["a/2", "b/1"]}


async def test_a_retry_looks_at_bad_adapters_again(folder):
    """What was bad may have been mended: a retry looks again, at nothing else."""
    (folder / "mended").mkdir()
    model = base(
        folder, adapters={"mended": str(folder / "mended"), "still": "/nowhere", "good": "/not/looked/at"},
        bad_adapters={"mended": "no weights", "still": "no weights"}, adapter_rank=16,
    )  # fmt: skip
    (folder / "mended").rmdir()
    write_adapter(folder / "mended")
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([]), models=[model], form=OpenAIForm(), policy=Policy(), output=None,
        identity="", code={}, created=0.0,
    )  # fmt: skip

    async def offload(target, order, progress):
        assert target == adapters.CHECK
        return adapters.check_offloaded(order, progress)

    found = await adapters.AdapterWork(adapters.NoAdapters(), offload).check_again(spec, {})
    assert list(found.models[0].bad_adapters) == ["still"]


async def test_nobody_fetches():
    """The stand-in refuses, naming what was wanted."""
    with pytest.raises(InvalidInput, match="acme/a"):
        await adapters.NoAdapters().ensure("p", "base", ["acme/a"])


@pytest.mark.parametrize(("argument", "rank"), [({}, 64), ({"max-lora-rank": 16}, 16)])
def test_room_grows_with_what_was_fetched(folder, argument, rank):
    """The engine gets room for the ranks that were fetched, unless somebody has settled it."""
    model = base(folder, adapter_rank=16, engine_args=argument)
    found = adapters.with_fetched(model, {"acme/a": Had("acme/a/1", folder="/a", rank=40)})
    assert found.adapter_rank == rank


@pytest.mark.parametrize(
    ("argument", "room", "is_bad"),
    [({}, 64, False), ({"max-lora-rank": 64}, 16, False), ({"--max_lora_rank": "8"}, 16, True)],
)
async def test_a_configured_id_gets_room_for_its_rank(folder, opened, argument, room, is_bad):
    """What lies at a hub tells its rank once it is here: the engine has room for it, unless that is settled."""
    place = write_adapter(folder / "a", rank=64)
    hub = RankedHub({"acme/a": place})
    model = base(folder, adapters={"mine": "acme/a"}, adapter_rank=16, engine_args=argument)
    service = await opened(adapters=hub)
    _, spec = await prepared(service, order(folder, "mine", model=model, default_model=True))
    assert spec.models[0].adapters == {"mine": place}
    assert spec.models[0].adapter_rank == room
    assert bool(spec.models[0].bad_adapters) is is_bad


def test_only_what_is_used_stays(folder):
    """Names of adapters that no row uses leave the description; the model's own stay. So does what an engine has."""
    places, names = {"a/1": "/a", "b/1": "/b", "c": "/c"}, {"a": "a/1", "b": "b/1"}
    allowed = ["base", "other-name", "a", "a/1", "b", "b/1", "c"]
    model = base(
        folder, adapters=places, adapter_names=names, allowed=allowed, adapter_rank=16, bad_adapters={"c": "x"}
    )
    static = msgspec.structs.replace(model, adapter_rank=0)
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([]), models=[model, static], form=OpenAIForm(), policy=Policy(), output=None,
        identity="", code={}, created=0.0,
    )  # fmt: skip
    found, same = adapters.drop_unused(spec, {0: ["b/1"], 1: []}).models
    assert (found.adapters, found.adapter_names, found.bad_adapters) == ({"b/1": "/b"}, {"b": "b/1"}, {})
    assert found.allowed == ["base", "other-name", "b", "b/1"]
    assert same == static


@pytest.mark.parametrize(("most", "is_refused"), [(3, False), (2, True)])
def test_what_a_job_can_tell_apart_is_bounded(folder, monkeypatch, most, is_refused):
    """With more models and adapters than rows can be marked with, the order is refused, naming how many there are."""
    monkeypatch.setattr(preparation, "TARGETS_MAX", most)
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([]), models=[base(folder, adapters={"a": "/a", "b": "/b"})], form=OpenAIForm(),
        policy=Policy(), output=None, identity="", code={}, created=0.0,
    )  # fmt: skip
    if not is_refused:
        assert len(preparation.seal_order(spec).targets) == 4
        return
    with pytest.raises(InvalidInput, match="3 models and adapters"):
        preparation.seal_order(spec)
