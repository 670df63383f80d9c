"""Models that are a connector: registered, deployed, found by their names, and what a job gets of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from remote_room import KEY, THEM, US, RemoteRoom, connector_fields

from batchmill.errors import Conflict, Forbidden, InvalidInput, RateLimited, UnknownName
from batchmill.jobs.ledger import deployed
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.deployed import ModelsRemoved
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.models.connectors.reading import read_connector, read_file
from batchmill.services.remote import model_records as remote_model_records
from batchmill.services.remote.models import find_batch_provider, spec_of
from batchmill.services.remote.stored import ConnectorRecord, RemoteModel
from batchmill.states import JobState
from batchmill.types import Caller, Connector, DatasetSpec, ModelSpec, Policy, Scope
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[RemoteRoom]:
    room = RemoteRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


@pytest.fixture
async def made(room: RemoteRoom) -> ConnectorRecord:
    return await room.remote.connectors.create(US, connector_fields())


async def register(room: RemoteRoom, made: ConnectorRecord, name: str = "embed", **fields: Any) -> RemoteModel:
    room.clock.at += 1.0  # so that there is an order in which they were made
    values = {"name": name, "function_name": "remote", "connector_id": made.id}
    return await room.remote.models.register(US, values | fields)


# -- registering ------------------------------------------------------------------------------------------------------


async def test_versions_of_a_name_are_one_group(room: RemoteRoom, made: ConnectorRecord) -> None:
    """The first model of a name makes a group of it, and the next is its next version; all outlive the process."""
    first, second = await register(room, made), await register(room, made, description="better")
    assert first.group == second.group
    assert (first.version, second.version, first.state) == (1, 2, "REGISTERED")
    groups = room.remote.groups.all(US)
    assert [(each.name, each.latest) for each in groups] == [("embed", 2)]
    remote = await room.again()
    assert remote.models.all(US) == [first, second]
    assert remote.groups.all(US) == groups


async def test_a_group_may_be_named(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A model joins the group that is named; of an unknown one, or another project's, nothing is registered."""
    group = await room.remote.groups.register(US, {"name": "ours", "access_mode": "private"})
    theirs = await room.remote.groups.register(THEM, {"name": "ours"})
    assert (await register(room, made, model_group_id=group.id)).group == group.id
    for unknown in (theirs.id, "x"):
        with pytest.raises(UnknownName, match="Model group not found"):
            await register(room, made, model_group_id=unknown)
    assert len(room.remote.models.all(US)) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": None}, "model name is null"),
        ({"function_name": None}, "model format is null"),
        ({"function_name": "TEXT_EMBEDDING"}, "function_name must be remote"),
        ({"connector_id": None}, "You must provide connector content when creating a remote model without connector"),
        ({"guardrails": {"type": "local_regex"}}, "guardrails is not supported here"),
        ({"interface": {"input": {"$ref": "#"}}}, "is not supported: write it out"),
        ({"backend_roles": ["x"]}, "You cannot specify model access control parameters"),
        ({"is_enabled": "yes"}, "is_enabled is true or false"),
        ({"rate_limiter": {"limit": "4", "unit": "FORTNIGHTS"}}, "rate_limiter.unit must be one of"),
        ({"rate_limiter": {"limit": "-4", "unit": "MINUTES"}}, "rate_limiter.limit must be at least 0.001"),
        ({"rate_limiter": {"limit": "1e-300", "unit": "DAYS"}}, "rate_limiter.limit must be at least 0.001"),
        ({"deploy_setting": {"is_auto_deploy_enabled": 1}}, "is_auto_deploy_enabled is true or false"),
    ],
)
async def test_what_is_refused(room: RemoteRoom, made: ConnectorRecord, fields: dict[str, Any], words: str) -> None:
    """What ML Commons refuses is refused in its words; what would do nothing here is refused by name."""
    with pytest.raises(InvalidInput, match=words):
        await register(room, made, **fields)
    assert room.remote.models.all(US) == []
    assert room.remote.groups.all(US) == []


