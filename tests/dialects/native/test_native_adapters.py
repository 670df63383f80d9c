"""Adapters over batchmill's own API, through the SDK, at a whole server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from dialects.open_server import open_server
from fakes.lora_files import WEIGHTS, lora, lora_files, write_base, write_lora

from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import Forbidden, InvalidInput, ModelFailed, UnknownName
from batchmill.types import Scope
from batchmill.wire.native import NewKey

CONFIG = """
[models.tiny]
engine = "vllm"
source = "tiny"

[deployments]
adapter_sources = ["{folder}/shared/*"]
"""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    write_base(tmp_path / "tiny")
    async with open_server(tmp_path, CONFIG.format(folder=tmp_path)) as running, AsyncClient(running.url) as client:
        client.running = running
        yield client


async def test_from_adding_to_removing(client: AsyncClient, tmp_path: Path) -> None:
    """A folder of the caller's machine is sent, gets versions, is listed with its base, and goes."""
    first = await client.add_adapter("org/shout", write_lora(tmp_path / "a"), base="tiny")
    assert (first.own_name, first.state, first.source, first.rank) == ("org/shout/1", "ready", "upload", 4)
    second = await client.add_adapter("org/shout", str(write_lora(tmp_path / "b", r=8)), base="tiny")
    assert await client.adapter("org/shout") == second
    assert await client.adapter("org/shout", 1) == first
    assert await client.adapters() == await client.adapters("tiny") == [first, second]
    assert await client.adapters("other") == []
    [model] = await client.models()
    assert (model.name, model.adapters) == ("tiny", ["org/shout", "org/shout/1", "org/shout/2"])
    assert [each.own_name for each in await client.remove_adapter("org/shout", 2)] == ["org/shout/2"]
    assert await client.adapter("org/shout") == first
    await client.remove_adapter("org/shout")
    with pytest.raises(UnknownName):
        await client.adapter("org/shout")


async def test_a_place_of_the_server(client: AsyncClient, tmp_path: Path) -> None:
    """A place that the server lists is fetched from; callers are not told where it lies."""
    write_lora(tmp_path / "shared" / "one")
    await asyncio.to_thread((tmp_path / "shared" / "one").rename, tmp_path / "shared" / "two")
    source = f"{tmp_path}/shared/nowhere"
    with pytest.raises(ModelFailed) as caught:
        await client.add_adapter("shout", source, base="tiny")
    assert caught.value.code == "adapter_failed" and str(tmp_path) not in caught.value.message
    reply = await http(client, "POST", "", json={"name": "shout", "base": "tiny", "source": f"{tmp_path}/shared/two"})
    assert (reply.status_code, reply.json()["state"], reply.json()["source"]) == (202, "fetching", "two")
    async with asyncio.timeout(60):
        while (await client.adapter("shout", 2)).state == "fetching":
            await asyncio.sleep(0.05)
    assert (await client.adapter("shout")).state == "ready"


async def http(client: AsyncClient, method: str, path: str, **more) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False) as other:
        return await other.request(method, f"{client.running.url}/batchmill/v1/adapters{path}", timeout=60, **more)


async def test_what_is_refused(client: AsyncClient, tmp_path: Path) -> None:
    """What callers may not name, what is not an adapter and what does not fit is refused, each with its code."""
    with pytest.raises(Forbidden, match="are not accepted over the API"):
        await client.add_adapter("shout", "elsewhere/one", base="tiny")
    with pytest.raises(UnknownName):
        await client.add_adapter("shout", write_lora(tmp_path / "a"), base="nobody")
    with pytest.raises(InvalidInput, match="there is no folder"):
        await client.add_adapter("shout", "./nowhere", base="tiny")
    with pytest.raises(InvalidInput, match="needs no token"):
        await client.add_adapter("shout", tmp_path / "a", base="tiny", token="secret:x")
    other = write_lora(tmp_path / "b", lora_files() | {WEIGHTS: lora(takes=8)})
    with pytest.raises(ModelFailed, match="does not fit tiny"):
        await client.add_adapter("shout", other, base="tiny")
    media = {"content-type": "application/vnd.batchmill.adapter+gzip"}
    reply = await http(client, "POST", "/shout?base=tiny", content=b"hello", headers=media)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_bundle")
    reply = await http(client, "POST", "/shout?base=tiny", content=b"hello", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    reply = await http(client, "POST", "", json={"name": "tiny", "base": "tiny", "source": f"{tmp_path}/shared/x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "name_taken")
    assert [each.state for each in await client.adapters()] == ["failed"]


async def test_keys(client: AsyncClient, tmp_path: Path) -> None:
    """A key sees its own project's adapters, of those that it names; making and removing is an admin's."""
    folder = write_lora(tmp_path / "a")
    await client.add_adapter("shout", folder, base="tiny")
    keys = client.running.services.keys
    admin = (await keys.create(name="a", project="default", scope=Scope.ADMIN)).key
    url = client.running.url
    async with AsyncClient(url, admin) as boss:
        await boss.add_adapter("other", folder, base="tiny")
        narrow = await boss.create_key(NewKey("n", Scope.ADMIN, models=["shout", "tiny"]))
        reader = await boss.create_key(NewKey("r", Scope.SUBMIT))
    async with AsyncClient(url, narrow.key) as key:
        assert [each.name for each in await key.adapters()] == ["shout"]
        with pytest.raises(UnknownName):
            await key.adapter("other")
        with pytest.raises(UnknownName):
            await key.remove_adapter("other")
        with pytest.raises(Forbidden, match="may not use the adapter 'more'"):
            await key.add_adapter("more", folder, base="tiny")
    async with AsyncClient(url, reader.key) as key:
        assert len(await key.adapters()) == 2
        with pytest.raises(Forbidden):
            await key.add_adapter("shout", folder, base="tiny")
    theirs = (await keys.create(name="t", project="other", scope=Scope.ADMIN)).key
    async with AsyncClient(url, theirs) as key:
        assert await key.adapters() == []
