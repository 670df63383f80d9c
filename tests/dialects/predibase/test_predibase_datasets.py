"""Datasets over HTTP: what an upload becomes, and every way in which it does not become one."""

from __future__ import annotations

import asyncio
import gzip

import httpx2
import pytest
import pytest_asyncio
from dialects.open_server import open_server
from dialects.predibase.predibase_kit import MISSING_ID, Predibase, lines, row

ROWS = lines(row(1), row(2, model="finance/2"), row(3, model="org/adapter"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("datasets")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def predibase(running):
    async with httpx2.AsyncClient(base_url=running.url, trust_env=False, timeout=60) as http:
        yield Predibase(http)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def refused(reply: httpx2.Response, status: int, *words: str) -> None:
    """The reply has this status, and its error these words."""
    assert reply.status_code == status, reply.text
    for word in words:
        assert word in reply.json()["error"], reply.text


async def test_who_asks(predibase):
    """Every key that the client wants is there; a base URL that ends with a slash makes no difference."""
    for path in ("/users/current", "//users/current"):
        reply = (await predibase.http.get(f"{predibase.http.base_url}".rstrip("/") + path)).json()
        assert {"id", "username", "uuid", "tenant"} == set(reply)
        assert reply["tenant"]["shortCode"] == reply["tenant"]["name"] == "default"
        assert set(reply["tenant"]["subscription"]) == {
            "id", "tier", "isTrial", "expiration", "daysRemainingInPlan", "active",
        }  # fmt: skip


async def test_an_upload_becomes_a_dataset(predibase):
    """Begun, put and named, it is pending until its rows were looked at; then it is connected."""
    begun = await predibase.begin("first.jsonl")
    assert set(begun) == {"presignedUrl", "uploadToken"} and begun["presignedUrl"].startswith("http://127.0.0.1:")
    assert (await predibase.put(begun["presignedUrl"], ROWS)).status_code == 200
    refused(await predibase.get("first"), 404, "'first'")
    named = (await predibase.name(begun["uploadToken"], "first")).json()
    assert (named["status"], named["lastError"]) == ("pending", None)
    reply = await predibase.until_checked("first")
    assert (reply["status"], reply["lastError"], reply["rows"], reply["bytes"]) == ("connected", None, 3, len(ROWS))
    assert (reply["connection"], reply["uuid"]) == ({"type": "file", "name": "file_uploads"}, named["uuid"])
    again = await predibase.name(begun["uploadToken"], "first")  # whose reply was lost
    assert again.status_code == 200 and again.json()["uuid"] == named["uuid"]
    refused(await predibase.name(begun["uploadToken"], "other"), 409, "'first'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lines(row(1), {**row(2), "custom_id": 2}), ["line 2", "custom_id is 2", "string"]),
        (lines(row(1), {**row(2), "custom_id": None}), ["line 2", "custom_id is null"]),
        (lines(row(1), row(2), row(1)), ["line 3", "row-1", "line 1"]),
        (b'{"custom_id":"a","url":"/v1/x","url":"/v1/y","body":{}}\n', ["line 1", "'url' is used twice"]),
        (lines({"prompt": "a", "completion": "b"}), ["line 1"]),
        (lines(row(1)) + b"{\n" + b"[]\n", ["line 2", "line 3"]),
        (lines(*({"a": n} for n in range(50))), ["line 5", "and 45 more"]),
        (lines({**row(1), "url": "fine_tuning"}), ["line 1", "/v1/chat/completions"]),
        (lines({**row(1), "body": 7}), ["line 1", "body"]),
        (b"", ["in.jsonl", "empty"]),
        (b"prompt,completion\na,b\n", ["line 1"]),
    ],
)
async def test_rows_that_cannot_be_run(predibase, content, words):
    """The dataset fails, with what is wrong and in which lines; the client raises it as it stands."""
    reply = await predibase.upload(content, "wrong")
    assert reply["status"] == "failed"
    for word in words:
        assert word in reply["lastError"]
    assert "/data/" not in reply["lastError"]


async def test_a_failed_dataset_gives_its_name_away(predibase):
    """Whoever mends the file uploads it under the same name."""
    bad = await predibase.upload(lines(row(1), row(1)), "mended")
    good = await predibase.upload(lines(row(1), row(2)), "mended")
    assert (bad["status"], good["status"]) == ("failed", "connected") and bad["uuid"] != good["uuid"]
    refused(await predibase.http.get(f"/v2/datasets/{bad['uuid']}/download-link"), 404)


async def test_a_name_that_is_taken(predibase):
    """The same bytes are the dataset that is there; others are refused, with the way out, until it is deleted."""
    first = await predibase.upload(ROWS, "taken")
    same = await predibase.upload(ROWS, "taken")
    assert same["uuid"] == first["uuid"]
    begun = await predibase.begin()
    await predibase.put(begun["presignedUrl"], lines(row(9)))
    for _ in range(2):
        refused(await predibase.name(begun["uploadToken"], "taken"), 409, "'taken'", "another name", "DELETE")
    assert (await predibase.http.delete(f"/v2/datasets/{first['uuid']}")).status_code == 204
    assert (await predibase.name(begun["uploadToken"], "taken")).status_code == 200
    assert (await predibase.until_checked("taken"))["rows"] == 1


async def test_the_same_upload_named_twice(predibase):
    """A second try at naming bytes that were there before is answered as the first one was."""
    first = await predibase.upload(ROWS, "repeated")
    begun = await predibase.begin()
    await predibase.put(begun["presignedUrl"], ROWS)
    reply = [(await predibase.name(begun["uploadToken"], "repeated")).json()["uuid"] for _ in range(2)]
    assert reply == [first["uuid"], first["uuid"]]


async def test_an_upload_works_once(predibase):
    """What arrived whole cannot be sent again, and the refusal is no status that the client would repeat."""
    begun = await predibase.begin()
    url = begun["presignedUrl"]
    other = url[:-1] + ("A" if url[-1] != "A" else "B")
    swapped = (await predibase.begin())["presignedUrl"].partition("?")[0] + "?" + url.partition("?")[2]
    for altered in (other, swapped, url.partition("?")[0]):
        refused(await predibase.put(altered, ROWS), 403, "altered")
    assert (await predibase.put(url, ROWS)).json() == {"bytes": len(ROWS)}
    refused(await predibase.put(url, ROWS), 410, "has been used")


async def test_of_two_uploads_by_one_link_one_counts(predibase):
    """Bytes that come twice at the same time are one dataset."""
    begun = await predibase.begin()
    replies = await asyncio.gather(*(predibase.put(begun["presignedUrl"], ROWS) for _ in range(4)))
    assert sorted(each.status_code for each in replies) == [200, 410, 410, 410]


async def test_an_upload_that_broke_off_may_come_again(predibase, running):
    """Half a file is nothing: naming it says so, and its link still holds."""
    begun = await predibase.begin()
    host, _, rest = begun["presignedUrl"].removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    head = f"PUT /{rest} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(ROWS)}\r\n\r\n"
    writer.write(head.encode() + ROWS[: len(ROWS) // 2])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    refused(await predibase.name(begun["uploadToken"], "broken"), 409, "PUT the whole file")
    assert (await predibase.put(begun["presignedUrl"], ROWS)).status_code == 200
    assert (await predibase.name(begun["uploadToken"], "broken")).status_code == 200


@pytest.mark.parametrize(
    ("filename", "content", "form", "rows"),
    [
        ("rows.jsonl.gz", gzip.compress(ROWS), "openai", 3),
        ("rows", ROWS, "openai", 3),
        ("table.csv", b"prompt,completion\na,b\n", "csv", None),
        ("table.parquet", b"PAR1", "parquet", None),
    ],
)
async def test_kinds_of_files(predibase, filename, content, form, rows):
    """Packed lines are read; a table is kept as it is, its rows are nobody's requests."""
    reply = await predibase.upload(content, f"kind {filename}", filename)
    assert (reply["status"], reply["format"], reply["rows"]) == ("connected", form, rows)


@pytest.mark.parametrize("name", ["", " a", "a ", ".", "..", "a/b", "a?b", "a#b", "a%20b", "a\\b", "a\nb", "n" * 257])
async def test_names_that_no_url_can_hold(predibase, name):
    """The client writes a name into a URL as it is: what would mean another one there is refused when it is given."""
    begun = await predibase.begin()
    await predibase.put(begun["presignedUrl"], ROWS)
    refused(await predibase.name(begun["uploadToken"], name), 400, "cannot be called")


async def test_names_with_spaces_and_letters_of_any_kind(predibase):
    """They are found again by the name as it was given."""
    reply = await predibase.upload(ROWS, "Ünïcode & more, v1.2")
    assert reply["name"] == "Ünïcode & more, v1.2"


async def test_what_is_not_there(predibase):
    """Unknown names, connections, ids, tokens and regions are refused by what they are."""
    refused(await predibase.get("nobody"), 404, "'nobody'")
    refused(await predibase.get("nobody", "warehouse"), 404, "'warehouse'", "file_uploads")
    refused(await predibase.name(MISSING_ID, "a"), 404, MISSING_ID)
    refused(await predibase.http.get(f"/v2/datasets/{MISSING_ID}/download-link"), 404, MISSING_ID)
    refused(await predibase.http.delete(f"/v2/datasets/{MISSING_ID}"), 404, MISSING_ID)
    body = {"fileName": "a.jsonl", "mimeType": "", "region": "us-west"}
    refused(await predibase.http.post("/v2/datasets/upload", json=body), 400, "us-west", "leave")


async def test_a_download_link_works_once(predibase):
    """A part of the file, or its head, leaves it as it is; the whole file, or its end, uses it up."""
    reply = await predibase.upload(ROWS, "down")
    place = f"/v2/datasets/{reply['uuid']}/download-link"
    link = (await predibase.http.get(place)).json()
    assert link["fileExtension"] == "jsonl"
    assert (await predibase.http.head(link["url"])).headers["content-length"] == str(len(ROWS))
    part = await predibase.http.get(link["url"], headers={"range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, ROWS[:10])
    rest = await predibase.http.get(link["url"], headers={"range": "bytes=10-"})
    assert (rest.status_code, rest.content) == (206, ROWS[10:])
    refused(await predibase.http.get(link["url"]), 410, "has been used")
    other = (await predibase.http.get(place)).json()["url"]
    refused(await predibase.http.get(other[:-1] + ("A" if other[-1] != "A" else "B")), 403, "altered")
    assert (await predibase.http.get(other)).content == ROWS
    refused(await predibase.http.get(other), 410)


async def test_of_several_downloads_by_one_link_one_comes_to_its_end(predibase):
    """Whoever began at the same time gets a refusal, or a reply that breaks off where the file is a large one."""
    large = lines(*(row(number, user="u" * 1000) for number in range(8000)))
    for name, content in (("small", ROWS), ("large", large)):
        reply = await predibase.upload(content, f"at once {name}")
        url = (await predibase.http.get(f"/v2/datasets/{reply['uuid']}/download-link")).json()["url"]
        replies = await asyncio.gather(*(predibase.http.get(url) for _ in range(5)), return_exceptions=True)
        whole = [each for each in replies if isinstance(each, httpx2.Response) and each.status_code == 200]
        assert [each.content == content for each in whole] == [True]
        for other in replies:
            assert other in whole or isinstance(other, httpx2.RemoteProtocolError) or other.status_code == 410