async def test_unknown_connector(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A model names a connector of its own project."""
    fields = {"name": "m", "function_name": "remote", "connector_id": made.id}
    with pytest.raises(UnknownName, match="Failed to find connector with the provided connector id"):
        await room.remote.models.register(THEM, fields)


async def test_a_connector_of_its_own(room: RemoteRoom) -> None:
    """An inline connector is the model's alone: its credentials are kept, change and go with it."""
    fields = {"name": "m", "function_name": "REMOTE", "connector": connector_fields()}
    model = await room.remote.models.register(US, fields)
    assert await room.secrets() == [f"connector/{model.id}/openAI_key"]
    assert room.remote.connectors.all(US) == []
    changed = await room.remote.models.update(US, model.id, {"connector": {"parameters": {"model": "other"}}})
    assert room.remote.models.connector(changed).parameters["model"] == "other"
    with pytest.raises(InvalidInput, match="This remote does not have a connector_id field"):
        await room.remote.models.update(US, model.id, {"connector_id": "x"})
    await room.remote.models.update(US, model.id, {"connector": {"credential": {"openAI_key": "n" * 20}}})
    assert await room.vault.reveal(f"connector/{model.id}/openAI_key") == "n" * 20
    await room.remote.models.delete(US, model.id)
    assert await room.secrets() == []


async def test_an_inline_connector_needs_predict(room: RemoteRoom) -> None:
    """ML Commons takes an inline connector with a predict action only, and where it may lead is checked too."""
    fields = connector_fields()
    del fields["actions"][0]
    with pytest.raises(InvalidInput, match="Connector endpoint is required when creating a remote model"):
        await room.remote.models.register(US, {"name": "m", "function_name": "remote", "connector": fields})
    fields = connector_fields()
    fields["actions"][0]["url"] = "https://10.0.0.1/v1/embeddings"
    with pytest.raises(InvalidInput, match="its address is private"):
        await room.remote.models.register(US, {"name": "m", "function_name": "remote", "connector": fields})


# -- the life of a model ----------------------------------------------------------------------------------------------


async def test_states(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A model is deployed and undeployed any number of times, and deleted only when it is not deployed."""
    models, model = room.remote.models, await register(room, made)
    assert (await models.deploy(US, model.id)).state == "DEPLOYED"
    assert (await models.deploy(US, model.id)).revision == 2
    with pytest.raises(InvalidInput, match="Model cannot be deleted in deploying or deployed state"):
        await models.delete(US, model.id)
    assert (await models.undeploy(US, model.id)).state == "UNDEPLOYED"
    await models.delete(US, model.id)
    with pytest.raises(UnknownName, match=f"Failed to find model with the provided model id: {model.id}"):
        models.get(US, model.id)


async def test_a_call_deploys(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A call deploys a model that is not, unless the model says otherwise."""
    models = room.remote.models
    model, stubborn = (
        await register(room, made),
        await register(room, made, deploy_setting={"is_auto_deploy_enabled": False}),
    )
    assert (await models.ready(US, model.id)).is_deployed
    with pytest.raises(InvalidInput, match=f"deploy model first Model ID: {stubborn.id}"):
        await models.ready(US, stubborn.id)
    assert [each.model.name for each in room.directory.list(US)] == [model.id, model.id]


async def test_auto_deploy_can_be_off(tmp_path: Path) -> None:
    """Where the configuration wants it so, somebody must deploy a model first."""
    room = RemoteRoom(tmp_path, model_auto_deploy=False)
    remote = await room.again()
    made = await remote.connectors.create(US, connector_fields())
    model = await register(room, made)
    with pytest.raises(InvalidInput, match=f"Please run this first: POST /_plugins/_ml/models/{model.id}/_deploy"):
        await remote.models.ready(US, model.id)
    await room.close()


async def test_disabled(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A disabled model answers nobody and is offered to nobody, until it is enabled."""
    models, model = room.remote.models, await register(room, made, is_enabled=False)
    for refused in (models.ready, models.deploy):
        with pytest.raises(Forbidden, match="Model is disabled"):
            await refused(US, model.id)
    assert models.find(model.id) is None
    await models.update(US, model.id, {"is_enabled": True})
    assert (await models.ready(US, model.id)).is_deployed


async def test_update(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A model takes another connector, name, group or limit; what is not said stays."""
    models, model = room.remote.models, await register(room, made, description="old")
    other = await room.remote.connectors.create(US, connector_fields(name="Other"))
    group = await room.remote.groups.register(US, {"name": "ours"})
    changed = await models.update(
        US, model.id, {"name": "new", "connector_id": other.id, "model_group_id": group.id, "rate_limiter": {}}
    )
    assert (changed.name, changed.connector, changed.group, changed.version) == ("new", other.id, group.id, 1)
    assert changed.details.description == "old"
    assert (await room.again()).models.get(US, model.id) == changed
    assert room.remote.groups.get(US, group.id).latest == 1


async def test_rate_limiter(room: RemoteRoom, made: ConnectorRecord) -> None:
    """So many calls of a model are answered in a unit of time, and not one more; jobs keep to it too."""
    model = await register(room, made, rate_limiter={"limit": "2", "unit": "MINUTES"})
    assert room.remote.models.spec(model.id).limits.requests_per_minute == 2
    for _ in range(2):
        room.remote.models.admit(model.id)
    with pytest.raises(RateLimited, match="Request is throttled at model level"):
        room.remote.models.admit(model.id)
    await room.clock.sleep(30)
    room.remote.models.admit(model.id)


async def test_models_are_bounded(room: RemoteRoom, made: ConnectorRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for so many models, and not for one more; what was refused left no version behind."""
    monkeypatch.setattr(remote_model_records, "MODELS_MAX", 1)
    await register(room, made)
    with pytest.raises(InvalidInput, match="which is the maximum"):
        await register(room, made)
    assert room.remote.groups.all(US)[0].latest == 1


# -- groups -----------------------------------------------------------------------------------------------------------


async def test_groups(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A group has a name of its own within its project, changes, and goes when it is empty."""
    groups = room.remote.groups
    with pytest.raises(InvalidInput, match="Model group name is null"):
        await groups.register(US, {})
    with pytest.raises(InvalidInput, match="access_mode must be one of"):
        await groups.register(US, {"name": "g", "access_mode": "restricted"})
    group = await groups.register(US, {"name": "g", "add_all_backend_roles": False, "description": "d"})
    with pytest.raises(InvalidInput, match=f"already being used by a model group with ID: {group.id}"):
        await groups.register(US, {"name": "g"})
    changed = await groups.update(US, group.id, {"name": "h"})
    assert (changed.name, changed.details["description"], changed.revision) == ("h", "d", 2)
    model = await register(room, made, model_group_id=group.id)
    with pytest.raises(Conflict, match="Cannot delete the model group when it has associated model versions"):
        await groups.delete(US, group.id)
    with pytest.raises(UnknownName, match=f"Failed to find model group with ID: {group.id}"):
        groups.get(THEM, group.id)
    await room.remote.models.delete(US, model.id)
    await groups.delete(US, group.id)
    assert groups.all(US) == []


# -- what a job gets --------------------------------------------------------------------------------------------------


def connector(**changes: Any) -> Connector:
    return read_connector(connector_fields(**changes), id="c", is_trusted=True)[0]


def at_batches(url: str, **parameters: str) -> Connector:
    found = connector(parameters=parameters)
    return replace(found, actions=[replace(found.actions[1], url=url)])


@pytest.mark.parametrize(
    ("url", "provider"),
    [
        ("https://api.openai.com/v1/batches", "openai"),
        ("https://API.openai.com/v1/batches", "openai"),
        ("https://me.openai.azure.com/openai/v1/batches", "azure"),
        ("https://api.anthropic.com/v1/messages/batches", "anthropic"),
        ("https://api.cohere.com/v1/embed-jobs", "cohere"),
        ("https://api.cohere.ai/v1/embed-jobs", "cohere"),
        ("https://generativelanguage.googleapis.com/v1beta/models/gemini-x:batchGenerateContent", "gemini"),
        ("https://api.sagemaker.us-east-1.amazonaws.com/CreateTransformJob", "sagemaker"),
        ("https://bedrock.us-east-1.amazonaws.com/model-invocation-job", "bedrock"),
        ("https://bedrock-fips.us-gov-west-1.amazonaws.com/model-invocation-job", "bedrock"),
        ("https://bedrock-runtime.us-east-1.amazonaws.com/x", None),
        ("https://api.openai.com.example.com/v1/batches", None),
        ("https://example.com/openai/v1/batches", None),
    ],
)
@pytest.mark.once
def test_providers_are_known_by_their_hosts(url: str, provider: str | None) -> None:
    """A batch API is known by the whole host, not by a word somewhere in its URL."""
    assert find_batch_provider(at_batches(url)) == provider


@pytest.mark.once
def test_a_provider_may_be_named() -> None:
    """A connector may say whose API it speaks, wherever it is; a name nobody knows is refused."""
    assert find_batch_provider(at_batches("https://mill.example.com/v1/batches", provider="openai")) == "openai"
    with pytest.raises(InvalidInput, match="names the provider 'opnai'"):
        find_batch_provider(at_batches("https://mill.example.com/v1/batches", provider="opnai"))


@pytest.mark.once
def test_two_ways() -> None:
    """With both actions a model has two routes, the batch API first; either can be asked for alone."""
    spec = spec_of("id", connector())
    assert (spec.engine, [route.engine for route in spec.routes]) == ("routes", ["provider_batch", "connector"])
    assert (spec.routes[0].provider, spec.routes[0].source) == ("openai", "text-embedding-ada-002")
    assert spec.live().engine == "connector"
    assert spec_of("id", connector(), route="batch").engine == "provider_batch"
    assert spec_of("id", connector(), route="online").engine == "connector"


@pytest.mark.parametrize(
    ("found", "route", "words"),
    [
        (at_batches("https://mill.example.com/v1/batches"), "auto", 'the parameter "provider": "openai"'),
        (at_batches("https://mill.example.com/v1/batches"), "batch", 'the parameter "provider": "openai"'),
        (at_batches("https://api.openai.com/v1/batches"), "online", "has no predict action"),
    ],
)
@pytest.mark.once
def test_no_way(found: Connector, route: str, words: str) -> None:
    """Where rows cannot go is told with what to change."""
    with pytest.raises(InvalidInput, match=words):
        spec_of("id", found, route=route)


async def test_a_job_keeps_its_connector(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A spec has the connector by value and its credentials by name, and never the credential itself."""
    model = await register(room, made)
    spec = room.remote.models.spec(model.id, route="online")
    await room.remote.connectors.update(US, made.id, {"parameters": {"model": "other"}})
    assert spec.connector is not None
    assert spec.connector.parameters["model"] == "text-embedding-ada-002"
    assert room.remote.models.spec(model.id, route="online").source == "other"
    assert KEY not in repr(spec)


# -- the directory ----------------------------------------------------------------------------------------------------


def caller(project: str = "default", *models: str) -> Caller:
    return Caller(project, Scope.SUBMIT, "k", frozenset(models) or None)


async def test_the_directory_offers_them(room: RemoteRoom, made: ConnectorRecord) -> None:
    """A project's models are found by id, and by name where that means one thing; keys may name fewer."""
    old, model = await register(room, made), await register(room, made)
    directory = room.directory
    assert [each.name for each in directory.list(caller())] == [old.id, model.id, "embed"]
    assert directory.find(caller(), model.id).model.allowed == [model.id, "embed"]
    assert directory.find(caller(), old.id).model.allowed == [old.id]
    assert directory.find(caller(), "embed").model.name == model.id
    assert "embed" in directory.find(caller(), "embed").model.live().targets()
    assert directory.for_job(caller(), "embed").name == model.id
    assert [each.name for each in directory.specs(caller("default", "embed"))] == [old.id, model.id]
    assert [each.name for each in directory.specs(caller("default", model.id))] == [model.id]
    assert directory.serves("/v1/anything", caller())
    for nobody in (caller("other"), caller("default", "something")):
        assert directory.list(nobody) == []
        assert not directory.sees(nobody, model.id)
        with pytest.raises(UnknownName, match="does not exist or you do not have access to it"):
            directory.find(nobody, model.id)


async def test_a_name_of_two_groups_means_nothing(room: RemoteRoom, made: ConnectorRecord) -> None:
    """Where models of two groups have one name only their ids are names, and only callable ones count."""
    await register(room, made)
    group = await room.remote.groups.register(US, {"name": "ours"})
    other = await register(room, made, model_group_id=group.id)
    assert room.remote.models.find("embed") is None
    await room.remote.models.update(US, other.id, {"is_enabled": False})
    found = room.remote.models.find("embed", "default")
    assert found is not None
    assert found.version == 1
    assert room.remote.models.find("embed", "other") is None


async def test_a_model_without_a_way_is_not_offered(room: RemoteRoom) -> None:
    """A model through which no row can go is registered, and not offered for jobs: the others are."""
    fields = connector_fields()
    fields["actions"] = [{**fields["actions"][1], "url": "https://mill.example.com/v1/batches"}]
    made = await room.remote.connectors.create(US, fields)
    model = await register(room, made)
    directory = room.directory
    assert directory.specs(caller()) == []
    with pytest.raises(InvalidInput, match="an unknown batch API"):
        directory.find(caller(), model.id)


# -- orders -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["its own", "shared"])
async def ordered(request: pytest.FixtureRequest, room: RemoteRoom, made: ConnectorRecord) -> RemoteModel:
    """A model that an order names, with a connector of its own or a shared one."""
    if request.param == "shared":
        return await register(room, made)
    fields = {"name": "embed", "function_name": "remote", "connector": connector_fields()}
    return await room.remote.models.register(US, fields)


async def change(room: RemoteRoom, model: RemoteModel, **fields: Any) -> None:
    if model.connector is not None:
        await room.remote.connectors.update(US, model.connector, fields)
    else:
        await room.remote.models.update(US, model.id, {"connector": fields})


async def delete(room: RemoteRoom, model: RemoteModel) -> None:
    await room.remote.models.delete(US, model.id)
    if model.connector is not None:
        await room.remote.connectors.delete(US, model.connector)


def job_of(room: RemoteRoom, model: RemoteModel, *, used: Sequence[str] = ()) -> JobSpec:
    specs = [room.remote.models.spec(model.id), ModelSpec("other", "openai", "other")]
    return JobSpec("job_1", DatasetSpec(["x"]), specs, TableForm(), Policy(), None, "", {}, 0.0, used=[*used])


async def enter(room: RemoteRoom, job: JobSpec) -> None:
    assert room.database is not None
    await room.database.write(job_records.enter, job, None, None)


async def test_a_connector_that_is_removed_while_an_order_is_taken(room: RemoteRoom, ordered: RemoteModel) -> None:
    """The job is not stored, unless its rows name other models."""
    job = job_of(room, ordered)
    await delete(room, ordered)
    with pytest.raises(UnknownName, match=f"of the model {ordered.id} was removed: choose") as refused:
        await enter(room, job)
    assert isinstance(refused.value, ModelsRemoved)
    assert [each.name for each in refused.value.left_of(job.models)] == ["other"]
    await enter(room, replace(job, used=["other"]))


async def test_a_connector_of_a_job_that_is_stored_first(room: RemoteRoom, ordered: RemoteModel) -> None:
    """The connector stays until the job has ended."""
    await enter(room, job_of(room, ordered))
    with pytest.raises(Conflict, match="an unfinished job uses"):
        await delete(room, ordered)


async def test_a_connector_that_is_changed_while_an_order_is_taken(room: RemoteRoom, ordered: RemoteModel) -> None:
    """The job is not stored: what it was checked for is there no more. Sent again, the order gets what is there now."""
    job = job_of(room, ordered)
    await change(room, ordered, parameters={"model": "other"})
    with pytest.raises(Conflict, match=f"of the model {ordered.id} was changed meanwhile: send the order again"):
        await enter(room, job)
    await enter(room, replace(job, id="job_2", used=["other"]))
    await enter(room, job_of(room, ordered))


async def test_a_retry_and_its_connector(room: RemoteRoom, ordered: RemoteModel) -> None:
    """A retry calls what its job was ordered with, though that has changed since; with none it is refused."""
    job = job_of(room, ordered)
    await enter(room, job)
    assert room.database is not None
    ledger = Ledger(room.database)
    await room.database.call(ledger.move, job.id, JobState.CANCELLED, finished=1.0)
    await change(room, ordered, parameters={"model": "other"})
    await room.database.read(partial(deployed.refuse_removed, spec=job, models=job.models))
    await delete(room, ordered)
    within = partial(deployed.refuse_removed, spec=job, models=job.models)
    with pytest.raises(UnknownName, match="was removed"):
        await room.database.call(partial(ledger.open_generation, within=within), job.id, 1, {}, 0)
    assert ledger.job(job.id)["generation"] == 0
    await room.database.read(partial(deployed.refuse_removed, spec=job, models=job.models[1:]))


async def test_a_connector_in_a_file_is_not_looked_for(room: RemoteRoom, tmp_path: Path) -> None:
    """A job with one is stored, and a stored connector of the same name is not in use by it."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(connector_fields(credential={"openAI_key": "env:KEY"})))
    model = ModelSpec("m", "connector", str(path), connector=read_file(path))
    await enter(room, JobSpec("job_1", DatasetSpec(["x"]), [model], TableForm(), Policy(), None, "", {}, 0.0))
    await room.remote.connectors.create(US, connector_fields(connector_id="mine"))
    await room.remote.connectors.delete(US, "mine")
