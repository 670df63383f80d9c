"""Adapters by name and version: registered, fetched, found, removed."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.lora_files import CONFIG, WEIGHTS, lora, lora_files, write_lora
from fakes.model_hub import TOKEN, ModelHub
from msgspec.structs import replace
from services.adapter_room import SMALL, THEM, US, AdapterRoom

from batchmill.errors import Conflict, Forbidden, InvalidInput, StorageFull, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.models.adapters.fetching import Fetched, FetchReport
from batchmill.services.adapters import records
from batchmill.services.adapters.records import check_name, read_reference
from batchmill.services.adapters.service import REMOVED_S
from batchmill.store.sql.tables import jobs
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire import adapter_bundles
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[AdapterRoom]:
    room = AdapterRoom(tmp_path, adapter_patterns=["org/*"], adapter_sources=[str(tmp_path / "shared"), "s3://ours/*"])
    await room.again()
    yield room
    await room.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelHub]:
    with ModelHub() as hub:
        for name, value in {**hub.environment(), "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.repositories = {"org/one": lora_files(), "org/two": lora_files(r=32, lora_alpha=1)}
        yield hub


async def add(room: AdapterRoom, name: str, folder: Path, who=US, base: str = "tiny"):
    record = await room.adapters.register(who, base, name, str(folder), is_trusted=True)
    return await room.adapters.wait(record)


@pytest.mark.parametrize("name", ["shout", "a.b_c-d", "org/name", "1", "v2", "7b/x"])
@pytest.mark.once
def test_names(name: str) -> None:
    """An adapter may be called as a repository of a hub is."""
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b/c", "a/1", "a/", "/a", "a b", ".a", "-a", "ä", "a" * 191, "a\n"])
@pytest.mark.once
def test_no_names(name: str) -> None:
    """What could be read as a version, a path or a flag is not a name."""
    with pytest.raises(InvalidInput) as caught:
        check_name(name)
    assert caught.value.code == "invalid_name"


@pytest.mark.parametrize(
    ("text", "means"),
    [("a", ("a", None)), ("a/2", ("a", 2)), ("o/a", ("o/a", None)), ("o/a/2", ("o/a", 2)), ("a/02", ("a/02", None))],
)
@pytest.mark.once
def test_references(text: str, means: tuple) -> None:
    """The last part of a name is a version where it is a number."""
    assert read_reference(text) == means


async def test_versions(room: AdapterRoom, tmp_path: Path) -> None:
    """A name that is registered again gets the next version; each stays what it was, also for the next process."""
    first = await add(room, "shout", write_lora(tmp_path / "a"))
    assert (first.own_name, first.state, first.rank, first.trained_for) == ("shout/1", "ready", 4, "org/tiny")
    assert (Path(first.folder) / WEIGHTS).read_bytes() == lora()
    second = await add(room, "shout", write_lora(tmp_path / "b", r=8, lora_alpha=1))
    await room.again()
    adapters = room.adapters
    assert [each.own_name for each in adapters.list("default")] == ["shout/1", "shout/2"]
    assert adapters.get("default", "shout") == second and adapters.get("default", "shout", 1) == first
    assert room.directory.find(US, "shout").adapter == second.own_name
    assert room.directory.find(US, "shout/1").model.adapters == {"shout/1": first.folder}
    assert adapters.list("default", "twin") == [] and adapters.list("other") == []
    with pytest.raises(UnknownName, match="there is no adapter 'shout/3'"):
        adapters.get("default", "shout", 3)
    with pytest.raises(UnknownName):
        adapters.get("other", "shout")


async def test_a_number_is_never_given_twice(room: AdapterRoom, tmp_path: Path) -> None:
    """After a version was removed its number is not another's."""
    folder = write_lora(tmp_path / "a")
    await add(room, "shout", folder)
    await room.adapters.remove("default", "shout")
    assert (await add(room, "shout", folder)).own_name == "shout/2"


async def test_one_that_does_not_fit(room: AdapterRoom, tmp_path: Path) -> None:
    """An adapter for another base has failed, and the version before stays the newest that is ready."""
    good = await add(room, "shout", write_lora(tmp_path / "a"))
    bad = await add(room, "shout", write_lora(tmp_path / "b", lora_files() | {WEIGHTS: lora(takes=8)}))
    assert (bad.version, bad.state) == (2, "failed")
    assert bad.message.startswith("it does not fit tiny: its model.layers.0.self_attn.q_proj takes 8")
    assert room.directory.find(US, "shout").adapter == good.own_name
    assert list(room.adapters.adapted("default", room.directory.configured.get("tiny")).adapters) == [good.own_name]


