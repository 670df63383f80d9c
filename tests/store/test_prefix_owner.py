"""The prefix of `[storage] objects` belongs to one database."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.faulty_objects import faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.config import Config, StorageEntry
from batchmill.errors import BatchmillError, InvalidConfig
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url
from batchmill.services.data_dirs.databases import describe
from batchmill.services.doctor import check_storage
from batchmill.store import prefix_owner
from batchmill.store.prefix_owner import NAME, PrefixOwner
from batchmill.store.sql.database import Database

BUCKET = "owned"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url, bucket_client(url, BUCKET):
        yield url


@pytest.fixture(params=["file", "s3", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3":
        for name, value in s3_environment(request.getfixturevalue("s3")).items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}/{tmp_path.name}"
    return f"file://{tmp_path}/store" if request.param == "file" else "memory:///store"


async def claim(folder: Path, url: str) -> str:
    """Claim a prefix as an owner of the database in `folder` does. Returns the id of its ledger."""
    folder.mkdir(exist_ok=True)
    database = Database(folder / "batchmill.db")
    try:
        await prefix_owner.claim(database, url, f"the database of {folder.name}")
        found = await database.read(prefix_owner.find_ledger)
        assert found is not None and found[1] == url
        return found[0]
    finally:
        database.close()


async def test_another_database_is_refused(tmp_path: Path, url: str) -> None:
    """Its message names the prefix, what it belongs to, and both ways out. The owner, also elsewhere, goes on."""
    first = await claim(tmp_path / "one", url)
    if url.startswith("memory"):  # each process has a store of its own
        return
    with pytest.raises(InvalidConfig) as refused:
        await claim(tmp_path / "two", url)
    assert refused.value.code == "other_storage_owner"
    for part in (url, first, "the database of one", "another prefix", f"delete the object {url}/{NAME}"):
        assert part in refused.value.message
    shutil.copytree(tmp_path / "one", tmp_path / "restored")
    assert await claim(tmp_path / "restored", url) == first == await claim(tmp_path / "one", url)
    assert await claim(tmp_path / "two", f"{url}/other") != first


async def test_a_prefix_that_is_claimed_on_purpose(tmp_path: Path) -> None:
    """Without its owner's name, the prefix belongs to the next one; then the first one is refused."""
    url = f"file://{tmp_path}/store"
    await claim(tmp_path / "one", url)
    (tmp_path / "store" / NAME).unlink()
    await claim(tmp_path / "two", url)
    with pytest.raises(InvalidConfig, match="the database of two"):
        await claim(tmp_path / "one", url)


async def test_two_that_claim_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has it: also where the store knows no conditional put, the one that it kept."""
    url = f"file://{tmp_path}/store"
    put = ObjectStore.put

    def put_after_another(store: ObjectStore, key: str, data: bytes) -> None:
        put(store, key, msgspec.json.encode(PrefixOwner("faster", "the database of another")))
        put(store, key, data)

    monkeypatch.setattr(ObjectStore, "put", put_after_another)
    with pytest.raises(InvalidConfig, match="the database of another"):
        await claim(tmp_path / "one", url)
    (tmp_path / "store" / NAME).unlink()

    def put_before_another(store: ObjectStore, key: str, data: bytes) -> None:
        put(store, key, data, overwrite=True)
        put(store, key, msgspec.json.encode(PrefixOwner("later", "the database of another")), overwrite=True)

    monkeypatch.setattr(ObjectStore, "put", put_before_another)
    with pytest.raises(InvalidConfig, match="the database of another"):
        await claim(tmp_path / "one", url)


async def test_an_owner_that_cannot_be_read(tmp_path: Path) -> None:
    """Who owns it is not guessed: neither from what is no owner, nor from an empty object."""
    (tmp_path / "store").mkdir()
    for data in (b"", b"{}", b"not JSON"):
        (tmp_path / "store" / NAME).write_bytes(data)
        with pytest.raises(InvalidConfig, match="does not say whom"):
            await claim(tmp_path / "one", f"file://{tmp_path}/store")
        assert (tmp_path / "store" / NAME).read_bytes() == data


async def test_a_store_that_is_away(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database that has claimed the prefix is opened without it; another one is not."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with faulty_objects(s3) as plan:
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        first = await claim(tmp_path / "one", url)
        plan.always["GET"] = plan.always["HEAD"] = "denied"
        assert await claim(tmp_path / "one", url) == first
        with pytest.raises(BatchmillError):
            await claim(tmp_path / "two", url)


async def test_what_doctor_says(tmp_path: Path) -> None:
    """Whose the prefix is, as the next start would find it. It claims nothing."""

    def row(name: str) -> tuple[bool, str]:
        storage = StorageEntry(f"file://{tmp_path}/store")
        config = Config(tmp_path / name, tmp_path, key_file=tmp_path / "keys", storage=storage)
        assert str(tmp_path / name) in describe(config)
        (found,) = [each for each in check_storage(config) if each.name == "object store: owner"]
        return found.is_ok, found.message

    url = f"file://{tmp_path}/store"
    assert row("one")[0] and "no owner yet" in row("one")[1]
    assert not os.path.exists(tmp_path / "store" / NAME)
    await claim(tmp_path / "one", url)
    assert row("one") == (True, f"{url} belongs to this database")
    is_ok, message = row("two")
    assert not is_ok and "the database of one" in message
    Database(tmp_path / "one" / "other.db").close()
    (tmp_path / "one" / "other.db").rename(tmp_path / "one" / "batchmill.db")
    assert not row("one")[0] and ObjectStore(parse_url(url)).find(NAME) is not None
