"""Connectors: whose they are, where they may lead, and what becomes of their credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from fakes.databases import databases
from remote_room import KEY, THEM, US, RemoteRoom, at, connector_fields

from batchmill.errors import Conflict, Forbidden, InvalidInput, ModelFailed, UnknownName
from batchmill.models.addresses import Private
from batchmill.services.remote import connector_records, connectors
from batchmill.services.remote.changes import new_id
from batchmill.services.remote.connectors import Endpoints
from batchmill.store.sql.tables import jobs
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[RemoteRoom]:
    room = RemoteRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


def model_of(connector_id: str) -> dict[str, Any]:
    return {"name": "m", "function_name": "remote", "connector_id": connector_id}


async def test_a_connector_and_its_secrets_outlive_the_process(room: RemoteRoom) -> None:
    """What was made is there for the next process; the connector refers to its credential, which is in the vault."""
    made = await room.remote.connectors.create(US, connector_fields(description="all of it"))
    remote = await room.again()
    found = remote.connectors.get(US, made.id)
    assert found == made
    assert (found.revision, found.connector.parameters["model"]) == (1, "text-embedding-ada-002")
    assert found.connector.credential == {"openAI_key": f"secret:connector/{made.id}/openAI_key"}
    assert await room.vault.reveal(f"connector/{made.id}/openAI_key") == KEY
    assert KEY.encode() not in databases.data(room.folder / "batchmill.db")


async def test_others_do_not_see_it(room: RemoteRoom) -> None:
    """To another project a connector does not exist, in the words for one that nobody has."""
    made = await room.remote.connectors.create(US, connector_fields())
    for connector_id in (made.id, "nobodys"):
        words = f"Failed to find connector with the provided connector id: {connector_id}"
        with pytest.raises(UnknownName, match=words):
            room.remote.connectors.get(THEM, connector_id)
        with pytest.raises(UnknownName, match=words):
            await room.remote.connectors.update(THEM, connector_id, {"description": "x"})
        with pytest.raises(UnknownName, match=words):
            await room.remote.connectors.delete(THEM, connector_id)
    assert room.remote.connectors.all(THEM) == []


async def test_dry_run_keeps_nothing(room: RemoteRoom) -> None:
    """A dry run reads the fields and leaves nothing behind, however it is asked for."""
    for made in (
        await room.remote.connectors.create(US, connector_fields(), dry_run=True),
        await room.remote.connectors.create(US, connector_fields(dry_run=True)),
    ):
        assert made.id == "dryRunConnector"
    assert room.remote.connectors.all(US) == []
    assert await room.secrets() == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://api.example.com", "it is not https"),
        ("https://127.0.0.1:8000", "its address is private"),
        ("https://10.1.2.3", "its address is private"),
        ("https://169.254.169.254", "where clouds serve credentials"),
        ("https://[fd00:ec2::254]", "where clouds serve credentials"),
        ("https://user:pass@api.example.com", "Encountered error when trying to create uri"),
        ("https://2130706433", "its host is a number"),
        ("https://${parameters.host}", "needs a fixed scheme, host and port"),
        ("https://${parameters.host:-api.example.com}.${parameters.zone}", "needs a fixed scheme, host and port"),
    ],
)
async def test_where_callers_may_not_lead(room: RemoteRoom, url: str, words: str) -> None:
    """A connector of a caller leads to public HTTPS, and its host is not a parameter of a call."""
    with pytest.raises(InvalidInput, match=words):
        await room.remote.connectors.create(US, at(url))
    assert await room.secrets() == []


async def test_own_parameters_make_the_host(room: RemoteRoom) -> None:
    """A host may be made of the connector's own parameters; they are judged as what they make."""
    fields = at("https://${parameters.host}", parameters={"host": "api.example.com", "model": "m", "endpoint": "/e"})
    made = await room.remote.connectors.create(US, fields)
    with pytest.raises(InvalidInput, match="its address is private"):
        await room.remote.connectors.update(US, made.id, {"parameters": {"host": "127.0.0.1"}})
    assert room.remote.connectors.get(US, made.id) == made


async def test_listed_hosts_may_be_private(tmp_path: Path) -> None:
    """What the configuration lists may be private and without TLS; naming one opens no other."""
    room = RemoteRoom(tmp_path, private_hosts=("127.0.0.1", "models.internal"))
    remote = await room.again()
    for url in ("http://127.0.0.1:8000", "http://models.internal:8001"):
        await remote.connectors.create(US, at(url))
    with pytest.raises(InvalidInput, match="it is not https"):
        await remote.connectors.create(US, at("http://other.internal"))
    await room.close()