async def test_one_that_is_none(room: AdapterRoom, tmp_path: Path) -> None:
    """What cannot be fetched has failed with the reason; its files are not kept."""
    folder = write_lora(tmp_path / "a", {CONFIG: b"{}", "adapter_model.bin": b""})
    found = await add(room, "shout", folder)
    assert found.state == "failed" and "a pickle" in found.message
    assert room.folders() == []
    with pytest.raises(UnknownName):
        room.directory.find(US, "shout")
    assert room.adapters.get("default", "shout") == found


async def test_who_may_name_what(room: AdapterRoom, tmp_path: Path) -> None:
    """Callers register from the places that are listed, and no others; a link leads nowhere else."""
    adapters = room.adapters
    inside = write_lora(tmp_path / "shared" / "one")
    outside = write_lora(tmp_path / "private")
    (tmp_path / "shared" / "link").symlink_to(outside)
    record = await adapters.wait(await adapters.register(US, "tiny", "shout", str(inside)))
    assert record.state == "ready"
    for source in (str(outside), str(tmp_path / "shared" / "link"), f"{tmp_path}/shared/../private", "s3://theirs/x"):
        with pytest.raises(Forbidden, match="are not accepted over the API"):
            await adapters.register(US, "tiny", "other", source)
    with pytest.raises(Forbidden):
        await adapters.register(US, "tiny", "other", "elsewhere/one")
    with pytest.raises(InvalidInput, match='give the token as a reference, "secret:NAME", never the token itself'):
        await adapters.register(US, "tiny", "other", "org/one", token="env:HF_TOKEN")
    assert [each.own_name for each in adapters.list("default")] == ["shout/1"]


@pytest.mark.parametrize(
    ("base", "name", "kind", "code"),
    [
        ("nobody", "shout", UnknownName, "model_not_found"),
        ("far", "shout", InvalidInput, "no_adapters"),
        ("tiny", "twin", Conflict, "name_taken"),
        ("tiny", "a", Conflict, "name_taken"),
        ("tiny", "a b", InvalidInput, "invalid_name"),
    ],
)
async def test_what_cannot_be_registered(room: AdapterRoom, tmp_path: Path, base, name, kind, code) -> None:
    """An unknown base, one that takes no adapters, and a name that something else has are refused."""
    with pytest.raises(kind) as caught:
        await room.adapters.register(US, base, name, str(tmp_path), is_trusted=True)
    assert caught.value.code == code
    assert room.adapters.list_all() == []


async def test_a_base_of_another_project(room: AdapterRoom, tmp_path: Path) -> None:
    """A project registers for the models that it may use."""
    folder = write_lora(tmp_path / "a")
    with pytest.raises(UnknownName):
        await room.adapters.register(SMALL, "tiny", "shout", str(folder), is_trusted=True)
    assert (await add(room, "shout", folder, SMALL, "twin")).state == "ready"


async def test_a_token(room: AdapterRoom, hub: ModelHub) -> None:
    """A token is kept by its name and shown to the hub; one that is missing is named."""
    hub.private.add("org/one")
    await room.vault.put("hub", TOKEN)
    record = await room.adapters.register(US, "tiny", "shout", "org/one", token="secret:hub")
    assert (await room.adapters.wait(record)).state == "ready"
    assert record.token == "secret:hub"
    record = await room.adapters.register(US, "tiny", "other", "org/one", token="secret:nobody")
    assert "there is no secret 'nobody'" in (await room.adapters.wait(record)).message


async def test_a_hub_that_comes_back(room: AdapterRoom, hub: ModelHub) -> None:
    """What may go better later is tried again before it has failed."""
    hub.broken = 1
    record = await room.adapters.register(US, "tiny", "shout", "org/one")
    assert (await room.adapters.wait(record)).state == "ready"


async def test_names_of_rows(room: AdapterRoom, hub: ModelHub) -> None:
    """Ids that rows name are registered once, fetched, and fail one by one; one that failed is tried again."""
    found = await room.adapters.ensure("default", "tiny", ["org/one", "org/none", "org/two", "org/one", "org/1"])
    assert {name: (each.own_name, each.state) for name, each in found.items()} == {
        "org/one": ("org/one/1", "ready"),
        "org/none": ("org/none/1", "failed"),
        "org/two": ("org/two/1", "ready"),
        "org/1": ("org/1/1", "failed"),
    }
    assert "has no org/none" in found["org/none"].message and "is not a valid adapter name" in found["org/1"].message
    assert found["org/two"].rank == 32
    hub.repositories["org/none"] = lora_files()
    again = await room.adapters.ensure("default", "tiny", ["org/one", "org/none"])
    assert again["org/one"] == found["org/one"]
    assert (again["org/none"].own_name, again["org/none"].state) == ("org/none/1", "ready")