async def test_trusted_endpoints(tmp_path: Path) -> None:
    """Where expressions are configured, the whole URL of every action must match one."""
    room = RemoteRoom(tmp_path, trusted_connector_endpoints=[r"^https://api\.openai\.com/v1/(embeddings|batches)$"])
    remote = await room.again()
    await remote.connectors.create(US, connector_fields())
    with pytest.raises(InvalidInput, match="Connector URL is not matching the trusted connector endpoint regex"):
        await remote.connectors.create(US, at("https://api.openai.com.example.com"))
    await room.close()


async def test_trusted_connectors_may_go_anywhere(room: RemoteRoom) -> None:
    """A command's connector may lead inside and refer to variables; a caller can change nothing of it but end it."""
    fields = at("http://127.0.0.1:8000", credential={"openAI_key": "env:OPENAI_API_KEY"})
    made = await room.remote.connectors.create(US, fields, is_trusted=True)
    assert made.connector.credential == {"openAI_key": "env:OPENAI_API_KEY"}
    with pytest.raises(Forbidden, match="batchmill connectors update"):
        await room.remote.connectors.update(US, made.id, {"credential": {"openAI_key": "mine-and-mine-alone"}})
    changed = await room.remote.connectors.update(
        US, made.id, {"credential": {"openAI_key": "another-key-0123"}}, is_trusted=True
    )
    assert changed.connector.credential == {"openAI_key": f"secret:connector/{made.id}/openAI_key"}
    back = await room.remote.connectors.update(US, made.id, {"credential": fields["credential"]}, is_trusted=True)
    assert back.connector.credential == fields["credential"]
    assert await room.secrets() == []  # what it referred to before is gone with the reference
    await room.remote.connectors.delete(US, made.id)


async def test_a_caller_refers_to_no_variable(room: RemoteRoom) -> None:
    """What looks like a reference is, in a connector of a caller, the credential itself."""
    made = await room.remote.connectors.create(US, connector_fields(credential={"openAI_key": "env:HOME"}))
    assert await room.vault.reveal(f"connector/{made.id}/openAI_key") == "env:HOME"


async def test_update_merges(room: RemoteRoom) -> None:
    """Parameters and credentials are merged key by key, actions are replaced, and the revision rises."""
    made = await room.remote.connectors.create(US, connector_fields())
    changed = await room.remote.connectors.update(
        US, made.id, {"parameters": {"model": "other"}, "credential": {"second": "second-secret-key"}}
    )
    assert (changed.revision, changed.changed) == (2, room.clock.now())
    assert changed.connector.parameters == {"model": "other", "endpoint": "/v1/embeddings"}
    assert sorted(await room.secrets()) == [f"connector/{made.id}/openAI_key", f"connector/{made.id}/second"]


async def test_credentials_go_nowhere_else(room: RemoteRoom) -> None:
    """Who leads a connector to another host, port or scheme, or past certificates, must bring its credentials along."""
    made = await room.remote.connectors.create(US, connector_fields(credential={"openAI_key": KEY, "org": "o" * 12}))
    there = at("https://api.example.com")["actions"]
    for fields in (
        {"actions": there},
        {"actions": there, "credential": {"openAI_key": "another-key-0123"}},  # but not `org`
        {"actions": at("https://api.openai.com:8443")["actions"]},
        {"client_config": {"skip_ssl_verification": True}},
    ):
        with pytest.raises(InvalidInput, match=r"give them all again in the same change \((openAI_key, )?org\)"):
            await room.remote.connectors.update(US, made.id, fields)
    assert room.remote.connectors.get(US, made.id) == made
    assert await room.vault.reveal(f"connector/{made.id}/openAI_key") == KEY
    await room.remote.connectors.update(US, made.id, {"actions": at("https://API.openai.com:443")["actions"]})
    mine = {"openAI_key": "another-key-0123", "org": "p" * 12}
    changed = await room.remote.connectors.update(US, made.id, {"actions": there, "credential": mine})
    assert changed.connector.actions[0].url == "https://api.example.com/v1/embeddings"
    await room.remote.connectors.update(
        US, made.id, {"actions": at("https://b.example.com")["actions"]}, is_trusted=True
    )


async def test_jobs_of_before_do_not_get_credentials_of_now(room: RemoteRoom) -> None:
    """A job knows its connector by value: what is given for another place has another name, which rotation keeps."""
    made = await room.remote.connectors.create(US, connector_fields())
    moved = at("https://api.example.com", credential={"openAI_key": "another-key-0123"})
    fields = {"actions": moved["actions"], "credential": moved["credential"]}
    route = ModelSpec("x", "connector", "x", connector=made.connector)
    assert room.database is not None
    await room.database.write(_insert_job, ModelSpec("x", "routes", "x", routes=[route]))
    with pytest.raises(Conflict, match="an unfinished job uses"):
        await room.remote.connectors.update(US, made.id, fields)
    assert await room.vault.reveal(f"connector/{made.id}/openAI_key") == KEY
    await room.remote.connectors.update(US, made.id, {"credential": {"openAI_key": "rotated-key-0123"}})
    await room.database.write(lambda db: db.execute(jobs.update().values(state="completed")))
    changed = await room.remote.connectors.update(US, made.id, fields)
    (name,) = await room.secrets()
    assert changed.connector.credential == {"openAI_key": f"secret:{name}"}
    assert name != f"connector/{made.id}/openAI_key" and await room.vault.reveal(name) == "another-key-0123"
    again = await room.remote.connectors.update(US, made.id, {"credential": {"openAI_key": "third-key-01234567"}})
    assert again.connector.credential == changed.connector.credential and await room.secrets() == [name]


async def test_parameters_do_not_lead_credentials_away(room: RemoteRoom) -> None:
    """A host that is made of parameters is another one once they are; paths may change."""
    parameters = {"host": "api.example.com", "model": "m", "endpoint": "/e"}
    made = await room.remote.connectors.create(US, at("https://${parameters.host}", parameters=parameters))
    with pytest.raises(InvalidInput, match="would send its credentials to https://evil.example.com:443"):
        await room.remote.connectors.update(US, made.id, {"parameters": {"host": "evil.example.com"}})
    await room.remote.connectors.update(US, made.id, {"parameters": {"model": "n"}})


async def test_own_connectors_of_models_keep_credentials_too(room: RemoteRoom) -> None:
    """The same holds for a connector that only one model has; one of whoever runs the server is closed to callers."""
    models, register = room.remote.models, {"name": "m", "function_name": "remote"}
    made = await models.register(US, register | {"connector": connector_fields()})
    with pytest.raises(InvalidInput, match="would send its credentials to"):
        await models.update(US, made.id, {"connector": {"actions": at("https://api.example.com")["actions"]}})
    theirs = at("http://127.0.0.1:8000", credential={"openAI_key": "env:OPENAI_API_KEY"})
    made = await models.register(US, register | {"connector": theirs}, is_trusted=True)
    with pytest.raises(Forbidden, match="belongs to the operator of this server"):
        await models.update(US, made.id, {"connector": {"description": "x"}})


async def test_a_command_brings_no_references_into_callers_connectors(room: RemoteRoom) -> None:
    """A connector of a caller stays one when a command changes it: a reference is refused, not kept as a key."""
    made = await room.remote.connectors.create(US, connector_fields())
    with pytest.raises(InvalidInput, match="cannot refer to a secret"):
        await room.remote.connectors.update(US, made.id, {"credential": {"openAI_key": "env:HOME"}}, is_trusted=True)
    assert await room.vault.reveal(f"connector/{made.id}/openAI_key") == KEY


async def test_credentials_rotate_while_deployed(room: RemoteRoom) -> None:
    """While a deployed model uses a connector only its credentials may change, and workers are told of that."""
    made = await room.remote.connectors.create(US, connector_fields())
    model = await room.remote.models.register(US, model_of(made.id), deploy=True)
    events: list[frozenset[str]] = []

    async def listener(names: frozenset[str]) -> None:
        events.append(names)

    room.vault.listen(listener)
    words = rf"1 models are still using this connector, please undeploy the models first: \[{model.id}\]"
    with pytest.raises(InvalidInput, match=words):
        await room.remote.connectors.update(US, made.id, {"description": "x", "credential": {"openAI_key": "n" * 20}})
    assert events == []
    await room.remote.connectors.update(US, made.id, {"credential": {"openAI_key": "n" * 20}})
    assert events == [frozenset({f"connector/{made.id}/openAI_key"})]
    await room.remote.models.undeploy(US, model.id)
    await room.remote.connectors.update(US, made.id, {"description": "x"})