async def test_two_jobs_name_the_same(room: AdapterRoom, hub: ModelHub) -> None:
    """Two that ask at once wait for one fetch; one that gives up does not end it."""
    hub.held.clear()
    request = [asyncio.create_task(room.adapters.ensure("default", "tiny", ["org/one"])) for _ in range(3)]
    async with asyncio.timeout(60):
        while not any("/resolve/" in line for line in hub.asked):
            await asyncio.sleep(0.02)
    request[0].cancel()
    hub.held.set()
    first, second = await asyncio.gather(*request[1:])
    assert first == second and first["org/one"].state == "ready"
    assert [each.own_name for each in room.adapters.list_all()] == ["org/one/1"]


async def test_an_owner_that_ends(room: AdapterRoom, hub: ModelHub) -> None:
    """What was being fetched when its process ended is fetched by the next, or by the one after a look."""
    hub.held.clear()
    record = await room.adapters.register(US, "tiny", "shout", "org/one")
    async with asyncio.timeout(60):
        while not any("/resolve/" in line for line in hub.asked):
            await asyncio.sleep(0.02)
    await room.again(resumes=False)
    assert room.adapters.get("default", "shout").state == "fetching" and room.folders() == []
    hub.held.set()
    await room.again()
    assert (await room.adapters.wait(record)).state == "ready"


def bundle(folder: Path, files: dict[str, bytes], **info) -> Path:
    """An archive with these members."""
    path = folder / "bundle.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in info.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))
    return path


async def test_an_upload(room: AdapterRoom, tmp_path: Path) -> None:
    """An adapter that is sent here is ready once its archive is, and says that it was uploaded."""
    with (tmp_path / "bundle.tar.gz").open("wb") as file:
        adapter_bundles.write(file, write_lora(tmp_path / "a"))
    record = await room.adapters.upload(US, "tiny", "shout", tmp_path / "bundle.tar.gz")
    assert (record.own_name, record.state, record.source) == ("shout/1", "ready", "upload")
    assert room.folders() == [record.id]


@pytest.mark.parametrize(
    ("files", "info", "words"),
    [
        ({CONFIG: lora_files()[CONFIG]}, {}, f"it has no {WEIGHTS}"),
        ({**lora_files(), "../x": b""}, {}, "'../x' is not one of"),
        ({**lora_files(), "adapter_model.bin": b""}, {}, "a pickle"),
        (lora_files(), {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is not one of"),
        ({**lora_files(), CONFIG: b"{}"}, {}, "peft_type is None"),
    ],
)
async def test_bad_uploads(room: AdapterRoom, tmp_path: Path, files, info, words: str) -> None:
    """An archive of anything else is refused, leaves no version and writes nothing beside it."""
    with pytest.raises(InvalidInput) as caught:
        await room.adapters.upload(US, "tiny", "shout", bundle(tmp_path, files, **info))
    assert words in caught.value.message
    assert room.adapters.list_all() == [] and room.folders() == []


async def test_no_archive(room: AdapterRoom, tmp_path: Path) -> None:
    """Bytes that are not an archive, and one that ends too early, are refused."""
    whole = bundle(tmp_path, lora_files()).read_bytes()
    for data in (b"hello", whole[:-20], b""):
        (tmp_path / "broken").write_bytes(data)
        with pytest.raises(InvalidInput, match="this is not an archive of an adapter"):
            await room.adapters.upload(US, "tiny", "shout", tmp_path / "broken")


async def test_an_upload_that_was_cut_off(room: AdapterRoom, tmp_path: Path) -> None:
    """A version whose upload was written down and never arrived has failed for the next process."""
    record = records.AdapterRecord("id", "default", "shout", 0, "tiny", "upload")
    await room.database.write(records.begin, record, 100)
    await room.again()
    record = await room.adapters.wait(room.adapters.get("default", "shout"))
    assert (record.state, record.message) == ("failed", "its upload is not complete: upload it again")


def job(places: list[str]) -> dict:
    """The record of a job whose model has these adapters."""
    model = ModelSpec("tiny", "llm", "tiny", adapters={f"a/{at}": place for at, place in enumerate(places)})
    spec = JobSpec("job_1", DatasetSpec([]), [model], OpenAIForm(), Policy(), None, "x", {}, 0.0)
    return {"id": "job_1", "identity": "x", "created": 0.0, "state": "running", "spec": msgspec.json.encode(spec)}


async def test_removed_while_a_job_uses_it(room: AdapterRoom, tmp_path: Path) -> None:
    """A removed adapter is found no more; its files stay a while, and for as long as a job needs them. An order that
    was checked before is refused as it is stored, however late that is.
    """
    record = await add(room, "shout", write_lora(tmp_path / "a"))
    await room.database.write(lambda db: db.execute(jobs.insert().values(**job([record.folder]))))
    assert [each.own_name for each in await room.adapters.remove("default", "shout", 1)] == ["shout/1"]
    with pytest.raises(UnknownName):
        room.adapters.get("default", "shout")
    late = msgspec.json.decode(job([record.folder])["spec"], type=JobSpec)
    with pytest.raises(Conflict, match="the adapter a/0 was removed meanwhile: send the order again"):
        await room.database.write(job_records.enter, replace(late, id="job_2"), None, None)
    await room.adapters.sweep()
    assert room.folders() == [record.id]
    await room.clock.sleep(REMOVED_S + 1)
    await room.again()
    assert room.folders() == [record.id], "the job has not ended"
    await room.database.write(lambda db: db.execute(jobs.update().values(state="completed")))
    await room.adapters.sweep()
    assert room.folders() == []


async def test_removed_while_it_is_fetched(room: AdapterRoom, hub: ModelHub) -> None:
    """Removing what is on its way ends that; whoever waits for it is told."""
    hub.held.clear()
    record = await room.adapters.register(US, "tiny", "shout", "org/one")
    waiting = asyncio.create_task(room.adapters.wait(record))
    await asyncio.sleep(0)
    await room.adapters.remove("default", "shout")
    assert (await waiting).state == "removed"
    with pytest.raises(UnknownName):
        await room.adapters.remove("default", "shout")


async def test_a_disk_that_was_full(room: AdapterRoom, tmp_path: Path) -> None:
    """A version of which nobody could write down what became of it is fetched again by the next look."""
    written, full = room.database.write, StorageFull("there is no room")

    async def write(function, *args, **kwargs):
        if function is records.update:
            raise full
        return await written(function, *args, **kwargs)

    room.database.write = write
    record = await room.adapters.register(US, "tiny", "shout", str(write_lora(tmp_path / "a")), is_trusted=True)
    with pytest.raises(StorageFull):
        await room.adapters.wait(record)
    assert room.adapters.get("default", "shout").state == "fetching"
    room.database.write = written
    await room.adapters.sweep()
    assert (await room.adapters.wait(record)).state == "ready"


async def test_removed_while_it_is_settled(room: AdapterRoom, tmp_path: Path) -> None:
    """An upload that was removed before it was ready stays removed, for the next process too."""
    record = await room.database.write(
        records.begin, records.AdapterRecord("id", "default", "shout", 0, "tiny", "upload"), 100
    )
    await room.again(resumes=False)
    await room.adapters.remove("default", "shout")
    late = FetchReport(Fetched(str(room.home / "id"), "0", 1), 4, None)
    assert (await room.adapters._store_fetched(record, late)).state == "removed"
    assert room.adapters.list_all() == []
    await room.again()
    assert room.adapters.list_all() == []


async def test_the_token_of_a_job(room: AdapterRoom, hub: ModelHub) -> None:
    """What one job could not read another may, with its own token."""
    hub.private.add("org/one")
    assert (await room.adapters.ensure("default", "tiny", ["org/one"]))["org/one"].state == "failed"
    await room.vault.put("hub", TOKEN)
    found = (await room.adapters.ensure("default", "tiny", ["org/one"], token="secret:hub"))["org/one"]
    assert (found.own_name, found.state) == ("org/one/1", "ready")


async def test_projects_do_not_meet(room: AdapterRoom, tmp_path: Path) -> None:
    """Two projects may use one name, and neither sees or removes what is the other's."""
    folder = write_lora(tmp_path / "a")
    ours, theirs = await add(room, "shout", folder), await add(room, "shout", folder, THEM)
    assert [ours.own_name, theirs.own_name] == ["shout/1", "shout/1"]
    await room.adapters.remove("other", "shout")
    assert room.adapters.list_all() == [ours]