async def test_delete_waits_for_its_models(room: RemoteRoom) -> None:
    """A connector that a model uses stays; afterwards it goes with its secrets."""
    made = await room.remote.connectors.create(US, connector_fields())
    model = await room.remote.models.register(US, model_of(made.id))
    words = rf"1 models are still using this connector, please delete or update the models first: \[{model.id}\]"
    with pytest.raises(Conflict, match=words):
        await room.remote.connectors.delete(US, made.id)
    assert await room.secrets() == [f"connector/{made.id}/openAI_key"]
    await room.remote.models.delete(US, model.id)
    await room.remote.connectors.delete(US, made.id)
    assert await room.secrets() == []
    assert (await room.again()).connectors.all(US) == []


async def test_delete_waits_for_unfinished_jobs(room: RemoteRoom) -> None:
    """A job has the connector by value and its credentials by name: they stay until it has ended."""
    made = await room.remote.connectors.create(US, connector_fields())
    route = ModelSpec("x", "connector", "x", connector=made.connector)
    assert room.database is not None
    await room.database.write(_insert_job, ModelSpec("x", "routes", "x", routes=[route]))
    with pytest.raises(Conflict, match="an unfinished job uses"):
        await room.remote.connectors.delete(US, made.id)
    await room.database.write(lambda db: db.execute(jobs.update().values(state="completed")))
    await room.remote.connectors.delete(US, made.id)


def _insert_job(db: sa.Connection, model: ModelSpec) -> None:
    spec = JobSpec("job_1", DatasetSpec([], "jsonl"), [model], OpenAIForm(), Policy(), None, "i", {}, 0.0)
    needed = {each.name: 0 for each in jobs.c if not each.nullable and not each.default and not each.server_default}
    db.execute(jobs.insert().values(needed | {"id": "job_1", "state": "running", "spec": msgspec.json.encode(spec)}))


async def test_chosen_ids(room: RemoteRoom) -> None:
    """An id may be chosen where nobody has it; the connector that has it keeps its secrets."""
    made = await room.remote.connectors.create(US, connector_fields(connector_id="mine"))
    assert made.id == "mine"
    with pytest.raises(Conflict, match="exists already"):
        await room.remote.connectors.create(THEM, connector_fields(connector_id="mine", credential={"openAI_key": "y"}))
    (name,) = await room.secrets()
    assert await room.vault.reveal(name) == KEY and made.connector.credential == {"openAI_key": f"secret:{name}"}
    await room.remote.connectors.delete(US, "mine")
    await room.remote.connectors.create(THEM, connector_fields(connector_id="mine"))
    with pytest.raises(ModelFailed):  # a job of the former, tried again, would ask for it
        await room.vault.reveal(name)
    with pytest.raises(InvalidInput, match="connector_id must be"):
        await room.remote.connectors.create(US, connector_fields(connector_id="../x"))


async def test_access_control_is_refused(room: RemoteRoom) -> None:
    """Fields of OpenSearch's access control are refused in its words, not ignored."""
    with pytest.raises(InvalidInput, match="You cannot specify connector access control parameters"):
        await room.remote.connectors.create(US, connector_fields(access_mode="private"))


async def test_limits(room: RemoteRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for so many connectors of so many bytes, and not for one more."""
    monkeypatch.setattr(connector_records, "CONNECTORS_MAX", 1)
    made = await room.remote.connectors.create(US, connector_fields(description=""))
    with pytest.raises(InvalidInput, match="which is the maximum"):
        await room.remote.connectors.create(US, connector_fields())
    assert await room.secrets() == [f"connector/{made.id}/openAI_key"]
    size = len(msgspec.json.encode(made.connector))
    monkeypatch.setattr(connectors, "SPEC_BYTES_MAX", size + 1)
    await room.remote.connectors.update(US, made.id, {"description": "x"})
    with pytest.raises(InvalidInput, match="the maximum is"):
        await room.remote.connectors.update(US, made.id, {"description": "xx"})


@pytest.mark.once
def test_ids_are_no_flags() -> None:
    """An id has 20 characters that stand in a URL as they are, and begins with a letter or digit."""
    for _ in range(200):
        made = new_id()
        assert len(made) == 20
        assert made[0].isalnum()
        assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@pytest.mark.once
def test_open_path_is_judged_with_something_in_it() -> None:
    """What calls fill in behind the host keeps no URL from being judged."""
    Endpoints(Private()).check_url("https://api.example.com/v1/${parameters.id}/cancel?x=${parameters.y:-1}")
    with pytest.raises(InvalidInput, match="its address is private"):
        Endpoints(Private()).check_url("https://10.0.0.1/v1/${parameters.id}")
